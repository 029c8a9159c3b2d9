"""Whose request is it: workflow and agent, from what clients send unchanged."""
