"""What a process and the blobs' agent of its host say to each other, a packet each; docs/bus.md has the protocol."""

import msgspec

from runtime.blobs.blob import BlobInfo

MAX_PACKET = 4096
"""Bytes: names are short, and contents travel as file descriptors."""


class Begin(msgspec.Struct, tag=True, array_like=True):
    """Lend me a segment of at least this size to write into."""

    size_bytes: int


class Publish(msgspec.Struct, tag=True, array_like=True):
    """The segment holds this blob; show it. I write no more."""

    segment: int
    info: BlobInfo


class Get(msgspec.Struct, tag=True, array_like=True):
    """Lend me the segment of this version; -1 asks for the newest one's description alone."""

    name: str
    version: int


class Drop(msgspec.Struct, tag=True, array_like=True):
    """I use that segment no more, once: the token that one `Begin` or `Get` gave. Not answered."""

    segment: int


class Room(msgspec.Struct, tag=True, array_like=True):
    """A segment to write into, lent until it is dropped."""

    segment: int
    capacity: int
    gone: tuple[int, ...] = ()
    """Segments this connection mapped that exist no more: unmap them."""


class Found(msgspec.Struct, tag=True, array_like=True):
    """What the agent holds; `segment` is lent until it is dropped, or -1 where none was asked for."""

    info: BlobInfo
    segment: int = -1
    capacity: int = 0
    gone: tuple[int, ...] = ()


class Absent(msgspec.Struct, tag=True, array_like=True):
    """No such blob."""


class Denied(msgspec.Struct, tag=True, array_like=True):
    """The request makes no sense."""

    why: str


RequestPacket = Begin | Publish | Get | Drop
ReplyPacket = Room | Found | Absent | Denied

encode = msgspec.msgpack.Encoder().encode
decode_request = msgspec.msgpack.Decoder(RequestPacket).decode
decode_reply = msgspec.msgpack.Decoder(ReplyPacket).decode
