"""Learned hardware affinity beside every map of two tasks to two classes, live, on paced engines: samples per second.

python tools/bench/affinity.py [--seconds 20 | --short] [--only learned|best|uniform] [--json FILE] [key.sub=value …]
python tools/bench/affinity.py --swap [STEPS] [--json FILE] [key.sub=value …]

One H800 and three H20, which cost about the same, are two pools. `read` shows long prompts and samples few tokens, `write` the other way
round; both have the same weight. `learned` is `affinity: learned` on both pools, `best` the best of the four maps of whole tasks to classes,
each on both pools; `uniform` are pools of one class alone that cost what both pools do. Everything is live but the engines' time, which is paced
(docs/pace.md): a step lasts what the class would take for it, and tokens are drawn by the scripted engine. Arms run three at a time.
`--json` writes {"learned", "best", "uniform": {class: …}, "maps", "price", "outlasted"}. Fails where more than 2 % of any arm's steps
outlasted their pace.

`--swap` runs `learned` alone. After 6 steps of training, or as many as are given, the tasks change places: what comes of `read` is as `write` was,
and the other way round. It tells after how many more steps the map follows, and `--json` writes {"before", "steps", "samples_s", "plans", "outlasted"}; it
fails where that takes more than 3.
"""

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from rubato.actors import catalog  # noqa: E402
from rubato.actors.engines.pace import MOST_OUTLASTED  # noqa: E402
from rubato.actors.training.base_model import make_tokenizer, write_tokenizer  # noqa: E402
from rubato.runtime.launch.children import die_with_parent  # noqa: E402
from rubato.runtime.launch.connection import connect  # noqa: E402
from rubato.runtime.registry import ActorRecord, list_actors  # noqa: E402
from tools.bench import paced_job  # noqa: E402
from tools.bench.paced_job import is_up  # noqa: E402
from tools.bench.peers.changing_places import LONG, SAMPLED, SHORT  # noqa: E402
from tools.bench.short import NO_RESULT  # noqa: E402

MIXED = {"h800": 1, "h20": 3}
ALONE = {"h800": 2, "h20": 6}
"""Engines of one GPU each. A class alone costs what both pools do: 10.56 and 11.10 US dollars an hour against 10.83."""

TASKS = {"read": (LONG, SAMPLED[LONG]), "write": (SHORT, SAMPLED[SHORT])}
"""Tokens shown, tokens sampled."""

SCALE = 3.0
"""Modelled seconds last so many."""

AT_ONCE = 3
WARM_S = 10.0
"""From the first sample: slots are full, and the requests in them are at different places."""
PLAN_S, START_S, END_S = 100.0, 120.0, 30.0

SWAP_AT, SWAPPED_WITHIN, SWAP_STEPS, SETTLED = 6, 3, 12, 4
"""Steps of training before tasks change places, those within which the map is to follow, those after which it is waited for no more, and
those that are watched beyond."""
SWAP_S = 400.0
"""Limit of all of them."""


class Arm(NamedTuple):
    """One job."""

    name: str
    engines: Mapping[str, int]
    affinity: str | Mapping[str, str] = {}


class Measured(NamedTuple):
    samples_s: float
    outlasted: float
    """Share of the steps that outlasted their pace."""
    why: str = ""
    """The plan, where there is one."""


def arms() -> list[Arm]:
    """The longest first."""
    maps = [dict(zip(TASKS, names, strict=True)) for names in product(MIXED, repeat=len(TASKS))]
    named = [Arm(" ".join(f"{task}→{name}" for task, name in each.items()), MIXED, each) for each in maps]
    return [Arm("learned", MIXED, "learned"), *named, *(Arm(f"all {name}", {name: num}) for name, num in ALONE.items())]


def price(engines: Mapping[str, int]) -> float:
    """US dollars an hour."""
    return sum(num * (catalog.hardware(name).usd_per_hour or 0.0) for name, num in engines.items())


JOB: Mapping[str, Any] = {
    "run": {"name": "affinity", "steps": 1_000_000},
    "env": {"isolation": "inline", "concurrency": 96},
    "rollout": {"max_len": 4096},
    "staleness": {"bounded": False},
    "train": {"kind": "scripted", "batch_groups": 24, "group_size": 4, "scripted": {"step_s": 0.0, "weights_mib": 0.01}},
    "check": {"enabled": False},
    "eval": {"every": 0, "final_num_tasks": 0},
    "checkpoint": {"every": 1000},
    "report": {"finish": ""},
}  # fmt: skip
"""What all arms have."""

ENGINE: Mapping[str, Any] = {
    "kind": "scripted", "num_slots": 16, "max_len": 4096, "max_batch_tokens": 4096, "stream_every": 256, "kv_on_update": "keep",
    "scripted": {"stop_share": 0.0, "vocab_size": make_tokenizer().get_vocab_size()},
}  # fmt: skip

ACTORS = {
    "sample_buffer": "rubato.actors.samples.buffer:SampleBuffer",
    "llm_proxy": "rubato.actors.proxy.proxy:LLMProxy",
    "engine": "rubato.actors.engines.worker:EngineWorker",
    "env_manager": "rubato.actors.envs.manager:EnvManager",
    "trainer": "rubato.actors.training.trainer:Trainer",
}


def job(arm: Arm, model: Path) -> dict[str, Any]:
    """Its config."""
    shown_text = f"{ROOT}/tools/bench/peers/shown_text.py:ShownText"
    actors: dict[str, Any] = {role: {"class": target} for role, target in ACTORS.items()}
    actors["engine"]["pools"] = {
        name: {"count": num, "hardware": name, "set": {"engine.pace.hardware": name}} for name, num in arm.engines.items()
    }
    tasks = {
        name: {"class": shown_text, "kwargs": {"tokens": shown}, "max_turns": 1, "max_new_tokens": sampled}
        for name, (shown, sampled) in TASKS.items()
    }
    pace = {"hardware": next(iter(arm.engines)), "model": "qwen3-8b", "scale": SCALE}
    own = {"actors": actors, "tasks": tasks, "affinity": arm.affinity, "model": {"path": str(model)}}
    return {**JOB, **own, "engine": {**ENGINE, "pace": pace}}


class Planned(NamedTuple):
    """A plan of the proxy."""

    why: str
    shares: Mapping[str, Mapping[str, float]]

    def map(self) -> dict[str, str]:
        """Task → the class that has most of it."""
        return {task: max(shares, key=lambda name: shares[name]) for task, shares in self.shares.items()}


def plans(folder: Path) -> list[Planned]:
    """Those that the proxy made so far."""
    log = folder / "logs" / "llm_proxy-1.jsonl"
    lines = log.read_text().splitlines() if log.exists() else []
    made = [json.loads(line) for line in lines if '"affinity_planned"' in line]
    return [Planned(each["why"], each["shares"]) for each in made]


async def measure(folder: Path, launcher: "subprocess.Popen[bytes]", arm: Arm, seconds: float, warm_s: float = WARM_S) -> Measured:
    """Watch the run in `folder` for `seconds` once it is warm, and where it learns, once it has a plan. Raises TimeoutError."""
    await is_up(folder, launcher)
    async with connect(folder) as run:

        async def look() -> tuple[float, float, Sequence[ActorRecord]]:
            """Time and samples, at the next beat of the sample buffer."""
            before = buffer(await list_actors(run.store))
            while True:
                await asyncio.sleep(0.05)
                actors = await list_actors(run.store)
                now = buffer(actors)
                if now is not None and (before is None or now.beat != before.beat):
                    return time.monotonic(), now.metrics.get("samples/put", 0.0), actors  # noqa: TID251

        async with asyncio.timeout(START_S):
            while (await look())[1] == 0:
                pass
        async with asyncio.timeout(PLAN_S):
            while arm.affinity == "learned" and not plans(folder):
                await look()
        await asyncio.sleep(warm_s)
        began_s, had, _ = await look()
        await asyncio.sleep(seconds)
        ended_s, has, actors = await look()
    engines = [actor.metrics for actor in actors if actor.role == "engine"]
    steps = sum(each["paced/steps"] for each in engines)
    outlasted = sum(each["paced/steps"] * each["paced/outlasted_frac"] for each in engines) / steps
    return Measured((has - had) / (ended_s - began_s), outlasted, plans(folder)[-1].why if plans(folder) else "")


def buffer(actors: Sequence[ActorRecord]) -> ActorRecord | None:
    return next((actor for actor in actors if actor.role == "sample_buffer"), None)


def run(arm: Arm, seconds: float, overrides: Sequence[str], warm_s: float = WARM_S) -> Measured:
    """Launch the arm's job, measure it, and stop it."""
    with tempfile.TemporaryDirectory(prefix="rubato-affinity-") as scratch:
        place = Path(scratch)
        write_tokenizer(place / "model")
        (place / "job.yaml").write_text(json.dumps(job(arm, place / "model")))
        command = [ROOT / "tools/launch.py", place / "job.yaml", *overrides, "--run-dir", place / "run"]
        with (place / "said").open("w") as out:
            launcher = subprocess.Popen([sys.executable, *map(str, command)], cwd=place, stdout=out, stderr=out, preexec_fn=die_with_parent)
        try:
            found = asyncio.run(measure(place / "run", launcher, arm, seconds, warm_s))
        except TimeoutError:
            raise SystemExit(f"{arm.name} did not get going: {(place / 'said').read_text()[-2000:]}") from None
        finally:
            launcher.terminate()
            launcher.wait(END_S)
    note = f"  {found.why}" if found.why else ""
    outlasted = f"{100 * found.outlasted:.1f} % of steps outlasted"
    print(f"{arm.name:24} {found.samples_s:6.2f} samples/s paced, {outlasted}{note}", flush=True)
    return found


def run_all(wanted: Sequence[Arm], seconds: float, overrides: Sequence[str], warm_s: float = WARM_S) -> dict[str, Measured]:
    """Some at a time, for engines that are paced wait most of the time."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        found = pool.map(lambda arm: run(arm, seconds, overrides, warm_s), wanted)
        return {arm.name: each for arm, each in zip(wanted, found, strict=True)}


class Followed(NamedTuple):
    """How the map came after tasks that changed places."""

    before: int
    """Steps of training before the tasks changed places."""
    steps: int | None
    """Those from then until the plan was made; None where it never was."""
    samples_s: list[float]
    """Of each step, from the first."""
    plans: list[str]
    outlasted: float


def swapped_job(model: Path, flag: Path) -> dict[str, Any]:
    """The config of `learned`, with tasks that change places once `flag` is there."""
    found = job(Arm("learned", MIXED, "learned"), model)
    peers = ROOT / "tools/bench/peers/changing_places.py"
    found["actors"]["engine"]["class"] = f"{peers}:ByPrompt"
    for name, (shown, _) in TASKS.items():
        own = {"class": f"{peers}:ChangingPlaces", "kwargs": {"tokens": shown, "flag": str(flag)}}
        found["tasks"][name] |= own | {"max_new_tokens": max(SAMPLED.values())}
    return found


def rates(folder: Path) -> list[float]:
    """Samples per second of each step so far."""
    rows = folder / "metrics.jsonl"
    text = rows.read_text() if rows.exists() else ""
    return [json.loads(line)["perf/samples_s"] for line in text[: text.rfind("\n") + 1].splitlines()]


async def follow(after: int, overrides: Sequence[str]) -> Followed:
    """Run `learned`, let tasks change places after so many steps, and wait until the map has followed. Raises TimeoutError."""
    with tempfile.TemporaryDirectory(prefix="rubato-affinity-") as scratch:
        model, flag = Path(scratch) / "model", Path(scratch) / "swapped"
        write_tokenizer(model)
        async with (
            paced_job.job("affinity", swapped_job(model, flag), overrides) as folder,
            connect(folder) as run,
            asyncio.timeout(SWAP_S),
        ):
            await until(lambda: len(rates(folder)) >= after and bool(plans(folder)))
            flag.touch()
            before, known = len(rates(folder)), len(plans(folder))
            new = exchanged(plans(folder)[-1].map())
            print(f"after {before} steps tasks change places", flush=True)
            await until(lambda: new in [plan.map() for plan in plans(folder)[known:]] or len(rates(folder)) > before + SWAP_STEPS)
            num, found = len(rates(folder)) - before, plans(folder)
            steps = num if new in [plan.map() for plan in found[known:]] else None
            await until(lambda: len(rates(folder)) >= before + num + SETTLED)
            whys = [plan.why for plan in found]
            return Followed(before, steps, rates(folder), whys, await paced_job.outlasted(run.store))


def exchanged(plan: Mapping[str, str]) -> dict[str, str]:
    """The map with its two tasks in each other's place. Raises SystemExit where both are on one class: nothing would show."""
    (first, its), (second, other) = plan.items()
    if its == other:
        raise SystemExit(f"{first} and {second} are both mapped to {its}, so a change of places would not show")
    return {first: other, second: its}


async def until(condition: Callable[[], bool]) -> None:
    """Of what other processes write, which has no event."""
    while not condition():  # noqa: ASYNC110 - see above
        await asyncio.sleep(0.05)


def swap(after: int, overrides: Sequence[str], file: Path | None) -> int:
    """Run it, print, and write the figures where asked for."""
    found = asyncio.run(follow(after, overrides))
    for number, why in enumerate(found.plans, 1):
        print(f"plan {number}: {why}")
    print(f"samples/s of each step (paced): {', '.join(f'{rate:.1f}' for rate in found.samples_s)}")
    said = "did not follow" if found.steps is None else f"followed after {found.steps} steps"
    print(f"the map {said}; {100 * found.outlasted:.1f} % of steps outlasted")
    if file:
        file.write_text(json.dumps(found._asdict(), indent=2))
    followed = found.steps is not None and found.steps <= SWAPPED_WITHIN
    return 0 if followed and found.outlasted <= MOST_OUTLASTED else 1


def summed_up(found: Mapping[str, Measured], wanted: Sequence[Arm]) -> dict[str, Any]:
    """As `--json` writes it."""
    by_arm = {arm.name: found[arm.name].samples_s for arm in wanted}
    maps = {arm.name: by_arm[arm.name] for arm in wanted if isinstance(arm.affinity, dict) and arm.affinity}
    summary: dict[str, Any] = {
        "uniform": {next(iter(arm.engines)): by_arm[arm.name] for arm in wanted if not arm.affinity},
        "maps": maps,
        "price": {arm.name: price(arm.engines) for arm in wanted},
        "outlasted": {name: each.outlasted for name, each in found.items()},
        "paced": True,
    }
    if "learned" in by_arm:
        summary["learned"] = by_arm["learned"]
    if maps:
        summary["best"] = max(maps.values())
    return summary


def main(argv: Sequence[str]) -> int:
    """Measure, print, and write the figures where asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each arm's measurement")
    parser.add_argument("--only", choices=("learned", "best", "uniform"))
    parser.add_argument("--short", action="store_true", help="a second of each arm, none to warm up: it starts, its figures say nothing")
    parser.add_argument("--swap", type=int, nargs="?", const=SWAP_AT, metavar="STEPS", help="before tasks change places")
    parser.add_argument("--json", type=Path)
    parser.add_argument("overrides", nargs="*", metavar="key.sub=value")
    asked = parser.parse_args(argv)
    if asked.swap is not None:
        return swap(asked.swap, asked.overrides, asked.json)
    kinds = {"learned": lambda a: a.affinity == "learned", "uniform": lambda a: not a.affinity}
    kinds["best"] = lambda a: not any(kinds[kind](a) for kind in ("learned", "uniform"))
    wanted = [arm for arm in arms() if not asked.only or kinds[asked.only](arm)]
    if asked.short:
        print(NO_RESULT)
    seconds, warm_s = (1.0, 0.0) if asked.short else (asked.seconds, WARM_S)
    found = run_all(wanted, seconds, asked.overrides, warm_s)
    summary = summed_up(found, wanted)
    if asked.json:
        asked.json.write_text(json.dumps(summary, indent=2))
    if not asked.only:
        learned, worst = summary["learned"], min(summary["uniform"].values())
        print(f"learned / best map {learned / summary['best']:.2f}, learned / worse class alone {learned / worst:.2f}, paced")
    late = [name for name, share in summary["outlasted"].items() if share > MOST_OUTLASTED]
    if late:
        print(f"more than {100 * MOST_OUTLASTED:g} % of the steps outlasted their pace in {', '.join(late)}: these figures say nothing")
    return 1 if late and not asked.short else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
