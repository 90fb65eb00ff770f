"""Messages between hosts about blobs: what there is, its pieces, and where one is to be pulled."""

from typing import ClassVar

from rubato.bus.message import Buffer, Message, Request


class NotHere(Message, frozen=True):
    """Why this host can't give it; ask another."""

    why: str


class BlobPiece(Message, frozen=True):
    """One piece of the content, as long as runtime/blobs/blob.py cuts it; the last may be shorter."""

    data: Buffer


class GetPiece(Request[BlobPiece | NotHere], frozen=True):
    """Piece `index`, counted from 0. A host that is still pulling it answers once it has it."""

    idempotent: ClassVar[bool] = True
    name: str
    version: int
    term: int
    index: int


class BlobPieces(Message, frozen=True):
    """The digests of all pieces, 32 bytes each, in order: their own digest is the blob's."""

    digests: Buffer


class GetPieces(Request[BlobPieces | NotHere], frozen=True):
    """What each piece must hash to."""

    idempotent: ClassVar[bool] = True
    name: str
    version: int
    term: int


class Newest(Message, frozen=True):
    """The newest version that a host has; digest and size of what changed since the one before, where that is there too."""

    version: int
    term: int
    digest: str
    size_bytes: int
    delta: str = ""
    delta_bytes: int = 0


class FindNewest(Request[Newest | NotHere], frozen=True):
    """Which version of this name is the newest there?"""

    idempotent: ClassVar[bool] = True
    name: str


class Pulled(Message, frozen=True):
    """It lies on this host now. `sources`: who gave pieces of it; empty where it was here already."""

    sources: tuple[str, ...]


class NotPulled(Message, frozen=True):
    """No source had all of it; what went wrong with each."""

    why: str


class PullBlob(Request[Pulled | NotPulled], frozen=True):
    """Bring this blob to your host, from one of the node agents in `sources`, best first. Asked often, it is pulled once.

    The first `ways` of them give one part of the pieces each, at the same time, as long as they do. Where `delta` is given, and your host
    has the version before, what changed is pulled instead, and the blob made of both.
    """

    idempotent: ClassVar[bool] = True
    name: str
    version: int
    term: int
    digest: str
    size_bytes: int
    sources: tuple[str, ...]
    ways: int = 1
    delta: str = ""
    delta_bytes: int = 0
