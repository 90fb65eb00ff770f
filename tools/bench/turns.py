"""CPU time per turn and role: one-token turns of FrozenLake, all roles live, beside an `openai` client that plays them over HTTP.

python tools/bench/turns.py [--seconds 20] [--runs 1] [--only rubato|http] [--json FILE] [key.sub=value …]

Rubato runs the quickstart's actors as processes; engines and trainer are scripted and answer at once, and their CPU time is left out.
`node` is the launcher, `store` the Redis it started. The peer is one keep-alive AsyncOpenAI client and a starlette server that answers at
once, with the same environment and as many episodes at a time; its figure is client and server together. CPU time is of whole processes,
all threads and what they started, from /proc. `--json` writes {"cpu_us_per_turn", "by_role", "http_cpu_us_per_turn", …}: medians of `--runs`,
which take turns.
"""

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from rubato.runtime.launch.children import die_with_parent  # noqa: E402
from rubato.runtime.launch.connection import connect  # noqa: E402
from rubato.runtime.observe.figures import cpu_seconds  # noqa: E402
from rubato.runtime.registry import ActorRecord, list_actors  # noqa: E402

CONCURRENCY = 192
OVERRIDES = (
    "run.steps=1000000",
    f"env.concurrency={CONCURRENCY}",
    f"engine.kind={ROOT}/tools/bench/peers/walker.py:Walker",
    "engine.scripted.token_s=0",
    "train.kind=scripted",
    "train.scripted.step_s=0",
    "train.scripted.weights_mib=0.01",
    "check.enabled=false",
    "eval.every=0",
    "eval.final_num_tasks=0",
    "checkpoint.every=50",
    'report.finish=""',
)
LEFT_OUT = ("engine", "trainer")
WARM_STEPS = 5
START_S, END_S = 120.0, 60.0


class Seen:
    """CPU seconds by process name and turns played, as of the moment when an engine published its count."""

    def __init__(self, cpu_s: dict[str, float], turns: float) -> None:
        self.cpu_s, self.turns, self.time = cpu_s, turns, time.monotonic()  # noqa: TID251

    def since(self, before: "Seen") -> tuple[float, dict[str, float]]:
        """Turns, and CPU µs per turn of each role."""
        turns = self.turns - before.turns
        by_role: defaultdict[str, float] = defaultdict(float)
        for name, seconds in self.cpu_s.items():
            by_role[role_of(name)] += 1e6 * (seconds - before.cpu_s[name]) / turns
        return turns, dict(by_role)


def role_of(name: str) -> str:
    """`engine` of `engine-2`."""
    role, _, number = name.rpartition("-")
    return role if number.isdigit() else name


async def measure(folder: Path, launcher: "subprocess.Popen[bytes]", seconds: float) -> dict[str, Any]:
    """Watch the run in `folder` for `seconds` once it is warm. Raises TimeoutError where it does not get that far."""
    async with asyncio.timeout(START_S):
        while steps_of(folder) < WARM_STEPS:
            await asyncio.sleep(0.2)
            if launcher.poll() is not None:
                raise TimeoutError
    async with connect(folder) as run:

        async def look() -> Seen:
            """At the next beat of the first engine, which publishes how many tokens there were."""
            before = engines(await list_actors(run.store))
            while True:
                await asyncio.sleep(0.01)
                actors = await list_actors(run.store)
                if engines(actors)[0].beat != before[0].beat:
                    break
            pids = {actor.name: actor.pid for actor in actors if actor.pid != launcher.pid}
            pids |= {"node": launcher.pid, **store_of(launcher.pid)}
            return Seen(cpu_seconds(pids), sum(actor.metrics["engine/tokens"] for actor in engines(actors)))

        first = await look()
        await asyncio.sleep(seconds)
        last = await look()
    turns, by_role = last.since(first)
    ours = sum(us for role, us in by_role.items() if role not in LEFT_OUT)
    return {"cpu_us_per_turn": ours, "by_role": by_role, "turns_s": turns / (last.time - first.time)}


def engines(actors: Sequence[ActorRecord]) -> list[ActorRecord]:
    return [actor for actor in actors if actor.role == "engine"]


def store_of(launcher: int) -> dict[str, int]:
    """The Redis server that the launcher started."""
    for file in Path(f"/proc/{launcher}/task").glob("*/children"):
        for child in file.read_text().split():
            if Path(f"/proc/{child}/comm").read_text().startswith(("redis", "valkey")):
                return {"store": int(child)}
    return {}


def steps_of(folder: Path) -> int:
    rows = folder / "metrics.jsonl"
    return rows.read_bytes().count(b"\n") if rows.exists() else 0


def rubato(seconds: float, overrides: Sequence[str]) -> dict[str, Any]:
    """Launch the job, measure it, and stop it."""
    with tempfile.TemporaryDirectory(prefix="rubato-turns-") as scratch:
        folder, said = Path(scratch) / "run", Path(scratch) / "said"
        command = ["tools/launch.py", "configs/quickstart.yaml", *OVERRIDES, *overrides, "--run-dir", str(folder)]
        with said.open("w") as out:
            launcher = subprocess.Popen([sys.executable, *command], cwd=ROOT, stdout=out, stderr=out, preexec_fn=die_with_parent)
        try:
            return asyncio.run(measure(folder, launcher, seconds))
        except TimeoutError:
            raise SystemExit(f"{WARM_STEPS} steps were not trained: {said.read_text()[-2000:]}") from None
        finally:
            launcher.terminate()
            launcher.wait(END_S)


def http(seconds: float) -> dict[str, Any]:
    """The same turns by an `openai` client in a process of its own."""
    command = [sys.executable, ROOT / "tools/bench/peers/openai_turns.py", "play"]
    command += ["--concurrency", CONCURRENCY, "--seconds", seconds]
    done = subprocess.run(list(map(str, command)), check=True, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    found = json.loads(done.stdout)
    return {
        "http_cpu_us_per_turn": found["client_us"] + found["server_us"],
        "http_server_us_per_turn": found["server_us"],
        "http_turns_s": found["turns"] / seconds,
    }


def median_of(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Key by key, one level deep."""
    found: dict[str, Any] = {}
    for key in dict.fromkeys(key for run in runs for key in run):
        values = [run[key] for run in runs if key in run]
        found[key] = median_of(values) if isinstance(values[0], dict) else statistics.median(values)
    return found


def report(found: dict[str, Any]) -> None:
    """What was measured, in lines."""
    if "by_role" in found:
        for role, us in sorted(found["by_role"].items(), key=lambda item: -item[1]):
            print(f"{role:18} {us:7.0f} µs a turn{'   (left out)' if role in LEFT_OUT else ''}")
        print(f"rubato, without {' and '.join(LEFT_OUT)}: {found['cpu_us_per_turn']:.0f} µs a turn, {found['turns_s']:.0f} turns/s")
    if "http_cpu_us_per_turn" in found:
        us, server = found["http_cpu_us_per_turn"], found["http_server_us_per_turn"]
        print(f"openai over HTTP: {us:.0f} µs a turn, {server:.0f} of them the server's, {found['http_turns_s']:.0f} turns/s")
    if "by_role" in found and "http_cpu_us_per_turn" in found:
        print(f"HTTP / rubato: {found['http_cpu_us_per_turn'] / found['cpu_us_per_turn']:.1f}")


def main(argv: Sequence[str]) -> int:
    """Measure, print, and write the figures where asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each measurement")
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--only", choices=("rubato", "http"))
    parser.add_argument("--json", nargs="?", const="-", metavar="FILE", help="without FILE in place of the table")
    parser.add_argument("overrides", nargs="*", metavar="key.sub=value")
    asked = parser.parse_args(argv)
    runs: list[dict[str, Any]] = []
    for _ in range(asked.runs):
        ours = {} if asked.only == "http" else rubato(asked.seconds, asked.overrides)
        theirs = {} if asked.only == "rubato" else http(asked.seconds)
        runs.append(ours | theirs)
    found = median_of(runs)
    if asked.json == "-":
        print(json.dumps(found))
        return 0
    report(found)
    if asked.json:
        Path(asked.json).write_text(json.dumps(found, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
