"""Samples as text: one line each, and one trajectory from its first prompt to its last answer."""

import re
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from rubato.actors.report.transcripts.reading import FoundSamples, Sample, SampleBranch, SampleTurn

MOST_SCORES, WIDE = 4, 110
"""Columns of scores, and the width of screen that has room for them beside the text."""

MOST_WHY = 60
"""Characters of why a rollout failed, before what it wrote; the whole is shown of one trajectory."""

STOP, CUT = "⏹", "…"
"""How a turn ended: at a stop token, or at its limit."""

STYLES = {"trained": "green", "zero_spread": "yellow", "eval": "cyan", "": "dim"}

_SPECIAL = re.compile(r"<\|[^|<>]{1,40}\|>|<(?:s|/s|pad|bos|eos|unk)>")
"""How special tokens look in most vocabularies."""

_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def summary(found: FoundSamples) -> str:
    """How many there are and how they end, the reward and its parts, how many were cut: of every sample asked for, kept or not."""
    num, parts = found.fates.total(), [name for name in found.sums if name not in ("reward", "cut")]
    told = [f"{num:,} {'trajectory' if num == 1 else 'trajectories'}, {len(found.kept):,} kept"]
    told.append(", ".join(f"{count:,} {fate or 'without a fate yet'}" for fate, count in found.fates.most_common()))
    if (reward := found.mean("reward")) is not None:
        apart = ", ".join(f"{name} {_figure(found.mean(name))}" for name in parts[:MOST_SCORES])
        told.append(f"reward {_figure(reward)}" + (f" ({apart})" if apart else ""))
        told.append(f"cut {found.mean('cut') or 0:.0%}")
    return " · ".join(told)


def columns(samples: Sequence[Sample], width: int) -> list[str]:
    """The scores that are columns of their own at a screen of this width: a single one is the reward."""
    parts = list(dict.fromkeys(name for sample in samples for name in sample.scores))
    return parts[:MOST_SCORES] if len(parts) > 1 and width >= WIDE else []


def heads(parts: Sequence[str]) -> list[str]:
    """Of the columns of the table."""
    return ["trajectory", "reward", *parts, "end", "step", "fate", "weights", "what the model wrote ◂ first prompt"]


def table(samples: Sequence[Sample], width: int) -> Table:
    """One line each."""
    parts = columns(samples, width)
    shown = Table(box=None, pad_edge=False, header_style="dim", expand=True)
    for name in heads(parts)[:-1]:
        right = name in ("reward", "step", *parts)
        shown.add_column(name, no_wrap=True, justify="right" if right else "left", max_width=12 if right else None)
    shown.add_column(heads(parts)[-1], no_wrap=True, ratio=1)
    for sample in samples:
        shown.add_row(*cells(sample, parts))
    return shown


def cells(sample: Sample, parts: Sequence[str]) -> list[Text]:
    """Of one line of the table."""
    step = "" if sample.step is None else f"v{sample.step}" if sample.purpose == "eval" else str(sample.step)
    figures = [_figure(sample.reward), *(_figure(sample.scores.get(name)) for name in parts)]
    plain = [sample.trajectory_id, *figures, _end(sample), step]
    fate = Text(sample.fate or "none yet", style=STYLES.get(sample.fate, "red"))
    text = _flat(sample.reason) if sample.turns is None else in_one_line(sample.turns)
    if sample.turns and sample.reason:
        text = f"{_flat(sample.reason)[:MOST_WHY]} · {text}"
    return [*map(Text, plain), fate, Text(_versions(sample.versions or {})), Text(text)]


def in_one_line(turns: Sequence[SampleTurn]) -> str:
    """The answers, then what came before the first: what tells trajectories of one task apart comes first."""
    told = " ▸ ".join(_flat(turn.completion) + _mark(turn) for turn in turns)
    return f"{told}   ◂ {_flat(turns[0].prompt)}" if turns else ""


def whole(sample: Sample) -> Text:
    """One trajectory, turn by turn."""
    text = Text(f"{sample.trajectory_id}", style="bold")
    text.append(f"   {facts(sample)}\n", style="not bold")
    turns, branches = sample.turns or [], sample.branches or []
    for number, turn in enumerate(turns, 1):
        if len(branches) > 1 and (number == 1 or turns[number - 2].branch != turn.branch):
            text.append(f"\nbranch {turn.branch} · {_origin(branches[turn.branch - 1])}\n", style="bold")
        reason = " · cut at its limit" if turn.finish_reason == "length" and turn.tokens > 1 else ""
        many = "1 token" if turn.tokens == 1 else f"{turn.tokens} tokens"
        text.append(f"\nturn {number} · {many} · {_spans(turn.versions)}{reason}\n", style="dim")
        text.append(_safe(turn.prompt).rstrip("\n") + "\n", style="not bold")
        text.append("▸ ", style="bold cyan")
        text.append(_safe(turn.completion) + _mark(turn) + "\n", style="cyan")
    return text


def facts(sample: Sample) -> str:
    """Everything about it but its text."""
    fate = {"": "no fate yet", "eval": f"held out, of version {sample.step}"}.get(sample.fate, sample.fate)
    step = f" in step {sample.step}" if sample.step is not None and sample.purpose == "train" else ""
    apart = ", ".join(f"{name} {_figure(value)}" for name, value in sample.scores.items())
    told = [f"{fate}{step}" + (f" ({sample.reason})" if sample.reason else "")]
    if sample.reward is not None:
        told.append(f"reward {_figure(sample.reward)}" + (f" ({apart})" if apart else ""))
    task = f"task {sample.task}, " if sample.task else ""
    told += [f"{task}row {sample.row}, seed {sample.seed}", f"attempt {sample.attempt}"]
    told += [f"age {sample.age}"] if sample.age is not None else []
    told += [f"{len(sample.turns)} turns, {sample.tokens} tokens"] if sample.turns is not None else []
    told += [f"{len(sample.branches)} branches, each carries the reward"] if sample.branches and len(sample.branches) > 1 else []
    told += ["ended at a limit of turns or tokens"] if sample.truncated else []
    told += [f"{name} {value:g}" for name, value in (sample.info or {}).items()]
    return " · ".join(told)


def width_of(console: Console) -> int:
    """A terminal's own width; a pipe gets enough for the text to be read, since lines do not break there."""
    return console.width if console.is_terminal else max(console.width, 160)


def _origin(branch: SampleBranch) -> str:
    if branch.after is None:
        return f"{branch.tokens} tokens, a context of its own"
    return f"{branch.tokens} tokens, {branch.shared} of them up to turn {branch.after}, which it goes on from"


def _end(sample: Sample) -> str:
    """limit: of turns, of tokens, or the environment's own. cut: the last turn at its limit. done: the environment ended it."""
    if sample.turns is None:
        return ""
    last = sample.finish_reasons[-1] if sample.finish_reasons else ""
    return "limit" if sample.truncated else "cut" if sample.cut and last == "length" else "done"


def _versions(versions: Mapping[int, int]) -> str:
    return "→".join(f"v{version}" for version in sorted({*list(versions)[:1], *list(versions)[-1:]}))


def _spans(versions: Mapping[int, int]) -> str:
    if len(versions) == 1:
        return f"v{next(iter(versions))}"
    return ", ".join(f"{num} by v{version}" for version, num in versions.items())


def _mark(turn: SampleTurn) -> str:
    if turn.finish_reason == "stop":
        return STOP
    return CUT if turn.finish_reason == "length" and turn.tokens > 1 else ""


def _flat(text: str) -> str:
    return " ".join(_safe(_SPECIAL.sub(" ", text)).split())


def _safe(text: str) -> str:
    """A model may write anything, also what would command the terminal."""
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)


def _figure(value: float | None) -> str:
    return "–" if value is None else f"{value + 0.0:.2f}".replace("-0.00", "0.00")
