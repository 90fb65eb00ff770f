"""Deterministic simulation of a whole job: `python tools/simtest.py --seeds 500 --start 0`. See docs/reliability.md."""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from queue import Queue
from threading import Thread

import msgspec

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rubato.runtime.launch.children import die_with_parent
from rubato.sim.simtest import mutations
from rubato.sim.simtest.faults import DEFAULT, KINDS, Fault
from rubato.sim.simtest.run import Bench, faults_of, run
from rubato.sim.simtest.search import SeedFinding, examine, first_catch
from rubato.sim.simtest.setup import can_serve

CAUGHT_WITHIN = 1000
"""Seeds by which every mutation must be caught."""


def main(argv: Sequence[str]) -> int:
    args = _parsed(argv)
    kinds = args.faults.split(",") if args.faults else DEFAULT
    for name in ("seeds", "jobs", "rounds"):
        if (number := getattr(args, name)) is not None and number < 1:
            print(f"--{name} is {number}; it must be a whole number at least 1.", file=sys.stderr)
            return 2
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        print(f"--faults: {unknown[0]!r} is no fault. Faults: {', '.join(KINDS)}.", file=sys.stderr)
        return 2
    if args.mutate and args.mutate not in mutations.MUTATIONS:
        print(f"{args.mutate} is no mutation. Mutations: {', '.join(mutations.MUTATIONS)}.", file=sys.stderr)
        return 2
    if not can_serve() and not args.worker:
        print(
            "left out: agents from outside, and mutations for them, since starlette is not installed: pip install -e '.[serve]'", flush=True
        )
        if args.mutate and mutations.MUTATIONS[args.mutate].sessions:
            return 2
    if args.replay is not None:
        return _replay(args.replay, faults_of(args.replay, kinds, args.rounds), args.mutate)
    if args.worker:
        return _work(args, kinds)
    return _mutations(args) if args.mutations else _seeds(args)


def _parsed(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="simtest", description=__doc__)
    parser.add_argument("--seeds", type=int, help="how many seeds (100; with --mutations at most 1000 each)")
    parser.add_argument("--start", type=int, default=0, help="the first seed")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="worker processes")
    parser.add_argument("--faults", default="", help=f"comma-separated kinds, of {', '.join(KINDS)}")
    parser.add_argument("--rounds", type=int, default=1, help="three to seven faults so many times in each seed")
    parser.add_argument("--mutate", default="", help=f"remove one safeguard: {', '.join(mutations.MUTATIONS)}")
    parser.add_argument("--mutations", action="store_true", help="show for each safeguard which seed misses it")
    parser.add_argument("--replay", type=int, help="run one seed twice, and tell everything that happens in it")
    parser.add_argument("--worker", default="", help=argparse.SUPPRESS)
    parser.add_argument("--stride", type=int, default=1, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def _seeds(args: argparse.Namespace) -> int:
    wanted = args.seeds or 100
    jobs = max(1, min(args.jobs, wanted))
    shares = [
        ["--worker", "seeds", "--start", str(args.start + i), "--stride", str(jobs), "--seeds", str(_share(wanted, jobs, i))]
        for i in range(jobs)
    ]  # fmt: skip
    common = ["--faults", args.faults, "--rounds", str(args.rounds), "--mutate", args.mutate]
    began, findings = time.perf_counter(), list[SeedFinding]()
    for line in _lines([[*share, *common] for share in shares]):
        finding = msgspec.json.decode(line, type=SeedFinding)
        findings.append(finding)
        if finding.failed:
            _print_failure(finding, args)
    seconds = time.perf_counter() - began
    failures = sum(bool(finding.failed) for finding in findings)
    missing = wanted - len(findings)
    print(
        f"{len(findings)} seeds from {args.start}: {failures} failures, {sum(f.steps for f in findings)} steps, "
        f"{sum(f.fired for f in findings)} faults, {3600 * len(findings) / seconds:.0f} seeds/hour in {jobs} processes"
        + (f"; {missing} seeds gave no verdict" if missing else "")
    )
    return 1 if failures or missing else 0


def _print_failure(finding: SeedFinding, args: argparse.Namespace) -> None:
    again = "equal twice" if finding.replays else "DIFFERENT the second time"
    print(f"seed {finding.seed} FAILED: {finding.failed}")
    for fault in finding.faults:
        print(f"  needs {fault}")
    mutate = f" --mutate {args.mutate}" if args.mutate else ""
    faults = f" --faults {args.faults}" if args.faults else ""
    faults += f" --rounds {args.rounds}" if args.rounds > 1 else ""
    print(f"  trace {finding.hash}, {again}; replay: python tools/simtest.py --replay {finding.seed}{faults}{mutate}", flush=True)


def _mutations(args: argparse.Namespace) -> int:
    most = str(args.seeds or CAUGHT_WITHIN)
    names = [name for name, each in mutations.MUTATIONS.items() if can_serve() or not each.sessions]
    jobs = max(1, min(args.jobs, len(names)))
    commands = [["--worker", ",".join(names[i::jobs]), "--start", str(args.start), "--seeds", most] for i in range(jobs)]
    began, missed, told = time.perf_counter(), 0, 0
    for line in _lines(commands):
        text, caught = msgspec.json.decode(line, type=tuple[str, bool])
        print(text, flush=True)
        missed += not caught
        told += 1
    seconds = time.perf_counter() - began
    print(f"{told} mutations: {told - missed} caught, {missed + len(names) - told} missed, {seconds:.0f} s in {jobs} processes")
    return 1 if missed or told < len(names) else 0


def _work(args: argparse.Namespace, kinds: Sequence[str]) -> int:
    bench = Bench()
    try:
        if args.worker == "seeds":
            for number in range(args.seeds):
                finding = examine(bench, args.start + number * args.stride, kinds, args.mutate, args.rounds)
                print(msgspec.json.encode(finding).decode(), flush=True)
            return 0
        for name in args.worker.split(","):
            mutation = mutations.MUTATIONS[name]
            drawn = kinds if args.faults else mutation.faults or kinds
            outcome, num = first_catch(bench, name, args.start, args.seeds, drawn)
            what = mutation.what + (f" (faults {','.join(drawn)})" if drawn is not kinds else "")
            text = f"{name}: without {what}, none of {num} seeds fails"
            if outcome is not None:
                text = f"{name}: without {what}, seed {outcome.seed} (number {num}) fails: {outcome.violation}"
            print(msgspec.json.encode((text, outcome is not None)).decode(), flush=True)
    finally:
        bench.close()
    return 0


def _replay(seed: int, faults: list[Fault], mutate: str) -> int:
    bench = Bench()
    try:
        with mutations.applied(mutate):
            first, second = (run(bench, seed, faults, keep=True) for _ in range(2))
    finally:
        bench.close()
    print("\n".join(first.lines))
    equal = first.hash == second.hash
    print(f"{first.events} events, trace {first.hash} and {second.hash}: {'equal' if equal else 'DIFFERENT'}")
    print(f"seed {seed}: {first.steps} steps, {first.fired} faults, {first.violation or 'every invariant held'}")
    return 0 if equal and first.violation is None else 1


def _lines(commands: list[list[str]]) -> Iterator[str]:
    """What workers print, line by line as it comes; they end with this process's pipes."""
    lines: Queue[str | None] = Queue(maxsize=1000)

    def follow(worker: "subprocess.Popen[str]") -> None:
        assert worker.stdout is not None
        for line in worker.stdout:
            lines.put(line)
        lines.put(None)

    workers = [
        subprocess.Popen([sys.executable, __file__, *command], stdout=subprocess.PIPE, text=True, preexec_fn=die_with_parent)
        for command in commands
    ]
    try:
        for worker in workers:
            Thread(target=follow, args=(worker,), daemon=True).start()
        for _ in workers:
            while (line := lines.get()) is not None:
                yield line
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()


def _share(wanted: int, jobs: int, index: int) -> int:
    return wanted // jobs + (index < wanted % jobs)


if __name__ == "__main__":
    if os.environ.get("PYTHONHASHSEED") != "0":  # sets of texts have one order in every process: a seed replays anywhere
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "PYTHONHASHSEED": "0"})
    sys.exit(main(sys.argv[1:]))
