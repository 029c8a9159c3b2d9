"""The gateway's decisions inside systems that route or scale themselves: Envoy, Ray Serve and Dynamo."""
