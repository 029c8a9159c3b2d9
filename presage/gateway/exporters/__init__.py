"""Forecasts for servers that take them as a file, as metrics or by a plug-in, not with each request."""
