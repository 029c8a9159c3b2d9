"""Train, evaluate, compare and study the next-agent predictor."""
