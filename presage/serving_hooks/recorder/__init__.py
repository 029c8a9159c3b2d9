"""Records what an engine serves, as traces to train on. Independent of vLLM."""
