"""Watches the servers behind the gateway: health, load, speed."""
