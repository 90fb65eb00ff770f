"""xoscar: an actor that asks and actors that answer, in sub-pools of their own (one process each), on uvloop, over its unix channel."""

import argparse
import asyncio
import os
from pathlib import Path
from typing import Any

import numpy as np
import xoscar  # pyright: ignore[reportMissingImports] - a peer, installed for the comparison alone
from load import BULK_BYTES, PAYLOAD, READERS, Figures, gigabytes, now_ns, rate, report, requests, round_trips

ROUND_TRIPS, REQUESTS, MESSAGES, BULKS = 2_000, 12_000, 16_000, 4


class Receiver(xoscar.Actor):
    def __init__(self) -> None:
        self.num = 0

    async def generate(self, prompt: bytes) -> bytes:
        return prompt

    async def note(self, text: bytes) -> None:
        self.num += 1

    async def count(self) -> int:
        num, self.num = self.num, 0
        return num

    async def read(self, array: Any) -> float:
        return float(array[::512].sum())


class Sender(xoscar.Actor):
    async def measure(self, receivers: list[Any]) -> Figures:
        first = receivers[0]

        async def call() -> bytes:
            return await first.generate(PAYLOAD)

        figures = await round_trips(call, ROUND_TRIPS)
        figures["req_s"] = await requests(call, REQUESTS)
        figures["msg_s"] = await self._messages(first)
        figures["bulk_1to1_gb_s"] = await self._bulk(receivers[:1])
        figures["bulk_1to4_gb_s"] = await self._bulk(receivers)
        return figures

    async def _messages(self, receiver: Any) -> float:
        began, seen = now_ns(), 0
        for _ in range(MESSAGES):
            await receiver.note.tell(PAYLOAD)
        while seen < MESSAGES:
            seen += await receiver.count()
        return rate(MESSAGES, began)

    async def _bulk(self, receivers: list[Any]) -> float:
        array, began = np.ones(BULK_BYTES // 8), 0
        for index in range(BULKS + 1):
            if index == 1:
                began = now_ns()
            await asyncio.gather(*(receiver.read(array) for receiver in receivers))
        return gigabytes(BULKS, len(receivers), began)


async def measure() -> Figures:
    """All figures."""
    pool = await xoscar.create_actor_pool("127.0.0.1", n_process=1 + READERS, use_uvloop=True)
    async with pool:
        first, *others = pool.sub_processes
        sender = await xoscar.create_actor(Sender, address=first, uid="sender")
        receivers = [await xoscar.create_actor(Receiver, address=place, uid=place) for place in others]
        return await sender.measure(receivers)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", required=True)
    # The pools are processes of their own, which import what the actors use.
    os.environ["PYTHONPATH"] = str(Path(__file__).resolve().parent)
    report(parser.parse_args().json, asyncio.run(measure()))
