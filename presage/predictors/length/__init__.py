"""Estimators of lengths behind one interface, their baselines, and the intervals that make them honest."""
