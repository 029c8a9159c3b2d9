"""Doubles for tests and benchmarks: an engine without a model, forecasts by chance, tiny models, servers.

No other module of Presage imports them. `engine.py` needs vLLM, `models.py` the extra `train`, `servers.py` httpx.
"""
