"""Which agents a workflow calls next."""
