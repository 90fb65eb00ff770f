"""The join token: everything a second host needs to enter a running job, as one line of text. Whoever holds it is in."""

import base64
import zlib
from urllib.parse import urlsplit

import msgspec

from bus.errors import BadKeys
from bus.keys import check_keys
from runtime.errors import LaunchError
from runtime.keys import RunKeys

PREFIX = "rubato1."
"""Names the format, so that a later one can be told apart."""
SUM_BYTES = 4
"""A CRC-32 ends the token, so that one that was mistyped or cut is told apart from one that leads nowhere."""


class JoinToken(msgspec.Struct, frozen=True, array_like=True):
    """`gate` is the first host's tcp address that leads to the Store; empty where every host reaches `state_url` itself."""

    run_id: str
    gate: str
    state_url: str
    keys: RunKeys

    def __repr__(self) -> str:
        return f"JoinToken({self.run_id}, {self.gate})"


def write_token(token: JoinToken) -> str:
    data = msgspec.msgpack.encode(token)
    return PREFIX + base64.urlsafe_b64encode(data + _sum(data)).decode().rstrip("=")


def read_token(text: str) -> JoinToken:
    """Raises LaunchError for what is not a whole token; its text is never repeated, because it is a secret."""
    body = text.strip().removeprefix(PREFIX)
    try:
        if body == text.strip():
            raise ValueError(f"it does not begin with {PREFIX}")
        whole = base64.urlsafe_b64decode(body + "=" * (-len(body) % 4))
        data = whole[:-SUM_BYTES]
        if whole[-SUM_BYTES:] != _sum(data):
            raise ValueError("its checksum does not fit: it was mistyped or is not whole")
        token = msgspec.msgpack.decode(data, type=JoinToken)
        check_keys(token.keys.curve)
        _check_leads_somewhere(token.gate or token.state_url)
    except (ValueError, msgspec.MsgspecError, BadKeys) as error:
        raise LaunchError(
            f"this is no join token ({error}). Print one on the first host with: rubato keys join-token --run DIR"
        ) from None
    return token


def _sum(data: bytes) -> bytes:
    return zlib.crc32(data).to_bytes(SUM_BYTES, "big")


def _check_leads_somewhere(address: str) -> None:
    """Raises ValueError where another host can't come to `address`, or it has a port that can't be."""
    parts = urlsplit(address)
    if not parts.hostname or parts.port == 0:
        raise ValueError("it names no address that another host could come to")
