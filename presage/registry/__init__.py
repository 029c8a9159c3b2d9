"""MLflow: package, gate, promote, roll back, resolve. It judges figures and never reads traces."""
