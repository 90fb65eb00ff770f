"""How environments and rollouts end badly: named outcomes, with the sentence a user reads."""

from typing import Literal, NamedTuple

EnvOutcome = Literal["env_reset_failed", "env_step_failed", "env_timeout", "env_bad_result", "env_lost"]


class EnvFailure(Exception):
    """A call into an environment failed. `outcome` names how; `env_lost` was not its own fault and may be tried again.

    `what` continues a sentence: "raised in reset: KeyError('goal')". `where` is the last frame, if known.
    """

    def __init__(self, outcome: EnvOutcome, method: str, what: str, where: str = "") -> None:
        super().__init__(what)
        self.outcome: EnvOutcome = outcome
        self.method = method
        self.what = what
        self.where = where


class GaveUp(Exception):
    """A rollout ended without a score; `retry` when another attempt may fare better."""

    def __init__(
        self, reason: str, detail: str = "", *, retry: bool = False, failure: EnvFailure | None = None
    ) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail
        self.retry = retry
        self.failure = failure


class Subject(NamedTuple):
    """What a sentence about an environment speaks of. `log` is the path of the log to look into."""

    target: str
    log: str


def sentence(subject: Subject, failure: EnvFailure, *, task: int | None = None, seed: int, tries: int = 0) -> str:
    """One line for the user: which environment did what, on which task, how often, and where to read more."""
    raised, colon, cause = failure.what.partition(": ")
    on = "" if failure.method == "import" else f" (seed {seed})" if task is None else f" (task {task}, seed {seed})"
    parts = [f"env {subject.target} {raised}{on}{colon}{cause}"]
    if tries:
        parts.append(f"{tries} of {tries} tries failed{'' if task is None else '; its group is dropped'}")
    elif task is not None:
        parts.append("The rollout leaves its group")
    return ". ".join([*parts, f"Log: {subject.log}"])
