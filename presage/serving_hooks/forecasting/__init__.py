"""Forecasts of running workflows: predictors, online counts as fallback, and circuit breakers around both."""
