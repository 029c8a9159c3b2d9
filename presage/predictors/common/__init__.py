"""Code that all kinds of predictor share."""

from collections.abc import Callable

Progress = Callable[[str, float], None]
"""Progress callback: current stage and the share of it that is done, 0..1."""
