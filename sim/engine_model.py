"""A modelled engine in virtual time: continuous batching, prefix reuse per session, preemption when its KV room is full.

Between two events the batch is constant, so all its decode steps are taken at once; a request that comes in meanwhile joins
at the next step's boundary, as commands do in a live engine. Prefill goes first and stalls decoding.
"""

import heapq
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from rubato.actors.engines.engine import StepSeen
from rubato.planning.roofline import Roofline
from rubato.runtime.errors import ConfigError
from rubato.sim.timeline import Cancelled, SimEvent, Timeline

MAX_STEPS = 256
"""Steps taken at once: their time is taken at their middle, which is exact while one roof of the two bounds all of them."""


@dataclass(eq=False, slots=True)
class BatchRequest:
    """One request: `context` tokens are known when it begins, `new_tokens` come."""

    session: str
    context: int
    new_tokens: int
    min_version: int
    done: SimEvent
    finish: int = 0
    """Step count of the engine at which it is complete."""
    entry: int = 0
    """Number of its place in the running batch; 0 while it has none."""
    version: int = -1
    """Of the weights that sampled its first token."""


@dataclass(slots=True)
class Usage:
    """Seconds and tokens so far."""

    prefill_s: float = 0.0
    decode_s: float = 0.0
    request_s: float = 0.0
    """Seconds of decode, once for each request in it."""
    tokens: int = 0
    prefilled: int = 0
    preempted: int = 0
    seen: StepSeen | None = None
    """Called after steps, where that is wanted."""

    @property
    def busy_s(self) -> float:
        return self.prefill_s + self.decode_s


@dataclass(frozen=True, slots=True)
class DecodeSpan:
    """Decode steps of a constant batch that begins with `context` tokens."""

    model: Roofline
    batch: int
    context: int

    def seconds(self, steps: int) -> float:
        return steps * self.model.step_s(self.batch, self.context + self.batch * (steps - 1) / 2)

    def steps_within(self, elapsed_s: float, most: int) -> int:
        """Steps begun within `elapsed_s`, at least one: the one under way is finished."""
        low, high = 1, most
        while low < high:
            middle = (low + high) // 2
            if self.seconds(middle) < elapsed_s:
                low = middle + 1
            else:
                high = middle
        return low


@dataclass(eq=False)
class ModelledEngine:
    """Runs until the timeline ends. Its router sets `on_change`, which is called when its version or suspension changes."""

    timeline: Timeline
    name: str
    model: Roofline
    version: int = 0
    suspended: bool = False
    usage: Usage = field(default_factory=Usage)
    on_change: Callable[["ModelledEngine"], None] = lambda engine: None

    def __post_init__(self) -> None:
        self._waiting: deque[BatchRequest] = deque()
        self._early: list[BatchRequest] = []
        """They ask for weights that are not here yet."""
        self._aborted: dict[str, SimEvent] = {}
        self._running: list[tuple[int, int, BatchRequest]] = []
        self._batch = self._context = self._steps = self._serial = 0
        self._idle: OrderedDict[str, int] = OrderedDict()
        """Session -> tokens of its KV that are kept between its turns, the least recently used first."""
        self._idle_tokens = self._recompute = 0
        self._room = self.model.kv_tokens
        self._changed = self.timeline.event()
        self.timeline.start(self._serve())

    async def generate(self, session: str, context: int, new_tokens: int, min_version: int = 0) -> int:
        """Returns when the tokens are there, with the version that sampled the first. Raises ConfigError where they can never fit."""
        if context + new_tokens > self._room:
            asked = f"a request of {context + new_tokens} tokens; {self.name} holds {self._room}"
            raise ConfigError(f"The workload has {asked}. Give the engine more GPUs, or the task a smaller max_context.")
        job = BatchRequest(session, context, max(1, new_tokens), min_version, self.timeline.event())
        (self._waiting if min_version <= self.version else self._early).append(job)
        self._wake()
        try:
            await job.done
        except Cancelled:
            self.timeline.start(self.abort(session))
            raise
        return job.version

    @property
    def num_slots(self) -> int:
        """Requests decoded at once."""
        return self.model.spec.num_slots

    @property
    def in_flight(self) -> int:
        """Requests that run or wait here."""
        return self._batch + len(self._waiting) + len(self._early)

    @property
    def left(self) -> dict[str, tuple[int, int]]:
        """Of each request that runs or waits here: tokens that are to come, and those whose KV is here. Steps under way don't count yet."""
        running = (job for _, entry, job in self._running if entry == job.entry)
        found = {job.session: (job.finish - self._steps, job) for job in running}
        here = {name: (left, job.context + job.new_tokens - left) for name, (left, job) in found.items()}
        waiting = {job.session: (job.new_tokens, self.held(job.session)) for job in (*self._waiting, *self._early)}
        return here | waiting

    def held(self, session: str) -> int:
        """Tokens of an idle session whose KV is here."""
        return self._idle.get(session, 0)

    def adopt(self, session: str, tokens: int) -> None:
        """KV of an idle session comes from elsewhere: `tokens` in all; it is dropped where there is no room for it."""
        missing = tokens - self.held(session)
        if missing > 0 and self._make_room(missing, session):
            self._idle[session] = tokens
            self._idle.move_to_end(session)
            self._idle_tokens += missing

    def forget(self, session: str) -> None:
        """The session is over: its KV is free."""
        self._idle_tokens -= self._idle.pop(session, 0)

    async def abort(self, session: str) -> int:
        """Take the session's request off at the next step's boundary, without its KV, and let its `generate` return; the tokens that
        were still to come: 0 where it had ended."""
        aborted = self._aborted.setdefault(session, self.timeline.event())
        self._wake()
        return await aborted

    def suspend(self) -> None:
        """From the next step's boundary nothing is computed."""
        self.suspended = True
        self._wake()
        self.on_change(self)

    def resume(self, version: int) -> None:
        """Go on with weights `version`; if they are newer, every KV is stale and what runs is prefilled again."""
        if version > self.version:
            self.version = version
            self._recompute = self._context
            self._idle.clear()
            self._idle_tokens = 0
            self._waiting.extend(job for job in self._early if job.min_version <= version)
            self._early = [job for job in self._early if job.min_version > version]
        self.suspended = False
        self._wake()
        self.on_change(self)

    def _wake(self) -> None:
        self._changed.set()

    async def _serve(self) -> None:
        while True:
            self._changed = changed = self.timeline.event()
            self._drop_aborted()
            if not self.suspended and (prefill_s := self._admit()):
                await self.timeline.sleep(prefill_s)
                self.usage.prefill_s += prefill_s
            elif not self.suspended and self._batch:
                await self._decode(changed)
            else:
                await changed

    def _admit(self) -> float:
        """Take in what fits; returns the seconds that its prefill takes."""
        seconds = 0.0
        if self._recompute:
            each = self._context // max(1, self._batch)
            seconds += self._batch * self.model.prefill_s(each)
            self.usage.prefilled += self._recompute
            self._recompute = 0
        while self._waiting and self._batch < self.model.spec.num_slots:
            job = self._waiting[0]
            kept = self._idle.get(job.session, 0)
            if not self._make_room(job.context - kept, job.session):
                break
            self._waiting.popleft()
            self.forget(job.session)
            prefill_s = self.model.prefill_s(job.context - kept, kept)
            if self.usage.seen is not None:
                self.usage.seen(job.context - kept, 0, 0, prefill_s)
            seconds += prefill_s
            self.usage.prefilled += job.context - kept
            self._begin(job)
        return seconds

    def _begin(self, job: BatchRequest) -> None:
        self._batch += 1
        self._context += job.context
        job.finish = self._steps + job.new_tokens
        self._serial += 1
        job.entry = self._serial
        job.version = self.version if job.version < 0 else job.version
        heapq.heappush(self._running, (job.finish, self._serial, job))

    def _make_room(self, tokens: int, session: str = "") -> bool:
        """Forget idle sessions, the least recently used first, until `tokens` more and a step of the batch fit."""
        wanted = tokens + self._batch + 1
        while self._context + self._idle_tokens + wanted > self._room:
            oldest = next((name for name in self._idle if name != session), None)
            if oldest is None:
                return False
            self.forget(oldest)
        return True

    async def _decode(self, changed: SimEvent) -> None:
        """The steps up to the next completion, or up to the boundary after something changed."""
        while self._batch > 1 and not self._make_room(0):
            self._preempt()
        room = max(1, (self._room - self._context - self._idle_tokens) // self._batch)
        self._drop_left()
        most = min(self._running[0][0] - self._steps, room, MAX_STEPS)
        span = DecodeSpan(self.model, self._batch, self._context)
        began, steps = self.timeline.now, most
        self.timeline.at(began + span.seconds(most), changed.set)
        await changed
        if self.timeline.now < began + span.seconds(most):
            steps = span.steps_within(self.timeline.now - began, most)
            await self.timeline.sleep(began + span.seconds(steps) - self.timeline.now)
        self.usage.decode_s += span.seconds(steps)
        self.usage.request_s += span.batch * span.seconds(steps)
        if self.usage.seen is not None:
            self.usage.seen(0, span.batch, span.context, span.seconds(steps) / steps, steps)
        self.usage.tokens += self._batch * steps
        self._steps += steps
        self._context += self._batch * steps
        self._complete()

    def _complete(self) -> None:
        self._drop_left()
        while self._running and self._running[0][0] <= self._steps:
            _, _, job = heapq.heappop(self._running)
            held = job.context + job.new_tokens
            self._take_off(job, held)
            self._idle[job.session] = held
            self._idle_tokens += held
            job.done.set()
            self._drop_left()

    def _preempt(self) -> None:
        """Take the youngest request off; it comes back first, with the tokens that it has."""
        job = max((entry[2] for entry in self._running if entry[2].entry == entry[1]), key=lambda job: job.entry)
        left = job.finish - self._steps
        has = job.context + job.new_tokens - left
        self._take_off(job, has)
        self.usage.preempted += 1
        job.context, job.new_tokens = has, left
        self._waiting.appendleft(job)

    def _drop_aborted(self) -> None:
        if not self._aborted:
            return
        running = [job for _, entry, job in self._running if entry == job.entry and job.session in self._aborted]
        for job in running:
            job.new_tokens, held = job.finish - self._steps, job.context + job.new_tokens - job.finish + self._steps
            self._take_off(job, held)
        queued = [job for job in (*self._waiting, *self._early) if job.session in self._aborted]
        self._waiting = deque(job for job in self._waiting if job.session not in self._aborted)
        self._early = [job for job in self._early if job.session not in self._aborted]
        for job in running + queued:
            self._aborted.pop(job.session).set(job.new_tokens)
            job.done.set()
        for session, aborted in self._aborted.items():
            self.forget(session)
            aborted.set(0)
        self._aborted.clear()

    def _take_off(self, job: BatchRequest, held: int) -> None:
        job.entry = 0
        self._batch -= 1
        self._context -= held

    def _drop_left(self) -> None:
        """Whose entry was taken off stays in the heap until it comes to the top."""
        while self._running and self._running[0][2].entry != self._running[0][1]:
            heapq.heappop(self._running)
