"""What strangers may take of a gRPC server before a call of theirs is refused."""

from __future__ import annotations

import sys
from typing import Final

HANDSHAKE_SECONDS: Final = 5.0
"""How long a connection may take to become one of HTTP/2, TLS included; gRPC alone would wait for two minutes."""

IDLE_SECONDS: Final = 60.0
"""How long a connection may stay without a call; a channel of ours makes another when it needs one."""

STREAMS: Final = 1024
"""Most calls at once over one connection; a channel of ours lets further ones wait."""

LEAST_CONNECTIONS: Final = 64
_FALLBACK_CONNECTIONS: Final = 512


def server_limits(descriptors: int) -> list[tuple[str, int]]:
    """Return the options of a gRPC server in a process that may have so many ``descriptors``.

    At most half of them go to connections to the server, so that a flood leaves enough for everything else.
    """
    connections = max(LEAST_CONNECTIONS, descriptors // 2)
    return [
        ("grpc.server_handshake_timeout_ms", round(HANDSHAKE_SECONDS * 1000)),
        ("grpc.max_connection_idle_ms", round(IDLE_SECONDS * 1000)),
        ("grpc.max_concurrent_streams", STREAMS),
        ("grpc.max_allowed_incoming_connections", min(connections, 1 << 30)),
    ]


def descriptor_limit() -> int:
    """Return how many file descriptors this process may have."""
    if sys.platform == "win32":
        return 2 * _FALLBACK_CONNECTIONS
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 31 if soft == resource.RLIM_INFINITY else soft
