"""Rules of admission on the same lengths, in virtual time: python tools/bench/admission.py [--bound 2] [--steps 200] [--json out.json]

Our planner (`rubato`, and `rubato auto` with staleness.alpha=auto) beside models of the rules of AReaL, ROLL and prime-rl, each with the same
bound: what is compared is the rule, not those systems. Every line is one job on one modelled engine and trainer.

--adaptive plays three workloads with every fixed α and with auto instead: effective samples per second, samples/s × effective sample size
by an assumed law (sim.admission.job.DRIFT).
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from rich.console import Console
from rich.table import Table

from sim.admission.job import LengthWorkload, RuleFigures, distributions, length_job, measured
from sim.admission.rules import ArealRule, PrimeRlRule, RollRule
from sim.admission.workloads import ALPHAS, hardware, workloads

COLUMNS = ("tokens/s", "age mean", "age max", "dropped", "length bias", "samples/s × ESS")


def cells(found: RuleFigures) -> tuple[str, ...]:
    return (
        f"{found.tokens_s:.0f}", f"{found.age_mean:.2f}", str(found.age_max), f"{found.dropped:.1%}", f"{found.length_bias:.3f}",
        f"{found.value:.3f}",
    )  # fmt: skip


def compare(bound: int, steps: int, seed: int, step_s: float) -> dict[str, dict[str, RuleFigures]]:
    """By distribution and rule."""
    rules: dict[str, Any] = {"rubato": bound, "rubato auto": "auto"}
    models = {f"model of {rule.name}": rule for rule in (ArealRule(bound), RollRule(bound), PrimeRlRule(bound))}
    found: dict[str, dict[str, RuleFigures]] = {}
    for name, lengths in distributions().items():
        workload = LengthWorkload(lengths, step_s)
        for label, rule in (rules | models).items():
            job = length_job(workload, rule, steps=steps, seed=seed, hardware=hardware())
            found.setdefault(name, {})[label] = measured(job)
    return found


def adaptive(steps: int, seed: int) -> dict[str, dict[str, RuleFigures]]:
    """By workload and α."""
    return {
        name: {str(a): measured(length_job(load, a, steps=steps, seed=seed, hardware=hardware())) for a in ALPHAS}
        for name, load in workloads().items()
    }


def show(found: dict[str, dict[str, RuleFigures]], first: str, second: str) -> None:
    table = Table(first, second, *COLUMNS, box=None, pad_edge=False)
    for name, rows in found.items():
        for label, row in rows.items():
            table.add_row(name, label, *cells(row))
    Console(width=None if sys.stdout.isatty() else 120).print(table)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--adaptive", action="store_true", help="every fixed α and auto, on three workloads")
    parser.add_argument(
        "--bound", type=int, default=2, help="α of ours and of ROLL's, η of AReaL's, versions of prime-rl's"
    )
    parser.add_argument("--steps", type=int, help="of each job; 200, or 400 with --adaptive")
    parser.add_argument("--step-s", type=float, default=4.0, help="what a training step takes beside its tokens")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    asked = parser.parse_args(argv)
    if asked.bound < 0 or (asked.steps is not None and asked.steps < 1) or asked.step_s < 0:
        parser.error("--bound and --step-s must be at least 0, and --steps at least 1")
    print("virtual time: modelled engine and trainer, lengths digitised from papers")
    if asked.adaptive:
        found = adaptive(asked.steps or 400, asked.seed)
        show(found, "workload", "α")
    else:
        found = compare(asked.bound, asked.steps or 200, asked.seed, asked.step_s)
        show(found, "lengths", "rule")
    if asked.json is not None:
        plain = {
            name: {label: row._asdict() | {"value": row.value} for label, row in rows.items()}
            for name, rows in found.items()
        }
        asked.json.write_text(json.dumps(plain, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
