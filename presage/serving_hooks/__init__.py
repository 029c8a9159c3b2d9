"""Forecasts at run time."""
