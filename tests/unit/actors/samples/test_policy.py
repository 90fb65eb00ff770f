"""Batch policies: each is asked around the one below, hears what happens, and goes on with its state after a restart."""

import asyncio

import msgspec
import pytest

from rubato.actors.messages.samples import Batch, Claim, DrawTerm
from rubato.actors.samples.group import Group, GroupLimits, Training
from rubato.actors.samples.groups import Groups
from rubato.actors.samples.policy import Ending, PolicyPlugin
from rubato.actors.samples.sample import Outcome
from rubato.planning.staleness import Admission
from rubato.runtime.errors import ConfigError

LIMITS = GroupLimits(group_size=2, batch_groups=1, steps=10, run_seed=1, max_attempts=2, unbounded_batches=8, ticket_ttl_s=10.0)

OWN = """
from rubato.actors.samples.policy import Ending, PolicyPlugin

class NoZeros(PolicyPlugin):
    key = "no_zeros"
    refused = 0

    def complete(self, group):
        if 0.0 not in group.rewards():
            return super().complete(group)
        self.refused += 1
        self.groups.changes.training = True
        return Ending("zeros", "had a reward of 0.")

    def figures(self, step):
        return {"reward/refused": self.refused}

    def state(self):
        return self.refused

    def restored(self, state):
        import msgspec
        self.refused = msgspec.msgpack.decode(state) if state else 0
"""


class Half(PolicyPlugin):
    """Admits half of what the policy below it would."""

    def admit(self, view):
        admission = super().admit(view)
        return Admission(admission.num_groups // 2, f"half: {admission.why}")


class Counting(PolicyPlugin):
    """Notes what it hears; can't be left out once a step was bound."""

    key = "counting"

    def __init__(self, below, groups):
        super().__init__(below, groups)
        self.heard = []

    def settled(self, group):
        self.heard.append(("settled", group.id))

    def bound(self, step):
        self.heard.append(("bound", step))

    def trained(self, step):
        self.heard.append(("trained", step))

    def committed(self, step):
        self.heard.append(("committed", step))

    def state(self):
        return self.heard

    @property
    def needed(self):
        return "counting can't stop: set samples.policy" if self.heard else ""

    def restored(self, state):
        self.heard = msgspec.msgpack.decode(state, type=list[tuple[str, str | int]]) if state else []


class Refusing(PolicyPlugin):
    """Lets nothing train."""

    def complete(self, group):
        return Ending("refused", "were refused.")


def play(groups):
    for at, ticket in enumerate(groups.issue(2, "env_manager-1", 1, 0.0)):
        groups.score(ticket.trajectory_id, Outcome(0, float(at)))


def test_each_policy_is_asked_around_the_one_before():
    plain, halved, quartered = (Groups(LIMITS, 7, [Half] * num) for num in range(3))

    assert [groups.admission().num_groups for groups in (plain, halved, quartered)] == [8, 4, 2]
    assert quartered.admission().why.startswith("half: half: 8 of 8 slots")


def test_a_group_that_a_policy_refuses_ends_with_the_fate_that_it_gives():
    groups = Groups(LIMITS, 0, [Counting, Refusing])

    play(groups)

    assert {end.fate for end in groups.take_changes().ends} == {"refused"}
    assert (groups.training.barren.in_a_row, groups.training.barren.why) == (1, "were refused.")


def test_a_policy_hears_what_happens_in_its_order():
    groups = Groups(LIMITS, 0, [Counting])

    play(groups)
    groups.bind(1, groups.chosen(groups.plan(1, 1)))
    groups.advance(1)
    groups.commit(1, 1)

    name = "g00000000"
    assert groups.plugins[0].heard == [
        ("settled", name), ("settled", name), ("bound", 1), ("trained", 1), ("committed", 1)
    ]  # fmt: skip


def test_what_a_policy_remembers_comes_back_and_one_that_is_needed_may_not_be_left_out():
    groups = Groups(LIMITS, 0, [Counting])
    play(groups)
    written = msgspec.msgpack.encode(groups.record()), [msgspec.msgpack.encode(g) for g in groups.live.values()]

    def restored(policies):
        training = msgspec.msgpack.decode(written[0], type=Training)
        again = Groups(LIMITS, 0, policies)
        again.restore(training, [msgspec.msgpack.decode(each, type=Group) for each in written[1]], 0.0)
        return again

    assert restored([Half, Counting]).plugins[1].heard == groups.plugins[0].heard
    with pytest.raises(ConfigError, match="counting can't stop: set"):
        restored([Half])


def test_a_policy_of_ones_own_is_named_in_the_config_and_survives_a_restart(make_stage, tmp_path):
    (tmp_path / "mine.py").write_text(OWN)
    stage = make_stage(alpha=0, batch_groups=1, policy=f"{tmp_path}/mine.py:NoZeros")

    async def scene():
        await stage.start()
        await stage.buffer.draw_term(DrawTerm(0, 0))
        for ticket, reward in zip(await stage.admit(), (1.0, 0.0), strict=True):
            await stage.put(ticket, reward)
        await asyncio.sleep(1.0)
        await stage.start()
        for ticket in await stage.admit():
            await stage.put(ticket, 1.0)
        batch = await stage.buffer.claim(Claim(1, 1, 1, 0.0))

        assert isinstance(batch, Batch)
        assert batch.figures == {"reward/refused": 1}
        assert set((await stage.fates()).values()) == {"zeros"}

    stage.run(scene)


def test_a_policy_that_is_none_ends_the_job_with_a_sentence_and_nothing_is_admitted(make_stage, tmp_path):
    (tmp_path / "mine.py").write_text("class Other:\n    pass\n")
    stage = make_stage(policy=f"{tmp_path}/mine.py:Other")

    async def scene():
        await stage.start()

        ((sentence, failed),) = stage.finished
        assert failed
        assert sentence.startswith(f"samples.policy: {tmp_path}/mine.py:Other is not a subclass of ")
        assert await stage.admit() == []

    stage.run(scene)
