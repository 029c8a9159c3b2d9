"""The models: arrays in, arrays out. They know nothing of MLflow, vLLM or files of traces."""
