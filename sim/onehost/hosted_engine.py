"""The built-in engine as a process on shared cores: the live scheduler decides what goes into a step, and whose cache stays.

When it steps follows actors/engines/torch_engine.py.
"""

from collections.abc import Callable
from typing import NamedTuple

from rubato.actors.engines.engine import Work
from rubato.actors.engines.scheduler import Row, Scheduler, Sequence
from rubato.actors.engines.section import EngineSection
from rubato.actors.messages.generation import Sampling
from rubato.sim.onehost.calibrated import EngineCosts
from rubato.sim.onehost.cores import HostProcess
from rubato.sim.timeline import SimEvent, Timeline

TOKEN = 0
"""All that is ever shown or sampled: sessions differ in nothing but their length."""


class HostedRequest(NamedTuple):
    """A sequence of the live scheduler, and what happens when its last token is sampled."""

    sequence: Sequence
    min_version: int
    done: SimEvent


class HostedEngine:
    """Between its steps it takes commands; what comes during a step waits for the next. Routed to by sim/proxy_model.py."""

    def __init__(self, timeline: Timeline, loop: HostProcess, steps: HostProcess, section: EngineSection, costs: EngineCosts) -> None:
        self.name = loop.name
        self._loop, self._steps = loop, steps
        """Two threads: the event loop, and the one that steps."""
        self.version, self.suspended = 0, False
        self.on_change: Callable[[HostedEngine], None] = lambda engine: None
        self.busy_s = 0.0
        """Seconds in which some request was here that need not wait for weights."""
        self._timeline, self._section, self._costs = timeline, section, costs
        self._scheduler = Scheduler(section.num_slots, section.max_batch_tokens, prefix_cache=section.prefix_cache)
        self._posted: list[Sequence] = []
        """Commands that the step loop has not taken."""
        self._early: list[HostedRequest] = []
        self._done: dict[str, SimEvent] = {}
        """By request, until its last token is sampled."""
        self._num_here, self._since, self._stepping = 0, 0.0, False
        self._newest = 0

    @property
    def num_slots(self) -> int:
        return self._section.num_slots

    @property
    def cpu_s(self) -> float:
        """CPU seconds of the process."""
        return self._loop.cpu_s + self._steps.cpu_s

    def busy_until(self, now: float) -> float:
        """`busy_s` at this moment."""
        return self.busy_s + (now - self._since if self._num_here else 0.0)

    async def generate(self, session: str, context: int, new_tokens: int, min_version: int = 0) -> int:
        """The version of its first token; returns when the last one is sampled and the reply has left this process."""
        await self._loop.work(self._costs.request_s / 2)  # one by one: each is the step thread's as soon as it is read
        length = context + max(1, new_tokens)
        work = Work(session, session, (TOKEN,) * context, Sampling(max_new_tokens=max(1, new_tokens)))
        request = HostedRequest(Sequence(work, length), min_version, self._timeline.event())
        if min_version <= self.version:
            self._post(request)
        else:
            self._early.append(request)
        version = await request.done
        await self._loop.handle(self._costs.request_s / 4)
        self._went()  # as the live worker counts: it is busy until it has the tokens, not until they are sent
        await self._loop.handle(self._costs.request_s / 4)
        return version

    def forget(self, session: str) -> None:
        """A live engine does not hear that a session is over: its slot is used again when none is free."""

    def published(self, version: int) -> None:
        """Newer weights are there: lay them out beside the steps, then swap between two of them. Only the newest is pulled."""
        pulling, self._newest = self._newest > self.version, version
        if not pulling:
            self._pull(version)

    def _pull(self, version: int) -> None:
        self._loop.compute(lambda: self._costs.update_s, lambda: self._swap(version))

    def _swap(self, version: int) -> None:
        self.version = version
        if self._section.kv_on_update == "recompute":
            self._scheduler.forget_caches()
        early, self._early = self._early, []
        for request in early:
            if request.min_version <= version:
                self._post(request)
            else:
                self._early.append(request)
        self.on_change(self)
        if self._newest > version:
            self._pull(self._newest)

    def _post(self, request: HostedRequest) -> None:
        if not self._num_here:
            self._since = self._timeline.now
        self._num_here += 1
        self._posted.append(request.sequence)
        self._done[request.sequence.work.request_id] = request.done
        self._wake()

    def _went(self) -> None:
        self._num_here -= 1
        if not self._num_here:
            self.busy_s += self._timeline.now - self._since

    def _wake(self) -> None:
        """An idle step loop waits `gather_s` after the first request for others to share its step."""
        if not self._stepping and self._posted:
            self._stepping = True
            self._timeline.at(self._timeline.now + self._section.gather_s, self._step)

    def _step(self) -> None:
        rows: list[Row] = []
        began = self.version

        def cost() -> float:
            nonlocal began
            began = self.version
            for sequence in self._posted:
                self._scheduler.add(sequence)
            self._posted.clear()
            rows.extend(self._scheduler.schedule())
            tokens = sum(end - start for _, start, end in rows)
            return self._costs.step_s + self._costs.row_s * len(rows) + self._costs.token_s * tokens

        self._steps.compute(cost, lambda: self._stepped(rows, began))

    def _stepped(self, rows: list[Row], version: int) -> None:
        # New weights that came during the step made the caches stale: then what it added is all that there is.
        kept = [Row(sequence, sequence.num_cached, sequence.num_cached + end - start) for sequence, start, end in rows]
        ended: list[Sequence] = []
        for sequence in self._scheduler.computed(kept):
            sequence.sampled(TOKEN, 0.0, version)
            if sequence.finish_reason:
                ended.append(sequence)
        self._scheduler.retire(ended)
        for sequence in ended:
            first, _ = sequence.unsent_versions[0]
            self._done.pop(sequence.work.request_id).set(first)
        if self._scheduler.num_running or self._scheduler.num_waiting:
            self._step()
        else:
            self._stepping = False
            self._wake()
