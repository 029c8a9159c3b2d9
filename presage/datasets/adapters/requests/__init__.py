"""Logs of requests that name no workflow: what is read of a line, and which workflow each request continues."""
