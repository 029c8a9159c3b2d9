"""Train, evaluate and report predictors of remaining output tokens."""
