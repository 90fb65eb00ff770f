"""Virtual time for coroutines: a sleep costs nothing, and what is due at one moment goes on in the order in which it was set."""

import heapq
from collections.abc import Callable, Coroutine, Generator
from typing import Any


class SimEvent:
    """Happens once, with a value. Awaiting one that has happened goes on at once; setting it again changes nothing."""

    __slots__ = ("_processes", "_timeline", "happened", "value")

    def __init__(self, timeline: "Timeline") -> None:
        self._timeline = timeline
        self._processes: list[SimProcess] = []
        self.happened = False
        self.value: Any = None

    def set(self, value: Any = None) -> None:
        """Let all who wait go on, now."""
        if self.happened:
            return
        self.happened, self.value = True, value
        for process in self._processes:
            self._timeline.at(self._timeline.now, process.resume)
        self._processes.clear()

    def __await__(self) -> Generator["SimEvent", None, Any]:
        if not self.happened:
            yield self
        return self.value

    def add(self, process: "SimProcess") -> None:
        """`process` goes on when this happens."""
        self._processes.append(process)

    def remove(self, process: "SimProcess") -> bool:
        """`process` waits no longer; whether it did."""
        found = process in self._processes
        if found:
            self._processes.remove(process)
        return found


class Cancelled(Exception):
    """Rises where a coroutine waits that is cancelled."""


class SimProcess:
    """A coroutine under way; `ended` happens with what it returned."""

    __slots__ = ("_coroutine", "_is_cancelled", "_timeline", "_waits_for", "ended")

    def __init__(self, timeline: "Timeline", coroutine: Coroutine[SimEvent, None, Any]) -> None:
        self._coroutine = coroutine
        self._timeline = timeline
        self._waits_for: SimEvent | None = None
        self._is_cancelled = False
        self.ended = SimEvent(timeline)

    def cancel(self) -> None:
        """Let Cancelled rise where it waits, now."""
        if self._is_cancelled or self._waits_for is None:
            return
        self._is_cancelled = True
        if self._waits_for.remove(self):  # else it goes on anyway
            self._timeline.at(self._timeline.now, self.resume)

    def resume(self) -> None:
        """Run to the next event that has not happened."""
        try:
            if self._is_cancelled:
                self._is_cancelled = False
                event = self._coroutine.throw(Cancelled())
            else:
                event = self._coroutine.send(None)
        except StopIteration as end:
            self._waits_for = None
            self.ended.set(end.value)
        else:
            self._waits_for = event
            event.add(self)


class Timeline:
    """The clock and what is due. Nothing here reads the wall clock, so the same calls give the same run."""

    def __init__(self) -> None:
        self.now = 0.0
        """Seconds."""
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._num = 0

    def at(self, when_s: float, call: Callable[[], None]) -> None:
        """Call at `when_s`, after what was set for that moment before; a moment that is over means now."""
        self._num += 1
        heapq.heappush(self._due, (max(self.now, when_s), self._num, call))

    def event(self) -> SimEvent:
        return SimEvent(self)

    def start(self, coroutine: Coroutine[SimEvent, None, Any]) -> SimProcess:
        """Run it up to its first wait; the rest follows in `run`."""
        process = SimProcess(self, coroutine)
        process.resume()
        return process

    async def sleep(self, seconds: float) -> None:
        woken = SimEvent(self)
        self.at(self.now + seconds, woken.set)
        await woken

    def run(self, until: SimEvent | None = None) -> None:
        """Go on until `until` has happened, or until nothing is due."""
        while self._due and not (until and until.happened):
            self.now, _, call = heapq.heappop(self._due)
            call()
