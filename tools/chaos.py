"""Kill, stop and restart random processes of a run, then check that it did everything it promised.

python tools/chaos.py configs/quickstart.yaml --seconds 90 --seed 1
python tools/chaos.py configs/quickstart.yaml run.steps=60 --seconds 90 --kill redis,trainer --pause 15 20

Kinds: kill (SIGKILL), stop (SIGSTOP, and SIGCONT up to 20 s later), restart (SIGTERM). A launcher that ended is started again with
--resume. Ends with 0 and a line of figures, or with 1 and one sentence that names what is kept of the run. Linux only.
"""

import argparse
import asyncio
import itertools
import json
import os
import random
import signal
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from rubato.runtime.config import Config  # noqa: E402
from rubato.runtime.config.compose import load  # noqa: E402
from rubato.runtime.errors import RubatoError  # noqa: E402
from rubato.runtime.observe.trace import wall_s  # noqa: E402
from rubato.sim.audit import AuditLimits, audit  # noqa: E402
from tools.chaos_arguments import KINDS, chosen, parsed  # noqa: E402
from tools.chaos_changes import changes, under_way  # noqa: E402
from tools.chaos_job import Job, Victim, output_of  # noqa: E402

LONGEST_STOP_S = 20.0
"""Twice the lease of an actor: one that is stopped that long counts as dead when it comes back."""
START_S = 300.0
"""Longest until the first step, the making of a model included."""
PATIENCE_S = 180.0
"""Longest between two steps before the run counts as stuck: start-up on a busy machine included."""
GONE_S = 10.0
"""Processes of a job that ended have so long to follow."""
LOOK_S = 0.05
"""Another program's files and processes send no event when they change."""
AIM_S = 8.0
"""Longest that a hit waits for a switch to begin."""
WEIGHTS = {"kill": 5, "stop": 3, "restart": 2}


class Broken(Exception):
    """A promise was not kept; the sentence for the user."""


class Chaos:
    """Chooses who is hit, how and when, by the seed; keeps what happened."""

    def __init__(self, job: Job, roles: list[str], kinds: list[str], rng: random.Random, *, orchestrated: bool = False) -> None:
        self._job, self._rng, self._roles, self._kinds = job, rng, roles, kinds
        self._orchestrated = orchestrated
        self._deck: list[str] = []
        self._waking: dict[int, float] = {}
        self.events: list[dict[str, Any]] = []
        self.rows: list[tuple[float, int]] = []
        """When each step first had a row, and which."""

    def is_time(self, late_s: float) -> bool:
        """Where the job has an orchestrator, every second hit waits a while for a switch to fall into."""
        aims = self._orchestrated and len(self.events) % 2 == 0
        return not aims or late_s > AIM_S or under_way(self._job.folder)

    def hit(self, now: float) -> bool:
        """Hit the next role of the deck; False where none of its processes lives at the moment."""
        if not self._deck:
            self._deck = self._rng.sample(self._roles, len(self._roles))
        role = self._deck.pop()
        candidates = sorted(v for v in self._job.victims() if v.role == role)
        if not candidates:  # its turn comes again once it lives
            self._deck.insert(0, role)
            return False
        victim = self._rng.choice(candidates)
        first = role == "launcher" and not any(e["role"] == role for e in self.events)
        kind = self._kinds[0] if first else self._rng.choices(self._kinds, [WEIGHTS[k] for k in self._kinds])[0]
        stop_s = round(0.5 * (LONGEST_STOP_S / 0.5) ** self._rng.random(), 1) if kind == "stop" else 0.0
        if not _send(victim, KINDS[kind]):
            return False
        if kind == "stop":
            self._waking[victim.pid] = now + stop_s
        at = {"at_s": round(now, 2), "t": wall_s(), "step": self._job.steps()}
        self.events.append(at | {"role": role, "name": victim.name, "kind": kind, "stop_s": stop_s})
        print(f"{now:6.1f} s  step {self._job.steps():<4} {kind} {victim.name}" + (f" for {stop_s} s" if stop_s else ""))
        return True

    def missed(self) -> list[str]:
        """Roles asked for that were never hit."""
        hit = {event["role"] for event in self.events}
        return [role for role in self._roles if role not in hit]

    def wake(self, now: float) -> None:
        """Continue whatever was stopped long enough."""
        for pid in [pid for pid, at in self._waking.items() if at <= now]:
            del self._waking[pid]
            _send(Victim(pid, "", ""), signal.SIGCONT)

    def saw(self, now: float) -> None:
        """Note the newest step."""
        step = self._job.steps()
        if step > (self.rows[-1][1] if self.rows else 0):
            self.rows.append((now, step))

    def pauses(self) -> dict[str, dict[str, float]]:
        """Longest time without a new step that overlaps with the time from each event to the next, by role and kind."""
        found: dict[str, list[float]] = {}
        for index, event in enumerate(self.events):
            later = self.events[index + 1 :]
            until = later[0]["at_s"] if later else event["at_s"] + LONGEST_STOP_S
            event["pause_s"] = round(max(_gaps([at for at, _ in self.rows], event["at_s"], until), default=0.0), 2)
            found.setdefault(f"{event['role']} {event['kind']}", []).append(event["pause_s"])
        return {
            what: {"n": len(all_s), "median_s": round(statistics.median(all_s), 2), "max_s": max(all_s)}
            for what, all_s in sorted(found.items())
        }


def _gaps(times: list[float], since: float, until: float) -> Iterator[float]:
    """Lengths of the gaps between `times` that overlap with [since, until]."""
    for before, after in itertools.pairwise(times):
        if before <= until and after >= since:
            yield after - before


def _send(victim: Victim, number: signal.Signals) -> bool:
    try:
        os.kill(victim.pid, number)
    except ProcessLookupError:
        return False
    return True


async def go(args: argparse.Namespace, config: Config, job: Job, chaos: Chaos) -> dict[str, Any]:
    """The run under chaos, then to its end; returns the figures. Raises Broken."""
    loop = asyncio.get_running_loop()
    rng = random.Random(f"{args.seed}/when")
    await job.start()
    await _until_step(job, 1)
    began, rounds = loop.time(), 1
    next_at = began + rng.uniform(*args.pause)
    while (now := loop.time()) < began + args.seconds:
        chaos.saw(now - began)
        chaos.wake(now - began)
        if job.launcher.returncode is not None:
            chaos.wake(float("inf"))  # what is stopped can't end
        if job.launcher.returncode == 0:  # it got through sooner than the chaos: it is given as many steps again
            await _no_orphans(job)
            rounds += 1
            await job.start(f"run.steps={rounds * config.run.steps}")
        elif job.launcher.returncode is not None:
            await _again(job)
        elif now >= next_at and chaos.is_time(now - next_at) and chaos.hit(now - began):
            next_at = now + rng.uniform(*args.pause)
        await asyncio.sleep(LOOK_S)
    chaos.wake(float("inf"))
    print(f"{args.seconds:6.1f} s  chaos ends at step {job.steps()}; {len(chaos.events)} events")
    if not chaos.events:
        raise Broken(f"nothing was hit in {args.seconds:g} s: no process of {', '.join(chaos.missed())} lived when its turn came")
    steps = rounds * config.run.steps
    if args.rest is not None:
        await _kill(job)
        steps = min(steps, job.steps() + args.rest)
        await job.start(f"run.steps={steps}")
    await _to_the_end(job, chaos, began)
    return {"wall_s": round(loop.time() - began, 1), "wanted": steps}


async def _kill(job: Job) -> None:
    if job.launcher.returncode is None:
        job.launcher.kill()
    await job.launcher.wait()
    await _no_orphans(job)


async def _until_step(job: Job, step: int) -> None:
    loop = asyncio.get_running_loop()
    deadline = loop.time() + START_S
    while job.steps() < step:
        if job.launcher.returncode is not None:
            raise Broken(f"the run ended before step {step}: {job.last_words()}")
        if loop.time() > deadline:
            raise Broken(f"the run did not reach step {step} within {START_S:.0f} s")
        await asyncio.sleep(LOOK_S)


async def _again(job: Job) -> None:
    """The launcher was ended: nothing of it may be left, then it goes on."""
    code = job.launcher.returncode
    if code not in (-signal.SIGKILL, 130):
        raise Broken(f"the launcher ended with {code}: {job.last_words()}")
    await _no_orphans(job)
    await job.start()


async def _no_orphans(job: Job) -> None:
    loop = asyncio.get_running_loop()
    deadline = loop.time() + GONE_S
    while left := job.left():
        if loop.time() > deadline:
            told = " ".join(left[0].words)[:200]
            raise Broken(f"{len(left)} processes are left {GONE_S:.0f} s after their launcher ended, first: {told}")
        await asyncio.sleep(LOOK_S)


async def _to_the_end(job: Job, chaos: Chaos, began: float) -> None:
    loop = asyncio.get_running_loop()
    last, at = job.steps(), loop.time()
    while (code := job.launcher.returncode) != 0:
        chaos.saw(loop.time() - began)
        if code is not None:
            await _again(job)
        if job.steps() > last:
            last, at = job.steps(), loop.time()
        if loop.time() > at + PATIENCE_S:
            raise Broken(f"the run is stuck after step {last}: nothing new for {PATIENCE_S:.0f} s")
        await asyncio.sleep(LOOK_S)
    await _no_orphans(job)


def judge(job: Job, config: Config, steps: int) -> dict[str, Any]:
    """Hold what was written against what is promised."""
    train, alpha = config.section("train"), config.section("staleness").bound
    durable = config.state.durability == "always"
    members = train.group_size + config.section("samples").extra_rollouts
    found = audit(job.folder, AuditLimits(steps, train.batch_groups, members, alpha, durable))
    leaked = job.leaked()
    if leaked:
        found.problems.append(f"{len(leaked)} paths are left behind, first {leaked[0]}")
    if found.problems:
        raise Broken("; ".join(found.problems))
    return {"steps": found.steps, "samples": found.samples, "fates": found.fates, "orphans": 0, "leaked": 0}


def main(argv: list[str]) -> int:
    try:
        args = parsed(argv)
        config = load(args.config, args.overrides)
        roles = chosen(args.kill, config)
        job = _job(args)
    except RubatoError as error:
        print(error)
        return 2
    chaos = Chaos(job, roles, args.kinds, random.Random(args.seed), orchestrated="orchestrator" in config.actors)
    try:
        return asyncio.run(_run(args, config, job, chaos))
    except (asyncio.CancelledError, KeyboardInterrupt):
        job.forget(keep=args.run_dir is not None)
        print("interrupted; the run was ended")
        return 130
    except Exception as error:
        error.add_note(f"Kept are the {job.kept()}")
        raise


def _job(args: argparse.Namespace) -> Job:
    """Raises RubatoError where its folder can't be made."""
    if args.run_dir is None:
        return Job(args.config, Path(tempfile.mkdtemp(prefix="chaos-run-")) / "run", args.overrides)
    folder = args.run_dir.resolve()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        output_of(folder).open("ab").close()
    except OSError as error:
        raise RubatoError(f"--run-dir: {args.run_dir} can't be made: {error.strerror}.") from error
    return Job(args.config, folder, args.overrides)


async def _run(args: argparse.Namespace, config: Config, job: Job, chaos: Chaos) -> int:
    figures: dict[str, Any] = {"config": str(args.config), "seed": args.seed, "seconds": args.seconds}
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    try:
        figures |= await go(args, config, job, chaos)
        figures |= judge(job, config, figures["wanted"])
        sentence = ""
    except Broken as error:
        sentence = str(error)
    finally:
        await job.end_left()
    hits = Counter(event["kind"] for event in chaos.events)
    figures |= changes(job.folder, [event["t"] for event in chaos.events])
    figures |= {"pauses": chaos.pauses(), "events": chaos.events, "launches": job.launches, "hits": dict(hits)}
    if args.json:
        args.json.write_text(json.dumps(figures | {"broken": sentence}, indent=1) + "\n")
    if sentence:
        print(f"BROKEN, seed {args.seed}: {sentence} ({job.kept()})")
        return 1
    job.forget(keep=args.run_dir is not None)
    print(_summary(args, figures, chaos.missed()))
    return 0


def _summary(args: argparse.Namespace, figures: dict[str, Any], missed: list[str]) -> str:
    hits = ", ".join(f"{num} {kind}" for kind, num in sorted(figures["hits"].items()))
    fates = ", ".join(f"{num} {fate}" for fate, num in sorted(figures["fates"].items(), key=lambda item: -item[1]))
    return (
        f"seed {args.seed}: {args.seconds:g} s of chaos ({hits}; {figures['launches']} launches), {figures['steps']} steps gapless, "
        f"{figures['samples']} samples each one fate ({fates}), 0 in two steps, 0 over the bound, 0 orphans, 0 leaks"
        + _changed(figures)
        + (f"; never hit: {', '.join(missed)}" if missed else "")
    )


def _changed(figures: dict[str, Any]) -> str:
    if not figures.get("switches", 0) + figures.get("moves", 0):
        return ""
    told = f"; {figures['switches']} switches and {figures['moves']} moves begun, {figures['failed']} failed or cut off"
    return f"{told}; of the hits {figures['in_switch']} during a switch, {figures['in_move']} during moves"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
