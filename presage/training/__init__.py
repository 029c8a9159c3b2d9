"""Fit, evaluate, compare with baselines, report."""
