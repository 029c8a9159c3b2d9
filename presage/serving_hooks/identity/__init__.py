"""Whose request is it: workflow and agent, for the gateway and the engine, and for logs of requests.

`identifier.py` tells it from the texts of a request, `inference.py` from the hashes of its tokens. Both read first what
clients send unchanged: ids, headers and trace context.
"""
