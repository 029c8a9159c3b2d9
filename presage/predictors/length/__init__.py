"""The predictor of output lengths, and its baselines."""
