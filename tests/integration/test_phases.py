"""A program of one's own on the pools of a cluster, beside others: the example, run as two processes."""

import asyncio
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from rubato.actors.cluster.permits import PermitLost, Permits, Phases
from rubato.planning.permits import PermitLine
from rubato.runtime.errors import ConfigError
from rubato.runtime.launch.shared import SharedScope, open_shared, write_shared

EXAMPLE = Path(__file__).parents[2] / "examples" / "phases.py"


@pytest.fixture
def cluster(tmp_path, packaged_redis) -> Path:
    write_shared(tmp_path, SharedScope(tmp_path.name, packaged_redis))
    return tmp_path


async def _events(cluster, pool):
    store = open_shared(cluster)
    try:
        return [(event.stand.job, event.kind) for _, event in await Permits(store).events(pool)]
    finally:
        await store.close()


def test_two_programs_never_have_a_pool_at_once(cluster):
    programs = [
        subprocess.Popen([sys.executable, str(EXAMPLE), str(cluster), name], stdout=subprocess.PIPE, text=True, cwd=EXAMPLE.parents[1])
        for name in ("a", "b")
    ]
    said = [program.communicate(timeout=60)[0] for program in programs]

    assert all(program.returncode == 0 for program in programs)
    assert all("step 2: loss 2.5" in text for text in said)
    for pool in ("rollout-0", "training-0"):
        turns = [(job, kind) for job, kind in asyncio.run(_events(cluster, pool)) if kind != "waits"]
        assert sorted(turns) == sorted([(job, kind) for job in "ab" for kind in ("holds", "gone")] * 3)
        assert all(first[0] == second[0] for first, second in zip(turns[::2], turns[1::2], strict=True))


def test_what_a_phase_raises_ends_it_and_frees_the_pool(cluster):
    with Phases(str(cluster), job="a") as phase:
        with pytest.raises(KeyError, match="mine"), phase("rollout"):
            raise KeyError("mine")
        with phase("rollout") as grant:
            assert grant.pool == "rollout"

    assert asyncio.run(_events(cluster, "rollout")).count(("a", "gone")) == 2


async def _take_away(cluster, pool):
    store = open_shared(cluster)
    try:
        await Permits(store)._change(pool, lambda line: PermitLine())
    finally:
        await store.close()


def _lose(phase, cluster):
    with phase("rollout") as permit:
        asyncio.run(_take_away(cluster, "rollout"))
        while not permit.lost.is_set():
            threading.Event().wait(0.05)


def test_a_block_whose_permit_was_lost_ends_with_a_sentence(cluster):
    with Phases(str(cluster), job="a") as phase:
        with pytest.raises(PermitLost, match="do that phase again"):
            _lose(phase, cluster)

        with phase("rollout") as permit:
            assert not permit.lost.is_set()


def test_a_phase_on_a_pool_that_the_cluster_does_not_have_is_refused_with_the_nearest(cluster):
    (cluster / "config.yaml").write_text("scheduler: {rollout: {nodes: 2}, training: {nodes: 1}}\n")

    with pytest.raises(ConfigError, match=r"rollout=rolout-1: .* Did you mean rollout-1\? It has rollout-0, rollout-1, training-0\."):
        Phases(str(cluster), job="a", pools={"rollout": "rolout-1"})
    with Phases(str(cluster), job="a", pools={"rollout": "rollout-1"}) as phase:
        with pytest.raises(ConfigError, match=r"the pool of phase training=training: .* Did you mean training-0\?"):
            phase("training")
        with phase("rollout") as grant:
            assert grant.pool == "rollout-1"


def test_a_cluster_that_is_down_is_told_in_a_sentence(tmp_path):
    with pytest.raises(ConfigError, match=r"has no cluster that is up\. Start it with"):
        Phases(str(tmp_path), job="a")
