"""What of a transport libzmq carries: links over tcp, in the clear on the loopback and with CURVE beyond it."""

import itertools

import zmq

from bus.connection import Connection, Owner, Rest
from bus.errors import BadAddress
from bus.keys import Keys
from bus.libzmq.connection import Dialled
from bus.libzmq.listener import ZmqListener
from bus.libzmq.options import new_context


class ZmqContext:
    """A context and all its sockets, on one event loop."""

    def __init__(self, keys: Keys | None, owner: Owner) -> None:
        self._keys = keys
        self._owner = owner
        self._context = new_context()
        self._listener: ZmqListener | None = None
        self._names = itertools.count(1)

    def bind(self, address: str) -> str:
        """Listen there; the address with its port. Raises BadAddress, also for one that would need keys."""
        if self._listener is None:
            self._listener = ZmqListener(self._context, self._keys, self._owner)
        return self._listener.bind(address)

    def dial(self, address: str) -> Connection:
        """A connection to `address`. Raises BadAddress."""
        try:
            return Dialled(self._context, f"dialled-{next(self._names)}", address, self._keys, self._owner)
        except zmq.ZMQError as error:
            raise BadAddress(f"{address} cannot be connected to: {error.strerror}") from None

    def close(self) -> Rest:
        """Close what is bound; the caller closes what it dialled. What is returned waits for the last sends."""
        if self._listener is not None:
            self._listener.close()
        return self._context.term  # the context, unlike its sockets, may be used from any thread
