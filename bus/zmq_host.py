"""What of a transport libzmq carries: links over tcp, in the clear on the loopback and with CURVE beyond it."""

import asyncio
import itertools
from collections.abc import Callable

import zmq

from bus.end import Came, End, Left, Rest
from bus.errors import BadAddress
from bus.keys import Keys
from bus.refusals import Refusals
from bus.zmq_door import Door
from bus.zmq_ends import Dealer
from bus.zmq_sockets import new_context
from bus.zmq_zap import Zap
from bus.zmtp import Heard


class ZmqHost:
    """A context and all its sockets, on one event loop."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        keys: Keys | None,
        came: Came,
        left: Left,
        refusals: Refusals,
        drained: Callable[[], None],
    ) -> None:
        self._loop = loop
        self._keys = keys
        self._drained = drained
        self._came, self._left, self._refusals = came, left, refusals
        self._context = new_context()
        self._door: Door | None = None
        self._zap: Zap | None = None
        self._names = itertools.count(1)

    def bind(self, address: str) -> str:
        """Listen there; the address with its port. Raises BadAddress, also for one that would need keys."""
        if self._keys is not None and self._zap is None:
            allowed = frozenset({self._keys.client.public})
            self._zap = Zap(self._context, self._loop, allowed, lambda said: self._refusals.add("key", said))
        if self._door is None:
            self._door = Door(self._context, self._loop, self._came, self._left, self._refusals, self._drained)
        return self._door.bind(address, self._keys)

    def dial(self, address: str, heard: Heard, ended: Callable[[str], None]) -> End:
        """A link to `address`. Raises BadAddress."""
        name = f"line-{next(self._names)}"
        try:
            return Dealer(self._context, name, address, self._keys, self._loop, heard, self._drained, ended)
        except zmq.ZMQError as error:
            raise BadAddress(f"{address} cannot be connected to: {error.strerror}") from None

    def close(self) -> Rest:
        """Close what is bound; the caller closes what it dialled. What is returned waits for the last sends."""
        if self._door is not None:
            self._door.close()
        if self._zap is not None:
            self._zap.close()
        return self._context.term  # the context, unlike its sockets, may be used from any thread
