"""The right to compute: always held without a cluster, and of a class of the user's own where the config names one."""

from types import SimpleNamespace

import pytest

from rubato.actors.cluster.lease import TRAINING, AlwaysHeld, lease_of
from rubato.actors.config import ClusterSection
from rubato.runtime.errors import ConfigError

OWN = """
from contextlib import asynccontextmanager

from rubato.actors.cluster.lease import AlwaysHeld, Held


class Counted(AlwaysHeld):
    held = 0

    @asynccontextmanager
    async def __call__(self, phase):
        self.held += 1
        yield Held(self.actor)
        self.held -= 1
"""


def parts(log):
    for number in (1, 2):
        log.append(number)
        yield
    return "done"


def actor(**section):
    """Stands for a trainer whose offloaded calls run at once."""

    async def offload(call, *args):
        offloads.append(call)
        return call(*args)

    offloads = []
    return SimpleNamespace(config=SimpleNamespace(cluster=ClusterSection(**section)), offload=offload, offloads=offloads)


def test_without_a_cluster_the_right_is_there_at_once_and_all_parts_are_computed_in_one_call(on_stage):
    trainer, log, found = actor(), [], []
    lease = lease_of(trainer)

    async def play(_):
        await lease.begin()
        async with lease.waiting(), lease(TRAINING) as held:
            found.extend([held.is_held, held.waited_s, dict(held.figures), await held.run(parts(log))])

    on_stage(play)
    assert isinstance(lease, AlwaysHeld)
    assert found == [True, 0.0, {}, "done"]
    assert (log, len(trainer.offloads)) == ([1, 2], 1)


def test_a_lease_of_ones_own_is_held_while_its_block_runs(on_stage, tmp_path):
    (tmp_path / "counted.py").write_text(OWN)
    lease, seen = lease_of(actor(lease=f"{tmp_path}/counted.py:Counted")), []

    async def play(_):
        async with lease(TRAINING) as held:
            seen.append((lease.held, await held.compute(int, "7")))

    on_stage(play)
    assert (seen, lease.held) == ([(1, 7)], 0)


def test_a_lease_that_is_nowhere_is_refused_by_its_key():
    with pytest.raises(ConfigError, match=r"cluster\.lease: .*nowhere"):
        lease_of(actor(lease="nowhere:Lease"))


def test_a_job_of_a_cluster_has_its_permits_and_no_second_lease():
    with pytest.raises(ValueError, match="leave one of the two out"):
        ClusterSection(dir="/runs/lab", lease="mine:Lease")
