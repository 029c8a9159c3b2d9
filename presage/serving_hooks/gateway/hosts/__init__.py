"""The gateway's decisions inside systems that route requests themselves: Envoy and Ray Serve."""
