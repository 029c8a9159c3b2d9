"""Forecasts held against what came true: how good they are live, and the alarm when they no longer are."""
