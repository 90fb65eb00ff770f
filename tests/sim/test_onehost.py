"""Processes that share cores: exact times by hand, an engine that caches, gathers and swaps as the live one, a whole job."""

import functools
from itertools import pairwise
from pathlib import Path

import pytest
import yaml

from rubato.actors.engines.section import EngineSection
from rubato.runtime.cli import main
from rubato.sim.onehost.calibrated import EngineCosts
from rubato.sim.onehost.cores import Cores, HostProcess
from rubato.sim.onehost.hosted_engine import HostedEngine
from rubato.sim.onehost.observed import idle_shares
from rubato.sim.onehost.processes import host_job
from rubato.sim.onehost.scenario import OneHost, spec_of
from rubato.sim.scenario import load
from rubato.sim.timeline import Timeline

pytestmark = pytest.mark.slow

SCENARIO = Path(__file__).parents[2] / "configs" / "sim" / "quickstart.yaml"


def finished(cores: float, *work_s: float) -> list[float]:
    """When parts are through that begin together, one piece of work each."""
    timeline = Timeline()
    shared = Cores(timeline, cores)
    times: list[float] = [0.0] * len(work_s)

    def note(index: int) -> None:
        times[index] = timeline.now

    for index, seconds in enumerate(work_s):
        shared.begin(seconds, functools.partial(note, index))
    timeline.run()
    return times


@pytest.mark.parametrize(
    ("cores", "work_s", "times"),
    [
        (1, (1.0, 1.0), (2.0, 2.0)),
        (1, (1.0, 3.0), (2.0, 4.0)),
        (2, (1.0, 3.0), (1.0, 3.0)),
        (2, (1.0, 2.0, 3.0), (1.5, 2.5, 3.5)),
        (1.5, (1.5,), (1.5,)),
        (1.5, (1.5, 3.0), (2.0, 3.5)),
    ],
)
def test_cores_are_shared_evenly_and_nobody_gets_more_than_one(cores, work_s, times):
    assert finished(cores, *work_s) == pytest.approx(times)


def test_work_that_comes_later_slows_what_is_under_way():
    timeline = Timeline()
    cores, ended = Cores(timeline, 1), []
    cores.begin(2.0, lambda: ended.append(timeline.now))
    timeline.at(1.0, lambda: cores.begin(0.5, lambda: ended.append(timeline.now)))

    timeline.run()

    assert ended == pytest.approx([2.0, 2.5])


def test_what_comes_while_a_part_computes_is_handled_in_one_tick_and_before_its_further_work():
    timeline = Timeline()
    part, done = HostProcess(Cores(timeline, 1), timeline, "a"), []

    def note(what: str) -> None:
        done.append((what, round(timeline.now, 6)))

    part.compute(lambda: 1.0, lambda: note("step 1"))
    part.compute(lambda: 1.0, lambda: note("step 2"))
    for number, at in enumerate((0.2, 0.6)):
        timeline.at(at, functools.partial(part.post, 0.1, functools.partial(note, f"message {number}")))
    timeline.run()

    assert done == [("step 1", 1.0), ("message 0", 1.2), ("message 1", 1.2), ("step 2", 2.2)]
    assert part.cpu_s == pytest.approx(2.2)


COSTS = EngineCosts(step_s=1.0, row_s=0.1, token_s=0.01, request_s=0.0, update_s=0.5)


class Bench:
    """One engine on cores enough, and what was asked of it: (session, when, version)."""

    def __init__(self, **options) -> None:
        self.timeline = timeline = Timeline()
        cores = Cores(timeline, 8)
        section = EngineSection(**({"num_slots": 4, "gather_s": 0.25} | options))
        self.steps = HostProcess(cores, timeline, "engine-1")
        self.engine = HostedEngine(timeline, HostProcess(cores, timeline, "engine-1"), self.steps, section, COSTS)
        self.done: list[tuple[str, float, int]] = []

    def ask(self, session: str, context: int, new: int = 1, *, version: int = 0, at: float = 0.0) -> None:
        self.timeline.at(at, lambda: self.timeline.start(self._ask(session, context, new, version)))

    async def _ask(self, session: str, context: int, new: int, version: int) -> None:
        found = await self.engine.generate(session, context, new, version)
        self.done.append((session, round(self.timeline.now, 6), found))

    def run(self) -> list[tuple[str, float, int]]:
        self.timeline.run()
        return self.done


def test_requests_that_come_within_the_gathering_share_a_step():
    bench = Bench()
    bench.ask("a", 10)
    bench.ask("b", 20, at=0.2)
    bench.ask("c", 30, at=0.3)

    # 0.25 gathered, then 1 + 2 rows + 30 tokens; c was too late: gathered once more, 1 + 1 row + 30 tokens
    assert bench.run() == [("a", 1.75, 0), ("b", 1.75, 0), ("c", 3.4, 0)]


def test_a_session_s_next_turn_computes_only_what_is_new():
    bench = Bench()
    bench.ask("a", 100)
    bench.ask("a", 107, at=10.0)

    first, second = bench.run()

    assert first[1] == pytest.approx(0.25 + 1 + 0.1 + 1.0)
    assert second[1] == pytest.approx(10 + 0.25 + 1 + 0.1 + 0.07)


def test_the_slot_used_longest_ago_is_given_to_another_session():
    bench = Bench(num_slots=2)
    for number, session in enumerate("abc"):
        bench.ask(session, 100, at=10.0 * number)
    bench.ask("a", 101, at=30.0)
    bench.ask("c", 101, at=40.0)

    times = [when - 10.0 * number for number, (_, when, _) in enumerate(bench.run())]

    assert times == pytest.approx([2.35, 2.35, 2.35, 0.25 + 1 + 0.1 + 1.01, 0.25 + 1 + 0.1 + 0.01])


def test_new_weights_are_laid_out_beside_the_steps_and_make_caches_stale():
    bench = Bench()
    bench.ask("a", 100)
    bench.ask("b", 10, version=3, at=1.0)
    bench.timeline.at(5.0, lambda: bench.engine.published(3))
    bench.ask("a", 101, at=10.0)

    assert bench.run() == [
        ("a", 2.35, 0),
        ("b", pytest.approx(5.0 + 0.5 + 0.25 + 1 + 0.1 + 0.1), 3),
        ("a", pytest.approx(10.0 + 0.25 + 1 + 0.1 + 1.01), 3),
    ]
    assert bench.engine.busy_until(99.0) == pytest.approx(2.35 + 1.45 + 2.36)


def test_of_weights_that_come_while_others_are_laid_out_only_the_newest_are_pulled():
    bench = Bench()
    for version in (1, 2, 3):
        bench.timeline.at(float(version) / 10, functools.partial(bench.engine.published, version))

    bench.run()

    assert bench.engine.version == 3
    assert bench.timeline.now == pytest.approx(0.1 + 2 * 0.5)


def test_a_long_turn_takes_a_step_per_token_and_prefill_is_cut():
    bench = Bench(max_batch_tokens=50)
    bench.ask("a", 120, new=3)

    # prefill in 50 + 50 + 20 tokens, the last of which samples; two more tokens
    assert bench.run() == [("a", pytest.approx(0.25 + 3 * 1.1 + 1.2 + 2 * 1.11), 0)]


def short(**changes) -> tuple[OneHost, list]:

    scenario = load(SCENARIO).scenario
    assert isinstance(scenario, OneHost)
    live = scenario.live[0].model_copy(update={"steps": 7} | changes)
    return scenario, host_job(spec_of(scenario.job, live), scenario.calibrated, 1).run()


def test_a_job_trains_every_step_and_its_times_follow_one_another():
    _, rows = short()

    assert [row.step for row in rows] == list(range(1, 8))
    for before, row in pairwise(rows):
        assert row.began_s == before.ended_s <= row.asked_s <= row.claimed_s < row.trained_s < row.published_s <= row.ended_s
        assert all(used[0] >= before.used[name][0] for name, used in row.used.items())
    assert all(0.0 <= share <= 1.0 for share in idle_shares(rows, rows[-1]).values())


def test_more_cores_and_cheaper_parts_are_never_slower():
    scenario, rows = short()

    shape = spec_of(scenario.job, scenario.live[0].model_copy(update={"steps": 7}))
    calibrated = scenario.calibrated
    more = calibrated.model_copy(update={"cores": 64})
    faster = host_job(shape, more, 1).run()

    assert faster[-1].ended_s < rows[-1].ended_s


def test_the_same_scenario_gives_the_same_bytes(tmp_path):
    live = yaml.safe_load((SCENARIO.parent.parent / "calibrations" / "engines_1.yaml").read_text())
    one = yaml.safe_dump([live | {"steps": 8, "window": [3, 7]}], default_flow_style=True, width=10_000).strip()
    for name in ("a", "b"):
        code = main(["sim", str(SCENARIO), f"live={one}", "claims=[]", "--no-plots", "--out", str(tmp_path / name)])
        assert code == 0

    for name in ("agreement.csv", "phases.csv", "trace.json", "run.json"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("job.train.batch_groups=0", "job: train.batch_groups is 0; it must be a whole number at least 1."),
        ("calibrated.costs.background_cores=2", "leaves no core"),
        ("calibrated.rollouts.stages=[]", "stages"),
        ("live=[]", "live"),
    ],
)
def test_an_impossible_scenario_is_refused_with_a_sentence(override, sentence, tmp_path, capsys):
    code = main(["sim", str(SCENARIO), override, "--no-plots", "--out", str(tmp_path / "run")])

    assert code == 2
    assert sentence in capsys.readouterr().err
