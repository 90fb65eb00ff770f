"""What one peer may cost an endpoint, on every kind of connection."""

import resource

HEARTBEAT_MS = 2000
DEAD_MS = 6000
"""Three heartbeats missed. libzmq's own thread answers them, so a busy event loop is never taken for a dead one."""

HANDSHAKE_MS = 5000
"""A connection that has not finished ZMTP's handshake by then is dropped: a stranger holds no memory here."""

MAX_QUEUED = 4096
"""Frames in each direction between us and one peer that came to us. Credit keeps honest peers far below. Beyond it a sender is not
read from until we caught up, and one that does not read its replies is hung up on (a ROUTER that must deliver says so and drops nothing)."""

MAX_CONNECTIONS = 4096
"""Each costs some 30 KiB before its peer has said a word."""


def most_connections() -> int:
    """Half of the files that this process may have open, so that a flood of connections never keeps it from opening others."""
    return min(MAX_CONNECTIONS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)
