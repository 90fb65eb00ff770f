"""Counts what became of everything that was sampled: tokens by fate, and which share of each length was trained."""

from collections.abc import Iterable, Iterator
from copy import deepcopy

import msgspec

TRAINED = ("trained", "zero_spread")
"""Fates of samples that were in a step: without spread they count in its statistics and teach nothing."""


class KindTally(msgspec.Struct, array_like=True):
    """Of the samples of about one length, or of one task."""

    ended: int = 0
    """Without those that the end of the job left `unused`: it comes upon long ones more often."""
    trained: int = 0


class Tally(msgspec.Struct):
    """Part of `Training`, and so as durable as the ends it counts.

    `generated` is the sum of `tokens` and of what the samples that have no fate yet hold. What was sampled in attempts whose holder died
    or fell silent is in neither: nobody knows how much it was.
    """

    generated: int = 0
    """Tokens sampled, as far as anybody told; those that an engine resumed count once."""
    tokens: dict[str, int] = {}
    """Of these, by the fate of their sample; `retried` are of attempts that another one followed, `eval` of held-out tasks."""
    lost_attempts: int = 0
    """Attempts of whose tokens nobody told."""
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
            _add(self.lengths, self.tasks, tokens, task, fate in TRAINED)

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
            _add(lengths, tasks, tokens, task, True)
        for kind, tallies in (("length", lengths), ("task", tasks)):
            for key, tally in tallies.items():
                yield f"{kind}/{key}/ended", tally.ended
                yield f"{kind}/{key}/trained_frac", tally.trained / tally.ended


def _add(lengths: dict[int, KindTally], tasks: dict[str, KindTally], tokens: int, task: str, is_trained: bool) -> None:
    found = [lengths.setdefault(1 << (tokens - 1).bit_length() if tokens else 0, KindTally())]
    if task:
        found.append(tasks.setdefault(task, KindTally()))
    for tally in found:
        tally.ended += 1
        tally.trained += is_trained
