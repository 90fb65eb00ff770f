"""Names of samples, whether one is whole, how a large one is kept in a file, and what became of all that was sampled."""

import hashlib
import math
import os
from array import array
from collections.abc import Collection, Iterable, Iterator
from copy import deepcopy
from pathlib import Path

import msgspec

from rubato.actors.checkpoints.checkpoint import digest_of, sync_folder, write_through
from rubato.actors.messages.samples import MOST_FIGURES, GiveUp, Segment, Trajectory, flaw_of_logprobs, flaw_of_reward
from rubato.runtime.errors import RubatoError

INLINE_BYTES = 64 * 1024
"""Payloads up to this size lie in the Store; larger ones in a file."""


class Outcome(msgspec.Struct, frozen=True, array_like=True):
    """A trajectory's own figures, as samples.jsonl has them. Where none came `version_first` is -1, and the rest is of its last attempt."""

    version_first: int
    reward: float | None
    tokens: int = 0
    """Sampled tokens; -1 where not known."""
    turns: int = 0
    wall_s: float = 0.0
    finish_reasons: tuple[str, ...] = ()
    """Reason of each turn's end: `stop` or `length`."""
    cut: bool = False
    """Some turn ended at its limit, where that was more than one token."""
    scores: dict[str, float] = {}
    """Parts whose sum is the reward: see Trajectory."""
    info: dict[str, float] = {}
    """Info of held-out rollouts alone, whose trajectories are not kept for the trainer."""
    env_s: float = 0.0
    """Part of `wall_s` that its environment took."""
    text: str = ""
    """Text that the model wrote: of held-out rollouts alone, while their round is under way."""


FUTURE_VERSION = "future_version"


class StaleTerm(RubatoError):
    """A trainer that was replaced wants something. Nothing was changed."""


class OutOfOrder(RubatoError):
    """A step was claimed that is committed already, or one behind a step that has no groups. No group was bound."""


class PayloadLost(Exception):
    """A payload's file is missing or differs from its digest."""


def group_id(number: int) -> str:
    """Padded, so that the order of names is the order of age."""
    return f"g{number:08d}"


def trajectory_id(group: str, member: int) -> str:
    return f"{group}.{member}"


def split_id(trajectory: str) -> tuple[str, int]:
    """Group and member of a trajectory id; raises ValueError for any other text."""
    group, dot, member = trajectory.rpartition(".")
    if not dot or not member.isdecimal():
        raise ValueError(f"{trajectory!r} is no trajectory id")
    return group, int(member)


def group_number(name: str) -> int:
    """Number that `group_id` named."""
    return int(name[1:])


def seed_of(purpose: str, run_seed: int, row: int, task: str = "") -> int:
    """31-bit seed of the environment of a task's row. Held-out rows have the same in every run, so that their results compare."""
    name = f"{task}/{row}" if task else str(row)
    text = f"eval/{name}" if purpose == "eval" else f"{purpose}/{run_seed}/{name}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest()) >> 1


def noise_of(run_seed: int, trajectory: str, failures: int) -> int:
    """63-bit seed of a rollout's sampling, another one after each attempt that failed."""
    text = f"noise/{run_seed}/{trajectory}/{failures}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 1


# -- whole or not -------------------------------------------------------------------------------------------------


def outcome_of(trajectory: Trajectory) -> Outcome:
    """Outcome of a trajectory, for the ledger. Raises ValueError where nothing was sampled."""
    return msgspec.structs.replace(
        spent_of(trajectory),
        version_first=trajectory.version_first,
        reward=trajectory.reward,
        scores=trajectory.scores,
        info=trajectory.info if trajectory.ticket.purpose == "eval" else {},
    )


def spent_of(came: Trajectory | GiveUp) -> Outcome:
    """Outcome of a rollout that is no sample, for the ledger."""
    if isinstance(came, GiveUp):
        return Outcome(-1, None, came.tokens, came.turns, text=_text_of(came.played))
    tokens = sum(segment.mask.count(1) for segment in came.segments)
    return Outcome(-1, None, tokens, came.turns, came.wall_s, came.finish_reasons, came.cut, env_s=came.env_s, text=_text_of(came))


def _text_of(trajectory: Trajectory | None) -> str:
    return "" if trajectory is None or trajectory.ticket.purpose != "eval" else trajectory.text


def flaw(trajectory: Trajectory, *, newest: int, vocab_size: int | None) -> str:
    """Why training could not compute with this trajectory, by name and detail; empty where it can.

    `newest` is the newest weight version that can have sampled anything; without a `vocab_size` token ids are only checked for sign.
    Of a version that is not there yet, `future_version` is said: a Store that lost its newest writes may have forgotten it.
    """
    if found := flaw_of_reward(trajectory.reward):
        return f"reward_{found}"
    if trajectory.temperature and not 1e-6 <= trajectory.temperature <= 1e6:  # logits are divided by it in float32
        return f"bad_trajectory: its temperature is {trajectory.temperature}, which is not 0 and not within 1e-6 and 1e6"
    for what, figures in (("scores", trajectory.scores), ("numbers of info", trajectory.info)):
        if len(figures) > MOST_FIGURES or not all(map(math.isfinite, figures.values())):
            return f"bad_trajectory: its {what} are more than {MOST_FIGURES}, or one of them is not finite"
    for segment in trajectory.segments:
        if found := _flaw_of_segment(segment, vocab_size):
            return found
    versions = [span.version for segment in trajectory.segments for span in segment.spans]
    if not any(segment.mask.count(1) for segment in trajectory.segments):
        return "bad_trajectory: it has no sampled token"
    if max(versions) > newest:
        return f"{FUTURE_VERSION}: it was sampled under version {max(versions)}, and {newest} is the newest"
    if trajectory.ticket.purpose == "eval" and set(versions) != {trajectory.ticket.version}:
        return f"not_exact: it was sampled under versions {min(versions)} to {max(versions)}, and evaluates {trajectory.ticket.version}"
    if min(versions) < trajectory.ticket.version:
        return f"bad_trajectory: it was sampled under version {min(versions)}, its ticket says {trajectory.ticket.version}"
    return ""


def _flaw_of_segment(segment: Segment, vocab_size: int | None) -> str:
    num = len(segment.mask)
    if len(segment.tokens) != 4 * num or len(segment.logprobs) != 4 * num:
        sizes = f"{len(segment.tokens)} bytes of tokens, {len(segment.logprobs)} of log-probs and {num} of mask"
        return f"bad_trajectory: a segment has {sizes}, which do not belong together"
    if found := _flaw_of_tokens(segment.tokens, vocab_size):
        return found
    if segment.mask.count(0) + segment.mask.count(1) != num:
        return "bad_trajectory: a mask holds something else than 0 and 1"
    if found := flaw_of_logprobs(segment.logprobs):
        return f"bad_trajectory: {found}"
    end = sampled = 0
    for span in segment.spans:
        if not end <= span.start < span.end <= num:
            return f"bad_trajectory: the span {span.start} to {span.end} does not lie in order within {num} tokens"
        sampled += segment.mask.count(1, span.start, span.end)
        end = span.end
    if sampled != segment.mask.count(1):
        return f"bad_trajectory: spans cover {sampled} of {segment.mask.count(1)} sampled tokens"
    return ""


def _flaw_of_tokens(tokens: bytes, vocab_size: int | None) -> str:
    ids = array("i", tokens)
    if tokens[3::4].count(0) < len(ids) and min(ids) < 0:
        return f"bad_trajectory: token {min(ids)} is none of a vocabulary"
    if vocab_size is not None and ids and max(ids) >= vocab_size:
        return f"bad_trajectory: token {max(ids)} is outside the vocabulary of {vocab_size}"
    return ""


# -- files --------------------------------------------------------------------------------------------------------


def file_payload(folder: Path, name: str, payload: bytes) -> str:
    """Write `payload` to `folder`, on disk when this returns, and return its digest. Blocks; raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f"{name}.{os.urandom(4).hex()}.partial"  # a put that is asked again writes beside itself
    try:
        digest = write_through(partial, payload)
        partial.replace(folder / name)
    except OSError:
        partial.unlink(missing_ok=True)
        raise
    sync_folder(folder)
    return digest


def read_payload(folder: Path, name: str, digest: str) -> bytes:
    """The payload itself. Blocks; raises PayloadLost."""
    path = folder / name
    try:
        payload = path.read_bytes()
    except OSError as error:
        raise PayloadLost(f"sample file {path} can't be read: {error}") from error
    if digest_of(payload) != digest:
        raise PayloadLost(f"sample file {path} does not match its digest")
    return payload


def remove_payloads(folder: Path, trajectories: Collection[str]) -> None:
    """Delete the files of all attempts of samples that ended. Blocks; a file that is gone already is no error."""
    for path in folder.iterdir() if folder.is_dir() else ():
        if ".".join(path.name.split(".")[:2]) in trajectories:
            path.unlink(missing_ok=True)


def sweep_payloads(folder: Path, wanted: Collection[str]) -> None:
    """Delete the files that no sample waits for: a process was killed between writing one and its put. Blocks."""
    for path in folder.iterdir() if folder.is_dir() else ():
        if path.name not in wanted:
            path.unlink(missing_ok=True)


TRAINED = ("trained", "zero_spread")
"""Fates of samples that were in a step: without spread they count in its statistics and teach nothing."""


class KindTally(msgspec.Struct, array_like=True):
    """Counts of the samples of about one length, or of one task."""

    ended: int = 0
    """Without those that the end of the job left `unused`: it comes upon long ones more often."""
    trained: int = 0
    stale: int = 0
    """Too old to train."""

    def add(self, fate: str, num: int = 1) -> None:
        """So many ended with this fate."""
        self.ended += num
        self.trained += num * (fate in TRAINED)
        self.stale += num * (fate == "stale")


class Tally(msgspec.Struct):
    """Part of `Training`, and so as durable as the ends it counts.

    `generated` is the sum of `tokens` and of what the samples that have no fate yet hold. What was sampled in attempts whose holder died
    or fell silent is in neither: how much it was is not known.
    """

    generated: int = 0
    """Tokens sampled, as far as reported; those that an engine resumed count once."""
    tokens: dict[str, int] = {}
    """Number of these by the fate of their sample; `retried` are of attempts that another one followed, `eval` of held-out tasks."""
    lost_attempts: int = 0
    """Attempts whose tokens were never reported."""
    lengths: dict[int, KindTally] = {}
    """By the least power of two that is no less than the number of sampled tokens; 0 where none are known of."""
    tasks: dict[str, KindTally] = {}
    """By the name of the task, where it has one."""

    def tell(self, tokens: int, fate: str = "") -> None:
        """So many were sampled; their `fate`, where it is known already."""
        self.generated += tokens
        if fate:
            self.tokens[fate] = self.tokens.get(fate, 0) + tokens

    def end(self, fate: str, tokens: int, task: str = "") -> None:
        """A sample of `task` with so many `tokens`, all of them told before, ended."""
        self.tokens[fate] = self.tokens.get(fate, 0) + tokens
        if fate != "unused":
            _add(self.lengths, self.tasks, tokens, task, fate)

    def measured(self, fate: str, tokens: int) -> None:
        """A sample with this `fate` that ended while it ran, so that none of its tokens was known, has so many."""
        if tokens and (unknown := self.lengths.get(0)) is not None and unknown.ended:
            unknown.add(fate, -1)
            self.lengths.setdefault(_length(tokens), KindTally()).add(fate)

    def figures(self, held: int, trained: Iterable[tuple[int, str]]) -> Iterator[tuple[str, float]]:
        """Names of metrics and their values. `held` tokens have no fate yet; `trained` has tokens and task of each sample whose step a
        checkpoint is still to cover: it counts as trained."""
        yield "tokens/generated", self.generated
        yield "tokens/held", held
        for fate, tokens in self.tokens.items():
            yield f"tokens/{fate}", tokens
        yield "attempts/lost", self.lost_attempts
        lengths, tasks = deepcopy(self.lengths), deepcopy(self.tasks)
        for tokens, task in trained:
            _add(lengths, tasks, tokens, task, "trained")
        for kind, tallies in (("length", lengths), ("task", tasks)):
            for key, tally in tallies.items():
                if not tally.ended:
                    continue
                yield f"{kind}/{key}/ended", tally.ended
                yield f"{kind}/{key}/trained_frac", tally.trained / tally.ended
                if tally.stale:
                    yield f"{kind}/{key}/stale_frac", tally.stale / tally.ended


def _length(tokens: int) -> int:
    return 1 << (tokens - 1).bit_length() if tokens else 0


def _add(lengths: dict[int, KindTally], tasks: dict[str, KindTally], tokens: int, task: str, fate: str) -> None:
    lengths.setdefault(_length(tokens), KindTally()).add(fate)
    if task:
        tasks.setdefault(task, KindTally()).add(fate)
