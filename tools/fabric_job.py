"""One measured run of a job over the racks of a test-bed: what tools/fabric_testbed.py does once per mode."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from datetime import datetime
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

from rubato.runtime.config import Config
from rubato.runtime.config.compose import load
from rubato.runtime.errors import ConfigError, RubatoError
from rubato.runtime.launch.children import die_with_parent
from tools.fabric_namespaces import HIDDEN, Racks

ROOT = Path(__file__).resolve().parents[1]

LEARNED = 4
"""Versions that every engine has before any counts: phases are profiled, and their rhythm is known."""
LIMIT_S = 180.0
"""Of the start, or from one version to the next, on a machine that has other things to do."""
STOP_S = 30.0
"""For a process to save and to end."""
LOOK_S = 0.1
"""Another program's files send no event when they change."""

FoundT = TypeVar("FoundT")


class Stuck(RubatoError):
    """The job did not get where it should; its folder says why."""


class Job:
    """One run over the test-bed, seen from outside: its processes, and what it writes."""

    def __init__(self, config: Path, overrides: Sequence[str], racks: Racks, folder: Path, stack: ExitStack) -> None:
        self.folder = folder
        self._config, self._overrides = config, overrides
        self._racks, self._stack = racks, stack
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self, addresses: dict[str, str], num_slots: int) -> None:
        """Launch in the first rack, and join with an engine from each other one. Raises Stuck.

        A job has an engine where it is launched; there it gets one slot, or it would do the others' work while they pull.
        """
        first, *others = addresses
        self._rubato(first, "keys", "new", "--run", self.folder / first)
        host = f"bus.host={addresses[first]}"
        self._spawn(first, "launch", self._config, *self._overrides, host, "engine.num_slots=1", "--run-dir", self.folder / first)
        self.until(lambda: self.events(first, "trainer-1", "term"), "the trainer's start")
        token = self._rubato(first, "keys", "join-token", "--run", self.folder / first)
        for rack in others:
            self._spawn(
                rack, "add", "engine", f"engine.num_slots={num_slots}", "--join", token, "--host", addresses[rack],
                "--run-dir", self.folder / rack,
            )  # fmt: skip

    def syncs(self, num: int) -> dict[int, float]:
        """Seconds by version, once `num` versions after the first few have come to every engine. Raises Stuck."""
        for count in range(1, LEARNED + num + 1):
            self.until(partial(self._have, count), f"the sync of {count} versions to all racks")
        return dict(sorted(self._synced().items())[LEARNED:])

    def stop(self) -> None:
        first = self._racks.names[0]
        self._rubato(first, "stop", "--run", self.folder / first)
        for process in self._processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(STOP_S)

    def events(self, rack: str, actor: str, event: str) -> list[dict[str, Any]]:
        """What the actors that `actor` matches have logged in this rack's part of the run."""
        logs = sorted((self.folder / rack / "logs").glob(f"{actor}.jsonl"))
        return [line for log in logs for line in _lines(log) if line["event"] == event]

    def rows(self) -> list[dict[str, Any]]:
        return list(_lines(self.folder / self._racks.names[0] / "metrics.jsonl"))

    def _synced(self) -> dict[int, float]:
        """Seconds by version, from its publication until it was swapped in at every engine."""
        published = {e["version"]: _unix_s(e) for e in self.events(self._racks.names[0], "trainer-1", "weights_published")}
        swapped = [{e["version"]: _unix_s(e) for e in self.events(rack, "engine-*", "weights_swapped")} for rack in self.engines()]
        everywhere = set(published).intersection(*swapped)
        return {v: max(times[v] for times in swapped) - published[v] for v in everywhere}

    def engines(self) -> list[str]:
        """Racks that have one."""
        return self._racks.names

    def _have(self, count: int) -> bool:
        return len(self._synced()) >= count

    def until(self, found: Callable[[], FoundT | None], what: str) -> FoundT:
        """Wait for what `found` finds. Raises Stuck."""
        deadline = time.perf_counter() + LIMIT_S
        while not (value := found()):
            if time.perf_counter() > deadline or any(p.poll() is not None for p in self._processes):
                raise Stuck(f"{what} did not happen. What was printed and logged is in {self.folder}.")
            time.sleep(LOOK_S)  # noqa: TID251 - other programs can't be awaited
        return value

    def _spawn(self, rack: str, *words: object) -> None:
        log = self._stack.enter_context((self.folder / f"{rack}.out").open("wb"))
        command = self._racks.command(rack, _command(words))
        process = subprocess.Popen(
            command, env=_environment(), stdin=subprocess.DEVNULL, stdout=log, stderr=log, preexec_fn=die_with_parent
        )
        self._stack.callback(_end, process)
        self._processes.append(process)

    def _rubato(self, rack: str, *words: object) -> str:
        command = self._racks.command(rack, _command(words))
        done = subprocess.run(command, env=_environment(), stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
        if done.returncode:
            raise Stuck(f"rubato {words[0]} failed: {done.stderr.strip()}")
        return done.stdout.strip()


def measure(config: Path, overrides: Sequence[str], mode: str, folder: Path, num: int) -> dict[str, Any]:
    """One run in `mode` until `num` versions have counted. Raises RubatoError where it can't be."""
    overrides = [*overrides, f"fabric.static={str(mode == 'static').lower()}"]
    checked = load(config, overrides)
    addresses = addresses_of(checked)
    section = checked.section("fabric")
    with ExitStack() as stack:
        racks = Racks(mode, addresses)
        racks.make(section.trickle_mbps)
        folder.mkdir(parents=True)
        job = Job(config.resolve(), [*overrides, f"fabric.testbed={racks.prefix}"], racks, folder.resolve(), stack)
        job.start(addresses, checked.section("engine").num_slots)
        syncs = job.syncs(num)
        job.stop()
        rows = {row["step"]: row for row in job.rows()}
        sent = {" ".join(pair): size for pair, size in sorted(racks.sent_bytes().items())}
        pulls, caches = (
            [e for rack in racks.names for e in job.events(rack, *names) if e["version"] in syncs]
            for names in (("node-*", "blob_pulled"), ("engine-*", "kv_fetched"))
        )
    first, last = rows[min(syncs)], rows[max(v for v in syncs if v in rows)]
    steps = last["step"] - first["step"]
    per_step = {
        name: (last.get(f"fabric/{name}", 0.0) - first.get(f"fabric/{name}", 0.0)) / steps
        for name in ("exposed_s", "hidden_s", "reconfigurations")
    }
    return {
        "sync_s": median(syncs.values()),
        "pull_s": max(each["took_s"] for each in pulls),
        "step_s": median(rows[v]["time/step"] for v in syncs if v in rows and v > min(syncs)),
        **per_step,
        "weights_bytes": last["weights/bytes"],
        "kv_bytes": median([each["size_bytes"] for each in caches] or [0]),
        "syncs_s": {str(version): round(took, 4) for version, took in syncs.items()},
        "sent_bytes": sent,
    }


def addresses_of(config: Config) -> dict[str, str]:
    """One host per rack. Raises ConfigError."""
    racks = config.section("fabric").racks if config.has("fabric") else {}
    if len(racks) < 2 or any(len(hosts) != 1 for hosts in racks.values()):
        raise ConfigError("The test-bed needs fabric.racks: two or more, with the address of one host each.")
    return {rack: hosts[0] for rack, hosts in racks.items()}


def check_places(config: Path, run_dir: Path | None, report: Path | None) -> None:
    """Raises ConfigError where the runs could not be kept, or a path can't be used from inside the namespaces."""
    if run_dir and run_dir.exists():
        raise ConfigError(f"{run_dir} exists. Give another --run-dir.")
    for path in filter(None, (config, run_dir or Path(tempfile.gettempdir()), report)):
        if path.resolve().is_relative_to(HIDDEN):
            raise ConfigError(f"{path} is in {HIDDEN}, which is hidden from the test-bed. Give another place.")
    if report:
        _check_file(report)


def _check_file(path: Path) -> None:
    """Raises ConfigError where `path` can't be written, which would be found out only after the runs; leaves nothing there."""
    existed = path.exists()
    try:
        path.open("a").close()
        if not existed:
            path.unlink()
    except OSError as error:
        raise ConfigError(f"--json {path} can't be written: {error.strerror}. Give another file.") from error


def _command(words: Sequence[object]) -> list[str]:
    return [sys.executable, "-m", "rubato.runtime.cli", *map(str, words)]


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT)}


def _end(process: "subprocess.Popen[bytes]") -> None:
    """What a node agent has started goes with it, also where it could not drain."""
    process.kill()
    process.wait()


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """Whole lines only: the last one may be under way."""
    text = path.read_text() if path.exists() else ""
    yield from map(json.loads, text[: text.rfind("\n") + 1].splitlines())


def _unix_s(event: dict[str, Any]) -> float:
    return datetime.fromisoformat(event["t"]).timestamp()
