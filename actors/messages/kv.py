"""KV caches on their way from one engine to another."""

from typing import ClassVar

from bus.message import Buffer, Message, Request


class KvCache(Message, frozen=True):
    """The bytes of one request's cache."""

    data: Buffer


class FetchKv(Request[KvCache], frozen=True):
    """Give me the cache that a prompt of `num_tokens` tokens leaves under this weight version, or a newer one."""

    idempotent: ClassVar[bool] = True
    num_tokens: int
    version: int
