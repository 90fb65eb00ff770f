"""Prefill apart from decode on four paced engines, live: every fixed split beside `proxy.balance: auto`, on a load that flips half-way.

python tools/bench/prefill_decode.py [--short] [--json FILE] [key.sub=value …]

First come requests with long prompts and few tokens to sample, then the other way round, with so many in flight all the time. Proxy, engines
and bus are live processes; the engines' time is paced (docs/pace.md): a step and a KV move last what an H800 would take for it, four times
over, and tokens are drawn by the scripted engine. All arms run at once: paced engines wait most of the time. `--json` writes {"auto", "fixed": {"1P3D": …}} in samples per
second of the whole run, with each phase's seconds and what the planner changed. Fails where more than 2 % of any arm's steps outlasted their
pace.
"""

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from rubato.actors.engines.pace import MOST_OUTLASTED  # noqa: E402
from rubato.actors.messages.generation import Completion, Generate, Sampling, why_early  # noqa: E402
from rubato.runtime.guest import Guest, join  # noqa: E402
from rubato.runtime.launch.children import die_with_parent  # noqa: E402
from rubato.runtime.launch.connection import connect  # noqa: E402
from rubato.runtime.registry import list_actors  # noqa: E402
from tools.bench.paced_job import all_here, is_up  # noqa: E402
from tools.bench.short import NO_RESULT  # noqa: E402

ENGINES = 4
IN_FLIGHT = 64


class Phase(NamedTuple):
    name: str
    requests: int
    prompt: int
    """Tokens."""
    sampled: int


PHASES = Phase("reading", 176, 6000, 32), Phase("writing", 200, 64, 400)
SHORT = Phase("reading", 8, 600, 4), Phase("writing", 8, 64, 40)
"""That the bench starts, and nothing else."""
AT_ONCE = 4
ASK_S, END_S, BEAT_S = 240.0, 30.0, 2.0


class Measured(NamedTuple):
    samples_s: float
    phases_s: dict[str, float]
    """Until the last request of each phase was answered, from the end of the one before."""
    outlasted: float
    """Share of steps that outlasted their pace."""
    changes: list[str]


def arms() -> dict[str, tuple[int, str]]:
    """Engines that prefill, and how they are balanced; the longest runs first."""
    fixed = {f"{num}P{ENGINES - num}D": (num, "fixed") for num in (1, 3, 2)}
    return fixed | {"auto": (ENGINES // 2, "auto")}


def job(num_prefill: int, balance: str) -> dict[str, Any]:
    """Its config."""
    pools = {
        "prefill": {"count": num_prefill, "set": {"engine.serves": "prefill"}},
        "decode": {"count": ENGINES - num_prefill, "set": {"engine.serves": "decode"}},
    }
    return {
        "run": {"name": "prefill-decode"},
        "actors": {
            "llm_proxy": {"class": "rubato.actors.proxy.proxy:LLMProxy"},
            "engine": {"class": "rubato.actors.engines.worker:EngineWorker", "pools": pools},
        },
        "proxy": {"balance": balance, "balance_s": 2.0},
        "engine": {
            "kind": "scripted",
            "num_slots": 16,
            "max_len": 8192,
            "max_batch_tokens": 8192,
            "stream_every": 256,
            "scripted": {"stop_share": 0.0},
            "pace": {"hardware": "h800", "model": "qwen3-8b", "scale": 4.0},
        },
    }


async def play(me: Guest, phases: Sequence[Phase] = PHASES) -> dict[str, float]:
    """All requests in order, `IN_FLIGHT` at a time; returns the seconds of each phase."""
    loop = asyncio.get_running_loop()
    places = asyncio.Semaphore(IN_FLIGHT)
    last: dict[str, float] = {}

    async def one(phase: Phase, number: int) -> None:
        name = f"{phase.name}-{number}"
        request = Generate(name, name, bytes(4 * phase.prompt), Sampling(phase.sampled))
        reply = await me.ref("llm_proxy").ask(request, timeout=ASK_S)
        if not isinstance(reply, Completion):
            raise SystemExit(f"{name} was not answered: {why_early(reply)}")
        last[phase.name] = loop.time()
        places.release()

    began = loop.time()
    async with asyncio.TaskGroup() as tasks:
        for phase in phases:
            for number in range(phase.requests):
                await places.acquire()
                tasks.create_task(one(phase, number))
    reading, writing = (last[phase.name] for phase in phases)
    return {phases[0].name: reading - began, phases[1].name: writing - reading}


async def measure(folder: Path, launcher: "subprocess.Popen[bytes]", phases: Sequence[Phase] = PHASES) -> Measured:
    """Play the load on the run in `folder`. Raises TimeoutError where it does not come up."""
    await is_up(folder, launcher)
    async with connect(folder) as run, join(folder) as me:
        await all_here(run.store, ENGINES)
        phases_s = await play(me, phases)
        await asyncio.sleep(BEAT_S)  # the engines' figures are a beat old
        engines = [actor.metrics for actor in await list_actors(run.store) if actor.role == "engine"]
    steps = sum(each["paced/steps"] for each in engines)
    outlasted = sum(each["paced/steps"] * each["paced/outlasted_frac"] for each in engines) / steps
    log = (folder / "logs" / "llm_proxy-1.jsonl").read_text().splitlines()
    changes = [found["why"] for line in log if (found := json.loads(line)).get("event") == "stage_changed"]
    return Measured(sum(p.requests for p in phases) / sum(phases_s.values()), phases_s, outlasted, changes)


def run(name: str, num_prefill: int, balance: str, overrides: Sequence[str], phases: Sequence[Phase] = PHASES) -> Measured:
    """Launch the arm's job, measure it, and stop it."""
    with tempfile.TemporaryDirectory(prefix="rubato-prefill-decode-") as scratch:
        place = Path(scratch)
        (place / "job.yaml").write_text(json.dumps(job(num_prefill, balance)))
        command = [ROOT / "tools/launch.py", place / "job.yaml", *overrides, "--run-dir", place / "run"]
        with (place / "said").open("w") as out:
            launcher = subprocess.Popen([sys.executable, *map(str, command)], cwd=place, stdout=out, stderr=out, preexec_fn=die_with_parent)
        try:
            found = asyncio.run(measure(place / "run", launcher, phases))
        except TimeoutError:
            raise SystemExit(f"{name} did not get going: {(place / 'said').read_text()[-2000:]}") from None
        finally:
            launcher.terminate()
            launcher.wait(END_S)
    parts = ", ".join(f"{phase} {seconds:.0f} s" for phase, seconds in found.phases_s.items())
    outlasted = f"{100 * found.outlasted:.1f} % of steps outlasted"
    print("\n  ".join([f"{name}: {found.samples_s:.2f} samples/s paced; {parts}; {outlasted}", *found.changes]), flush=True)
    return found


def summed_up(found: Mapping[str, Measured]) -> dict[str, Any]:
    """As `--json` writes it."""
    return {
        "auto": found["auto"].samples_s,
        "fixed": {name: each.samples_s for name, each in found.items() if name != "auto"},
        "phases_s": {name: each.phases_s for name, each in found.items()},
        "outlasted": {name: each.outlasted for name, each in found.items()},
        "changes": found["auto"].changes,
        "paced": True,
    }


def main(argv: Sequence[str]) -> int:
    """Measure, print, and write the figures where asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--short", action="store_true", help="few requests, 2P2D and auto alone: it starts, its figures say nothing")
    parser.add_argument("overrides", nargs="*", metavar="key.sub=value")
    asked = parser.parse_args(argv)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        wanted = {name: arm for name, arm in arms().items() if not asked.short or name in ("2P2D", "auto")}
        phases = SHORT if asked.short else PHASES
        jobs = {name: pool.submit(run, name, *arm, asked.overrides, phases) for name, arm in wanted.items()}
        summary = summed_up({name: each.result() for name, each in jobs.items()})
    if asked.short:
        print(NO_RESULT)
    print(f"auto over the best fixed split: {summary['auto'] / max(summary['fixed'].values()):.2f}")
    if asked.json:
        asked.json.write_text(json.dumps(summary, indent=1))
    worst = max(summary["outlasted"].values())
    if worst > MOST_OUTLASTED and not asked.short:
        print(f"{100 * worst:.1f} % of an arm's steps outlasted their pace: this machine is too slow or too busy for it")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
