"""Run a real job over racks whose links follow emulated circuits, and compare its step times: circuits by the controller, fixed ones, none.

python tools/fabric_lab.py configs/lab_racks.yaml
python tools/fabric_lab.py configs/lab_racks.yaml --repetitions 1 --steps 2 --modes controller --json lab.json

Each rack of `fabric.racks` becomes a network namespace, as in tools/fabric_testbed.py. The launcher runs in the first rack; the next ones join
with a rank of the trainer each, until there are as many as `train.mesh` has, and the others with an engine. Modes take turns, each run
is a job of its own, and its first steps don't count: phases are profiled in them. `controller` changes circuits from phase to phase, `fixed` has
one set for all phases, the best that the same planner finds (`fabric.static`), and `electrical` no circuit, but `fabric.trickle_mbps` between
any two racks. Seconds of a step are the mean of a run's steps; what is told is the mean of the runs, with their spread.
"""

import argparse
import json
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from statistics import mean, stdev
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from rubato.runtime.config import Config  # noqa: E402
from rubato.runtime.config.compose import load  # noqa: E402
from rubato.runtime.errors import ConfigError, RubatoError  # noqa: E402
from tools.fabric_job import Job, addresses_of, check_places  # noqa: E402
from tools.fabric_namespaces import Racks, enter  # noqa: E402

MODES = {"controller": "fabric.static=false", "fixed": "fabric.static=true", "electrical": "fabric.enabled=false"}
WORDS = {"fixed": "fixed circuits", "electrical": "electrical links alone"}
LEARNED = 4
"""Steps before any counts: phases are profiled, and their rhythm is known."""
MOST_RUNS, MOST_STEPS = 100, 10_000
MEANS = {"step_s": "time/step", "train_s": "time/train", "wait_s": "time/wait_for_batch", "reward": "reward/mean"}
SUMS = {"exposed_s": "fabric/exposed_s", "hidden_s": "fabric/hidden_s", "changes": "fabric/reconfigurations"}
"""Rows have their sums since the job began."""


class LabJob(Job):
    """A rank or an engine in each rack but the first."""

    def begin(self, config: Config, addresses: dict[str, str]) -> None:
        """Raises Stuck."""
        first, *_ = addresses
        home = self.folder / first
        self._rubato(first, "keys", "new", "--run", home)
        self._spawn(first, "launch", self._config, *self._overrides, "--run-dir", home)
        self.until(lambda: self.events(first, "env_manager-1", "ready"), "the start")
        token = self._rubato(first, "keys", "join-token", "--run", home)
        model = f"model.path={home / config.section('model').path}"
        self._roles = roles(config)
        for rack, role in self._roles.items():
            where = ("--host", addresses[rack], "--run-dir", self.folder / rack)
            self._spawn(rack, "add", role, model, "--join", token, *where)

    def trained(self, num: int) -> list[dict[str, Any]]:
        """The row before the steps that count, and those of the first `num` of them. Raises Stuck."""
        for count in range(1, LEARNED + num + 1):
            self.until(lambda count=count: len(self.rows()) >= count, f"step {count}")
        return self.rows()[LEARNED - 1 : LEARNED + num]

    def engines(self) -> list[str]:
        return [rack for rack, role in self._roles.items() if role == "engine"]

    def sync_s(self) -> dict[int, float]:
        """Seconds by version, from when it is published until every engine has it."""
        return self._synced()

    def moved(self) -> int:
        """Requests that the orchestrator moved."""
        return sum(each["moved"] for each in self.events(self._racks.names[0], "orchestrator-1", "rebalanced"))


def roles(config: Config) -> dict[str, str]:
    """Rack → the role that joins there. Raises ConfigError where the racks don't suffice, or can't be joined."""
    home, *racks = addresses_of(config).items()
    if config.bus.host != home[1]:
        raise ConfigError(f"bus.host is {config.bus.host}, and the lab launches in {home[0]}: set it to {home[1]}.")
    far = config.section("train").mesh.size - config.actors["trainer_rank"].count if "trainer_rank" in config.actors else 0
    if len(racks) <= far:
        raise ConfigError(
            f"fabric.racks has {len(racks) + 1} racks, and the lab needs {far + 2}: one to launch in, {far} for ranks, one for an engine."
        )
    return {rack: "trainer_rank" if at < far else "engine" for at, (rack, _) in enumerate(racks)}


def measure(path: Path, overrides: Sequence[str], mode: str, number: int, place: Path, num: int) -> dict[str, Any]:
    """One run, in which `num` steps count. Raises RubatoError where it can't be."""
    name = f"{mode}-{number}"
    overrides = [*overrides, MODES[mode], f"fabric.testbed={name}"]
    config = load(path, overrides)
    addresses, folder = addresses_of(config), (place / name).resolve()
    roles(config)
    with ExitStack() as stack:
        racks = Racks(name, addresses)
        racks.make(config.section("fabric").trickle_mbps)
        folder.mkdir(parents=True)
        job = LabJob(path.resolve(), overrides, racks, folder, stack)
        job.begin(config, addresses)
        job.trained(0)
        before = racks.sent_bytes()
        rows = job.trained(num)
        after = racks.sent_bytes()
        syncs = job.sync_s()
        job.stop()
    steps = {row["step"] for row in rows[1:]}
    return {
        **figures(rows),
        "sync_s": mean([took for version, took in syncs.items() if version in steps] or [0.0]),
        "moves": job.moved(),
        "sent_mb": {" ".join(pair): round((after[pair] - before[pair]) / num / 1e6, 3) for pair in sorted(after)},
    }


def figures(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Of the steps after the first row's: means, and what changed of sums."""
    first, *counted = rows
    found = {name: mean(row.get(metric, 0.0) for row in counted) for name, metric in MEANS.items()}
    found |= {name: (counted[-1].get(metric, 0.0) - first.get(metric, 0.0)) / len(counted) for name, metric in SUMS.items()}
    return found


def summary(runs: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Of each figure that is a number: mean, standard deviation, least and most over the runs of a mode."""
    found: dict[str, dict[str, float]] = {}
    for name in (name for name, value in runs[0].items() if isinstance(value, int | float)):
        values = [run[name] for run in runs]
        spread = stdev(values) if len(values) > 1 else 0.0
        told = {"mean": mean(values), "sd": spread, "least": min(values), "most": max(values)}
        found[name] = {key: round(value, 4) for key, value in told.items()}
    return found


def table(modes: dict[str, dict[str, dict[str, float]]]) -> str:
    """The modes side by side; times in seconds, per step."""
    columns = {
        "step_s": "step",
        "train_s": "train",
        "sync_s": "sync",
        "wait_s": "rollout and sync",
        "exposed_s": "exposed",
        "hidden_s": "hidden",
    }
    lines = ["  ".join([f"{'circuits':<10}", *(f"{head:>18}" for head in columns.values())])]
    for mode, found in modes.items():
        cells = (f"{found[name]['mean']:.2f} ({found[name]['least']:.2f} to {found[name]['most']:.2f})" for name in columns)
        lines.append("  ".join([f"{mode:<10}", *(f"{cell:>18}" for cell in cells)]))
    ours = modes.get("controller")
    for mode, found in modes.items():
        if ours is not None and mode != "controller":
            lines.append(
                f"a step takes {found['step_s']['mean'] / ours['step_s']['mean']:.2f} times as long with {WORDS[mode]} as with the controller's circuits"
            )
    return "\n".join(lines)


def main(argv: Sequence[str]) -> int:
    args = _arguments(argv)
    try:
        if not args.inside:
            check_places(args.config, args.run_dir, args.json)
            enter([sys.executable, __file__, *argv, "--inside"])
        runs = _measured(args)
    except RubatoError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    modes = {mode: summary(found) for mode, found in runs.items()}
    print(table(modes))
    if args.json:
        command = " ".join(("python tools/fabric_lab.py", *argv[:-1]))
        args.json.write_text(json.dumps({"command": command, "modes": modes, "runs": runs}, indent=1) + "\n")
    return 0


def _measured(args: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    """By mode, what each run had; modes take turns, so that what else the machine does meets all of them. Raises RubatoError."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the job's processes are ended then too
    place = args.run_dir or Path(tempfile.mkdtemp(prefix="rubato-lab-"))
    runs: dict[str, list[dict[str, Any]]] = {mode: [] for mode in args.modes}
    try:
        for number in range(1, args.repetitions + 1):
            for mode, found in runs.items():
                print(f"{mode}, {number} of {args.repetitions}: running in {place} …", file=sys.stderr, flush=True)
                found.append(measure(args.config, args.overrides, mode, number, place, args.steps))
    finally:
        with suppress(OSError):  # it stays where there is something in it, to look into
            place.rmdir()
    return runs


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "fabric_lab", description="Run a real job over racks, and compare its steps by what circuits they have."
    )
    parser.add_argument("config", type=Path)
    parser.add_argument("overrides", nargs="*", metavar="key.sub=value", help="change single keys of the config")
    parser.add_argument("--repetitions", type=_within(MOST_RUNS), default=5, help="jobs per mode")
    parser.add_argument("--steps", type=_within(MOST_STEPS), default=5, help="steps that count, per job")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--run-dir", type=Path, help="a new folder for the runs; a temporary one by default")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)  # the namespaces are there
    return parser.parse_intermixed_args(list(argv))


def _within(most: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        if not (text.isdecimal() and len(text) < 9 and 1 <= int(text) <= most):
            raise argparse.ArgumentTypeError(f"{text[:20]!r} is no number from 1 to {most}")
        return int(text)

    return number


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
