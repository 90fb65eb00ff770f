"""The memory that blobs of one host lie in: segments that stay mapped in their users and are used again once nobody reads them.

A fresh mapping costs a page fault per page and an unmapping at the end, more than copying the pages. So a segment belongs to the
writer that first asked for it, who keeps it mapped; once its blob is freed and every reader has dropped it, that writer gets it back.
"""

import fcntl
import os
from collections import Counter

F_SEAL_FUTURE_WRITE = 0x10
"""Linux 5.1: what is mapped for writing stays so, nobody else gets to write. Python names it from 3.13 on."""

SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | F_SEAL_FUTURE_WRITE

PAGE_BYTES = 4096
HUGE_BYTES = 2 << 20
SPARES = 2
"""Free segments kept per writer: the next version's, and one whose reader was slow."""


class MemorySegment:
    """One memory file. `users` counts the tokens that are out; `is_shown` whether a blob lies in it."""

    def __init__(self, number: int, capacity: int, writer: object) -> None:
        self.number, self.capacity, self.writer = number, capacity, writer
        self.fd = os.memfd_create("rubato-blob", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, capacity)
        self.users = 0
        self.is_shown = False
        self.is_sealed = False

    def seal(self) -> None:
        """From here on only its writer's mapping can change it. Raises OSError."""
        if not self.is_sealed:
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, SEALS)
            self.is_sealed = True


class Slab:
    """All segments of a host. A user (any hashable: a connection) holds tokens; what it held ends with it."""

    def __init__(self) -> None:
        self._segments: dict[int, MemorySegment] = {}
        self._tokens: dict[object, Counter[int]] = {}
        self._spares: dict[object, list[MemorySegment]] = {}
        self._knows: dict[object, set[int]] = {}
        self._gone: dict[object, list[int]] = {}
        self._last = 0

    def join(self, user: object) -> None:
        self._tokens[user], self._spares[user], self._knows[user], self._gone[user] = Counter(), [], set(), []

    def leave(self, user: object) -> None:
        """Everything `user` held is dropped, as if it had said so; what it alone could write is freed when nobody reads it."""
        tokens, spares = self._tokens.pop(user), self._spares.pop(user)
        del self._knows[user], self._gone[user]
        for segment in spares:
            self._free(segment)
        for number, count in tokens.items():
            segment = self._segments[number]
            segment.users -= count
            self._settle(segment)

    def lend_to_write(self, user: object, size_bytes: int) -> MemorySegment:
        """A segment that nobody uses, of at least `size_bytes`; one token of it goes to `user`."""
        spares = self._spares[user]
        fitting = [s for s in spares if size_bytes <= s.capacity <= capacity_for(2 * size_bytes)]
        if fitting:
            segment = min(fitting, key=lambda s: s.capacity)
            spares.remove(segment)
        else:
            for unfit in spares:
                self._free(unfit)
            spares.clear()
            self._last += 1
            segment = self._segments[self._last] = MemorySegment(self._last, capacity_for(size_bytes), user)
        return self.lend(user, segment)

    def lend(self, user: object, segment: MemorySegment) -> MemorySegment:
        """One more token of `segment` goes to `user`."""
        self._tokens[user][segment.number] += 1
        segment.users += 1
        return segment

    def drop(self, user: object, number: int) -> None:
        """`user` gives one token back. Raises KeyError where it holds none."""
        tokens = self._tokens[user]
        if tokens[number] < 1:
            raise KeyError(number)
        tokens[number] -= 1
        if not tokens[number]:
            del tokens[number]
        segment = self._segments[number]
        segment.users -= 1
        self._settle(segment)

    def written_by(self, user: object, number: int) -> MemorySegment | None:
        """The segment, if `user` holds it and may write into it."""
        segment = self._segments.get(number)
        usable = (
            segment is not None and segment.writer is user and not segment.is_shown and self._tokens[user][number] > 0
        )
        return segment if usable else None

    def show(self, segment: MemorySegment) -> None:
        segment.is_shown = True

    def hide(self, segment: MemorySegment) -> None:
        """Its blob is freed; the segment goes back once every token of it is dropped."""
        segment.is_shown = False
        self._settle(segment)

    def is_new_to(self, user: object, segment: MemorySegment) -> bool:
        """Whether `user` needs its descriptor; asked once per answer, as it is known to `user` from then on."""
        if segment.number in self._knows[user]:
            return False
        self._knows[user].add(segment.number)
        return True

    def gone_for(self, user: object, most: int) -> tuple[int, ...]:
        """Segments that `user` has mapped and that exist no more, each told once."""
        gone = self._gone[user]
        told, self._gone[user] = gone[:most], gone[most:]
        return tuple(told)

    def close(self) -> None:
        for segment in list(self._segments.values()):
            self._free(segment)

    @property
    def num_segments(self) -> int:
        return len(self._segments)

    def _settle(self, segment: MemorySegment) -> None:
        """What nobody uses becomes its writer's spare, or is freed."""
        if segment.users or segment.is_shown:
            return
        spares = self._spares.get(segment.writer)
        if spares is None or len(spares) >= SPARES:
            self._free(segment)
        else:
            spares.append(segment)

    def _free(self, segment: MemorySegment) -> None:
        del self._segments[segment.number]
        os.close(segment.fd)
        for user, known in self._knows.items():
            if segment.number in known:
                known.discard(segment.number)
                self._gone[user].append(segment.number)


def capacity_for(size_bytes: int) -> int:
    """Whole pages, huge ones where it is large; never nothing, as no empty file can be mapped."""
    unit = HUGE_BYTES if size_bytes >= HUGE_BYTES else PAGE_BYTES
    return max(1, -(-size_bytes // unit)) * unit
