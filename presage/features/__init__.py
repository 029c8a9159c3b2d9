"""What a predictor sees. One definition, used by training and by serving."""
