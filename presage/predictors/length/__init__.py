"""Output-length estimators, their baselines, and conformal calibration of their quantiles."""
