"""The orchestrator on live processes with paced engines, against the same job with its planners off: seconds until all requests are answered.

python tools/bench/orchestrator.py [--json FILE] [--seeds 2] [--first-seed 0] [--only rebalance|switch|drift|uniform] [--virtual | --short]
                                    [key.sub=value …]

Proxy, engines, bus and orchestrator are live; the engines' time is paced (docs/pace.md), and how much a request samples is drawn by its seed
and not known before its end: all requests have the same limit. A scenario's arms share one started job, one after another, on the same
requests; scenarios run beside each other.

rebalance   8 H200 of Qwen3-8B. Half of the requests go on with long contexts (configs/workloads/swe_bench.yaml: up to 32,768 tokens), half
            are short prompts; their tasks and lengths are code and judge (configs/lengths). Against least-loaded routing, and an oracle that places each
            request by its length when it comes.
switch      4 H800 of Qwen2.5-14B, lengths of math: engines merge while the last ones run. Against four engines of one GPU.
            With --virtual, beside it, the best of degrees 1, 2 and 4 for the whole run (`static_s`); of uniform too.
drift       8 H800, engines of two; early steps read long prompts and sample little, late ones sample long. Against the best of all engines at
            degree 2, 4 or 8 for the whole run.
uniform     the engines of switch, every length the same. Against four engines of one GPU.

`--json` writes {"rebalance": {"off_s", "on_s", "oracle_s", "gain"}, …}, means over seeds; gain is off_s / on_s. Fails where more than 2 % of a job's steps outlasted
their pace.
"""

import argparse
import asyncio
import csv
import json
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any, NamedTuple

from msgspec.structs import replace

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from rubato.actors import catalog  # noqa: E402
from rubato.actors.engines.pace import MOST_OUTLASTED  # noqa: E402
from rubato.actors.messages.generation import Completion, Generate, Route, Sampling  # noqa: E402
from rubato.bus.message import pack_i32  # noqa: E402
from rubato.planning.makespan import Instance, Load  # noqa: E402
from rubato.planning.rebalance import shorten  # noqa: E402
from rubato.planning.roofline import Deployment, Roofline  # noqa: E402
from rubato.runtime.actor import Actor  # noqa: E402
from rubato.runtime.guest import Guest, join  # noqa: E402
from rubato.runtime.launch.connection import connect  # noqa: E402
from rubato.sim.virtual import run_virtual  # noqa: E402
from tools.bench.paced_job import all_here, job, outlasted  # noqa: E402
from tools.bench.peers.told_orchestrator import SetArm  # noqa: E402
from tools.bench.peers.virtual_job import virtual_job  # noqa: E402
from tools.bench.short import NO_RESULT  # noqa: E402

ASK_S = 400.0
VOCABULARY = 65536
STOP = 1
PLACED = "oracle"
STATIC = "static "
"""How arms begin that are shown beside the others, and that no gain counts."""


class Asked(NamedTuple):
    """One request; tokens."""

    shown: int
    sampled: int
    task: str = ""


class Scenario(NamedTuple):
    name: str
    hardware: str
    model: str
    engines: int
    limit: int
    """Tokens that any request may sample."""
    scale: float
    """EngineProfile seconds last so many; switches, moves and the planners' periods too, so that ratios stay."""
    arms: Mapping[str, SetArm]
    degree: int = 1
    """GPUs that an engine is started with."""
    statics: Mapping[str, SetArm] = {}
    """Further arms, of one degree for the whole run; in virtual time alone, for a live run has 500 s."""


def curve(task: str) -> list[tuple[int, float]]:
    with (ROOT / "configs/lengths/rollpacker_fig2a_len_cdf.csv").open() as lines:
        return [(int(row["tokens"]), float(row["cdf_pct"]) / 100) for row in csv.DictReader(lines) if row["task"] == task]


def draw(rng: Random, points: Sequence[tuple[int, float]], limit: int) -> int:
    """A length between the curve's points, straight from one to the next."""
    share, before = rng.random(), (0, 0.0)
    for tokens, below in points:
        if below >= share:
            part = (share - before[1]) / max(1e-9, below - before[1])
            return min(limit, max(2, round(before[0] + (tokens - before[0]) * part)))
        before = tokens, below
    return limit


def steps(scenario: Scenario, seed: int) -> list[list[Asked]]:
    """The requests of each step: all at once, and the next when all are answered."""
    rng = Random(f"{scenario.name} {seed}")
    limit = scenario.limit
    code, judge, math = curve("code"), curve("judge"), curve("math")

    def short() -> int:
        return rng.randint(100, 300)  # configs/workloads/gem_math.yaml

    def mixed() -> Asked:
        if rng.random() < 0.5:
            return Asked(rng.randint(1500, 32768 - limit), draw(rng, code, limit), "code")
        return Asked(short(), draw(rng, judge, limit), "judge")

    def about(shown: int, sampled: int) -> Asked:
        length = round(sampled * rng.lognormvariate(0, 0.25))
        return Asked(rng.randint(shown * 4 // 5, shown * 6 // 5), min(limit, max(2, length)))

    if scenario.name == "rebalance":
        return [[mixed() for _ in range(80)] for _ in range(3)]
    if scenario.name == "switch":
        return [[Asked(short(), draw(rng, math, limit)) for _ in range(64)] for _ in range(2)]
    if scenario.name == "uniform":
        return [[Asked(short(), 400) for _ in range(64)] for _ in range(4)]
    return [[about(*each[1:]) for _ in range(each.requests)] for each in DRIFT]


class Regime(NamedTuple):
    """A step of `drift`: so many requests of about so many tokens."""

    requests: int
    shown: int
    sampled: int


DRIFT = (Regime(96, 6000, 3), Regime(96, 6000, 15), Regime(96, 6000, 75), Regime(4, 250, 375), Regime(4, 250, 1875), Regime(4, 250, 1875))
"""Prompts give way to responses, which grow by five from step to step."""

OFF, BOTH = SetArm(()), SetArm(("rebalance", "switch"))
BEGUN = "on from "
"""How arms with planners begin that start with a better degree; no gain counts them."""
LARGER = {f"{STATIC}TP2": SetArm((), 2), f"{STATIC}TP4": SetArm((), 1), f"{BEGUN}TP4": SetArm(("rebalance", "switch"), 1)}
"""Of four engines of one GPU, of which TP4 is the best static degree."""

SCENARIOS = (
    Scenario("rebalance", "h200", "qwen3-8b", 8, 1024, 1.5, {"off": OFF, "on": SetArm(("rebalance",)), PLACED: OFF}),
    Scenario("switch", "h800", "qwen2.5-14b", 4, 2048, 2.0, {"off": OFF, "on": SetArm(("switch",))}, statics=LARGER),
    Scenario(
        "drift",
        "h800",
        "qwen2.5-14b",
        4,
        2600,
        1.0,
        {"TP2": OFF, "TP4": SetArm((), 2), "TP8": SetArm((), 1), "on": BOTH},
        degree=2,
        statics={f"{BEGUN}TP4": SetArm(("rebalance", "switch"), 2)},
    ),
    Scenario("uniform", "h800", "qwen2.5-14b", 4, 1024, 2.0, {"off": OFF, "on": BOTH}, statics=LARGER),
)


def config(scenario: Scenario) -> dict[str, Any]:
    """The job's."""
    return {
        "run": {"name": f"orchestrator-{scenario.name}"},
        "actors": {
            "llm_proxy": {"class": "rubato.actors.proxy.proxy:LLMProxy"},
            "engine": {"class": "rubato.actors.engines.worker:EngineWorker", "count": scenario.engines},
            "orchestrator": {"class": f"{ROOT}/tools/bench/peers/told_orchestrator.py:ToldOrchestrator"},
        },
        "orchestrator": {"enabled": True, "interval_s": 0.5 * scenario.scale, "switch_s": scenario.scale},
        "report": {"finish": ""},
        "engine": {
            "kind": "scripted",
            "num_slots": 256,
            "max_len": VOCABULARY,
            "max_batch_tokens": 8192,
            "stream_every": 8,
            "prefix_cache": False,
            "scripted": {"told_lengths": True, "vocab_size": VOCABULARY},
            "pace": {"hardware": scenario.hardware, "model": scenario.model, "scale": scenario.scale, "degree": scenario.degree},
        },
    }


class Player:
    """Plays steps on a running job."""

    def __init__(self, me: Guest | Actor, scenario: Scenario) -> None:
        self._me = me
        self._scenario = scenario
        self._num = 0

    async def step(self, asked: Sequence[Asked], sessions: Mapping[int, str]) -> float:
        """Seconds until all are answered; requests of `sessions` go where these were."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        async with asyncio.TaskGroup() as tasks:
            for place, each in enumerate(asked):
                tasks.create_task(self.one(each, sessions.get(place, "")))
        return loop.time() - began

    async def one(self, asked: Asked, session: str = "") -> str:
        """The engine that ended it."""
        self._num += 1
        name = f"{self._num}-{asked.sampled}"
        prompt = [asked.sampled, self._num, *[2] * (asked.shown - 2)]
        sampling = Sampling(self._scenario.limit, stop_token_ids=(STOP,))
        request = Generate(name, session or name, pack_i32(prompt), sampling, route=Route(asked.task))
        reply = await self._me.ref("llm_proxy").ask(request, timeout=ASK_S)
        if not isinstance(reply, Completion) or len(reply.tokens.ids) != 4 * asked.sampled:
            raise SystemExit(f"{name} was not answered by its {asked.sampled} tokens: {reply}")
        return reply.engine

    async def placed(self, asked: Sequence[Asked]) -> dict[int, str]:
        """The session of each request, by which it comes to the engine that suits its length: longest first, then moved until none helps."""
        sessions: dict[str, str] = {}
        while len(sessions) < self._scenario.engines:
            session = f"session-{self._num}"
            sessions[await self.one(Asked(3, 2), session)] = session
        loads = [Load(str(place), each.shown, each.sampled) for place, each in enumerate(asked)]
        bins: dict[str, list[Load]] = {name: [] for name in sorted(sessions)}
        work = dict.fromkeys(bins, 0.0)
        for load in sorted(loads, key=_work, reverse=True):
            name = min(work, key=lambda each: (work[each], each))
            bins[name].append(load)
            work[name] += _work(load)
        gpu, model = catalog.hardware(self._scenario.hardware), catalog.model(self._scenario.model)
        engine = Roofline(Deployment(gpu=gpu, model=model))
        found = shorten([Instance(name, 1, tuple(each)) for name, each in bins.items()], {1: engine}, most=64)
        return {int(load.name): sessions[each.name] for each in found.instances for load in each.loads}


def _work(load: Load) -> float:
    """Keys and values that its steps read."""
    return load.remaining * (load.context + load.remaining / 2)


class Measured(NamedTuple):
    arms: list[dict[str, list[float]]]
    """Of each seed: seconds of each step, by arm."""
    outlasted: float
    switches: int


async def play_arms(me: Guest | Actor, scenario: Scenario, seeds: range) -> list[dict[str, list[float]]]:
    """Of each seed: seconds of each step, by arm."""
    found: list[dict[str, list[float]]] = []
    player = Player(me, scenario)
    for seed in seeds:
        took: dict[str, list[float]] = {}
        for name, arm in scenario.arms.items():
            await me.ref("orchestrator").ask(replace(arm, fleet=scenario.engines), timeout=ASK_S)
            took[name] = []
            for asked in steps(scenario, seed):
                sessions = await player.placed(asked) if name == PLACED else {}
                took[name].append(await player.step(asked, sessions))
        found.append(took)
        print(f"{scenario.name} {seed}: " + ", ".join(f"{arm} {sum(s):.1f} s" for arm, s in took.items()), flush=True)
    return found


async def play_virtually(scenario: Scenario, seeds: range) -> Measured:
    """The same actors in this process, at scale 1 of virtual time."""
    more = scenario._replace(scale=1.0, arms={**scenario.arms, **scenario.statics})
    async with virtual_job(config(more)) as (asker, orchestrator):
        found = await play_arms(asker, more, seeds)
        switched = orchestrator.metrics.snapshot().get("orchestrator/switches", 0.0)
    return Measured(found, 0.0, int(switched))


async def play(scenario: Scenario, seeds: range, overrides: Sequence[str]) -> Measured:
    """All arms of all seeds, on one job."""
    async with job(scenario.name, config(scenario), overrides) as folder, connect(folder) as run, join(folder) as me:
        await all_here(run.store, scenario.engines)
        found = await play_arms(me, scenario, seeds)
        late = await outlasted(run.store)
        log = (folder / "logs" / "orchestrator-1.jsonl").read_text().splitlines()
    switched = sum(json.loads(line).get("event") == "switched" for line in log)
    return Measured(found, late, switched)


def summed_up(measured: Measured) -> dict[str, Any]:
    """As `--json` writes it: the arm off is the best of those with the planners off, `best_steps_s` what the best of them in each step takes."""
    arms = [{arm: sum(steps_s) for arm, steps_s in each.items()} for each in measured.arms]
    means = {arm: fmean(each[arm] for each in arms) for arm in arms[0]}
    static = [arm for arm in means if arm not in ("on", PLACED) and not arm.startswith((STATIC, BEGUN))]
    off_s = min(means[arm] for arm in static)
    summary: dict[str, Any] = {"off_s": off_s, "on_s": means["on"], "gain": off_s / means["on"]}
    if PLACED in means:
        summary |= {"oracle_s": means[PLACED], "of_oracle": (off_s - means["on"]) / (off_s - means[PLACED])}
    if beside := [arm for arm in means if arm.startswith(STATIC)]:
        summary["static_s"] = min(means[arm] for arm in ("off", *beside))
    if begun := [arm for arm in means if arm.startswith(BEGUN)]:
        summary["from_best_s"] = min(means[arm] for arm in begun)
    if len(static) > 1:
        summary["best_steps_s"] = fmean(sum(map(min, zip(*(each[arm] for arm in static), strict=True))) for each in measured.arms)
    more = {"arms": arms, "steps": measured.arms, "switches": measured.switches}
    return summary | {"outlasted": measured.outlasted} | more


def said(name: str, each: Mapping[str, Any], virtual: bool) -> str:
    """A scenario's line."""
    text = f"{name}: off {each['off_s']:.1f} s, on {each['on_s']:.1f} s"
    if "oracle_s" in each:
        text += f", oracle {each['oracle_s']:.1f} s, {100 * each['of_oracle']:.0f} % of its gain"
    if "static_s" in each:
        text += f", {each['static_s']:.1f} s with the best degree for the whole run"
    if "from_best_s" in each:
        text += f", {each['from_best_s']:.1f} s begun with it"
    if "best_steps_s" in each:
        text += f", {each['best_steps_s']:.1f} s with the best degree in each step"
    text += f"; gain {each['gain']:.2f}, "
    return text + ("virtual" if virtual else f"paced, {100 * each['outlasted']:.1f} % of steps outlasted")


async def play_all(wanted: Sequence[Scenario], seeds: range, overrides: Sequence[str]) -> dict[str, Measured]:
    """Beside each other, for paced engines wait most of the time."""
    found = await asyncio.gather(*(play(each, seeds, overrides) for each in wanted))
    return {each.name: measured for each, measured in zip(wanted, found, strict=True)}


def main(argv: Sequence[str]) -> int:
    """Measure, print, and write the figures where asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--seeds", type=int, default=2, help="so many")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--only", choices=[each.name for each in SCENARIOS])
    parser.add_argument("--virtual", action="store_true", help="one process, virtual time, scale 1")
    parser.add_argument("--short", action="store_true", help="uniform alone, one seed in virtual time: it starts, its figures say nothing")
    parser.add_argument("overrides", nargs="*", metavar="key.sub=value")
    asked = parser.parse_args(argv)
    if asked.short:
        print(NO_RESULT)
        asked.only, asked.seeds, asked.virtual = "uniform", 1, True
    wanted = [each for each in SCENARIOS if asked.only in (None, each.name)]
    seeds = range(asked.first_seed, asked.first_seed + asked.seeds)
    if asked.virtual:
        measured = {each.name: run_virtual(partial(play_virtually, each, seeds)) for each in wanted}
    else:
        measured = asyncio.run(play_all(wanted, seeds, asked.overrides))
    summary = {name: summed_up(each) for name, each in measured.items()}
    for name, each in summary.items():
        print(said(name, each, asked.virtual))
    if asked.json:
        asked.json.write_text(json.dumps(summary | {"paced": not asked.virtual, "virtual": asked.virtual}, indent=2))
    if late := [name for name, each in summary.items() if each["outlasted"] > MOST_OUTLASTED]:
        print(f"more than {100 * MOST_OUTLASTED:g} % of the steps outlasted their pace in {', '.join(late)}: these figures say nothing")
    return 1 if late else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
