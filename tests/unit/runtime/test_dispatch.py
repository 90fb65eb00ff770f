"""One ask under one key, made more than once: a link broke, and the attempts come over several, in any order."""

import asyncio
from typing import ClassVar

import pytest

from bus.codec import encode_body
from bus.envelope import Envelope, Kind
from bus.message import Message, Request
from bus.transport import Delivery
from runtime.actor import Actor, handler
from runtime.dispatch import NOBODY, Dispatcher
from runtime.observe.log import logger

OLD, NEW = b"old link", b"new link"


class Counted(Message, frozen=True):
    runs: int


class Count(Request[Counted], frozen=True):
    idempotent: ClassVar[bool] = True


class Counter(Actor):
    role = "counter"

    def __init__(self):
        self.runs, self.may_end, self.cancelled = 0, asyncio.Event(), 0

    @handler(concurrency=4)
    async def count(self, request: Count) -> Counted:
        self.runs += 1
        try:
            await self.may_end.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return Counted(self.runs)


class Wire:
    """Keeps what was answered: (peer, ask id) of each reply."""

    def __init__(self):
        self.answered = []

    def post(self, peer, envelope, buffers=()):
        if envelope.kind == Kind.OK:
            self.answered.append((peer, envelope.id))


class Scene:
    def __init__(self, tasks):
        self.wire, self.actor = Wire(), Counter()
        self.dispatcher = Dispatcher(
            self.wire,
            "counter-1",
            logger("test"),
            lambda work, name: tasks.create_task(work, name=name),
            {},
            lambda delivery: None,
        )
        self.reader = tasks.create_task(self.dispatcher.consume(self.actor))

    def attempt(self, peer, ask_id, kind=Kind.ASK):
        tag, body, _ = encode_body(Count())
        budget = 60_000_000
        self.dispatcher.arrived(
            Delivery(peer, Envelope(int(kind), ask_id, "counter-1", 0, tag, budget, b"", "key", 0, body), ())
        )


@pytest.fixture
def run():
    def run(scene_of):
        async def main():
            async with asyncio.TaskGroup() as tasks:
                scene = Scene(tasks)
                await scene_of(scene)
                scene.reader.cancel()

        asyncio.run(main())

    return run


async def ticks(num=5):
    for _ in range(num):
        await asyncio.sleep(0)


@pytest.mark.parametrize("num", range(6))
def test_an_attempt_that_arrives_as_the_one_before_ends_is_answered(run, num):
    """Whatever tick it falls into: once, one that came between the reply and the end of its task never was."""

    async def scene_of(scene):
        scene.attempt(OLD, 1)
        await ticks()
        scene.actor.may_end.set()
        await ticks(num)
        scene.attempt(NEW, 2)
        await ticks()

        assert (scene.wire.answered, scene.actor.runs) == ([(OLD, 1), (NEW, 2)], 1)

    run(scene_of)


@pytest.mark.parametrize("late", [OLD, NOBODY])
def test_an_old_attempt_that_arrives_behind_the_new_one_does_not_take_its_reply(run, late):
    async def scene_of(scene):
        scene.attempt(NEW, 2)
        await ticks()
        scene.attempt(late, 1)
        await ticks()
        scene.dispatcher.forget(late)
        scene.actor.may_end.set()
        await ticks()

        assert (NEW, 2) in scene.wire.answered
        assert scene.actor.runs == 1

    run(scene_of)


@pytest.mark.parametrize("leave", ["forget", "cancel"])
def test_it_runs_for_whoever_is_left_and_ends_with_the_last(run, leave):
    async def scene_of(scene):
        def leaves(peer, ask_id):
            if leave == "forget":
                scene.dispatcher.forget(peer)
            else:
                scene.attempt(peer, ask_id, Kind.CANCEL)

        scene.attempt(OLD, 1)
        await ticks()
        scene.attempt(NEW, 2)
        await ticks()
        leaves(OLD, 1)
        await ticks()
        assert scene.actor.cancelled == 0

        leaves(NEW, 2)
        await ticks()
        assert scene.actor.cancelled == 1

        scene.actor.may_end.set()
        scene.attempt(NEW, 3)
        await ticks()
        assert (scene.wire.answered, scene.actor.runs) == ([(NEW, 3)], 2)

    run(scene_of)
