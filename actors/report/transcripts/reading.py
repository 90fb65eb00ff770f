"""Joins what a run keeps of its trajectories (RUN/trajectories) with what became of them (RUN/samples.jsonl and its closed parts)."""

import difflib
import re
from array import array
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from rubato.actors.checkpoints import checkpoint as checkpoints
from rubato.actors.messages.samples import Segment, Trajectory
from rubato.actors.samples.run_files import read_kept, read_lines
from rubato.runtime.config.source import fill_tree
from rubato.runtime.config.yaml_core import read_yaml
from rubato.runtime.errors import LaunchError

TOKEN_BYTES = 4
"""An int32 id."""

UNDER_WAY = ""
"""Fate of a sample that has none yet: its group still runs, waits, or is in a step that no checkpoint covers."""

EVAL = "eval"
"""Stands for the fate of a held-out rollout."""

Decode = Callable[[list[int]], str]


class SampleTurn(msgspec.Struct, frozen=True):
    """One turn of a trajectory, special tokens included."""

    prompt: str
    """What was put before the model's answer since the turn before."""
    completion: str
    tokens: int
    """Sampled in this turn."""
    finish_reason: str
    """`stop`, or `length` where the turn was cut at its limit; empty where it is not on record."""
    versions: dict[int, int]
    """Sampled tokens by the weight version that sampled them, in order."""
    branch: int = 1
    """Of the sample's branches the one that it is in."""


class SampleBranch(msgspec.Struct, frozen=True):
    """One context of a trajectory. Each carries its reward."""

    after: int | None
    """Number of the turn, in an earlier branch, up to which it has the same tokens; null where it has another beginning."""
    shared: int
    """Tokens up to there."""
    tokens: int
    """All that it has."""


class Sample(msgspec.Struct, frozen=True):
    """One rollout, in the words of samples.jsonl; `turns` is null where no text of it is kept."""

    trajectory_id: str
    group_id: str
    attempt: int
    purpose: str
    task: str
    """Empty where the config names none."""
    row: int
    seed: int
    fate: str
    """As in samples.jsonl; `eval` of held-out rollouts, and empty where the sample has no fate yet."""
    reason: str
    step: int | None
    """The step that trained it; of a held-out rollout the version that it evaluates."""
    age: int | None
    reward: float | None
    scores: dict[str, float]
    info: dict[str, float] | None
    tokens: int
    finish_reasons: tuple[str, ...]
    cut: bool
    truncated: bool | None
    wall_s: float
    versions: dict[int, int] | None
    """Sampled tokens by weight version."""
    turns: list[SampleTurn] | None
    branches: list[SampleBranch] | None


@dataclass(frozen=True, slots=True)
class Filters:
    """Which samples are wanted; empty takes all."""

    name: str = ""
    """A trajectory, or a group."""
    step: int | None = None
    fate: str = ""
    task: str = ""
    row: int | None = None
    purpose: str = ""

    def take(self, row: dict[str, Any]) -> bool:
        """Whether a line of samples.jsonl, or what stands for one, is wanted."""
        return (
            (not self.name or self.name in (row["trajectory_id"], row["group_id"]))
            and (self.step is None or self.step == row["step"])
            and (not self.fate or self.fate == row["fate"])
            and (not self.task or self.task == row["task"])
            and (self.row is None or self.row == row["row"])
            and (not self.purpose or self.purpose == row["purpose"])
        )


class SampleRow(NamedTuple):
    """A line of samples.jsonl, or what stands for one, and the trajectory, where that is kept."""

    line: dict[str, Any]
    trajectory: Trajectory | None

    @property
    def order(self) -> tuple[int, str, int]:
        """Roughly as they came."""
        group, _, member = self.line["trajectory_id"].rpartition(".")
        first = self.line["version_first"] if self.trajectory is None else self.trajectory.version_first
        return first or 0, group, int(member)


@dataclass
class FoundSamples:
    """The samples that were asked for: those whose text is kept, oldest first, and figures over all of them."""

    kept: list[SampleRow] = field(default_factory=list)
    textless: list[SampleRow] = field(default_factory=list)
    """Those of which no text is kept because they failed, oldest first; no more than `MOST_TEXTLESS`."""
    fates: Counter[str] = field(default_factory=Counter)
    """Of every sample that was asked for, kept or not."""
    sums: dict[str, float] = field(default_factory=dict)
    """By `reward` and the name of each score, over the samples that have one."""
    counts: Counter[str] = field(default_factory=Counter)
    others: Counter[str] = field(default_factory=Counter)
    """Fates of the samples that were not asked for."""
    tasks: set[str] = field(default_factory=set)
    """Of all of them."""

    def __len__(self) -> int:
        return len(self.kept) + len(self.textless)

    def mean(self, name: str) -> float | None:
        """Of `reward`, `cut` or a score; None where no sample has one."""
        return self.sums[name] / self.counts[name] if self.counts[name] else None


MOST_TEXTLESS = 200


def find(folder: Path, filters: Filters) -> FoundSamples:
    """What the run in `folder` has. Raises LaunchError where that is no run, or nothing in it was asked for."""
    if not (folder / "config.yaml").is_file():
        raise LaunchError(f"{folder} holds no run: there is no config.yaml in it.")
    found, texts = FoundSamples(), dict[str, dict[int, Trajectory]]()
    for trajectory in read_kept(folder):
        texts.setdefault(trajectory.ticket.trajectory_id, {})[trajectory.ticket.attempt] = trajectory
    for line in _ledger(folder):
        _take(found, filters, SampleRow(line, texts.pop(line["trajectory_id"], {}).get(line["attempt"])))
    for attempts in texts.values():
        newest = attempts[max(attempts)]
        _take(found, filters, SampleRow(_line_of(newest), newest))
    found.kept.sort(key=lambda row: row.order)
    if not found.fates:
        raise LaunchError(_nothing(folder, filters, found))
    return found


def _take(found: FoundSamples, filters: Filters, row: SampleRow) -> None:
    line = row.line
    found.tasks.add(line["task"])
    if not filters.take(line):
        found.others[line["fate"]] += 1
        return
    found.fates[line["fate"]] += 1
    if line["reward"] is not None:
        for name, value in {"reward": line["reward"], "cut": line["cut"], **line["scores"]}.items():
            found.sums[name] = found.sums.get(name, 0.0) + value
            found.counts[name] += 1
    if row.trajectory is not None:
        found.kept.append(row)
    elif line["version_first"] is None and len(found.textless) < MOST_TEXTLESS:
        found.textless.append(row)


_LACKING = {"purpose": "train", "seed": 0, "scores": {}, "finish_reasons": (), "cut": False}


def _ledger(folder: Path) -> Iterator[dict[str, Any]]:
    """The lines of samples.jsonl and its closed parts, those of older programs with what they lack. A damaged line is passed over."""
    for text in read_lines(folder):
        try:
            line = msgspec.json.decode(text, type=dict[str, Any])
        except msgspec.MsgspecError:
            continue
        if "trajectory_id" in line:
            yield _LACKING | line if "row" in line else _LACKING | line | {"task": "", "row": line.get("task", 0)}


def _line_of(trajectory: Trajectory) -> dict[str, Any]:
    """What samples.jsonl would say of a trajectory that it does not know: a held-out one, or one that has no fate yet."""
    ticket = trajectory.ticket
    held_out = ticket.purpose == "eval"
    return {
        "trajectory_id": ticket.trajectory_id,
        "group_id": ticket.group_id,
        "attempt": ticket.attempt,
        "purpose": ticket.purpose,
        "task": ticket.task,
        "row": ticket.row,
        "seed": ticket.seed,
        "fate": "failed" if trajectory.reason else EVAL if held_out else UNDER_WAY,
        "reason": trajectory.reason.partition(":")[0],
        "step": ticket.version if held_out else None,
        "age": None,
        "reward": None if trajectory.reason else trajectory.reward,
        "scores": trajectory.scores,
        "tokens": sum(segment.mask.count(1) for segment in trajectory.segments),
        "finish_reasons": trajectory.finish_reasons,
        "cut": trajectory.cut,
        "wall_s": trajectory.wall_s,
        "version_first": trajectory.version_first,
    }


SHARED = (
    "trajectory_id", "group_id", "attempt", "purpose", "task", "row", "seed", "fate", "step", "age", "reward", "scores", "tokens", "cut",
    "wall_s",
)  # fmt: skip


def sample_of(row: SampleRow, decode: Decode) -> Sample:
    """All that there is to tell of one."""
    line, trajectory = row
    why = line["reason"] if trajectory is None or not trajectory.reason else trajectory.reason
    branches = None if trajectory is None else branches_of(trajectory)
    turns = None if trajectory is None else turns_of(trajectory, decode)
    versions: Counter[int] = Counter()
    for turn in turns or ():
        versions.update(turn.versions)
    return Sample(
        **{key: line[key] for key in SHARED},
        reason=why,
        finish_reasons=tuple(line["finish_reasons"]),
        info=None if trajectory is None else trajectory.info,
        truncated=None if trajectory is None else trajectory.truncated,
        versions=None if turns is None else dict(versions),
        turns=turns,
        branches=branches,
    )


def turns_of(trajectory: Trajectory, decode: Decode) -> list[SampleTurn]:
    """What was shown and what was sampled, turn by turn; segments follow one another, each from where it has tokens of its own."""
    turns: list[SampleTurn] = []
    reasons = _reasons_of(trajectory)
    for number, (segment, branch) in enumerate(zip(trajectory.segments, branches_of(trajectory), strict=True), 1):
        tokens, before = array("i", segment.tokens), branch.shared
        for start, end in _sampled(segment):
            prompt, text = decode(tokens[before:start].tolist()) if start > before else "", decode(tokens[start:end].tolist())
            reason = reasons[len(turns)] if len(turns) < len(reasons) else ""
            turns.append(SampleTurn(prompt, text, end - start, reason, _versions(segment, start, end), number))
            before = end
    return turns


def branches_of(trajectory: Trajectory) -> list[SampleBranch]:
    """What each segment shares with those before it: the deepest of their turns up to whose end it has the same tokens."""
    branches: list[SampleBranch] = []
    ends: list[bytes] = []
    """Of each turn so far, all tokens up to its end."""
    for segment in trajectory.segments:
        shared = max((end for end in ends if segment.tokens.startswith(end)), key=len, default=b"") if ends else b""
        after = ends.index(shared) + 1 if shared else None
        branches.append(SampleBranch(after, len(shared) // TOKEN_BYTES, len(segment.mask)))
        ends += [segment.tokens[: end * TOKEN_BYTES] for _, end in _sampled(segment)]
    return branches


def _sampled(segment: Segment) -> Iterator[tuple[int, int]]:
    """Where its sampled turns begin and end."""
    start = 0
    for sampled, run in groupby(segment.mask):
        end = start + sum(1 for _ in run)
        if sampled:
            yield start, end
        start = end


def _reasons_of(trajectory: Trajectory) -> Sequence[str]:
    """Of the turns, in the order of the segments: what is on record is in the order in which they ended, with those of contexts that were
    left out.
    """
    reasons, segments = trajectory.finish_reasons, trajectory.segments
    is_known = len(segments) == 1 or len({*reasons}) == 1
    return reasons if is_known and sum(1 for segment in segments for _ in _sampled(segment)) == len(reasons) else ()


def _versions(segment: Segment, start: int, end: int) -> dict[int, int]:
    found: dict[int, int] = {}
    for span in segment.spans:
        if num := max(0, min(end, span.end) - max(start, span.start)):
            found[span.version] = found.get(span.version, 0) + num
    return found


def decoder(folder: Path) -> Decode:
    """Decodes by the run's own tokenizer, or that of its newest checkpoint; where both are gone, token ids are written as they are."""
    model = fill_tree(read_yaml((folder / "config.yaml").read_text()).get("model") or {}, "model")[0]
    places = [folder / model.get("path", "model"), *checkpoints.by_step(folder / "checkpoints")]
    for place in places:
        if (place / "tokenizer.json").is_file():
            from tokenizers import Tokenizer

            tokenizer: Any = Tokenizer.from_file(str(place / "tokenizer.json"))
            return lambda ids: tokenizer.decode(ids, skip_special_tokens=False)
    return lambda ids: " ".join(f"[{token}]" for token in ids)


def group_or_trajectory(text: str) -> str:
    """`g12.3` for `g00000012.3`: zeros may be left out."""
    match = re.fullmatch(r"g(\d{1,8})(\.\d+)?", text)
    return f"g{int(match[1]):08d}{match[2] or ''}" if match else text


def _nothing(folder: Path, filters: Filters, found: FoundSamples) -> str:
    if not found.others:
        return f"{folder} has no trajectory yet: none has ended, or samples.keep is 0."
    names = ("step", "fate", "task", "row", "purpose")
    wanted = {name: getattr(filters, name) for name in names}
    asked = " ".join([filters.name, *(f"--{key} {value}" for key, value in wanted.items() if value not in (None, ""))])
    asked = asked.strip() or "here"
    fates = ", ".join(f"{name or 'no fate yet'} {num:,}" for name, num in found.others.most_common())
    guess = _guess("fate", filters.fate, found.others) or _guess("task", filters.task, found.tasks)
    return f"{folder}: no trajectory is {asked}. It has {fates}.{guess}"


def _guess(key: str, given: str, known: Collection[str]) -> str:
    near = difflib.get_close_matches(given, [name for name in known if name], n=1) if given not in known else []
    return f" Did you mean --{key} {near[0]}?" if near else ""
