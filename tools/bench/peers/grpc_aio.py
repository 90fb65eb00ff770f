"""grpc.aio over a unix socket: unary calls, a client stream for one-way messages, a stream of 2 MiB pieces for the array.

Raw bytes in both directions, no protobuf: its figures are better than a typed service's.
"""

import argparse
import asyncio
import multiprocessing
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import uvloop
from load import BULK_BYTES, PAYLOAD, READERS, Figures, gigabytes, now_ns, rate, report, requests, round_trips

ROUND_TRIPS, REQUESTS, MESSAGES, BULKS = 1_500, 8_192, 20_000, 3
PIECE_BYTES = 2 * 1024 * 1024
SERVICE = "Bench"


def serve(address: str) -> None:
    """A server that runs until it is asked to stop."""
    uvloop.run(_serve(address))


async def _serve(address: str) -> None:
    stop = asyncio.Event()

    async def generate(request: bytes, _: Any) -> bytes:
        return request

    async def note(stream: AsyncIterator[bytes], _: Any) -> bytes:
        num = 0
        async for _message in stream:
            num += 1
        return b"%d" % num

    async def read(stream: AsyncIterator[bytes], _: Any) -> bytes:
        total = 0.0
        async for piece in stream:
            total += float(np.frombuffer(piece, dtype=np.float64)[::512].sum())
        return b"%d" % total

    async def end(request: bytes, _: Any) -> bytes:
        stop.set()
        return request

    handlers = {
        "generate": grpc.unary_unary_rpc_method_handler(generate),
        "note": grpc.stream_unary_rpc_method_handler(note),
        "read": grpc.stream_unary_rpc_method_handler(read),
        "end": grpc.unary_unary_rpc_method_handler(end),
    }
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    server.add_insecure_port(address)
    await server.start()
    await stop.wait()
    await server.stop(1.0)


async def measure(folder: Path) -> Figures:
    """All figures."""
    addresses = [f"unix:{folder}/{index}" for index in range(READERS)]
    spawn = multiprocessing.get_context("spawn")
    servers = [spawn.Process(target=serve, args=(address,)) for address in addresses]
    for server in servers:
        server.start()
    channels = [grpc.aio.insecure_channel(address) for address in addresses]
    async with asyncio.TaskGroup() as tasks:
        for channel in channels:
            tasks.create_task(_reached(channel))
    generate = channels[0].unary_unary(f"/{SERVICE}/generate")

    async def call() -> bytes:
        return await generate(PAYLOAD)

    figures = await round_trips(call, ROUND_TRIPS)
    figures["req_s"] = await requests(call, REQUESTS)
    figures["msg_s"] = await _messages(channels[0])
    figures["bulk_1to1_gb_s"] = await _bulk(channels[:1])
    figures["bulk_1to4_gb_s"] = await _bulk(channels)
    for channel in channels:
        await channel.unary_unary(f"/{SERVICE}/end")(b"")
        await channel.close()
    for server in servers:
        await asyncio.to_thread(server.join)
    return figures


async def _reached(channel: grpc.aio.Channel) -> None:
    """Wait for the server; the first attempts come before it listens."""
    await channel.unary_unary(f"/{SERVICE}/generate")(b"", wait_for_ready=True)


async def _messages(channel: grpc.aio.Channel) -> float:
    async def stream() -> AsyncIterator[bytes]:
        for _ in range(MESSAGES):
            yield PAYLOAD

    began = now_ns()
    if int(await channel.stream_unary(f"/{SERVICE}/note")(stream())) != MESSAGES:
        raise RuntimeError("grpc lost messages")
    return rate(MESSAGES, began)


async def _bulk(channels: list[grpc.aio.Channel]) -> float:
    array = np.ones(BULK_BYTES // 8)

    async def send(channel: grpc.aio.Channel) -> None:
        async def stream() -> AsyncIterator[bytes]:
            view = array.data.cast("B")
            for start in range(0, BULK_BYTES, PIECE_BYTES):
                yield bytes(view[start : start + PIECE_BYTES])

        await channel.stream_unary(f"/{SERVICE}/read")(stream())

    began = 0
    for index in range(BULKS + 1):
        if index == 1:
            began = now_ns()
        async with asyncio.TaskGroup() as tasks:
            for channel in channels:
                tasks.create_task(send(channel))
    return gigabytes(BULKS, len(channels), began)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", required=True)
    with tempfile.TemporaryDirectory() as temporary:
        report(parser.parse_args().json, uvloop.run(measure(Path(temporary))))
