"""Presage: learns from the traces of multi-agent LLM applications what a running workflow will do next.

Importing this package loads neither torch, MLflow nor vLLM; each is imported where it is used.
"""

__version__ = "0.2.0"
