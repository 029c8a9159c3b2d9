"""Code that all kinds of predictor share."""
