"""Calibrated quantiles of a positive number: forest, boosted trees and ridge on its logarithm."""
