"""The built-in engine as a process on shared cores: steps of prefill and decode together, slots that keep a session's cache.

It follows actors/engines: scheduler.py for what goes into a step, slots.py for whose cache stays, step_loop.py for when it steps.
"""

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass

from actors.engines.section import EngineSection
from sim.onehost.cores import Part
from sim.onehost.costs import EngineCosts
from sim.timeline import SimEvent, Timeline


@dataclass(eq=False, slots=True)
class EngineLoad:
    """`context` tokens are known, of which the slot's cache holds `cached`; `left` are still to be sampled."""

    session: str
    context: int
    left: int
    min_version: int
    done: SimEvent
    cached: int = 0
    version: int = -1


class HostedEngine:
    """Between its steps it takes commands; what comes during a step waits for the next. Routed to by sim/proxy_model.py."""

    def __init__(self, timeline: Timeline, loop: Part, steps: Part, section: EngineSection, costs: EngineCosts) -> None:
        self.name = loop.name
        self._loop, self._steps = loop, steps
        """Two threads: the event loop, and the one that steps."""
        self.version, self.suspended = 0, False
        self.told: Callable[[HostedEngine], None] = lambda engine: None
        self.busy_s = 0.0
        """Seconds in which some request was here that need not wait for weights."""
        self._timeline, self._section, self._costs = timeline, section, costs
        self._posted: list[EngineLoad] = []
        """Commands that the step loop has not taken."""
        self._waiting: deque[EngineLoad] = deque()
        self._early: list[EngineLoad] = []
        self._running: dict[str, EngineLoad] = {}
        self._idle: OrderedDict[str, int] = OrderedDict()
        """Session -> tokens that its slot still caches, the least recently used first."""
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
        request = EngineLoad(session, context, max(1, new_tokens), min_version, self._timeline.event())
        if min_version <= self.version:
            self._post(request)
        else:
            self._early.append(request)
        await request.done
        await self._loop.handle(self._costs.request_s / 4)
        self._went()  # as the live worker counts: it is busy until it has the tokens, not until they are sent
        await self._loop.handle(self._costs.request_s / 4)
        return request.version

    def forget(self, session: str) -> None:
        """Nobody tells a live engine that a session is over: its slot is used again when none is free."""

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
            self._idle.clear()
            for request in self._running.values():
                request.cached = 0
        early, self._early = self._early, []
        for request in early:
            if request.min_version <= version:
                self._post(request)
            else:
                self._early.append(request)
        self.told(self)
        if self._newest > version:
            self._pull(self._newest)

    def _post(self, request: EngineLoad) -> None:
        if not self._num_here:
            self._since = self._timeline.now
        self._num_here += 1
        self._posted.append(request)
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
        rows: list[tuple[EngineLoad, int]] = []
        began = self.version

        def cost() -> float:
            nonlocal began
            began = self.version
            self._waiting.extend(self._posted)
            self._posted.clear()
            self._admit()
            rows.extend(self._rows())
            tokens = sum(num for _, num in rows)
            return self._costs.step_s + self._costs.row_s * len(rows) + self._costs.token_s * tokens

        self._steps.compute(cost, lambda: self._stepped(rows, began))

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self.num_slots:
            request = self._waiting.popleft()
            request.cached = min(self._idle.pop(request.session, 0), request.context - 1)
            if len(self._running) + len(self._idle) >= self.num_slots:
                self._idle.popitem(last=False)
            self._running[request.session] = request

    def _rows(self) -> list[tuple[EngineLoad, int]]:
        """Requests and how many tokens of each: decode first, then prefill, cut to what a step computes."""
        left = max(self._section.max_batch_tokens, self.num_slots)
        rows: list[tuple[EngineLoad, int]] = []
        prefilling: list[EngineLoad] = []
        for request in self._running.values():
            if request.context - request.cached == 1:
                rows.append((request, 1))
                left -= 1
            else:
                prefilling.append(request)
        for request in prefilling:
            if left <= 0:
                break
            num = min(left, request.context - request.cached)
            rows.append((request, num))
            left -= num
        return rows

    def _stepped(self, rows: list[tuple[EngineLoad, int]], version: int) -> None:
        for request, num in rows:
            request.cached += num
            if request.cached < request.context:
                continue
            request.version = version if request.version < 0 else request.version
            request.context += 1
            request.left -= 1
            if not request.left:
                self._end(request)
        if self._running or self._waiting:
            self._step()
        else:
            self._stepping = False
            self._wake()

    def _end(self, request: EngineLoad) -> None:
        del self._running[request.session]
        if self._section.prefix_cache:
            self._idle[request.session] = request.cached
        request.done.set()
