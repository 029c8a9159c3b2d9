"""Routing at run time."""
