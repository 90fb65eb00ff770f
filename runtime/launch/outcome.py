"""What the node agent tells the launcher: how the job ended, and what there is to show meanwhile."""

from typing import NamedTuple, Protocol

from runtime.messages import Progress


class JobOutcome(NamedTuple):
    """How the job ended: `kind` is done, failed or interrupted; `sentence` is for the user."""

    kind: str
    sentence: str


class Screen(Protocol):
    """Where the launcher shows what happens; see runtime/launch/console.py."""

    def progress(self, message: Progress) -> None: ...
    def notice(self, text: str, *, good: bool = False) -> None: ...
    def actors(self, ready: int, wanted: int) -> None: ...
