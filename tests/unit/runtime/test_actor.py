from pathlib import Path

import pytest

from rubato.bus.link import Identity
from rubato.bus.memory import MemoryNetwork, MemoryTransport
from rubato.bus.message import Ack, Message, Request
from rubato.runtime.actor import OWN, Actor, RunInfo, handler
from rubato.runtime.kernel import Kernel
from rubato.runtime.memory import MemoryBlobStore, MemoryStore
from rubato.runtime.observe.log import logger


class Ping(Request[Ack], frozen=True):
    n: int


class Pong(Message, frozen=True):
    n: int


class Either(Request[Ack | Pong], frozen=True):
    n: int


def test_handlers_are_found_by_the_message_they_take():
    class Player(Actor):
        @handler
        async def ping(self, request: Ping) -> Ack:
            return Ack()

        @handler(concurrency=8)
        async def either(self, request: Either) -> Ack | Pong:
            return Ack()

        @handler
        async def pong(self, message: Pong) -> None: ...

    assert {tag: (s.method, s.concurrency) for tag, s in Player.handlers.items()} == {
        "Ping": ("ping", 1),
        "Either": ("either", 8),
        "Pong": ("pong", 1),
    }


def test_a_subclass_inherits_handlers():
    class Base(Actor):
        @handler
        async def ping(self, request: Ping) -> Ack:
            return Ack()

    class Derived(Base):
        pass

    assert "Ping" in Derived.handlers


def test_a_handler_whose_reply_is_not_the_requests_is_refused_when_the_class_is_defined():
    with pytest.raises(TypeError, match=r"answered by \['Ack', 'Pong'\]"):

        class Wrong(Actor):
            @handler
            async def either(self, request: Either) -> Ack:
                return Ack()


def test_a_plain_function_or_a_missing_annotation_is_refused():
    with pytest.raises(TypeError, match="must be async"):

        class Plain(Actor):
            @handler
            def ping(self, request: Ping) -> Ack:
                return Ack()

    with pytest.raises(TypeError, match="one annotated message"):

        class Bare(Actor):
            @handler
            async def ping(self, request) -> Ack:
                return Ack()


async def test_a_method_that_hides_what_every_actor_has_is_refused_by_name():
    with pytest.raises(TypeError, match=r"Announcer\.notice is what every actor has already"):

        class Announcer(Actor):
            async def notice(self) -> None: ...


async def test_every_name_that_a_constructor_sets_is_refused_to_subclasses():
    class Plain(Actor): ...

    kernel = Kernel(
        Plain,
        None,
        name="plain-1",
        incarnation=1,
        run=RunInfo("test", Path("run"), 1, 1),
        transport=MemoryTransport(Identity("test", "plain-1", 1), MemoryNetwork()),
        store=MemoryStore(),
        blobs=MemoryBlobStore(),
        log=logger("test"),
    )

    assert vars(kernel.build()).keys() == OWN
