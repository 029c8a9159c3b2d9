"""Forecasts of running workflows: predictors, the counts behind them, and what keeps both from harming requests."""
