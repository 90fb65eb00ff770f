"""Who may compute on a pool: a line of jobs, served in the order in which they came (RollMux, section 4.3), one at a time. Pure."""

from collections.abc import Collection, Iterable
from typing import NamedTuple


class Stand(NamedTuple):
    """One who holds a pool's permit, or stands in line for it."""

    job: str
    phase: str
    ticket: int
    """Unique; tickets say nothing about the order."""
    since_s: float
    """Wall clock, in seconds: when it began to hold, or to wait."""
    term: int = 0
    """Of its grant; 0 while it waits. A later grant of the same pool has a higher one."""
    places: tuple[int, ...] = ()
    """Of the pool, that a tail keeps."""


class PermitLine(NamedTuple):
    """The permit of one pool."""

    holder: Stand | None = None
    queue: tuple[Stand, ...] = ()
    """First come, first served."""
    tail: Stand | None = None
    """Held before the holder, and still has its `places`: the pool's others are the holder's."""

    def held(self, ticket: int) -> Stand | None:
        """The stand under which `ticket` may compute now."""
        return next((each for each in (self.holder, self.tail) if each is not None and each.ticket == ticket), None)

    @property
    def tickets(self) -> frozenset[int]:
        """Of all who hold or wait."""
        return frozenset(each.ticket for each in (self.holder, self.tail, *self.queue) if each is not None)

    def may_use(self, term: int, place: int) -> Stand | None:
        """The stand under whose `term` a process may compute at `place` of the pool now."""
        if self.tail is not None and place in self.tail.places:
            return self.tail if self.tail.term == term else None
        return self.holder if self.holder is not None and self.holder.term == term else None


def joined(line: PermitLine, stand: Stand) -> PermitLine:
    """With `stand` at the end of the queue; who is in the line keeps its place.

    A job that asks for the same phase under another ticket was started again: it has its own place, and no other job gets in between, for what
    it began may still be running.
    """
    own = (stand.job, stand.phase)
    if stand.ticket in line.tickets:
        return line
    if line.tail is not None and line.tail[:2] == own:
        return line._replace(tail=line.tail._replace(ticket=stand.ticket))
    if line.holder is not None and line.holder[:2] == own:
        return line._replace(holder=None, queue=(stand, *line.queue))
    if any(each[:2] == own for each in line.queue):
        return line._replace(queue=tuple(stand if each[:2] == own else each for each in line.queue))
    return line._replace(queue=(*line.queue, stand))


def kept(line: PermitLine, alive: Collection[int]) -> PermitLine:
    """Without those whose tickets are not `alive`."""
    holder, tail = (each if each is not None and each.ticket in alive else None for each in (line.holder, line.tail))
    return PermitLine(holder, tuple(each for each in line.queue if each.ticket in alive), tail)


def narrowed(line: PermitLine, ticket: int, places: Iterable[int]) -> PermitLine:
    """The holder keeps only `places`, and the pool is free for the next. While there is a tail already nothing changes."""
    if line.tail is not None or line.holder is None or line.holder.ticket != ticket:
        return line
    return PermitLine(None, line.queue, line.holder._replace(places=tuple(sorted(places))))


def granted(line: PermitLine, term: int, now_s: float) -> PermitLine:
    """A pool that is free goes to the first of its queue, under `term`, which is above that of every grant before."""
    if line.holder is not None or not line.queue:
        return line
    first, *rest = line.queue
    return PermitLine(first._replace(term=term, since_s=now_s), tuple(rest), line.tail)
