"""Train, evaluate and report routers."""
