"""The seam for how batches are made: which groups are opened, what becomes of a complete one, and which ones a step trains.

`samples.policy` names classes of one's own, `package.module:Class` or `file.py:Class`; sections such as `tail_batching` name further ones
(actors/plugins.py). Each subclasses `PolicyPlugin`, overrides what it changes, and passes every other question on to the policy `below` it;
below all of them is `PlainPolicy`. The sample buffer alone carries out what they say, and journals what they have to remember.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, Self

import msgspec

from rubato.actors.samples.group import Group, PolicyRecord, Receipt
from rubato.planning.staleness import Admission, AdmissionView, HandOver, SupplyView, admit, hand_over
from rubato.runtime.errors import ConfigError

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger

    from rubato.actors.samples.groups import Groups
    from rubato.runtime.config import Config


class Ending(NamedTuple):
    """How a group ends that is complete and shall not train."""

    fate: str
    """Fate of the group's samples."""
    why: str
    """A sentence for the user, should group after group end so: what they had in common, and what to do about it."""


class BatchPolicy(Protocol):
    """The questions that the sample buffer asks."""

    def admit(self, view: AdmissionView) -> Admission:
        """How many further groups may be opened now."""
        ...

    def complete(self, group: Group) -> Ending | None:
        """Ending of a group that has all its outcomes, enough of them scored. None: it may be trained. Asked again where a sample of
        it was lost."""
        ...

    def next_batch(self, view: SupplyView) -> HandOver:
        """Which ready groups the step trains, or why it waits."""
        ...


class PlainPolicy:
    """The default: a group for every free slot; each may be trained; the oldest first, none left behind that would grow too old."""

    def admit(self, view: AdmissionView) -> Admission:
        return admit(view)

    def complete(self, group: Group) -> Ending | None:
        return None

    def next_batch(self, view: SupplyView) -> HandOver:
        return hand_over(view)


@dataclass(frozen=True)
class PolicyJob:
    """Parts of its job that a plug-in may use."""

    config: Any
    """The sample buffer's configuration, by sections: `config.train.batch_groups`."""
    now: Callable[[], float]
    """Loop time, in seconds."""
    tell: Callable[[str], None]
    """Shows the user a sentence."""
    log: "FilteringBoundLogger"


class PolicyPlugin:
    """Base of policies that a job may have: it changes nothing. All of it is called on the event loop and must not block."""

    key: ClassVar[str] = ""
    """Under which `state` is journaled; no two plug-ins of a job have the same. Empty where there is no state."""
    draws: ClassVar[bool] = False
    """Whether it draws prompts from the mixture itself, and opens groups with them: see `open`."""

    def __init__(self, below: BatchPolicy, groups: "Groups") -> None:
        self.below, self.groups = below, groups

    @classmethod
    def of(cls, below: BatchPolicy, groups: "Groups", job: PolicyJob) -> Self:
        """The plug-in as the configuration has it."""
        return cls(below, groups)

    @classmethod
    def check(cls, job: "Config") -> None:
        """Raises ValueError, a sentence, for a configuration that it can't go with: before the job starts."""

    # -- questions ----------------------------------------------------------------------------------------------

    def admit(self, view: AdmissionView) -> Admission:
        """As `BatchPolicy`."""
        return self.below.admit(view)

    def complete(self, group: Group) -> Ending | None:
        """As `BatchPolicy`."""
        return self.below.complete(group)

    def next_batch(self, view: SupplyView) -> HandOver:
        """As `BatchPolicy`."""
        return self.below.next_batch(view)

    def open(self) -> bool | None:
        """Open further groups by `groups.launch`, where there may be some; whether there were any. None: groups are opened as `admit` says,
        each with the next prompt of the mixture."""
        return None

    # -- what happens -------------------------------------------------------------------------------------------

    def waiting(self, places: int) -> None:
        """So many more rollout places are empty for want of a slot; fewer where negative."""

    def settled(self, group: Group) -> None:
        """A member of `group` has its outcome, or its sample was lost."""

    def asked(self, step: int, ess: float, kl: float) -> None:
        """The trainer asks for the batch of `step`; see `Claim`. It asks again until it has it."""

    def bound(self, step: int) -> None:
        """`groups.steps[step]` is the batch of `step` now."""

    def figures(self, step: int) -> dict[str, float]:
        """Metrics for the row of `step`, which is bound; asked whenever its batch is claimed."""
        return {}

    def trained(self, step: int) -> None:
        """Every step up to `step` was trained, maybe anew."""

    def committed(self, step: int) -> None:
        """A durable checkpoint covers every step up to `step`."""

    def given_up(self, steps: Sequence[int]) -> None:
        """The groups of these steps ended untrained; the steps get others."""

    def forgotten(self, receipt: Receipt) -> None:
        """The Store lost its newest writes: of steps up to that of `receipt`, the newest that a checkpoint covers, groups are as it says."""

    # -- what is remembered -------------------------------------------------------------------------------------

    def state(self) -> Any:
        """State that must survive a restart, as msgspec encodes it; None: none. Set `groups.changes.training` where it changed."""
        return None

    @property
    def needed(self) -> str:
        """Why a run with this state can't go on without the plug-in, a sentence; empty where it can, and the state is forgotten."""
        return ""

    def restored(self, state: msgspec.Raw | None) -> None:
        """Groups are as the Store has them, and so is the `state`; None in a run that did not have the plug-in until now."""


MakePolicy = Callable[[BatchPolicy, "Groups"], PolicyPlugin]


def records_of(plugins: Iterable[PolicyPlugin]) -> dict[str, PolicyRecord]:
    """State that each plug-in has to remember, by its key."""
    return {
        plugin.key: PolicyRecord(msgspec.Raw(msgspec.msgpack.encode(state)), plugin.needed)
        for plugin in plugins
        if (state := plugin.state()) is not None
    }


def restore(plugins: Iterable[PolicyPlugin], records: Mapping[str, PolicyRecord]) -> None:
    """Give each plug-in what it remembered. Raises ConfigError where one is missing that the run can't go on without."""
    known = {plugin.key for plugin in plugins}
    for key, record in records.items():
        if record.needed and key not in known:
            raise ConfigError(record.needed)
    for plugin in plugins:
        plugin.restored(records[plugin.key].state if plugin.key in records else None)
