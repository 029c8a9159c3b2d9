"""What the predictors of every kind share."""
