"""Ray: an async actor that asks and async actors that answer; arrays go through its object store with `put`."""

import argparse
import asyncio
import logging
import os
from typing import Any

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"  # read when ray is imported

import numpy as np
import ray  # pyright: ignore[reportMissingImports] - a peer, installed for the comparison alone
from load import BULK_BYTES, PAYLOAD, READERS, Figures, gigabytes, now_ns, rate, report, requests, round_trips

ROUND_TRIPS, REQUESTS, MESSAGES, BULKS = 800, 4_096, 5_000, 6
CONCURRENCY = 1000
"""Of an async actor: above all that is in flight, so that Ray's own limit never waits."""


class Receiver:
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


class Sender:
    async def measure(self, receivers: list[Any]) -> Figures:
        first = receivers[0]

        async def call() -> bytes:
            return await first.generate.remote(PAYLOAD)

        figures = await round_trips(call, ROUND_TRIPS)
        figures["req_s"] = await requests(call, REQUESTS)
        figures["msg_s"] = await self._messages(first)
        figures["bulk_1to1_gb_s"] = await self._bulk(receivers[:1])
        figures["bulk_1to4_gb_s"] = await self._bulk(receivers)
        return figures

    async def _messages(self, receiver: Any) -> float:
        began, seen = now_ns(), 0
        sent = [receiver.note.remote(PAYLOAD) for _ in range(MESSAGES)]
        while seen < MESSAGES:
            seen += await receiver.count.remote()
        del sent
        return rate(MESSAGES, began)

    async def _bulk(self, receivers: list[Any]) -> float:
        array, began = np.ones(BULK_BYTES // 8), 0
        for index in range(BULKS + 2):
            if index == 2:
                began = now_ns()
            stored = ray.put(array)
            await asyncio.gather(*(receiver.read.remote(stored) for receiver in receivers))
        return gigabytes(BULKS, len(receivers), began)


def measure() -> Figures:
    """All figures."""
    ray.init(
        num_cpus=2 + READERS,
        include_dashboard=False,
        logging_level=logging.ERROR,
        log_to_driver=False,
        object_store_memory=16 * BULK_BYTES,
        _node_ip_address="127.0.0.1",
    )
    options = {"max_concurrency": CONCURRENCY}
    receivers = [ray.remote(**options)(Receiver).remote() for _ in range(READERS)]
    sender = ray.remote(**options)(Sender).remote()
    figures = ray.get(sender.measure.remote(receivers))
    ray.shutdown()
    return figures


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", required=True)
    report(parser.parse_args().json, measure())
