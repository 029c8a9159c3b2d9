"""Decisions from forecasts, in plain Python over plain types: no vLLM, no torch, no clock or chance of their own."""
