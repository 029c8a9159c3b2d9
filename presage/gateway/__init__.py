"""The gateway: an OpenAI-compatible front that recognises workflows, forecasts, chooses models and annotates requests.

It proxies to one engine, several, or a router. If something fails here, the request is forwarded as it came.
"""
