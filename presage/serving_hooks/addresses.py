"""Addresses to listen on, as settings and commands give them."""

from __future__ import annotations


def host_and_port(value: str) -> str:
    """An address to listen on, as it came.

    Raises:
        ValueError: it is not HOST:PORT, or there is no such port.
    """
    host, _, port = value.rpartition(":")
    if not host or not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise ValueError(f"{value!r:.100}; give HOST:PORT, such as 127.0.0.1:9002")
    return value


def split_address(address: str) -> tuple[str, int]:
    """Host and port of an address as `host_and_port` accepts it."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)
