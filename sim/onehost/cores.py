"""Cores that the processes of one host share: each that has work gets an equal share, and never more than one core.

A part is a process with an event loop: what reaches it while it computes is handled together, in its next tick.
"""

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from rubato.sim.timeline import Timeline

Call = Callable[[], None]

ROUNDING_S = 1e-12
"""Work that differs by less is due together."""


class Cores:
    """Processor sharing. All active parts progress at one rate, so one clock of work done says when each of them is through."""

    def __init__(self, timeline: Timeline, num: float) -> None:
        self._timeline, self._num = timeline, num
        self._work_s = self._at = 0.0
        self._due: list[tuple[float, int, Call]] = []
        self._serial = self._plan = 0

    def begin(self, cpu_s: float, done: Call) -> None:
        """`done` is called once `cpu_s` of work are done."""
        self._progress()
        self._serial += 1
        heapq.heappush(self._due, (self._work_s + cpu_s, self._serial, done))
        self._look_ahead()

    @property
    def rate(self) -> float:
        """Seconds of work per second that each active part gets."""
        return min(1.0, self._num / max(1, len(self._due)))

    def _progress(self) -> None:
        self._work_s += (self._timeline.now - self._at) * self.rate
        self._at = self._timeline.now

    def _look_ahead(self) -> None:
        self._plan += 1
        if self._due:
            left_s = max(0.0, self._due[0][0] - self._work_s)
            self._timeline.at(self._timeline.now + left_s / self.rate, partial(self._through, self._plan))

    def _through(self, plan: int) -> None:
        """Of plans that a later `begin` replaced nothing comes."""
        if plan != self._plan:
            return
        self._progress()
        self._work_s = max(self._work_s, self._due[0][0])
        ended: list[Call] = []
        while self._due and self._due[0][0] <= self._work_s + ROUNDING_S:
            ended.append(heapq.heappop(self._due)[2])
        self._look_ahead()
        for call in ended:
            call()


class HostProcess:
    """One process: what it has to do, in order, and the CPU seconds that it took."""

    def __init__(self, cores: Cores, timeline: Timeline, name: str) -> None:
        self.name = name
        self.cpu_s = 0.0
        self._cores, self._timeline = cores, timeline
        self._mail: list[tuple[float, Call]] = []
        self._work: deque[tuple[Callable[[], float], Call]] = deque()
        self._busy = False

    def post(self, cpu_s: float, then: Call) -> None:
        """A message. All that wait are handled in one tick, before further work; `then` is called at its end, when replies leave."""
        self._mail.append((cpu_s, then))
        self._wake()

    def compute(self, cost: Callable[[], float], then: Call) -> None:
        """Work of its own, such as a decode step; its cost in CPU seconds is asked for when it begins."""
        self._work.append((cost, then))
        self._wake()

    async def handle(self, cpu_s: float) -> None:
        """`post`, and wait for it."""
        event = self._timeline.event()
        self.post(cpu_s, event.set)
        await event

    async def work(self, cpu_s: float) -> None:
        """`compute`, and wait for it."""
        event = self._timeline.event()
        self.compute(lambda: cpu_s, event.set)
        await event

    def _wake(self) -> None:
        """Begin behind all else that is due at this moment, so that what arrives together is handled together."""
        if not self._busy:
            self._busy = True
            self._timeline.at(self._timeline.now, self._go_on)

    def _go_on(self) -> None:
        if self._mail:
            mail, self._mail = self._mail, []
            self._begin(sum(cpu_s for cpu_s, _ in mail), [then for _, then in mail])
        elif self._work:
            cost, then = self._work.popleft()
            self._begin(cost(), [then])
        else:
            self._busy = False

    def _begin(self, cpu_s: float, calls: Sequence[Call]) -> None:
        self._cores.begin(cpu_s, partial(self._ended, cpu_s, calls))

    def _ended(self, cpu_s: float, calls: Sequence[Call]) -> None:
        self.cpu_s += cpu_s
        for call in calls:
            call()
        self._timeline.at(self._timeline.now, self._go_on)
