"""A tapped kernel: it shows its frames to one asker, without that asker's own, within bounds, and for as long as it is asked."""

import asyncio
from pathlib import Path

from rubato.bus.codec import decode_frame
from rubato.bus.message import Message, Request
from rubato.runtime.actor import Actor, handler
from rubato.runtime.messages import NotTapped, Tap, Tapped
from rubato.runtime.observe import tap
from tests.simulation.test_kernel import Client, Cluster
from tests.virtual import virtual


class Big(Message, frozen=True):
    data: bytes


class Ping(Request[Big], frozen=True):
    size: int


class Bell(Actor):
    role = "bell"

    @handler
    async def ring(self, request: Ping) -> Big:
        return Big(bytes(request.size))


class Tapping:
    """A bell, somebody who rings it, and two who tap."""

    def __init__(self, tasks: asyncio.TaskGroup, folder: Path) -> None:
        self._cluster = Cluster(tasks, folder)

    async def __aenter__(self) -> "Tapping":
        self.kernel, _ = await self._cluster.start(Bell, "bell-1")
        _, self.ringer = await self._cluster.start(Client, "client-1")
        _, self.one = await self._cluster.start(Client, "client-2")
        _, self.other = await self._cluster.start(Client, "client-3")
        return self

    async def __aexit__(self, *_: object) -> None:
        for name in list(self._cluster.serving):
            await self._cluster.kill(name)

    async def ring(self, size: int = 1) -> None:
        await self.ringer.ref("bell-1").ask(Ping(size), timeout=5)

    async def kill(self, name: str) -> None:
        await self._cluster.kill(name)

    async def tap(self, who: Actor, wait_s: float = 0.1) -> Tapped | NotTapped:
        return await who.ref("bell-1").ask(Tap(wait_s), timeout=5)


def tags(said: Tapped | NotTapped) -> list[tuple[bool, str, str]]:
    assert isinstance(said, Tapped)
    return [(f.sent, f.peer, envelope.tag) for f in said.frames for envelope in decode_frame(f.data) if envelope.tag]


@virtual
async def test_a_tap_sees_what_comes_and_goes_between_its_asks_and_nothing_of_its_own(tmp_path):
    async with asyncio.TaskGroup() as tasks, Tapping(tasks, tmp_path) as job:
        assert tags(await job.tap(job.one)) == []
        await job.ring()
        assert tags(await job.tap(job.one)) == [(False, "client-1", "Ping"), (True, "client-1", "Big")]
        assert tags(await job.tap(job.one)) == []


@virtual
async def test_one_taps_at_a_time_and_a_tap_that_nobody_asks_for_ends(tmp_path):
    async with asyncio.TaskGroup() as tasks, Tapping(tasks, tmp_path) as job:
        await job.tap(job.one)
        assert await job.tap(job.other) == NotTapped("another tap is on it already; try again later")
        assert job.kernel.transport.tap is not None
        await asyncio.sleep(tap.KEPT_S + 1)
        await job.ring()
        assert job.kernel.transport.tap is None
        assert tags(await job.tap(job.other)) == []


@virtual
async def test_a_tap_whose_asker_is_gone_is_free_for_the_next(tmp_path):
    async with asyncio.TaskGroup() as tasks, Tapping(tasks, tmp_path) as job:
        await job.tap(job.one)
        await job.kill("client-2")
        assert tags(await job.tap(job.other)) == []


@virtual
async def test_frames_that_do_not_fit_are_counted_and_not_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(tap, "HELD_BYTES", 1000)
    async with asyncio.TaskGroup() as tasks, Tapping(tasks, tmp_path) as job:
        await job.tap(job.one)
        await job.ring(2000)
        said = await job.tap(job.one)
        assert tags(said) == [(False, "client-1", "Ping")]
        assert isinstance(said, Tapped)
        assert said.lost == 1
