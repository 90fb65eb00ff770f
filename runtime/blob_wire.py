"""What travels between the blobs of a host and their users: one MessagePack struct per packet."""

import msgspec

from runtime.blobs import BlobInfo

MAX_PACKET = 4096
"""Bytes: names are short, and contents travel as file descriptors."""


class Begin(msgspec.Struct, tag=True, array_like=True):
    """Give me an empty file of this size."""

    name: str
    version: int
    epoch: int
    size_bytes: int


class Finish(msgspec.Struct, tag=True, array_like=True):
    """The file is filled; seal it and show it."""

    digest: str


class Get(msgspec.Struct, tag=True, array_like=True):
    """Give me the file of this version; -1 asks for the newest one's description alone."""

    name: str
    version: int


class Found(msgspec.Struct, tag=True, array_like=True):
    """What the agent holds; a descriptor comes beside it where one was asked for."""

    info: BlobInfo


class Absent(msgspec.Struct, tag=True, array_like=True):
    """No such blob."""


class Denied(msgspec.Struct, tag=True, array_like=True):
    """The request makes no sense."""

    why: str


encode = msgspec.msgpack.Encoder().encode
decode_request = msgspec.msgpack.Decoder(Begin | Finish | Get).decode
decode_reply = msgspec.msgpack.Decoder(Found | Absent | Denied).decode
