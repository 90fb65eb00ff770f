"""Remembers what was answered to which key, so that a request that is sent again is answered again and not run again."""

import msgspec

REPLIES_KEPT = 1024
"""At least so many, and at most twice that. A retry follows within seconds, and one actor answers some thousand requests a second."""

REPLY_BYTES = 64 * 1024
"""A larger reply is not kept, so that all of them fit in memory; its request runs again, which its class promises to bear."""


class Reply(msgspec.Struct, gc=False):
    """The tag and the encoded body of an answer."""

    tag: str
    body: msgspec.Raw


class Replies:
    """Two generations: when the young one is full it becomes the old one, which is forgotten. Cheaper than an order of use, and as good."""

    __slots__ = ("_old", "_young")

    def __init__(self) -> None:
        self._young: dict[str, Reply] = {}
        self._old: dict[str, Reply] = {}

    def get(self, key: str) -> Reply | None:
        """What was answered under `key`, as long as it is known."""
        return self._young.get(key) or self._old.get(key)

    def keep(self, key: str, tag: str, body: msgspec.Raw) -> None:
        if len(body) > REPLY_BYTES:
            return
        self._young[key] = Reply(tag, body)
        if len(self._young) >= REPLIES_KEPT:
            self._young, self._old = {}, self._young
