"""Circuits between the windows of a training step: the controller changes them exactly where the schedule says, on virtual time."""

import asyncio
from itertools import pairwise, product

import pytest

from rubato.actors.messages.fabric import PhaseWindow, PhaseWindows
from rubato.planning.demand import flows, per_link
from rubato.planning.phase_time import LinkRates, Operation, choose_links, run_s
from rubato.planning.topology import direct

GBPS = 1.0
PORTS = 3
DELAY_S = 0.010
RANKS = ("rank-0", "rank-1", "rank-2", "rank-3")


def both_ways(*pairs):
    return tuple((RANKS[a], RANKS[b], 50_000_000) for pair in pairs for a, b in (pair, pair[::-1]))


NEIGHBOURS, CROSSED = both_ways((0, 1), (2, 3)), both_ways((0, 2), (1, 3))
"""0.2 s with two circuits each, 0.4 s with one: three ports are too few for two of both."""
LONG = (
    PhaseWindow("context", 0.3, NEIGHBOURS),
    PhaseWindow("experts", 0.205, CROSSED),
    PhaseWindow("context", 0.1, NEIGHBOURS),
    PhaseWindow("gradients", 0.1, CROSSED),
)
SECTION = {"ports": 12, "ports_per_endpoint": PORTS, "link_gbps": GBPS, "reconfiguration_s": DELAY_S}


def by_hand(windows):
    """Changes as (due, links), by trying every choice of circuits: those of the windows of each name, and those for all in turn."""
    rates, planner = LinkRates(GBPS * 1e9 / 8), lambda directed, ports: direct(per_link(directed), ports)
    named = {w.name: Operation(flows(sum((each.traffic for each in windows if each.name == w.name), ()), RANKS)) for w in windows}
    candidates = [choose_links(ops, [PORTS] * 4, planner, rates) for ops in (list(named.values()), *([each] for each in named.values()))]
    took = [[run_s(Operation(flows(w.traffic, RANKS)), links, 4, rates) for links in candidates] for w in windows]

    def play(choices):
        now, due = 0.0, []
        for i, k in enumerate(choices):
            lasts, quiet = max(windows[i].lasts_s, took[i][k]), max(0.0, windows[i].lasts_s - took[i][k])
            following = choices[(i + 1) % len(choices)]
            if candidates[following] != candidates[k]:
                due.append((now + lasts - quiet, candidates[following]))
                now += max(0.0, DELAY_S - quiet)
            now += lasts
        return now, len(due), due[: sum(candidates[a] != candidates[b] for a, b in pairwise(choices))]

    best = min((play(choices) for choices in product(range(len(candidates)), repeat=len(windows))), key=lambda found: found[:2])
    return best[2]


def joined(lit):
    return {(min(a // PORTS, b // PORTS), max(a // PORTS, b // PORTS)) for a, b in lit}


async def changes(stage, lasts_s):
    """(seconds since the step began, circuits in place) whenever the switch's circuits have changed, looked at each millisecond, after those that it
    begins with."""
    loop, began = asyncio.get_running_loop(), asyncio.get_running_loop().time()
    found, before = [], None
    while loop.time() - began < lasts_s:
        report = await stage.report()
        lit = frozenset((c.ingress, c.egress) for c in report.circuits)
        if report.stage == "idle" and lit != before:
            assert report.circuits == stage.circuits()
            found.append((loop.time() - began, lit))
            before = lit
        await asyncio.sleep(0.001)
    return [(at, lit) for at, lit in found if at > 2 * DELAY_S]


async def step(stage, lasts_s=5.0):
    stage.number += 1
    await stage.begins("train_step")
    found = await changes(stage, lasts_s)
    await stage.begins("rollout")
    await asyncio.sleep(1)
    return found


def test_circuits_change_inside_a_training_step_exactly_where_the_schedule_says(scene):
    async def play(stage):
        await stage.controller.phase_windows(PhaseWindows("train_step", LONG))
        await step(stage)

        found = await step(stage, 2.0)

        wanted = by_hand(LONG)
        assert len(wanted) >= 2, "circuits change between context and experts, and back"
        assert [at for at, _ in found] == pytest.approx([due + DELAY_S for due, _ in wanted], abs=0.002)
        assert [joined(lit) for _, lit in found] == [set(links) for _, links in wanted]

    scene(play, **SECTION)


def test_of_a_change_what_a_windows_computation_covers_is_hidden(scene):
    async def play(stage):
        await stage.controller.phase_windows(PhaseWindows("train_step", LONG))
        await step(stage)
        stage.number += 1
        await stage.begins("train_step")
        await asyncio.sleep(2 * DELAY_S)
        before = await stage.report()

        await asyncio.sleep(0.9)

        report = await stage.report()
        assert report.reconfigurations - before.reconfigurations == 3
        hidden_s, exposed_s = report.hidden_s - before.hidden_s, report.exposed_s - before.exposed_s
        assert (hidden_s, exposed_s) == (pytest.approx(0.015, abs=1e-4), pytest.approx(0.015, abs=1e-4)), "100, 5 and 0 ms are quiet"

    scene(play, **SECTION)


def test_windows_that_do_not_outlast_a_change_keep_one_set_of_circuits(scene):
    short = tuple(PhaseWindow(w.name, 0.001, tuple((a, b, size // 1000) for a, b, size in w.traffic)) for w in LONG)

    async def play(stage):
        await stage.controller.phase_windows(PhaseWindows("train_step", short))
        await step(stage, 0.5)

        assert by_hand(short) == []
        assert await step(stage, 0.5) == []

    scene(play, **SECTION)


def test_the_next_phase_ends_the_windows_of_the_last_one(scene):
    async def play(stage):
        await stage.controller.phase_windows(PhaseWindows("train_step", LONG))
        await stage.begins("train_step")
        await asyncio.sleep(0.1)

        await stage.begins("rollout", NEIGHBOURS)

        assert await changes(stage, 5) == []

    scene(play, **SECTION)


def test_a_phase_whose_windows_are_taken_back_is_one_again(scene):
    async def play(stage):
        await stage.controller.phase_windows(PhaseWindows("train_step", LONG))
        await step(stage)
        await stage.controller.phase_windows(PhaseWindows("train_step", ()))

        assert await step(stage) == []

    scene(play, **SECTION)


def test_more_windows_than_are_worked_on_are_refused(scene):
    async def play(stage):
        await stage.controller.phase_windows(PhaseWindows("train_step", LONG * 65))

        await step(stage)

        assert (await stage.report()).reconfigurations == 0

    scene(play, **SECTION)
