"""Train, evaluate and compare the next-agent predictor."""
