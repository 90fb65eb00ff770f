"""Fits the costs and rollouts of sim/onehost/calibrated.py to one recording. Every figure says what it was fitted to, and how well."""

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from rubato.runtime.errors import ConfigError
from rubato.sim.calibration.recording import LAST_STEPS, WARM_STEPS, Recording, trained_tokens
from rubato.sim.distribution import Histogram
from rubato.sim.onehost.calibrated import Calibration, Costs, EngineCosts, Fit, LearningStage, Recorded, Rollouts, TrainerCosts

STAGE_STEPS = 6
"""Versions whose rollouts are taken to be alike."""

LEAST_SAMPLES = 50
"""Single steps without which an engine's three costs can't be told apart."""

OTHERS = ("fabric_controller", "optical_switch")
"""Roles that do next to nothing here: part of the background."""


UNITS = {"turn": "turns", "trajectory": "trajectories"}


def fit(recording: Recording, host: str) -> Calibration:
    """Everything the simulator needs. Raises ConfigError where the recording lacks it."""
    fits: list[Fit] = []
    cores = int(recording.window[-1].get("cpu/cores", 0))
    if not cores:
        raise ConfigError(f"{recording.folder}/metrics.jsonl has no cpu/cores. Record the run anew.")
    costs = Costs(
        **_per_unit(recording, fits), engine=_engine(recording, fits), trainer=_trainer(recording, fits),
        background_cores=_background(recording, fits),
    )  # fmt: skip
    played = rollouts(recording, fits)
    window = (WARM_STEPS + 1, len(recording.rows) - LAST_STEPS)
    recorded = Recorded(
        job=recording.run.name, seed=recording.run.seed, steps=len(recording.rows), engines=recording.count("engine"),
        env_managers=recording.count("env_manager"), window=window, host=host,
    )  # fmt: skip
    return Calibration(
        recorded=recorded, cores=cores, foreign_cores=recording.foreign_cores, costs=costs, rollouts=played,
        fits=tuple(fits),
    )  # fmt: skip


def _per_unit(recording: Recording, fits: list[Fit]) -> dict[str, float]:
    """CPU seconds over what was done meanwhile: turns or trajectories that were trained."""
    rows = recording.window[1:]
    trajectories = sum(_trained(row) for row in rows)
    turns = sum(_trained(row) * row["rollout/turns_mean"] for row in rows)
    found: dict[str, float] = {}
    for role, unit, num in (
        ("env_manager", "turn", turns), ("llm_proxy", "turn", turns), ("reward_service", "trajectory", trajectories),
        ("sample_buffer", "trajectory", trajectories), ("node", "trajectory", trajectories),
    ):  # fmt: skip
        present = role == "node" or role in recording.config["actors"]
        found[f"{role}_{unit}_s"] = recording.cpu_s(role) / num if present else 0.0
        source = f"cpu/{role}-* over {num:.0f} {UNITS[unit]}"
        spread = _spread(recording, role, unit) if present else 0.0
        fits.append(_fit(f"costs.{role}_{unit}_s", source, len(rows), f"{spread:.0%} between thirds of the run"))
    return found


def _spread(recording: Recording, role: str, unit: str) -> float:
    """How far the dearest third of the window is above the cheapest, relative to their mean."""
    window = recording.window
    names = [name for name in window[0] if name.rpartition("-")[0] == f"cpu/{role}"]
    ends = [0, len(window) // 3, 2 * len(window) // 3, len(window) - 1]
    each: list[float] = []
    for begin, end in pairwise(ends):
        done = sum(_trained(r) * (r["rollout/turns_mean"] if unit == "turn" else 1.0) for r in window[begin + 1 : end + 1])
        each.append(sum(window[end][name] - window[begin][name] for name in names) / done)
    return (max(each) - min(each)) / (sum(each) / len(each))


def _engine(recording: Recording, fits: list[Fit]) -> EngineCosts:
    """Least squares over single steps, by relative errors: a large step scatters more."""
    engines = recording.engines.values()
    sampled = [step for engine in engines for step in engine.sampled]
    if len(sampled) < LEAST_SAMPLES:
        raise ConfigError(f"{recording.folder} has {len(sampled)} timed steps; {LEAST_SAMPLES} are needed. Run longer.")
    steps = np.array(sampled)
    known = np.column_stack([np.ones(len(steps)), steps[:, 0], steps[:, 1]])
    weight = 1.0 / np.maximum(steps[:, 2], np.median(steps[:, 2]))
    step_s, row_s, token_s = _not_negative(known * weight[:, None], steps[:, 2] * weight)
    guess = known @ np.array([step_s, row_s, token_s])
    off = float(np.median(np.abs(guess - steps[:, 2]) / steps[:, 2]))
    whole = float(guess.sum() / steps[:, 2].sum() - 1)
    residual = f"median {off:.0%} of a step; {whole:+.1%} of all steps' time"
    fits.append(_fit("costs.engine.step_s, row_s, token_s", "step_times.sampled of all engines", len(steps), residual))
    turns = sum(rollout.turns for rollout in recording.rollouts)
    beside = [e.process_cpu_s - e.cpu_s - e.update_cpu_s for e in engines]
    source = f"step_times: process_cpu_s less steps and updates, over {turns} turns"
    each = [max(0.0, cpu_s) / (turns / len(beside)) for cpu_s in beside]
    residual = f"{_range(each):.0%} between engines" if len(each) > 1 else "one engine"
    fits.append(_fit("costs.engine.request_s", source, turns, residual))
    updates = sum(engine.updates for engine in engines)
    update_s = sum(engine.update_cpu_s for engine in engines) / max(1, updates)
    fits.append(_fit("costs.engine.update_s", "step_times.update_cpu_s", updates, "a mean"))
    return EngineCosts(step_s=step_s, row_s=row_s, token_s=token_s, request_s=sum(beside) / max(1, turns), update_s=update_s)


def _trainer(recording: Recording, fits: list[Fit]) -> TrainerCosts:
    rows = recording.window[1:]
    if any("time/train_cpu" not in row for row in rows):
        raise ConfigError(f"{recording.folder}/metrics.jsonl has no time/train_cpu. Record the run anew.")
    tokens = np.array([trained_tokens(row) for row in rows])
    cpu_s = np.array([row["time/train_cpu"] for row in rows])
    step_s, token_s, off = _line(tokens, cpu_s)
    if min(step_s, token_s) < 0:
        step_s, token_s = 0.0, float(cpu_s.sum() / tokens.sum())
    fits.append(_fit("costs.trainer.step_s, token_s", "time/train_cpu against trained tokens", len(rows), off))
    return TrainerCosts(step_s=step_s, token_s=token_s, **_publish(recording, fits), **_checkpoint(recording, fits))


def _publish(recording: Recording, fits: list[Fit]) -> dict[str, float]:
    """Publishing and the row, in steps without a checkpoint before them; their CPU time is split as their wall time is."""
    rows = [row for row in recording.window[1:] if not recording.follows_checkpoint(row)]
    publish_s = float(np.mean([row["time/publish"] for row in rows]))
    rest_s = float(np.mean([recording.rest_s(row) for row in rows]))
    beside = [_beside(recording, row) for row in rows]
    cpu_s = max(0.0, float(np.mean(beside)))
    source = "time/publish, the rest of time/step, and cpu/trainer-1 less time/train_cpu"
    residual = f"CPU time {float(np.std(beside)):.3f} s around {cpu_s:.3f} s"
    fits.append(_fit("costs.trainer.publish_*, rest_*", source, len(rows), residual))
    mine = cpu_s * publish_s / max(1e-9, publish_s + rest_s)
    return {
        "publish_s": mine, "publish_wait_s": max(0.0, publish_s - mine),
        "rest_s": cpu_s - mine, "rest_wait_s": max(0.0, rest_s - (cpu_s - mine)),
    }  # fmt: skip


def _checkpoint(recording: Recording, fits: list[Fit]) -> dict[str, float]:
    """What writing a checkpoint adds to the step that follows it."""
    rows = [row for row in recording.window[1:] if recording.follows_checkpoint(row)]
    others = [row for row in recording.window[1:] if not recording.follows_checkpoint(row)]
    if not rows:
        return {"checkpoint_s": 0.0, "checkpoint_wait_s": 0.0}
    usual_s = float(np.mean([recording.rest_s(row) for row in others]))
    usual_cpu_s = float(np.mean([_beside(recording, row) for row in others]))
    took = [recording.rest_s(row) - usual_s for row in rows]
    cpu_s = max(0.0, float(np.mean([_beside(recording, row) for row in rows])) - usual_cpu_s)
    residual = f"{float(np.std(took)):.3f} s around {float(np.mean(took)):.3f} s"
    source = "the rest of time/step behind a checkpoint, less that of other steps"
    fits.append(_fit("costs.trainer.checkpoint_*", source, len(rows), residual))
    return {"checkpoint_s": cpu_s, "checkpoint_wait_s": max(0.0, float(np.mean(took)) - cpu_s)}


def _beside(recording: Recording, row: Any) -> float:
    """CPU seconds of the trainer's process between the row before and this one, beside training."""
    before = recording.rows[int(row["step"]) - 2]
    return row["cpu/trainer-1"] - before["cpu/trainer-1"] - row["time/train_cpu"]


def _background(recording: Recording, fits: list[Fit]) -> float:
    """Cores that the job's other actors take."""
    small = [role for role in recording.config["actors"] if role in OTHERS]
    length, num = f"{recording.seconds:.0f} s", len(recording.window) - 1
    fits.append(_fit("costs.background_cores", f"cpu/ of {', '.join(small) or 'none'} over {length}", num, "a mean"))
    fits.append(_fit("foreign_cores", f"cpu/host less the job's own over {length}", num, "not modelled"))
    return sum(recording.cpu_s(role) for role in small) / recording.seconds


def rollouts(recording: Recording, fits: list[Fit] | None = None) -> Rollouts:
    """What the policy sampled; where each figure comes from is added to `fits`."""
    fits = [] if fits is None else fits
    rows = recording.rows
    turns = np.array([row["rollout/turns_mean"] for row in rows])
    lengths = np.array([row["rollout/len_mean"] for row in rows])
    first, per_turn, off = _line(turns, lengths)
    sampled = sum(rollout.tokens for rollout in recording.rollouts) / sum(r.turns for r in recording.rollouts)
    shown = max(0.0, per_turn - sampled)
    fits.append(_fit("rollouts.prompt_tokens, observation_tokens", "rollout/len_mean against turns", len(rows), off))
    fits.append(_fit("rollouts.action_tokens", "samples.jsonl", len(recording.rollouts), "a mean"))
    stages = tuple(_stage(recording, begin) for begin in range(0, len(rows), STAGE_STEPS))
    source = f"samples.jsonl and perf/train_tokens_s, by {STAGE_STEPS} versions"
    fits.append(_fit("rollouts.stages", source, len(recording.rollouts), "counts as recorded"))
    return Rollouts(
        prompt_tokens=max(1.0, round(first + shown, 3)), observation_tokens=round(shown, 3),
        action_tokens=round(sampled, 3), stages=stages,
    )  # fmt: skip


def _stage(recording: Recording, begin: int) -> LearningStage:
    """Rollouts that began under versions from `begin` on; steps that started from them."""
    versions = range(begin, begin + STAGE_STEPS)
    counts = Counter(r.turns for r in recording.rollouts if r.version_first in versions)
    rows = recording.rows[begin : begin + STAGE_STEPS]
    tokens = sum(_trained(row) * row["rollout/len_mean"] for row in rows)
    share = min(1.0, sum(trained_tokens(row) for row in rows) / tokens)
    if not counts:  # the last versions begin no rollout
        counts = Counter(r.turns for r in recording.rollouts)
    return LearningStage(
        until_version=begin + STAGE_STEPS, turns=Histogram(law="histogram", counts=dict(sorted(counts.items()))),
        trained_share=round(share, 4),
    )  # fmt: skip


def _line(known: Any, measured: Any) -> tuple[float, float, str]:
    """Intercept, slope and the residual in words; a slope is needed, so `known` must vary."""
    if float(np.ptp(known)) == 0.0:
        raise ConfigError("Every training step of this run was alike, so costs per token can't be told. Run longer.")
    slope, intercept = np.polyfit(known, measured, 1)
    off = float(np.sqrt(np.mean((intercept + slope * known - measured) ** 2)) / measured.mean())
    return float(intercept), float(slope), f"root mean square {off:.1%} of the mean"


def _not_negative(known: Any, measured: Any) -> list[float]:
    """Least squares; a coefficient that comes out negative is 0, and the others are fitted without it."""
    kept = list(range(known.shape[1]))
    while True:
        found = np.linalg.lstsq(known[:, kept], measured, rcond=None)[0]
        if found.min() >= 0:
            return [float(found[kept.index(i)]) if i in kept else 0.0 for i in range(known.shape[1])]
        del kept[int(found.argmin())]


def _trained(row: Any) -> float:
    """Trajectories in the batch."""
    return round(row["perf/samples_s"] * row["time/step"])


def _range(values: Sequence[float]) -> float:
    return (max(values) - min(values)) / max(1e-12, sum(values) / len(values))


def _fit(figure: str, source: str, samples: int, residual: str) -> Fit:
    return Fit(figure=figure, source=source, samples=samples, residual=residual)
