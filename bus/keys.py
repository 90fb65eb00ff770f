"""CURVE keys of a job: one pair proves that an endpoint is the job's, the other lets in the process that holds it.

A pair is Z85 text, 40 characters each half, as ZeroMQ itself writes keys. Nothing here prints or logs a secret half.
"""

from typing import NamedTuple

import msgspec

from rubato.bus.errors import BadKeys

KEY_CHARACTERS = 40


class KeyPair(msgspec.Struct, frozen=True):
    """Its `repr` leaves the secret half out: values end up in logs."""

    public: str
    secret: str

    def __repr__(self) -> str:
        return f"KeyPair({self.public})"


class Keys(NamedTuple):
    """`server`: every endpoint of the job that listens on tcp. `client`: each process that opens a link to one; no other is admitted."""

    server: KeyPair
    client: KeyPair


def new_keys() -> Keys:
    """Fresh random pairs. Raises BadKeys where libzmq was built without CURVE."""
    return Keys(_new_pair(), _new_pair())


def check_keys(keys: Keys) -> None:
    """Raise BadKeys unless both pairs are keys and their halves belong together."""
    import zmq

    for name, pair in keys._asdict().items():
        try:
            public = zmq.curve_public(pair.secret.encode()).decode()
        except (zmq.ZMQError, ValueError, UnicodeError):
            public = ""
        if len(pair.secret) != KEY_CHARACTERS or public != pair.public:
            raise BadKeys(f"the {name} pair is damaged: its halves do not belong together")


def _new_pair() -> KeyPair:
    import zmq

    try:
        public, secret = zmq.curve_keypair()
    except zmq.ZMQError as error:
        raise BadKeys(f"this libzmq has no CURVE ({error.strerror}); install pyzmq from its wheel") from None
    return KeyPair(public.decode(), secret.decode())
