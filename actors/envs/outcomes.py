"""Judges failed rollouts: which are worth a sentence to the user, and when the environment itself must be broken."""

from collections import deque

from actors.envs.failures import EnvFailure, Subject, sentence
from actors.messages.samples import Ticket

FIRST = 32
"""When this many rollouts ended and none got through its environment, none ever will."""

RECENT = 64
"""Window of the share below: eight groups of eight."""

MAX_SHARE = 0.95
"""Above this share of failures nothing is left to learn from."""

MAX_NOTICES = 5
"""Kinds of failure the user is told about; the log has all of them."""


class EnvRecord:
    """How environments fared lately. Only their own failures count: a lost worker or engine says nothing about them."""

    def __init__(self, subject: Subject, reset_tries: int) -> None:
        self._subject = subject
        self._reset_tries = reset_tries
        self._recent: deque[bool] = deque(maxlen=RECENT)
        self._ever_good = False
        self._told: set[tuple[str, str]] = set()

    def good(self) -> None:
        """A rollout got through its environment."""
        self._ever_good = True
        self._recent.append(False)

    def bad(self, ticket: Ticket, failure: EnvFailure) -> tuple[str, str]:
        """(notice, verdict): sentences for the user, each empty where there is nothing to say; a verdict ends the job."""
        if failure.outcome == "env_lost":
            return "", ""
        self._recent.append(True)
        tries = 0 if failure.method == "step" else self._reset_tries
        text = sentence(self._subject, failure, task=ticket.task, seed=ticket.seed, tries=tries)
        kind = (failure.outcome, failure.what.partition("(")[0])
        known = kind in self._told or len(self._told) >= MAX_NOTICES
        self._told.add(kind)
        return "" if known else text, self._verdict(text)

    def _verdict(self, text: str) -> str:
        num, failed = len(self._recent), sum(self._recent)
        if num < FIRST or (self._ever_good and (num < RECENT or failed <= MAX_SHARE * num)):
            return ""
        return f"{text}. {failed} of the last {num} rollouts failed in their environment"
