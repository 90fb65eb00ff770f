"""Makes the two kinds of sockets, with every option set before they bind or connect: later, libzmq ignores most of them in silence."""

import zmq

from bus import limits
from bus.address import MEMORY, TCP, Address, parse
from bus.codec import MAX_FRAME_BYTES
from bus.errors import BadAddress
from bus.keys import Keys

NEVER_MS = 24 * 3600 * 1000
"""When a DEALER would reconnect; its transport drops it long before, so that what is queued for a dead peer never reaches whoever
takes its address. Not -1, libzmq's own "never": that ends the pipe at once, and replies that arrived but were not read are lost."""

MAX_SOCKETS = 16 * 1024
"""Three per peer: the DEALER and both ends of its monitor. libzmq's default would end at 340 peers."""

Context = zmq.Context[zmq.Socket[bytes]]
Socket = zmq.Socket[bytes]


def new_context() -> Context:
    """One I/O thread: it moves 4 GB/s, more than the event loop behind it can look at."""
    context: Context = zmq.Context(io_threads=1)
    context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
    return context


def new_router(context: Context) -> Socket:
    """The socket that peers come to; `bind_to` binds it."""
    socket = _socket(context, zmq.ROUTER)
    # Without it, what is sent to a peer that has gone, or reads nothing, vanishes in silence.
    socket.set(zmq.ROUTER_MANDATORY, 1)
    socket.set(zmq.SNDHWM, limits.MAX_QUEUED)
    socket.set(zmq.RCVHWM, limits.MAX_QUEUED)
    return socket


def bind_to(socket: Socket, where: str, keys: Keys | None = None) -> str:
    """Bind and return the address with the port: the first free one of a range, or what the system chose. Raises BadAddress when it is taken or not allowed.

    On tcp `keys` are used wherever there are any. libzmq copies a socket's options into each endpoint as it is bound, so one
    socket may be bound in the clear first and with keys afterwards, but not the other way round.
    """
    address = _between_processes(where, keys)
    _prepare(socket, address)
    if keys is not None and address.scheme == TCP:
        socket.set(zmq.CURVE_SERVER, 1)
        socket.set(zmq.CURVE_SECRETKEY, keys.server.secret.encode())
        # Without a domain libzmq would admit every key.
        socket.set(zmq.ZAP_DOMAIN, b"rubato")
    for port in range(address.port, max(address.port, address.last_port) + 1):
        try:
            socket.bind(_spelt(address._replace(port=port)))
            break
        except zmq.ZMQError as error:
            if not address.last_port or error.errno != zmq.EADDRINUSE:
                raise BadAddress(f"{where} cannot be bound: {error.strerror}") from None
    else:
        raise BadAddress(f"{where} cannot be bound: all of its ports are in use; widen the range")
    bound = socket.get(zmq.LAST_ENDPOINT)
    return bound.rstrip(b"\0").decode() if isinstance(bound, bytes) else str(bound)


def new_dealer(context: Context) -> Socket:
    """The socket that goes to one peer; `connect_to` connects it."""
    socket = _socket(context, zmq.DEALER)
    socket.set(zmq.RECONNECT_IVL, NEVER_MS)
    socket.set(zmq.CONNECT_TIMEOUT, limits.HANDSHAKE_MS)
    return socket


def connect_to(socket: Socket, where: str, keys: Keys | None = None) -> None:
    """Connect in the background. Raises BadAddress when `where` is not an address that may be reached."""
    address = _between_processes(where, keys)
    _prepare(socket, address)
    if keys is not None and address.scheme == TCP:
        socket.set(zmq.CURVE_SERVERKEY, keys.server.public.encode())
        socket.set(zmq.CURVE_PUBLICKEY, keys.client.public.encode())
        socket.set(zmq.CURVE_SECRETKEY, keys.client.secret.encode())
    try:
        socket.connect(_spelt(address))
    except zmq.ZMQError as error:
        raise BadAddress(f"{where} cannot be connected to: {error.strerror}") from None


def _socket(context: Context, kind: int) -> Socket:
    socket = context.socket(kind)
    socket.set(zmq.LINGER, 0)
    socket.set(zmq.SNDHWM, 0)
    socket.set(zmq.RCVHWM, 0)
    # Checked by libzmq against the announced size of each part, before it allocates for it.
    socket.set(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
    socket.set(zmq.HANDSHAKE_IVL, limits.HANDSHAKE_MS)
    socket.set(zmq.HEARTBEAT_IVL, limits.HEARTBEAT_MS)
    socket.set(zmq.HEARTBEAT_TIMEOUT, limits.DEAD_MS)
    socket.set(zmq.HEARTBEAT_TTL, limits.DEAD_MS)
    return socket


def _between_processes(where: str, keys: Keys | None) -> Address:
    address = parse(where, keyed=keys is not None)
    if address.scheme == MEMORY:
        raise BadAddress(f"{where} is an address within one process; this process is reached by ipc:// or tcp://")
    return address


def _prepare(socket: Socket, address: Address) -> None:
    if address.place.startswith("["):
        socket.set(zmq.IPV6, 1)


def _spelt(address: Address) -> str:
    if address.scheme == TCP:
        # A name may stand for several addresses, and libzmq binds to addresses only.
        host = "127.0.0.1" if address.place == "localhost" else address.place
        return f"tcp://{host}:{address.port or '*'}"
    return f"{address.scheme}://{address.place}"
