"""Which model solves a prompt: scorers, calibration, distance from the training prompts, and the choice of a model."""
