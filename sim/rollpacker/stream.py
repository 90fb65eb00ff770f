"""RollPacker, Tables 3 and 4: long rounds in which half of the GPUs turn to training while the tail is still being generated."""

from collections.abc import Sequence

from pydantic import Field

from rubato.planning.tail import TailRound
from rubato.runtime.config import Section
from rubato.sim.outcome import Cell, RunProgress, RunResult, Table
from rubato.sim.rollpacker.rollout import RoundDone, RoundRun
from rubato.sim.rollpacker.tail import Shares, Size
from rubato.sim.scenario import Scenario, ScenarioKind
from rubato.sim.training_model import TrainerSpec

ADAM_BYTES = 30
"""Read and written per parameter by a mixed-precision update: gradient, master weight and two moments of 4 bytes in, the latter three out, and
the weight of 2 bytes."""


class FixedPart(Section):
    """Of a step's training, what no stream takes: gradients meet, the states come to the GPUs, the update, weights go to the engines."""

    trainer: TrainerSpec
    load_s: float = Field(ge=0)
    """Training's states, host to GPU."""
    sync_s: float = Field(ge=0)
    """Weights to the engines, and these back to work."""

    @property
    def seconds(self) -> float:
        """All of it, one after another."""
        trainer = self.trainer
        update_s = ADAM_BYTES * trainer.model.params / trainer.gpus / trainer.gpu.hbm_bytes_s
        return trainer.gradients_s + self.load_s + update_s + self.sync_s


class StreamTrainer(Scenario):
    """One long round, generated and trained, without the stream trainer and with it."""

    size: Size
    prompts: int = Field(ge=1)
    responses: int = Field(ge=1)
    shares: Shares
    """Training takes its share of a step whose rollout takes as long as this round's."""
    freed: tuple[float, ...] = Field(min_length=1)
    """Shares of responses that ended when half of the engines are freed. The adaptive rule takes the first at which memory suffices,
    and where every length may be the limit and still fits, that is the first of all."""
    reload_s: float = Field(default=0.0, ge=0)
    """Until the freed half can train."""
    fixed: FixedPart


def run(scenario: StreamTrainer, progress: RunProgress) -> RunResult:
    num = scenario.prompts
    round_ = TailRound(0, "long", tuple(range(num)), scenario.responses, num, scenario.responses, 0, "")
    plain = _done(scenario, round_, None)
    train_s, fixed_s = plain.seconds * scenario.shares.train / scenario.shares.rollout, scenario.fixed.seconds
    if fixed_s > train_s:
        raise ValueError(f"the fixed part of training takes {fixed_s:.1f} s, and training's share is {train_s:.1f} s")
    rows: list[tuple[Cell, ...]] = [("none", plain.seconds, plain.seconds + train_s)]
    figures: dict[str, float | bool] = {"none": plain.seconds + train_s}
    for place, share in enumerate(scenario.freed):
        done = _done(scenario, round_, share)
        for name, once in (("stream", False), ("one_shot", True)):
            step_s = done.seconds + fixed_s + left_s(done, train_s - fixed_s, scenario.reload_s, once=once)
            figures[f"{name}_{share * 100:.0f}_over_none"] = step_s / figures["none"]
            rows.append((f"{name}_{share:g}", done.seconds, step_s))
        progress(place + 1, len(scenario.freed), f"half freed at {share:.0%}")
    streamed = [value for name, value in figures.items() if name.startswith("stream_")]
    figures["stream_is_faster"] = max(streamed) < 1
    note = f"Of {train_s:.1f} s of training {fixed_s:.1f} s are a fixed part: load, update and sync, which no stream takes."
    return RunResult(figures=figures, tables={"phases": Table(("trainer", "rollout_s", "step_s"), rows)}, notes=(note,))


def left_s(done: RoundDone, train_s: float, reload_s: float, *, once: bool = False) -> float:
    """Seconds of training after the last response, on all GPUs: half of them took finished samples one by one since they were freed,
    at half of the speed; with `once` only those that were finished then. `train_s` is what forward and backward of the whole batch take on
    all."""
    if done.freed_s is None:
        return train_s
    each_s = _work_s(done.ended, train_s)
    now, trained_s = done.freed_s + reload_s, 0.0
    for (ended_s, _), work_s in zip(done.ended, each_s, strict=True):
        now = max(now, ended_s) + 2 * work_s
        if now > done.seconds or (once and ended_s > done.freed_s):
            break
        trained_s += work_s
    return train_s - trained_s


def _work_s(ended: Sequence[tuple[float, int]], train_s: float) -> list[float]:
    """Each sample's part, by its tokens."""
    total = sum(tokens for _, tokens in ended)
    return [train_s * tokens / total for _, tokens in ended]


def _done(scenario: StreamTrainer, round_: TailRound, free_at: float | None) -> RoundDone:
    size = scenario.size
    return RoundRun(size.engine, size.engines, free_at).run(round_, size.lengths, scenario.seed)


KIND = ScenarioKind(StreamTrainer, run)
