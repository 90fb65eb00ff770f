"""WorkSet: memory and Redis give equal results on any sequence of acts, and every id ends at most once."""

import asyncio
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import ClassVar

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from runtime.store.embedded import EmbeddedRedis
from runtime.store.errors import StoreError
from runtime.store.memory import MemoryStore
from runtime.store.redis import RedisStore
from runtime.store.servers import installed_server, packaged_server
from runtime.store.workset import Ended, Item, WorkSet
from tests.stores import need_server

ids = st.sampled_from([f"i{n}" for n in range(12)] + ["I", "ï", "i-1"])
groups = st.sampled_from(["a", "B", "c", "ç", "a:b"])
scores = st.integers(-2, 4)
steps = st.integers(1, 4)
epochs = st.integers(0, 3)


class Twins(RuleBasedStateMachine):
    """Every act goes to both; one server serves all examples, each in a run of its own."""

    loop: ClassVar[asyncio.AbstractEventLoop]
    server: ClassVar[EmbeddedRedis]
    runs: ClassVar[int] = 0

    def __init__(self) -> None:
        super().__init__()
        Twins.runs += 1
        self._redis = RedisStore(self.server.url, f"run{Twins.runs}")
        self._sets: tuple[WorkSet, WorkSet] = (MemoryStore().workset("w"), self._redis.workset("w"))
        self._put: set[str] = set()
        self._log: list[Ended] = []
        self._trimmed = 0

    def teardown(self) -> None:
        self.loop.run_until_complete(self._redis.close())

    def both(self, act: Callable[[WorkSet], Awaitable[object]]) -> object:
        memory, redis = (self.loop.run_until_complete(_outcome(act, workset)) for workset in self._sets)
        assert memory == redis
        return memory

    @rule(item_id=ids, group=groups, score=scores, note=st.sampled_from([b"", b"note"]))
    def put(self, item_id: str, group: str, score: int, note: bytes) -> None:
        known = item_id in self._put
        assert self.both(lambda w: w.put(Item(item_id, group, score, b"p", note))) == (
            "duplicate" if known else "stored"
        )
        self._put.add(item_id)

    @rule(item_id=ids, group=groups)
    def end(self, item_id: str, group: str) -> None:
        assert self.both(lambda w: w.end(item_id, group, "failed", b"why")) == (item_id not in self._put)
        self._put.add(item_id)

    @rule(group=groups)
    def seal(self, group: str) -> None:
        self.both(lambda w: w.seal(group, "trained"))

    @rule(group=groups)
    def discard(self, group: str) -> None:
        self.both(lambda w: w.discard(group, "dropped"))

    @rule(num=st.integers(1, 3), min_score=scores, step=steps, epoch=epochs)
    def claim(self, num: int, min_score: int, step: int, epoch: int) -> None:
        self.both(lambda w: w.claim(num, min_score, step, epoch))

    @rule(step=steps, epoch=epochs)
    def commit(self, step: int, epoch: int) -> None:
        self.both(lambda w: w.commit(step, epoch))

    @rule(at_least=epochs)
    def new_epoch(self, at_least: int) -> None:
        self.both(lambda w: w.new_epoch(at_least))

    @rule(group=groups)
    def members(self, group: str) -> None:
        self.both(lambda w: w.members(group))

    @precondition(lambda self: self._log)
    @rule(data=st.data())
    def trim(self, data: st.DataObject) -> None:
        through = data.draw(st.integers(0, self._log[-1].index + 1))
        self.both(lambda w: w.trim(through))
        self._put -= {entry.id for entry in self._log[self._trimmed : through]}
        self._trimmed = max(self._trimmed, min(through, len(self._log)))

    @invariant()
    def both_count_alike_and_every_id_ends_at_most_once_until_it_is_trimmed(self) -> None:
        self.both(lambda w: w.counts())
        self.both(lambda w: w.ended(0))
        known = self._log[-1].index if self._log else 0
        self._log += self.loop.run_until_complete(self._sets[0].ended(known))
        assert [entry.index for entry in self._log] == list(range(1, len(self._log) + 1))
        kept = self._log[self._trimmed :]
        assert len({entry.id for entry in kept}) == len(kept)


async def _outcome(act: Callable[[WorkSet], Awaitable[object]], workset: WorkSet) -> object:
    try:
        return await act(workset)
    except StoreError as error:
        return type(error), str(error)


def test_memory_and_redis_give_equal_results_and_every_id_ends_at_most_once():
    with asyncio.Runner() as runner, tempfile.TemporaryDirectory() as folder:
        Twins.loop = runner.get_loop()
        program = need_server(packaged_server() or installed_server(), "there is no Redis server")
        Twins.server = EmbeddedRedis(Path(folder), program=program)
        runner.run(Twins.server.start())
        machine = Twins.TestCase
        machine.settings = settings(max_examples=25, stateful_step_count=40, deadline=None)
        try:
            machine().runTest()
        finally:
            runner.run(Twins.server.stop())
