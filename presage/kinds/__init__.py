"""What kinds of predictor need of both training and registry: gates, promotion, registration; no terminal."""
