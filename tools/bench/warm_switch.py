"""What a job pays at its turn on pools that it shares, against starting its engine and its trainer anew; live processes, by part.

python tools/bench/warm_switch.py [--turns 5 | --short] [--json FILE] [key.sub=value …]

Two jobs share a rollout pool and a training pool at staleness.alpha=0, with the torch engine and trainer and an untrained model of 97 MB in
float32. *Warm* is from the permit of a pool, given in the cluster's Store, until the engine or the trainer is awake: `told` the permit comes
to the job, `asked` the engine has its order and finds the permit in the Store itself, `wake` the states come back. Of a finished rollout no
KV cache is kept: an engine makes an empty one, here of 117 MB. Of weights waking copies nothing, as on a CPU host memory is the device: `copy`
stands for it, the time in which this machine copies as many bytes, an engine's weights or a trainer's with both moments of AdamW. It counts
as warm.

*Cold* is the same process of the same job killed and started again by exec, not forked by the warm parent: `imports` until it loads its
model, `load` from disk (the trainer's is a checkpoint) and, of an engine, the published weights, `ready` until it takes part. Files are in the
page cache. The other job has ended by then; in the turns both run. Figures are medians. Ends with 1 where cold ÷ warm is below 10.
"""

import argparse
import asyncio
import json
import os
import secrets
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from actors.cluster import ROLLOUT, TRAINING, ClusterSection, permits_of  # noqa: E402
from runtime.launch.shared import SharedScope, write_shared  # noqa: E402
from runtime.registry import NODE  # noqa: E402
from runtime.store.embedded import EmbeddedRedis  # noqa: E402
from tools.bench.paced_job import job  # noqa: E402
from tools.bench.short import NO_RESULT  # noqa: E402
from tools.bench.weights import SIZES, write_config  # noqa: E402

SETTINGS = (
    "staleness.alpha=0",
    "checkpoint.every=1",
    "rollout.max_new_tokens=8",
    "engine.num_slots=4",
    "actors.engine={class: actors.engines.worker:EngineWorker, restarts: 100, threads: 2}",
    "actors.trainer={class: actors.training.trainer:Trainer, restarts: 100, threads: 2}",
)
"""A role with more than one thread is not forked; `model.torch_threads` stays 1."""
WHO = {"engine": ("engine-1", ROLLOUT, "llm_proxy-1", 1), "trainer": ("trainer-1", TRAINING, "trainer-1", 3)}
"""Its actor, its phase, who asks for its permit, and how many times the weights it holds."""
LEAST = 10.0
LIMIT_S = 600.0
LOOK_S = 0.2
"""Files of other processes tell nobody that they change."""

Event = Mapping[str, Any]
Parts = Mapping[str, float]


def events(folder: Path, actor: str) -> list[Event]:
    """What it has logged in the run, with `t` in seconds."""
    file = folder / "logs" / f"{actor}.jsonl"
    lines = file.read_text().split("\n")[:-1] if file.exists() else []
    found = map(json.loads, lines)
    return [line | {"t": datetime.fromisoformat(line["t"]).timestamp()} for line in found]


def warm(given: Mapping[int, float], asker: Sequence[Event], woken: Sequence[Event]) -> list[Parts]:
    """Of each turn after the first. `given` says when which epoch got its permit."""
    told = {event["epoch"]: event["t"] for event in asker if event["event"] == "permit_held"}
    turns = [event for event in woken if event["event"] == "woke"][1:]
    return [
        {
            "told": told[turn["epoch"]] - given[turn["epoch"]],
            "asked": turn["t"] - turn["seconds"] - told[turn["epoch"]],
            "wake": turn["seconds"],
        }
        for turn in turns
    ]


def cold(started_s: Sequence[float], own: Sequence[Event]) -> list[Parts]:
    """Of each start but the first, which was beside those of all others."""
    found: list[Parts] = []
    for began in started_s[1:]:
        marks = [began]
        for names in (("model_loads",), ("engine_started", "epoch"), ("ready",)):
            marks.append(next(event["t"] for event in own if event["event"] in names and event["t"] >= marks[-1]))
        found.append({name: marks[at + 1] - marks[at] for at, name in enumerate(("imports", "load", "ready"))})
    return found


def copied_s(size_bytes: int, times: int) -> float:
    """What this machine takes to copy `times` as many bytes; the median of several."""
    import torch

    states, device = torch.ones(2, times * size_bytes, dtype=torch.uint8)
    took: list[float] = []
    for _ in range(9):
        began = time.perf_counter()
        device.copy_(states)
        took.append(time.perf_counter() - began)
    return median(took)


def figures(turns: Sequence[Parts], starts: Sequence[Parts], copy_s: float) -> dict[str, Any]:
    """Medians of each part and of the sums, and the ratio of these."""
    parts = {
        kind: {part: median(each[part] for each in seen) for part in seen[0]}
        for kind, seen in (("warm", turns), ("cold", starts))
    }
    parts["warm"]["copy"] = copy_s
    warm_s = copy_s + median(sum(each.values()) for each in turns)
    cold_s = median(sum(each.values()) for each in starts)
    return {"turns": len(turns), "starts": len(starts), "warm_s": warm_s, "cold_s": cold_s, "ratio": cold_s / warm_s, **parts}  # fmt: skip


async def until(found: Callable[[], bool], what: str) -> None:
    try:
        async with asyncio.timeout(LIMIT_S):
            while not found():  # noqa: ASYNC110 - files of other processes tell nobody
                await asyncio.sleep(LOOK_S)
    except TimeoutError:
        raise SystemExit(f"{what} did not happen within {LIMIT_S:g} s") from None


def count(folder: Path, actor: str, name: str) -> int:
    return sum(event["event"] == name for event in events(folder, actor))


async def turns_of(cluster: Path, folder: Path, actor: str, phase: str, asker: str) -> list[Parts]:
    async with permits_of(ClusterSection(dir=str(cluster))) as permits:
        changes = [change for _, change in await permits.events(phase)]
    given = {change.stand.epoch: change.at_s for change in changes if change.kind == "holds"}
    return warm(given, events(folder, asker), events(folder, actor))


async def starts_of(folder: Path, actor: str, num: int) -> list[Parts]:
    """Kill the actor's process `num` times, each once the one before is ready."""

    def begun() -> list[Event]:
        return [event for event in events(folder, NODE) if event["event"] == "started" and event["actor"] == actor]

    for life in range(2, num + 2):
        os.kill(begun()[-1]["pid"], signal.SIGKILL)
        await until(lambda: count(folder, actor, "ready") == life, f"start {life} of {actor}")  # noqa: B023 - awaited here
    if any(event["forked"] for event in begun()):
        raise SystemExit(f"{actor} was forked: that is no cold start")
    return cold([event["t"] for event in begun()], events(folder, actor))


async def bench(num: int, given: Sequence[str], sizes: Mapping[str, Any] = SIZES) -> dict[str, Any]:
    """Turns of two jobs first; then the processes of one of them are killed."""
    with tempfile.TemporaryDirectory(prefix="rubato-warm-") as scratch:
        place = Path(scratch)
        server = EmbeddedRedis(place)
        write_shared(place, SharedScope(f"bench-{secrets.token_hex(4)}", await server.start()))
        config = json.loads(write_config(place, sizes).read_text())
        size_bytes = (place / "model" / "model.safetensors").stat().st_size

        def shared(name: str) -> list[str]:
            return [*SETTINGS, f"cluster={{dir: {place}, job: {name}}}", *given]

        try:
            async with job("a", config, shared("a")) as a:
                async with job("b", config, shared("b")) as b:
                    woken = [(folder, actor) for folder in (a, b) for actor, *_ in WHO.values()]
                    await until(lambda: min(count(*each, "woke") for each in woken) > num, f"{num + 1} turns")
                    turns = {role: await turns_of(place, a, *who[:3]) for role, who in WHO.items()}
                starts = {role: await starts_of(a, who[0], num) for role, who in WHO.items()}
        finally:
            await server.stop()
    found = {role: figures(turns[role], starts[role], copied_s(size_bytes, who[3])) for role, who in WHO.items()}
    return {"weights_bytes": size_bytes, "load": os.getloadavg()[0], **found}


def told(role: str, found: Mapping[str, Any]) -> str:
    def parts(kind: str) -> str:
        return f"{found[f'{kind}_s']:.3f} s ({', '.join(f'{name} {s:.3f}' for name, s in found[kind].items())})"

    return f"{role}: warm {parts('warm')}, cold {parts('cold')}: {found['ratio']:.0f} x"


def main(argv: Sequence[str]) -> int:
    """Measure, print, and write the figures where asked for; exit 1 where a switch is not ten times as fast as a start."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=5, help="turns, and starts, that are measured at least")
    parser.add_argument(
        "--short", action="store_true", help="a turn and a start of a small model: it starts, its figures say nothing"
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("overrides", nargs="*", metavar="key.sub=value")
    asked = parser.parse_args(argv)
    if asked.short:
        print(NO_RESULT, flush=True)
    turns, sizes = (1, {}) if asked.short else (asked.turns, SIZES)
    found = asyncio.run(bench(turns, asked.overrides, sizes))
    for role in WHO:
        print(told(role, found[role]))
    if asked.json:
        asked.json.write_text(json.dumps(found, indent=2))
    return 1 if not asked.short and any(found[role]["ratio"] < LEAST for role in WHO) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
