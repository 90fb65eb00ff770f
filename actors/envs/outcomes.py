"""Judges failed rollouts: which are worth a sentence to the user, and when none can be expected to succeed any more."""

import re
from collections import deque

from actors.envs.failures import GaveUp, Subject, sentence
from actors.messages.samples import Ticket

FIRST = 32
"""When this many rollouts ended and none got through, none ever will."""

RECENT = 64
"""Window of the share below: eight groups of eight."""

MAX_SHARE = 0.95
"""Above this share of failures nothing is left to learn from."""

MAX_DETAIL = 300
"""Characters of a failure's own words that are shown."""

DIGITS = re.compile(r"\d+")

MAX_NOTICES = 5
"""Kinds of failure the user is told about; the log has all of them."""


ELSEWHERE = "reward_failed"
"""The reward service judges its own functions."""


class RolloutRecord:
    """How rollouts fared lately. Only failures that another attempt would meet again count: a lost worker or engine says nothing."""

    def __init__(self, subject: Subject, reset_tries: int) -> None:
        self._subject = subject
        self._reset_tries = reset_tries
        self._recent: deque[bool] = deque(maxlen=RECENT)
        self._ever_good = False
        self._told: set[tuple[str, str]] = set()

    def good(self) -> None:
        """A rollout got through."""
        self._ever_good = True
        self._recent.append(False)

    def bad(self, ticket: Ticket, end: GaveUp) -> tuple[str, str]:
        """(notice, verdict): sentences for the user, each empty where there is nothing to say; a verdict ends the job."""
        if end.reason == ELSEWHERE or (end.retry and end.reason != "crashed"):
            return "", ""
        self._recent.append(True)
        text, kind = self._told_of(ticket, end)
        known = kind in self._told or len(self._told) >= MAX_NOTICES
        self._told.add(kind)
        return "" if known else text, self._verdict(text, " in their environment" if end.failure else "")

    def _told_of(self, ticket: Ticket, end: GaveUp) -> tuple[str, tuple[str, str]]:
        """The sentence, and what makes two failures the same to a reader."""
        if (failure := end.failure) is not None:
            tries = 0 if failure.method == "step" else self._reset_tries
            text = sentence(self._subject, failure, task=ticket.task, seed=ticket.seed, tries=tries)
            return text, (failure.outcome, failure.what.partition("(")[0])
        detail = " ".join(end.detail.split())[:MAX_DETAIL]
        text = f"a rollout ended as {end.reason} (task {ticket.task}, seed {ticket.seed}): {detail}"
        return f"{text}. Log: {self._subject.log}", (end.reason, DIGITS.sub("", detail))

    def _verdict(self, text: str, where: str) -> str:
        num, failed = len(self._recent), sum(self._recent)
        if num < FIRST or (self._ever_good and (num < RECENT or failed <= MAX_SHARE * num)):
            return ""
        return f"{text}. {failed} of the last {num} rollouts failed{where}"
