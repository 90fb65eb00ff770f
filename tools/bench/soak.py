"""Whether a run of days grows: memory, descriptors, Redis and the folder of configs/soak.yaml, and how long its resumption takes.

python tools/bench/soak.py [--minutes 60] [--json FILE] [key.sub=value …]

The run is stopped and resumed after five minutes and at the end. Slopes are least squares over the last two thirds of the time, of each process
that lived through them, and `rss_mib` is what each had, minute by minute; how the figures come about: docs/benchmarks.md.
"""

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from rubato.runtime.errors import ExitCode  # noqa: E402
from rubato.runtime.launch.card import running  # noqa: E402
from rubato.runtime.launch.children import die_with_parent  # noqa: E402
from rubato.runtime.store.redis import RedisLink  # noqa: E402
from tools.bench.scale import below, environment, name_of, scratch_folder  # noqa: E402

EARLY_S, LAST_SHARE = 300.0, 2 / 3
LOOK_S, START_S, END_S = 5.0, 180.0, 60.0


def clock() -> float:
    return time.monotonic()  # noqa: TID251


class Look(NamedTuple):
    """The run at one moment: (rss, descriptors) by process, and bytes of its Redis and its folder."""

    at: float
    steps: int
    processes: dict[str, tuple[int, int]]
    redis: int
    folder: int


class Soak:
    """The run in `folder`."""

    def __init__(self, folder: Path, words: Sequence[str]) -> None:
        self.folder, self._words = folder, words
        self._launcher: subprocess.Popen[bytes] | None = None

    def start(self, *, resume: bool) -> float:
        """Seconds from the launch to the first step after it."""
        before, began = self.steps(), clock()
        chosen = ("--resume", self.folder) if resume else (*self._words, "--run-dir", self.folder)
        command = [sys.executable, "-m", "rubato.runtime.cli", "launch", *map(str, chosen)]
        with self.folder.with_suffix(".log").open("a") as out:
            self._launcher = subprocess.Popen(command, stdout=out, stderr=out, stdin=subprocess.DEVNULL, env=environment(), preexec_fn=die_with_parent)  # fmt: skip
        while self.steps() == before:
            if self._launcher.poll() is not None or clock() - began > START_S:
                raise RuntimeError(f"the run made no step: {self.folder.with_suffix('.log').read_text()[-1000:]}")
            time.sleep(0.05)  # noqa: TID251 - another process's progress
        return clock() - began

    def stop(self) -> None:
        """As by Ctrl-C."""
        if self._launcher is not None:
            self._launcher.terminate()
            try:
                self._launcher.wait(END_S)
            except subprocess.TimeoutExpired:
                self._launcher.kill()
                self._launcher.wait()

    def steps(self) -> int:
        rows = self.folder / "metrics.jsonl"
        return rows.read_bytes().count(b"\n") if rows.exists() else 0

    def look(self) -> Look:
        assert self._launcher is not None
        if self._launcher.poll() is not None:
            raise RuntimeError(f"the run ended: {self.folder.with_suffix('.log').read_text()[-1000:]}")
        processes = {name_of(pid): sizes for pid in below([self._launcher.pid]) if (sizes := _sizes(pid)) is not None}
        return Look(clock(), self.steps(), processes, asyncio.run(self._redis_bytes()), _folder_bytes(self.folder))

    async def _redis_bytes(self) -> int:
        card = running(self.folder)
        link = RedisLink(card.url, card.id)
        try:
            return int(str((await link.figures())["used_memory"]))
        finally:
            await link.close()


def _sizes(pid: int) -> tuple[int, int] | None:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        return int(status.partition("VmRSS:")[2].split()[0]) << 10, len(list(Path(f"/proc/{pid}/fd").iterdir()))
    except (OSError, IndexError):
        return None


def _folder_bytes(folder: Path) -> int:
    """Without Redis's own file, which grows and is rewritten, by up to 16 MB."""
    total, state = 0, folder / "state"
    for path in folder.rglob("*"):
        try:
            counts = path.is_file() and not path.is_symlink() and state not in path.parents
            total += path.lstat().st_size if counts else 0
        except OSError:
            continue
    return total


def slope(xs: Sequence[float], ys: Sequence[float]) -> float:
    """Of the line by least squares; 0 where there is none."""
    return statistics.linear_regression(xs, ys).slope if len(set(xs)) > 1 else 0.0


def figures(looks: Sequence[Look]) -> dict[str, Any]:
    """Slopes over `looks`."""
    at, steps = [look.at for look in looks], [float(look.steps) for look in looks]
    whole = set.intersection(*(set(look.processes) for look in looks))
    return {
        "slopes": {
            name: {
                "rss_b_s": round(slope(at, [look.processes[name][0] for look in looks]), 2),
                "fds_s": round(slope(at, [look.processes[name][1] for look in looks]), 6),
            }
            for name in sorted(whole)
        },
        "folder_b_step": round(slope(steps, [look.folder for look in looks]), 1),
        "redis_b_step": round(slope(steps, [look.redis for look in looks]), 1),
        "steps": looks[-1].steps,
        "window_s": round(looks[-1].at - looks[0].at),
        "rss_mib": {name: [round(look.processes[name][0] / 2**20, 2) for look in looks[:: round(60 / LOOK_S)]] for name in sorted(whole)},
        "newest": {name: {"rss": rss, "fds": fds} for name, (rss, fds) in looks[-1].processes.items() if name in whole},
    }


def measured(folder: Path, words: Sequence[str], minutes: float) -> dict[str, Any]:
    """Play the run for `minutes` and look at it."""
    soak = Soak(folder, words)
    try:
        soak.start(resume=False)
        began = clock()
        end = began + 60.0 * minutes
        _sleep_until(began + min(EARLY_S, 60.0 * minutes * (1 - LAST_SHARE)))
        soak.stop()
        early_s = soak.start(resume=True)
        _sleep_until(began + 60.0 * minutes * (1 - LAST_SHARE))
        looks: list[Look] = []
        while not looks or clock() < end:
            looks.append(soak.look())
            time.sleep(LOOK_S)  # noqa: TID251 - the span is what is asked for
        soak.stop()
        late_s = soak.start(resume=True)
    finally:
        soak.stop()
    return {**figures(looks), "minutes": minutes, "resume_early_s": round(early_s, 2), "resume_s": round(late_s, 2)}


def _sleep_until(moment: float) -> None:
    time.sleep(max(0.0, moment - clock()))  # noqa: TID251 - the span is what is asked for


def main(argv: Sequence[str]) -> int:
    """Measure, print, and write the figures where asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", default=[], metavar="key.sub=value")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--json", type=Path, metavar="FILE")
    asked = parser.parse_intermixed_args(argv)
    with scratch_folder() as scratch:
        try:
            found = measured(scratch / "run", (str(ROOT / "configs/soak.yaml"), "run.steps=1000000", *asked.overrides), asked.minutes)
        except RuntimeError as error:
            print(f"soak: {error}", file=sys.stderr)
            return ExitCode.FAILED
    for name, slopes in found["slopes"].items():
        print(f"{name:<18} {slopes['rss_b_s'] * 3600 / 2**20:8.2f} MiB/h {slopes['fds_s'] * 3600:8.2f} descriptors/h")
    print(f"folder {found['folder_b_step']:.0f} B/step, Redis {found['redis_b_step']:.0f} B/step, {found['steps']} steps")
    print(f"resumed in {found['resume_early_s']:.1f} s early, in {found['resume_s']:.1f} s at the end")
    if asked.json:
        asked.json.write_text(json.dumps(found, indent=1))
    return ExitCode.DONE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
