"""Whether the other side of a connection is still there, as the system knows it.

A socket that nobody reads tells nothing by itself: neither that the client has closed its side, nor that it is gone.
"""

from __future__ import annotations

import ipaddress
import socket
from typing import Any

WATCH_S = 0.04
"""How often a connection is looked at while its answer is computed."""
PROBE = b"HTTP/1.1 100 Continue\r\n\r\n"
"""An interim answer, which HTTP lets anyone send: where nobody listens any more, it comes back as a reset."""
_TCP_INFO = getattr(socket, "TCP_INFO", None)
_TCP_CLOSE, _TCP_CLOSE_WAIT = 7, 8


def is_loopback_address(host: str | None) -> bool:
    """Whether an address is this machine's alone. None, which is what is left of a client that has gone, is not."""
    if host is None:
        return False
    if host.startswith("unix"):
        return True
    try:
        address = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    return address.is_loopback


def is_gone(transport: Any) -> bool:
    """Whether the connection was reset. False where the system does not say."""
    return _state(transport) == _TCP_CLOSE


def has_closed_its_side(transport: Any) -> bool:
    """Whether the client will send nothing more; it may still wait for its answer."""
    return _state(transport) == _TCP_CLOSE_WAIT


def _state(transport: Any) -> int | None:
    connection = transport.get_extra_info("socket")
    if _TCP_INFO is None or connection is None:
        return None
    try:
        state: int = connection.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, 1)[0]
    except OSError:
        return None
    return state
