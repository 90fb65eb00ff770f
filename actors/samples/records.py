"""What the buffer keeps in the Store, and what of it a checkpoint carries.

samples/training           Training
samples/group/<group>      Group, from its first ticket until it ends (held-out rounds are not kept)
samples/payload/<sample>   MessagePack Trajectory of a scored member, while its group lives; larger ones lie in files
stream samples/ends        SampleEnd of each sample, in the order in which they ended
"""

from typing import NamedTuple

import msgspec

from actors.samples.group import Group, SampleEnd
from runtime.store.store import Store

TRAINING = "samples/training"
GROUP = "samples/group/"
PAYLOAD = "samples/payload/"
ENDS = "samples/ends"


class Training(msgspec.Struct):
    """Where training stands."""

    version: int = 0
    """The newest published weights: steps trained so far."""
    committed: int = 0
    """Steps that a durable checkpoint covers."""
    epoch: int = 0
    cursor: int = 0
    """Groups admitted so far: the next one's number and task."""
    ended: int = 0
    """Index of the newest end."""
    raised_step: int = 0
    """The step in which training raised last."""
    raises: int = 0
    """How often it did in that step."""


class Receipt(msgspec.Struct, frozen=True, array_like=True):
    """What a step trains, for the checkpoint that will cover it: enough to end its samples should the Store forget them."""

    step: int
    cursor: int
    """Groups admitted when the step was handed out."""
    ends: tuple[SampleEnd, ...]
    """Of every member, groups in the order of the batch."""


class Records(NamedTuple):
    """What the Store has of a run."""

    training: Training
    groups: list[Group]


async def read_records(store: Store) -> Records:
    """Groups come oldest first."""
    training = await store.get(TRAINING)
    groups = await store.scan(GROUP)
    return Records(
        msgspec.msgpack.decode(training, type=Training) if training else Training(),
        [msgspec.msgpack.decode(value, type=Group) for _, value in sorted(groups.items())],
    )
