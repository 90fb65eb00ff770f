"""What a run's first host pays for hosts: its CPU per trajectory as the same work comes from ever more of them.

python tools/bench/scale.py [--hosts 1 4 16 64] [--rate 64] [--seconds 30] [--json FILE]

The first host has the launcher (its node agent, the gate, the embedded Redis), the buffer, the proxy and a scripted trainer. Each further host
is a node agent with one scripted engine and one environment manager, which joins through the gate by the run's token, over tcp with keys; the
processes of hosts are forked of one that has imported everything (tools/bench/warm_hosts.py). No process loads torch. How each figure comes
about: docs/benchmarks.md.
"""

import argparse
import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import yaml  # noqa: E402

from rubato.runtime.errors import ExitCode, LaunchError  # noqa: E402
from rubato.runtime.launch.children import die_with_parent  # noqa: E402
from rubato.runtime.launch.connection import connect  # noqa: E402
from rubato.runtime.registry import ActorRecord, list_actors  # noqa: E402
from rubato.runtime.store.store import StoreError  # noqa: E402
from tools.bench import warm_hosts  # noqa: E402
from tools.bench.short import NO_RESULT  # noqa: E402

TURNS, TOKENS = 4, 8
TOKEN_S, STEP_S = 0.02, 0.34
"""Of the scripted engines, and on average of the environments, whose chance spreads the messages over time."""
TRAJECTORY_S = TURNS * (TOKENS * TOKEN_S + STEP_S)
BATCH = 128
WARM_S, IDLE_S = 8.0, 8.0
"""Before the window; and of the first host alone, before any other joins."""
START_S, JOIN_S, END_S, LOOK_S = 120.0, 240.0, 60.0, 0.05
AT_ONCE = 8
"""Hosts that start at a time: what they do at their start is done on their own processors elsewhere."""
TICKS = os.sysconf("SC_CLK_TCK")
BYTES = 1 << 30


def clock() -> float:
    return time.monotonic()  # noqa: TID251


def config(model: Path, hosts: int, rate: float) -> dict[str, Any]:
    """Of a run whose `hosts` play `rate` trajectories a second together."""
    each = max(1, round(rate * TRAJECTORY_S / hosts))
    return {
        "run": {"name": "scale", "seed": 1, "steps": 1_000_000},
        "bus": {"host": "127.0.0.1"},
        "actors": {
            "sample_buffer": {"class": "rubato.actors.samples.buffer:SampleBuffer"},
            "llm_proxy": {"class": "rubato.actors.proxy.proxy:LLMProxy"},
            "trainer": {"class": "rubato.actors.training.trainer:Trainer"},
            "engine": {"class": "rubato.actors.engines.worker:EngineWorker", "count": 0},
            "env_manager": {"class": "rubato.actors.envs.manager:EnvManager", "count": 0},
        },
        "model": {"path": str(model)},
        "env": {
            "class": f"{ROOT}/tools/bench/peers/spread_turns.py:SpreadTurns",
            "kwargs": {"turns": TURNS, "step_s": STEP_S},
            "isolation": "inline",
            "concurrency": each,
        },
        "engine": {"kind": "scripted", "num_slots": 4 * each, "scripted": {"token_s": TOKEN_S, "stop_share": 0.0}},
        "rollout": {"max_turns": TURNS, "max_new_tokens": TOKENS},
        "staleness": {"alpha": 2},
        "train": {"kind": "scripted", "scripted": {"step_s": 0.0, "weights_mib": 0.01}, "batch_groups": BATCH // 8, "group_size": 8},
        "check": {"enabled": False},
        "eval": {"every": 0, "final_num_tasks": 0},
        "checkpoint": {"every": 1000},
        "report": {"finish": ""},
    }


# -- processes -----------------------------------------------------------------------------------------------------


def stat(pid: int) -> list[str]:
    """Fields of /proc/PID/stat from the third on; empty where there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def below(roots: Iterable[int]) -> list[int]:
    """`roots` and all processes below them."""
    parents = {int(entry.name): stat(int(entry.name)) for entry in Path("/proc").iterdir() if entry.name.isdigit()}
    found = list(roots)
    for pid in found:
        found += [child for child, fields in parents.items() if fields and int(fields[1]) == pid]
    return found


def cpu_s(pid: int) -> float:
    """User and system time of a process, without its children's."""
    fields = stat(pid)
    return (int(fields[11]) + int(fields[12])) / TICKS if fields else 0.0


def proportional_bytes(pids: Iterable[int]) -> int:
    """Memory of these processes, of which what several share counts once."""
    total = 0
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        total += sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))
    return total


def name_of(pid: int) -> str:
    """What a process of the first host is called."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return ""
    if "rubato.runtime.node" in words:
        return words[words.index("rubato.runtime.node") + 2]
    if "rubato.runtime.launch.warm" in words:
        return "warm_parent"
    return "redis" if "redis" in words[0] else "launcher"


# -- one run -------------------------------------------------------------------------------------------------------


class Moment(NamedTuple):
    """What the first host had used, and how many trajectories its buffer had, when that published its figures."""

    at: float
    cpu: dict[str, float]
    trajectories: float


class Run:
    """A run in `place`, from its launch on."""

    def __init__(self, place: Path, settings: dict[str, Any]) -> None:
        self.folder = place / "run"
        self._place, self._said = place, place / "said"
        (place / "run.yaml").write_text(yaml.safe_dump(settings))
        warm_hosts.warm_up(place / "run.yaml")
        self._rubato("keys", "new", "--run", self.folder)
        command = self._command("launch", place / "run.yaml", "--run-dir", self.folder)
        with self._said.open("w") as out:
            self._launcher = subprocess.Popen(command, cwd=place, stdout=out, stderr=out, stdin=subprocess.DEVNULL, env=environment(), preexec_fn=die_with_parent)  # fmt: skip
        self._hosts: list[int] = []
        self._num_started = 0
        self.lost = 0
        """Hosts that ended as they joined, each of which another one stands for."""

    def up(self) -> None:
        """Wait for the first host's actors. Raises RuntimeError where they don't come."""
        self._until(lambda actors: {"llm_proxy", "sample_buffer", "trainer"} <= {actor.role for actor in actors}, "the first host")

    def join(self, hosts: int) -> float:
        """Seconds until so many hosts have joined, from the first one's start to the last one's actors."""
        token = self._rubato("keys", "join-token", "--run", self.folder).strip()
        began = clock()
        self._until(lambda actors: self._joined(actors, hosts, token), f"{hosts} hosts", JOIN_S)
        return clock() - began

    def _joined(self, actors: Sequence[ActorRecord], hosts: int, token: str) -> bool:
        """Whether all are there; starts further ones, of which `AT_ONCE` are on their way at a time."""
        ready = min(sum(actor.role == role for actor in actors) for role in ("engine", "env_manager"))
        for pid in [pid for pid in self._hosts if os.waitpid(pid, os.WNOHANG)[0]]:
            self._hosts.remove(pid)
            self.lost += 1
        while len(self._hosts) < min(hosts, ready + AT_ONCE):
            self._num_started += 1
            self._hosts.append(warm_hosts.start(self._place / f"host-{self._num_started}", token, "engine=1,env_manager=1"))
        return ready == hosts

    def head(self) -> list[int]:
        return below([self._launcher.pid])

    def moment(self) -> Moment:
        """At the buffer's next beat."""
        return asyncio.run(self._moment())

    async def _moment(self) -> Moment:
        async with connect(self.folder, types=False) as connection, asyncio.timeout(START_S):
            beat = -1
            while True:
                (buffer,) = [actor for actor in await list_actors(connection.store) if actor.role == "sample_buffer"]
                if 0 <= beat < buffer.beat:
                    cpu = dict.fromkeys(map(name_of, self.head()), 0.0)
                    for pid in self.head():
                        cpu[name_of(pid)] = cpu.get(name_of(pid), 0.0) + cpu_s(pid)
                    return Moment(clock(), cpu, buffer.metrics.get("samples/put", 0.0))
                beat = buffer.beat
                await asyncio.sleep(LOOK_S)

    def hosts_bytes(self) -> int:
        return proportional_bytes(below(self._hosts))

    def close(self) -> None:
        """Stop it; nothing of it is left."""
        self._launcher.terminate()
        try:
            self._launcher.wait(END_S)
        except subprocess.TimeoutExpired:
            self._launcher.kill()
            self._launcher.wait()
        warm_hosts.end(self._hosts, END_S)

    def _until(self, there: Callable[[Sequence[ActorRecord]], bool], what: str, limit_s: float = START_S) -> None:
        deadline = clock() + limit_s
        while clock() < deadline and self._launcher.poll() is None:
            try:
                if there([actor for actor in asyncio.run(self._actors()) if actor.state == "ready"]):
                    return
            except (LaunchError, StoreError):
                pass
            time.sleep(4 * LOOK_S)  # noqa: TID251 - another process's progress
        logs = [self._said, *sorted(self._place.glob("host-*.log"))]
        said = "\n".join(line for log in logs if log.exists() for line in log.read_text(errors="replace").splitlines()[-3:])
        raise RuntimeError(f"{what} did not come: {said[-3000:]}")

    async def _actors(self) -> list[ActorRecord]:
        async with connect(self.folder, types=False) as connection:
            return await list_actors(connection.store)

    def _rubato(self, *words: object) -> str:
        return subprocess.run(self._command(*words), cwd=self._place, env=environment(), capture_output=True, text=True, check=True).stdout

    def _command(self, *words: object) -> list[str]:
        return [sys.executable, "-m", "rubato.runtime.cli", *map(str, words)]


def environment() -> dict[str, str]:
    """Of the commands that are run."""
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def measured(model: Path, hosts: int, asked: argparse.Namespace) -> dict[str, Any]:
    """The figures of one run."""
    with scratch_folder() as scratch:
        run = Run(scratch, config(model, hosts, asked.rate))
        try:
            run.up()
            idle = spent(run.moment(), later(run, asked.idle))
            join_s = run.join(hosts)
            time.sleep(asked.warm)  # noqa: TID251 - the span is what is asked for
            first, last = run.moment(), later(run, asked.seconds)
            head, there = run.head(), run.hosts_bytes()
            found = {
                "join_s": round(join_s, 1),
                "head_cpu_s_per_s": round(sum(spent(first, last).values()), 4),
                "head_rss": proportional_bytes(head),
                "cpu_us_per_trajectory": per_trajectory(first, last),
                "trajectories_s": round((last.trajectories - first.trajectories) / (last.at - first.at), 2),
                "hosts_rss": there,
                "hosts_lost": run.lost,
                "head": {name: round(used, 4) for name, used in spent(first, last).items()},
                "idle": {name: round(used, 4) for name, used in idle.items()},
            }
        finally:
            run.close()
    print(line(hosts, found), flush=True)
    return found


@contextmanager
def scratch_folder() -> Generator[Path]:
    """A folder for the block. A TemporaryDirectory would go with the first fork that ends."""
    folder = Path(tempfile.mkdtemp(prefix="rubato-scale-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def later(run: Run, seconds: float) -> Moment:
    time.sleep(seconds)  # noqa: TID251 - the span is what is asked for
    return run.moment()


def spent(first: Moment, last: Moment) -> dict[str, float]:
    """Seconds of CPU a second, by process."""
    return {name: max(0.0, used - first.cpu.get(name, 0.0)) / (last.at - first.at) for name, used in last.cpu.items()}


def per_trajectory(first: Moment, last: Moment) -> float:
    """Microseconds of CPU. Raises RuntimeError where nothing was played."""
    num = last.trajectories - first.trajectories
    if num <= 0:
        raise RuntimeError("no trajectory came to the buffer: the hosts' logs say why")
    return round(1e6 * sum(spent(first, last).values()) * (last.at - first.at) / num, 1)


def saturates(found: dict[str, dict[str, Any]], per_host: float) -> dict[str, Any] | None:
    """Where one process of the first host would need a whole core, each host playing `per_host` trajectories a second: the fewest hosts.

    A process needs fixed + each · hosts + work · trajectories: `fixed` is what it used alone, the others follow from the runs with the fewest
    and the most hosts.
    """
    if len(found) < 2:
        return None
    least, most = min(map(int, found)), max(map(int, found))
    few, many = found[str(least)], found[str(most)]
    best: dict[str, Any] | None = None
    for name, used in many["head"].items():
        fixed = many["idle"].get(name, 0.0)
        above = few["head"].get(name, 0.0) - fixed, used - fixed
        rates = few["trajectories_s"], many["trajectories_s"]
        each = max(0.0, (above[1] * rates[0] - above[0] * rates[1]) / (most * rates[0] - least * rates[1]))
        work = max(0.0, above[0] - each * least) / rates[0]
        if (slope := each + work * per_host) > 0.0:
            hosts = int((1.0 - fixed) / slope)
            if best is None or hosts < best["hosts"]:
                best = {"hosts": hosts, "process": name, "trajectories_s": round(hosts * per_host, 1), "per_host": per_host}
    return best


def line(hosts: int, found: dict[str, Any]) -> str:
    """A run for a reader."""
    parts = ", ".join(f"{name} {used:.3f}" for name, used in sorted(found["head"].items(), key=lambda one: -one[1]) if used >= 0.001)
    return (
        f"{hosts:3} hosts joined in {found['join_s']:5.1f} s, {found['hosts_rss'] / BYTES:.2f} GiB; first host "
        f"{found['cpu_us_per_trajectory']:6.0f} µs of CPU a trajectory at {found['trajectories_s']:.1f}/s, "
        f"{found['head_rss'] / BYTES:.2f} GiB ({parts})"
    )


def main(argv: Sequence[str]) -> int:
    """Measure, print, and write the figures where asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, nargs="+", default=[1, 4, 16, 64], metavar="N")
    parser.add_argument("--rate", type=float, default=64.0, help="trajectories a second, of all hosts together")
    parser.add_argument("--per-host", type=float, default=4.0, help="trajectories a second of each host, for saturates_at")
    parser.add_argument("--seconds", type=float, default=30.0, help="the window")
    parser.add_argument("--short", action="store_true", help="a few seconds each: the figures are no result")
    parser.add_argument("--json", type=Path, metavar="FILE")
    asked = parser.parse_args(argv)
    if not all(1 <= hosts <= asked.rate * TRAJECTORY_S for hosts in asked.hosts):
        parser.error(f"--hosts must be within 1 and {asked.rate * TRAJECTORY_S:g}, so that each has a trajectory to play at --rate")
    asked.warm, asked.idle = WARM_S, IDLE_S
    if asked.short:
        asked.seconds, asked.warm, asked.idle = 4.0, 2.0, 1.0
        print(NO_RESULT, flush=True)
    with scratch_folder() as scratch:
        model = scratch / "model"
        making = "import sys; from pathlib import Path; from rubato.actors.training.base_model import make; make(Path(sys.argv[1]), 1, print, steps=0)"
        command = [sys.executable, "-c", making, str(model)]  # in a process of its own: it loads torch
        subprocess.run(command, env=environment(), capture_output=True, check=True)
        try:
            found = {str(hosts): measured(model, hosts, asked) for hosts in dict.fromkeys(asked.hosts)}
        except RuntimeError as error:
            print(f"scale: {error}", file=sys.stderr)
            return ExitCode.FAILED
    at = saturates(found, asked.per_host)
    if at:
        print(f"{at['process']} would fill a core at {at['hosts']} hosts of {asked.per_host:g} trajectories a second each")
    if asked.json:
        asked.json.write_text(json.dumps({"hosts": found, "saturates_at": at, **({"note": NO_RESULT} if asked.short else {})}, indent=1))
    return ExitCode.DONE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
