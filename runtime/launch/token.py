"""The join token: everything a second host needs to enter a running job, as one line of text. Whoever holds it is in."""

import base64

import msgspec

from bus.errors import BadKeys
from bus.keys import check_keys
from runtime.errors import LaunchError
from runtime.keys import RunKeys

PREFIX = "rubato1."
"""Names the format, so that a later one can be told apart."""


class JoinToken(msgspec.Struct, frozen=True, array_like=True):
    """`gate` is the first host's tcp address that leads to the Store; empty where every host reaches `state_url` itself."""

    run_id: str
    gate: str
    state_url: str
    keys: RunKeys

    def __repr__(self) -> str:
        return f"JoinToken({self.run_id}, {self.gate})"


def write_token(token: JoinToken) -> str:
    return PREFIX + base64.urlsafe_b64encode(msgspec.msgpack.encode(token)).decode().rstrip("=")


def read_token(text: str) -> JoinToken:
    """Raises LaunchError for what is not a whole token; its text is never repeated, because it is a secret."""
    body = text.strip().removeprefix(PREFIX)
    try:
        if body == text.strip():
            raise ValueError(f"it does not begin with {PREFIX}")
        token = msgspec.msgpack.decode(base64.urlsafe_b64decode(body + "=" * (-len(body) % 4)), type=JoinToken)
        check_keys(token.keys.curve)
    except (ValueError, msgspec.MsgspecError, BadKeys) as error:
        raise LaunchError(
            f"this is no join token ({error}). Print one on the first host with: rubato keys join-token --run DIR"
        ) from None
    return token
