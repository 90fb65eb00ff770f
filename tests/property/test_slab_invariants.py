"""Whatever writers and readers do, and whenever they die: memory that is written is nobody else's, and none is forgotten."""

import os

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from rubato.runtime.blobs.server import SPARES, MemorySegment, Slab, capacity_for

USERS = ("a", "b", "c")


class SlabMachine(RuleBasedStateMachine):
    """A model beside the slab: who holds which token, and what is shown."""

    def __init__(self):
        super().__init__()
        self.slab = Slab()
        self.alive: set[str] = set()
        self.lives = 0
        self.users: dict[str, tuple[str, int]] = {}
        self.drafts: list[tuple[tuple[str, int], MemorySegment]] = []
        self.shown: list[MemorySegment] = []
        self.reads: list[tuple[tuple[str, int], MemorySegment]] = []

    def user(self, name):
        if name not in self.users:
            self.lives += 1
            self.users[name] = (name, self.lives)
            self.slab.join(self.users[name])
        return self.users[name]

    @rule(name=st.sampled_from(USERS), size=st.integers(0, 3 << 20))
    def begin(self, name, size):
        user = self.user(name)
        segment = self.slab.lend_to_write(user, size)
        assert segment.capacity >= size
        assert segment not in self.shown
        assert all(segment is not other for _, other in self.drafts + self.reads)
        self.drafts.append((user, segment))

    @rule(pick=st.integers(0, 99))
    def finish(self, pick):
        if self.drafts:
            user, segment = self.drafts.pop(pick % len(self.drafts))
            assert self.slab.written_by(user, segment.number) is segment
            segment.is_shown = True
            self.shown.append(segment)
            self.slab.drop(user, segment.number)

    @rule(pick=st.integers(0, 99))
    def abandon(self, pick):
        if self.drafts:
            user, segment = self.drafts.pop(pick % len(self.drafts))
            self.slab.drop(user, segment.number)

    @rule(pick=st.integers(0, 99), name=st.sampled_from(USERS))
    def read(self, pick, name):
        if self.shown:
            user = self.user(name)
            self.reads.append((user, self.slab.lend(user, self.shown[pick % len(self.shown)])))

    @rule(pick=st.integers(0, 99))
    def drop(self, pick):
        if self.reads:
            user, segment = self.reads.pop(pick % len(self.reads))
            self.slab.drop(user, segment.number)

    @rule(pick=st.integers(0, 99))
    def free(self, pick):
        if self.shown:
            self.slab.hide(self.shown.pop(pick % len(self.shown)))

    @rule(name=st.sampled_from(USERS))
    def die(self, name):
        user = self.users.pop(name, None)
        if user is not None:
            self.slab.leave(user)
            self.drafts = [d for d in self.drafts if d[0] != user]
            self.reads = [r for r in self.reads if r[0] != user]

    @invariant()
    def what_is_used_exists(self):
        for segment in [*self.shown, *(s for _, s in self.drafts + self.reads)]:
            os.fstat(segment.fd)
            assert segment.users == sum(segment is s for _, s in self.drafts + self.reads)

    @invariant()
    def what_is_not_used_is_spare_or_gone(self):
        used = {s.number for s in [*self.shown, *(s for _, s in self.drafts + self.reads)]}
        assert len(used) <= self.slab.num_segments <= len(used) + SPARES * len(self.users)

    def teardown(self):
        self.slab.close()
        assert self.slab.num_segments == 0


SlabMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestSlab = SlabMachine.TestCase


def test_a_segment_is_whole_pages_and_never_empty():
    assert [capacity_for(n) for n in (0, 1, 4096, 4097, (2 << 20) + 1)] == [4096, 4096, 4096, 8192, 4 << 20]
