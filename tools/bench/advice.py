"""Takes the advice that a job gives about itself, and the changes that it does not give, one by one: does the first help most?

python tools/bench/advice.py [--short] [--only environment] [--steps 8] [--json FILE] [key.sub=value …]

Five jobs on live processes, each held up by something else: worker processes of environments, slots of engines, the trainer, the
rollouts that alpha lets be in flight, and reward functions. Engines are scripted and paced (docs/pace.md; in the last job 10 ms a
token), the trainer is scripted, steps of environments and reward functions are sleeps in worker processes: all throughput here is
paced, not measured. A gain is the
job's throughput with the change over that without, less one; a quarter of the steps comes before what counts. `--json` writes
{"environment": {"bound", "advice", "samples_s", "outlasted_frac", "changes": [{"change", "predicted", "measured", "outlasted_frac"}],
"first_helps_most"}, …}. Fails where a first advice does not help most, or more than 2 % of any arm's steps outlasted their pace.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from actors.advice import Row, view_of  # noqa: E402
from actors.engines.pace import MOST_OUTLASTED  # noqa: E402
from planning.advice import SingleChange, advise, what_if  # noqa: E402
from runtime.launch.children import die_with_parent  # noqa: E402
from tools.bench.short import NO_RESULT  # noqa: E402

Settings = dict[str, str | int | float | None]
"""None takes a key of `COMMON` away."""

COMMON: Settings = {
    "actors.reward_service.count": 0,
    "reward.functions": "[]",
    "env.class": f"{ROOT}/tools/bench/peers/waiting.py:Waiting",
    "env.kwargs": "{turns: 4, step_s: 0.005}",
    "env.workers": 2,
    "env.concurrency": 8,
    "engine.kind": "scripted",
    "engine.num_slots": 32,
    "engine.gather_s": 0,
    "engine.scripted.stop_share": 0,
    "engine.scripted.vocab_size": 4096,
    "engine.pace.hardware": "h20",
    "engine.pace.model": "qwen3-8b",
    "engine.pace.scale": 6,
    "rollout.max_turns": 4,
    "rollout.max_new_tokens": 8,
    "train.kind": "scripted",
    "train.scripted.step_s": 0.1,
    "train.scripted.weights_mib": 0.01,
    "train.batch_groups": 2,
    "train.group_size": 4,
    "staleness.alpha": 1,
    "check.enabled": "false",
    "eval.every": 0,
    "eval.final_num_tasks": 0,
    "checkpoint.every": 100,
    "report.finish": '""',
    "actors.engine.count": 2,
    "actors.env_manager.count": 1,
}

JOBS: dict[str, Settings] = {
    "environment": {"env.kwargs": "{turns: 4, step_s: 0.25}"},
    "engine": {"engine.num_slots": 1},
    "trainer": {"train.scripted.step_s": 4.0},
    "slots": {"env.concurrency": 64, "rollout.max_new_tokens": 32},
    "rewards": {
        "actors.reward_service.count": 1,
        "reward.functions": f"['{ROOT}/tools/bench/peers/scoring.py:slow']",
        "reward.workers": 1,
        "reward.timeout_s": 60,
        "env.concurrency": 32,
        "env.kwargs": "{turns: 1, step_s: 0.005}",
        "rollout.max_turns": 1,
        "rollout.max_new_tokens": 2,
        "engine.scripted.token_s": 0.01,
        "engine.pace.hardware": None,
        "engine.pace.model": None,
        "engine.pace.scale": None,
    },
}

SHORT: dict[str, Settings] = {"engine": JOBS["engine"] | {"rollout.max_turns": 1, "rollout.max_new_tokens": 4}}

KEYS = {
    "engine": "actors.engine.count",
    "env_manager": "actors.env_manager.count",
    "env_workers": "env.workers",
    "alpha": "staleness.alpha",
    "concurrency": "env.concurrency",
    "reward_workers": "reward.workers",
}


def applied(settings: Settings, change: SingleChange) -> Settings:
    """The job with what was advised."""
    if change.name == "trainer":
        return settings | {"train.scripted.step_s": float(str(settings["train.scripted.step_s"])) / 2}
    return settings | {KEYS[change.name]: change.after}


def rows_of(settings: Settings, steps: int) -> list[Row]:
    """Run the job, and return the rows of its metrics."""
    with tempfile.TemporaryDirectory(prefix="rubato-advice-") as scratch:
        folder = Path(scratch) / "run"
        command = [sys.executable, "tools/launch.py", "configs/quickstart.yaml", f"run.steps={steps}"]
        command += [f"{key}={value}" for key, value in settings.items() if value is not None] + [
            "--run-dir",
            str(folder),
        ]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, preexec_fn=die_with_parent)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)} ended with {done.returncode}: {(done.stdout + done.stderr)[-2000:]}")
        return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def samples_s(rows: Sequence[Row]) -> float:
    """Throughput without the first quarter of the steps."""
    counted = rows[max(1, len(rows) // 4) :]
    return sum(row["perf/samples_s"] * row["time/step"] for row in counted) / sum(row["time/step"] for row in counted)


def outlasted(rows: Sequence[Row]) -> float:
    """The share of the run's steps that outlasted their pace: each row tells that of all steps so far."""
    return rows[-1].get("paced/outlasted_frac", 0.0)


def measure(job: Settings, steps: int, most: int | None = None) -> dict[str, Any]:
    """The job as it is, then with each change, or with the first `most` of them."""
    rows = rows_of(job, steps)
    alpha, before = int(str(job["staleness.alpha"])), samples_s(rows)
    view = view_of(rows, alpha)
    if view is None:
        raise SystemExit("the rows lack what advice is made from")
    advice, changes = advise(view), []
    print(f"  as it is: {before:.1f} samples/s (paced), {outlasted(rows):.1%} of steps outlasted", flush=True)
    for change in what_if(view)[:most]:
        taken = rows_of(applied(job, change), steps)
        gain, late = samples_s(taken) / before - 1.0, outlasted(taken)
        changes.append({"change": change.words, "predicted": change.gain, "measured": gain, "outlasted_frac": late})
        print(
            f"  {change.words:32} predicted {change.gain:+6.0%}   taken {gain:+6.0%} (paced), {late:.1%} of steps outlasted",
            flush=True,
        )
    first = bool(advice.changes) and changes[0]["measured"] == max(each["measured"] for each in changes)
    return {
        "bound": advice.bound, "advice": advice.why, "samples_s": before, "changes": changes, "first_helps_most": first,
        "outlasted_frac": outlasted(rows),
    }  # fmt: skip


def late_arms(found: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The arms of which too many steps outlasted their pace."""
    arms = {f"{name} as it is": job["outlasted_frac"] for name, job in found.items()}
    arms |= {f"{name} with {c['change']}": c["outlasted_frac"] for name, job in found.items() for c in job["changes"]}
    return [arm for arm, share in arms.items() if share > MOST_OUTLASTED]


def main(argv: Sequence[str]) -> int:
    """Measure each job, print, and write the figures where asked for; exit 1 where a first advice did not help most or a pace was outlasted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=tuple(JOBS), action="append", help="of the five")
    parser.add_argument("--steps", type=int, default=8, help="of each run")
    parser.add_argument(
        "--short",
        action="store_true",
        help="three steps of one job, and of its first change: it starts, its figures say nothing",
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("overrides", nargs="*", metavar="key.sub=value")
    asked = parser.parse_args(argv)
    given: Settings = dict(pair.split("=", 1) for pair in asked.overrides)
    found: dict[str, Any] = {}
    jobs, steps, most = {name: JOBS[name] for name in asked.only or JOBS}, asked.steps, None
    if asked.short:
        print(NO_RESULT)
        jobs, steps, most = SHORT, 3, 1
    for name, job in jobs.items():
        print(name, flush=True)
        found[name] = measured = measure(COMMON | job | given, steps, most)
        print(f"  advice: {measured['advice']}\n  the first helped most: {measured['first_helps_most']}")
    if asked.json:
        asked.json.write_text(json.dumps(found, indent=2))
    if asked.short:
        return 0
    if late := late_arms(found):
        print(
            f"more than {MOST_OUTLASTED:.0%} of the steps outlasted their pace: {', '.join(late)}. This counts for nothing"
        )
    return 0 if not late and all(measured["first_helps_most"] for measured in found.values()) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
