"""The predictors of output lengths and of context growth, and their baselines."""
