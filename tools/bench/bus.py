"""The bus beside its peers: `python tools/bench/bus.py [--runs N] [--json FILE]`.

Rubato with everything on (typed bodies, credit, deadlines, incarnations, trace ids, metrics), raw synchronous pyzmq,
and where they are installed (extra `bench`) xoscar, Ray and grpc.aio. The systems take turns, so that a machine that changes speed
changes it for all; each figure is the median of the runs. Two processes talk: 256 B payloads, 256 requests in flight, 64 MB arrays.

Measured on their own: `--awake` (round trips while idle-priority spinners keep the cores from sleeping), `--fanin P` (P connections from
one process), `--curve` (encrypted tcp), `--idle` (memory of an idle actor process, and how soon it is ready), `--redis` (samples).
"""

import argparse
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PEERS = Path(__file__).resolve().parent / "peers"
sys.path.insert(0, str(ROOT))

from rubato.runtime.launch.children import die_with_parent  # noqa: E402

LIMIT_S = 120.0
"""Of one run of one system."""

SPIN = "import os; os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))\nwhile True: pass"
"""Runs only where nothing else wants the core, which then need not be woken up."""

Figures = dict[str, float]


class System(NamedTuple):
    """A driver in `peers`, and the package it needs."""

    name: str
    script: str
    package: str
    options: tuple[str, ...] = ()


SYSTEMS = (
    System("rubato", "rubato_actors.py", "zmq"),
    System("zmq-sync", "zmq_sync.py", "zmq"),
    System("xoscar", "xoscar_pools.py", "xoscar"),
    System("ray", "ray_actors.py", "ray"),
    System("grpc", "grpc_aio.py", "grpc"),
)
"""The first two are always there."""

COLUMNS = {
    "rtt_p50_us": "rtt p50 µs",
    "rtt_p99_us": "rtt p99 µs",
    "req_s": "req/s",
    "msg_s": "msg/s",
    "rtt_cpu_us": "rtt CPU µs",
    "req_cpu_us": "req CPU µs",
    "msg_cpu_us": "msg CPU µs",
    "bulk_1to1_gb_s": "64 MB 1→1 GB/s",
    "bulk_1to4_gb_s": "64 MB 1→4 GB/s",
}


class Ratio(NamedTuple):
    """Ours over theirs; `most` is the largest that is good enough, `least` the smallest."""

    figure: str
    other: str
    least: float = 0.0
    most: float = float("inf")


RATIOS = (
    Ratio("rtt_p50_us", "zmq-sync", most=1.25),
    Ratio("req_s", "zmq-sync", least=0.7),
    Ratio("req_s", "xoscar", least=8.0),
    Ratio("req_s", "ray", least=80.0),
    Ratio("msg_s", "zmq-sync", least=1.0),
)


def run(system: System, *options: str) -> Figures | None:
    """One run; None when it failed, which is said."""
    with tempfile.TemporaryDirectory(prefix="rubato-bench-") as folder:
        told = Path(folder) / "figures.json"
        command = [sys.executable, str(PEERS / system.script), "--json", str(told), *system.options, *options]
        # Not a pipe: what a system leaves behind would hold it open.
        with (Path(folder) / "stderr").open("w+") as errors:
            driver = subprocess.Popen(command, stderr=errors, stdout=subprocess.DEVNULL, cwd=folder, start_new_session=True)
            try:
                driver.wait(LIMIT_S)
            except subprocess.TimeoutExpired:
                print(f"{system.name}: no figures within {LIMIT_S:.0f} s", file=sys.stderr)
                return None
            finally:
                end_all(driver)
            errors.seek(0)
            said = errors.read().strip()
        if driver.returncode or not told.exists():
            print(f"{system.name}: ended with {driver.returncode}: {said.splitlines()[-1:]}", file=sys.stderr)
            return None
        return json.loads(told.read_text())


def end_all(driver: "subprocess.Popen[bytes]") -> None:
    """End the driver and whatever it started that is still there."""
    with suppress(ProcessLookupError):
        os.killpg(driver.pid, signal.SIGKILL)
    driver.wait()


def in_turns(systems: Sequence[System], runs: int, *options: str) -> dict[str, Figures]:
    """Medians of `runs` interleaved runs; a system that never answered is left out."""
    seen: dict[str, list[Figures]] = {system.name: [] for system in systems}
    for number in range(runs):
        for system in systems:
            if number and not seen[system.name]:
                continue
            figures = run(system, *options)
            if figures is not None:
                seen[system.name].append(figures)
        print(f"run {number + 1} of {runs}", file=sys.stderr, flush=True)
    return {name: {key: median(f[key] for f in found if key in f) for key in found[0]} for name, found in seen.items() if found}


def show(found: dict[str, Figures]) -> None:
    """The table and the ratios."""
    print(f"{'':10}" + "".join(f"{title:>16}" for title in COLUMNS.values()))
    for name, figures in found.items():
        cells = (f"{figures[key]:,.1f}" if key in figures else "-" for key in COLUMNS)
        print(f"{name:10}" + "".join(f"{cell:>16}" for cell in cells))
    print()
    ours = found.get("rubato", {})
    for figure, other, least, most in RATIOS:
        theirs = found.get(other, {}).get(figure)
        if theirs and figure in ours:
            ratio = ours[figure] / theirs
            wanted = f"at least {least:g}" if least else f"at most {most:g}"
            verdict = "" if least <= ratio <= most else "  SHORT"
            print(f"{COLUMNS[figure]:12} rubato / {other:9} {ratio:8.2f}   wanted {wanted}{verdict}")


@contextmanager
def awake() -> Generator[None, None, None]:
    """Keep every core from sleeping, at idle priority."""
    spinners = [subprocess.Popen([sys.executable, "-c", SPIN], preexec_fn=die_with_parent) for _ in range(os.cpu_count() or 1)]
    try:
        yield
    finally:
        for spinner in spinners:
            spinner.kill()
            spinner.wait()


def measure(arguments: argparse.Namespace) -> dict[str, Figures]:
    """What was asked for."""
    ours, limit = SYSTEMS[:2]
    if arguments.awake:
        with awake():
            return in_turns((ours, limit), arguments.runs, "--only", "rtt")
    if arguments.curve:
        schemes = (ours._replace(name=scheme, options=("--scheme", scheme)) for scheme in ("tcp", "curve"))
        return in_turns(tuple(schemes), arguments.runs, "--only", "rtt", "req", "msg")
    if arguments.fanin:
        return in_turns((ours._replace(name="fanin", script="rubato_fanin.py"),), arguments.runs, "--peers", str(arguments.fanin))
    if arguments.idle:
        return in_turns((ours._replace(name="idle", script="rubato_idle.py"),), arguments.runs)
    if arguments.redis:
        scripts = (("store", "rubato_store.py"), ("actor", "rubato_samples.py"))
        return in_turns(tuple(ours._replace(name=name, script=script) for name, script in scripts), arguments.runs)
    return in_turns(chosen(arguments.only), arguments.runs)


def chosen(only: Sequence[str] | None) -> list[System]:
    """The systems that are installed; the others are named."""
    wanted = [system for system in SYSTEMS if not only or system.name in only]
    missing = [system.name for system in wanted if importlib.util.find_spec(system.package) is None]
    if missing:
        print(f"not installed, left out: {', '.join(missing)} (pip install -e '.[bench]')")
    return [system for system in wanted if system.name not in missing]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5, help="interleaved runs of each system (5)")
    parser.add_argument("--only", nargs="*", choices=[system.name for system in SYSTEMS], help="these systems only")
    parser.add_argument("--json", type=Path, help="write the medians there")
    alone = parser.add_mutually_exclusive_group()
    alone.add_argument("--awake", action="store_true", help="round trips with the cores kept awake")
    alone.add_argument("--fanin", type=int, metavar="P", help="requests/s over P connections from one process")
    alone.add_argument("--curve", action="store_true", help="tcp in the clear beside tcp with CURVE")
    alone.add_argument("--idle", action="store_true", help="memory and start of an idle actor process")
    alone.add_argument(
        "--redis", action="store_true", help="put, claim and commit on Redis, AOF everysec: alone and through the SampleBuffer"
    )
    arguments = parser.parse_args()
    print(f"{os.cpu_count()} cores, Python {sys.version.split()[0]}, medians of {arguments.runs} interleaved runs")
    found = measure(arguments)
    if any(set(figures) & set(COLUMNS) for figures in found.values()):
        show(found)
    else:
        for name, figures in found.items():
            print(f"{name:10}" + "  ".join(f"{key} {value:,.2f}" for key, value in figures.items()))
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1))
    return 0 if found else 1


if __name__ == "__main__":
    sys.exit(main())
