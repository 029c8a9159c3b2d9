"""Monitoring of forecasts: live accuracy against outcomes, and the drift alarm."""
