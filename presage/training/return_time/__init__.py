"""Training and evaluation of return-time predictors."""
