"""The predictor of return times, and its baselines."""
