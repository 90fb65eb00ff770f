"""What a trainer asks of its ranks. A `term` is one life of the trainer: ranks serve one, and begin again for the next."""

from typing import Literal

from rubato.bus.message import Ack, Buffer, Message, Request


class RankFailed(Message, frozen=True):
    """Why a rank did not do it. refused: the run can't go on so. lost: it waited for another rank in vain. no_room: `errno` of a full disk."""

    kind: Literal["refused", "lost", "raised", "no_room"]
    why: str
    errno: int = 0


class TermOpened(Message, frozen=True):
    """The rank is free for the term."""

    meet: str = ""
    """HOST:PORT at which it waits for the others, where it was asked to."""


class RankSpent(Message, frozen=True):
    """It has served another term, and has to be started again."""


class OpenTerm(Request[TermOpened | RankSpent | RankFailed], frozen=True):
    """Can you serve this term? `listen` names an address at which the rank is to wait for the others: ranks of one host meet by a file."""

    term: int
    listen: str = ""


class TermJoined(Message, frozen=True):
    """All ranks of the term are there."""

    device: str
    """Where this one computes."""


class JoinTerm(Request[TermJoined | RankFailed], frozen=True):
    """Be rank `rank` of `members`, and meet the others at `store`. Ends with any of them, and with the trainer `head`."""

    term: int
    rank: int
    members: tuple[str, ...]
    head: str
    store: str
    """Path of a file, or the HOST:PORT at which the first rank waits."""
    train: str
    """The section `train` without `auto`, as JSON."""
    address: str = ""
    """By which ranks of other hosts reach this one; empty where all are on one host."""


class RankLoaded(Message, frozen=True):
    """The step and the term of the trainer, which is not that of its ranks, that the weights stand at, and the size of their whole image."""

    step: int
    trainer_term: int
    image_bytes: int
    num_bytes: int
    """Of the rows of it that this rank writes."""
    section_bytes: int
    """Of what it writes into its host's part, where a version is in parts."""


class LoadRank(Request[RankLoaded | RankFailed], frozen=True):
    """Load `model`, or the rank's own where that is empty, or go on from `checkpoint`, where that is not empty."""

    term: int
    model: str
    checkpoint: str


class StepTrained(Message, frozen=True):
    """Metrics of the step, the same from every rank, and the tokens of it."""

    metrics: dict[str, float]
    num_tokens: int
    exchanged: tuple[int, int] = (0, 0)
    """Bytes that the rank sent the next one of its copy of the model, and its like of the next copy."""


class TrainShare(Request[StepTrained | RankFailed], frozen=True):
    """Compute your share of a step over `groups`, MessagePack of lists of trajectories."""

    term: int
    step: int
    groups: Buffer


class ShareLogprobs(Message, frozen=True):
    """MessagePack of a list for each sequence: empty where another rank computed it."""

    logprobs: Buffer


class ComputeLogprobs(Request[ShareLogprobs | RankFailed], frozen=True):
    """Log-probabilities of your share of `sequences`, MessagePack of lists of token ids."""

    term: int
    sequences: Buffer
    temperature: float


class WriteWeights(Request[Ack | RankFailed], frozen=True):
    """Write your rows of the weights into the blob that is drafted in this segment of the host."""

    term: int
    segment: int
    size_bytes: int


class RowsTaken(Message, frozen=True):
    """The rank's rows are copied."""

    sizes: dict[str, int]
    """Bytes of each file that all ranks write rows of."""
    files: dict[str, bytes]
    """The first rank's others."""
    num_bytes: int
    """Of the rows."""


class TakeRows(Request[RowsTaken | RankFailed], frozen=True):
    """Copy your rows of weights and optimiser states, for a checkpoint of the trainer's `trainer_term`."""

    term: int
    trainer_term: int


class WriteRows(Request[Ack | RankFailed], frozen=True):
    """Write the rows that were taken last into the files of `folder`; training may go on meanwhile. May be asked again."""

    term: int
    folder: str


class PartDrafted(Message, frozen=True):
    """The segment of this rank's host into which its ranks write."""

    segment: int


class DraftPart(Request[PartDrafted | RankFailed], frozen=True):
    """Draft the part of your host, as version `version` and term `trainer_term` of blob `name`: its ranks write their rows into it."""

    term: int
    name: str
    version: int
    trainer_term: int
    size_bytes: int


class WriteSection(Request[Ack | RankFailed], frozen=True):
    """Write your rows of the weights from the byte `begin` on into the part that is drafted in this segment of your host."""

    term: int
    segment: int
    size_bytes: int
    begin: int


class RangesRead(Message, frozen=True):
    """MessagePack of pairs: where some bytes of the ranges begin in the image, and these bytes."""

    pieces: Buffer


class ReadRanges(Request[RangesRead | RankFailed], frozen=True):
    """Send what the part `name` that you drafted has of these ranges of the image, MessagePack of pairs: begin and end."""

    term: int
    name: str
    ranges: Buffer


class PartShown(Message, frozen=True):
    """The part is there. `delta` and its size are of what changed in it, empty and 0 where it travels whole."""

    digest: str
    size_bytes: int
    delta: str = ""
    delta_bytes: int = 0


class ShowPart(Request[PartShown | RankFailed], frozen=True):
    """Let others have the part `name` that you drafted; all of it is written. `leaves`: engines of other hosts will read it."""

    term: int
    name: str
    leaves: bool


class RowsPart(Message, frozen=True):
    """Consecutive bytes of a rank's rows. Each of `places` says of the next ones the file, empty for the weights, where in it, and how many."""

    places: tuple[tuple[str, int, int], ...]
    data: Buffer


class ReadRows(Request[RowsPart | RankFailed], frozen=True):
    """Send `num_bytes` of the rows that were copied for a checkpoint, or written into the part `of` of your host, from the byte `begin` of all."""

    term: int
    of: str
    begin: int
    num_bytes: int


class CheckpointFound(Message, frozen=True):
    """Where the host has the checkpoint; empty where it has to be brought."""

    folder: str


class FindCheckpoint(Request[CheckpointFound | RankFailed], frozen=True):
    """Has your host the checkpoint `folder` of the trainer's, with this manifest, there or in a copy?"""

    term: int
    folder: str
    manifest: bytes


class PutFile(Request[Ack | RankFailed], frozen=True):
    """Write `data` at the byte `begin` of the file `name` of your host's copy of the checkpoint `folder`."""

    term: int
    folder: str
    name: str
    begin: int
    data: Buffer
