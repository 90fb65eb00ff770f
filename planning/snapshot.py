"""Frozen views of the running system: what the planners are told, so that they never have to look."""

from typing import NamedTuple


class EngineView(NamedTuple):
    """One engine, alive at the moment of the snapshot. A dead one has no view."""

    name: str
    version: int
    """Newest weight version it is known to hold."""
    num_slots: int
    """Requests it decodes at once; at least 1."""
    in_flight: int
    """Requests given to it and not yet answered, running or waiting inside."""
    suspended: bool = False
    """It takes no new request: paused, drained, or it refused the last one."""


class RequestView(NamedTuple):
    """One request for a completion."""

    session: str
    """The trajectory; its earlier turns left a KV cache on one engine."""
    min_version: int = 0
    num_resumed: int = 0
    """Tokens that it has already, from an engine that died or handed it back."""
