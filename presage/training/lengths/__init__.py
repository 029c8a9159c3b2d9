"""Predictors of remaining output tokens: trained, judged beside baselines, reported."""
