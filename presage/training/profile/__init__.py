"""The training of profiles, and its figures."""
