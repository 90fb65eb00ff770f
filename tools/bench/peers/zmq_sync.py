"""Raw synchronous pyzmq, DEALER to ROUTER over ipc: no types, no loop, no promises. The limit of what a bus on ZeroMQ can reach.

One frame per message, in each direction; the 64 MB array is one frame too, sent and received without a copy of ours.
"""

import argparse
import multiprocessing
import os
import tempfile
from pathlib import Path

import numpy as np
import zmq
from load import BULK_BYTES, IN_FLIGHT, PAYLOAD, READERS, WARM_UP, Cpu, Figures, gigabytes, latency, now_ns, rate, report

ONE_WAY, COUNT, STOP = b"1" * (len(PAYLOAD) + 1), b"c", b"q"
"""Told from a request by their length, which costs the receiver least."""

ROUND_TRIPS, REQUESTS, MESSAGES, BULKS = 5_000, 60_000, 200_000, 8


def serve(url: str) -> None:
    """Echo requests, count one-way messages, look at each page of an array."""
    socket = _bound(zmq.Context(), url)
    seen = 0
    while True:
        peer, frame = socket.recv(), socket.recv(copy=False)
        size = len(frame)
        if size == len(PAYLOAD):
            socket.send(peer, zmq.SNDMORE)
            socket.send(frame.bytes)
        elif size == len(ONE_WAY):
            seen += 1
        elif size > len(ONE_WAY):
            _touch(frame)
            socket.send(peer, zmq.SNDMORE)
            socket.send(b"k")
        elif frame.bytes == COUNT:
            socket.send(peer, zmq.SNDMORE)
            socket.send(b"%d" % seen)
            seen = 0
        else:
            return


def read_bulk(url: str) -> None:
    """One of several readers: takes arrays until it is told to stop."""
    with zmq.Context() as context, _connected(context, url) as socket:
        socket.send(b"h")
        while len(frame := socket.recv(copy=False)) > 1:
            _touch(frame)
            socket.send(b"k")


def measure(folder: Path, only: list[str]) -> Figures:
    """The figures; the receiver is another process."""
    url = f"ipc://{folder}/one"
    receiver = multiprocessing.get_context("spawn").Process(target=serve, args=(url,))
    receiver.start()
    socket = _connected(zmq.Context.instance(), url)
    cpu = Cpu(os.getpid(), receiver.pid or 0)
    figures = _round_trips(socket) | {"rtt_cpu_us": cpu.per(WARM_UP + ROUND_TRIPS)}
    if not only:
        figures |= {"req_s": _requests(socket), "req_cpu_us": cpu.per(REQUESTS)}
        figures |= {"msg_s": _messages(socket), "msg_cpu_us": cpu.per(MESSAGES)}
        figures["bulk_1to1_gb_s"] = _bulk(socket)
    socket.send(STOP)
    socket.close()
    receiver.join()
    if not only:
        figures["bulk_1to4_gb_s"] = _fan_out(f"ipc://{folder}/many")
    return figures


def _round_trips(socket: zmq.Socket[bytes]) -> Figures:
    samples: list[int] = []
    for _ in range(WARM_UP + ROUND_TRIPS):
        began = now_ns()
        socket.send(PAYLOAD)
        socket.recv()
        samples.append(now_ns() - began)
    return latency(samples[WARM_UP:])


def _requests(socket: zmq.Socket[bytes]) -> float:
    began = now_ns()
    for _ in range(IN_FLIGHT):
        socket.send(PAYLOAD)
    for _ in range(REQUESTS - IN_FLIGHT):
        socket.recv()
        socket.send(PAYLOAD)
    for _ in range(IN_FLIGHT):
        socket.recv()
    return rate(REQUESTS, began)


def _messages(socket: zmq.Socket[bytes]) -> float:
    began = now_ns()
    for _ in range(MESSAGES):
        socket.send(ONE_WAY)
    socket.send(COUNT)
    if int(socket.recv()) != MESSAGES:
        raise RuntimeError("zmq-sync lost messages")
    return rate(MESSAGES, began)


def _bulk(socket: zmq.Socket[bytes]) -> float:
    array = np.ones(BULK_BYTES // 8)
    began = 0
    for index in range(BULKS + 1):
        if index == 1:
            began = now_ns()
        socket.send(array.data, copy=False)
        socket.recv()
    return gigabytes(BULKS, 1, began)


def _fan_out(url: str) -> float:
    socket = _bound(zmq.Context.instance(), url)
    spawn = multiprocessing.get_context("spawn")
    readers = [spawn.Process(target=read_bulk, args=(url,)) for _ in range(READERS)]
    for reader in readers:
        reader.start()
    peers = [socket.recv_multipart()[0] for _ in readers]
    array = np.ones(BULK_BYTES // 8)
    rounds, began = BULKS // 2, 0
    for index in range(rounds + 1):
        if index == 1:
            began = now_ns()
        for peer in peers:
            socket.send(peer, zmq.SNDMORE)
            socket.send(array.data, copy=False)
        for _ in peers:
            socket.recv_multipart()
    figure = gigabytes(rounds, READERS, began)
    for peer in peers:
        socket.send_multipart([peer, STOP])
    for reader in readers:
        reader.join()
    socket.close()
    return figure


def _touch(frame: zmq.Frame) -> float:
    return float(np.frombuffer(frame.buffer, dtype=np.float64)[::512].sum())


def _bound(context: zmq.Context[zmq.Socket[bytes]], url: str) -> zmq.Socket[bytes]:
    socket = context.socket(zmq.ROUTER)
    socket.set_hwm(0)
    socket.linger = 1000
    socket.bind(url)
    return socket


def _connected(context: zmq.Context[zmq.Socket[bytes]], url: str) -> zmq.Socket[bytes]:
    socket = context.socket(zmq.DEALER)
    socket.set_hwm(0)
    socket.linger = 1000
    socket.connect(url)
    return socket


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", required=True)
    parser.add_argument("--only", nargs="*", default=[], choices=["rtt"])
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        report(arguments.json, measure(Path(temporary), arguments.only))
