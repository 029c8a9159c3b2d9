"""Before an engine serves: its command line, and checks that its vLLM is one that Presage supports."""
