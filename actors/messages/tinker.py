"""A Tinker server and its trainer: operations on models, in the order of each model's `seq`."""

from typing import ClassVar, Final, Literal

import msgspec

from rubato.bus.message import Ack, Message, Request

TINKER: Final = "tinker"
"""Role of the actor that speaks HTTP. Its trainer has the role `trainer`: engines look for weights there."""

Loss = Literal["cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "gspo"]


# -- operations ---------------------------------------------------------------------------------------------------------


class Tensor(msgspec.Struct, frozen=True, array_like=True):
    """Dense and C-ordered; `data` is little-endian."""

    dtype: Literal["float32", "int64"]
    shape: tuple[int, ...]
    data: bytes


class Datum(msgspec.Struct, frozen=True, array_like=True):
    """One sequence that a loss is taken of."""

    tokens: bytes
    """int32 little-endian: the model's input, of T tokens. Targets are shifted by the client."""
    inputs: dict[str, Tensor]
    """What the loss wants, by its name there. Each has shape [T]; `target_tokens` and `weights` of cross_entropy may have [T, K]."""


class Begin(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The model's first operation: an adapter of this shape."""

    base: str
    """As the client names it; kept beside what is saved."""
    rank: int
    seed: int = 0
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True
    start: str = ""
    """Folder that Save wrote, to begin with, in place of an adapter that adds nothing."""
    optimizer: bool = False
    """The optimiser of `start` too."""


class ForwardBackward(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Add the gradient of the sum of a loss over these sequences to that which waits for OptimStep."""

    loss: str
    """A Loss; another one is the client's error."""
    data: tuple[Datum, ...]
    config: dict[str, float] = {}
    """By the loss's names: clip_low_threshold, clip_high_threshold, beta."""
    forward_only: bool = False
    """No gradient: what the model says of the sequences, and the loss."""


class OptimStep(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A step of AdamW with the gradient that has gathered, which is gone after it."""

    learning_rate: float
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0
    """Of all of the adapter's gradients together; 0 clips none."""


class Save(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Write the adapter as it is now into `folder`, in peft's format, whole or not at all. One that is there already is replaced."""

    folder: str
    """Absolute."""
    optimizer: bool = True
    """With the optimiser, so that Load and Begin can go on from it; sampling needs none."""


class Load(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Go on with the adapter that Save wrote into `folder`: of this rank and these targets. A gradient that waits is dropped."""

    folder: str
    optimizer: bool = False
    """Its optimiser too; else it begins anew."""


class Follow(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Where the model stands is published under the adapter `Operate.model`, now and after each OptimStep and Load, before those are answered."""


Operation = Begin | ForwardBackward | OptimStep | Save | Load | Follow
"""As msgpack (`msgspec.msgpack.encode`) it is also what the operations log holds."""


def changes(operation: Operation) -> bool:
    """Whether the model is another after it, so that a trainer that began anew wants it again."""
    return not (isinstance(operation, Save) or (isinstance(operation, ForwardBackward) and operation.forward_only))


# -- what came of them ---------------------------------------------------------------------------------------------------


class Computed(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Of a ForwardBackward."""

    logprobs: tuple[bytes, ...]
    """Of each datum's targets, float32 little-endian, shaped as they are."""
    losses: tuple[bytes, ...]
    """What each target adds to the loss, likewise."""
    metrics: dict[str, float]
    """By Tinker's names, `NAME:REDUCTION`: what several requests say of one batch is put together by it."""


class Stepped(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Of an OptimStep."""

    version: int
    """How often OptimStep and Load have changed the model since its Begin."""
    metrics: dict[str, float]


class Stands(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Of Begin, Save, Load and Follow: where the model stands after it."""

    version: int


Outcome = Computed | Stepped | Stands


class Operated(Message, frozen=True):
    """Carried out, now or before."""

    seq: int
    outcome: Outcome
    covered: int
    """The trainer goes on from a file after this one, if it has to: up to here the model's operations are needed no more. -1: from Begin."""


class Behind(Message, frozen=True):
    """The trainer began anew, and has the model as it was after `covered`: what came after that is wanted again, in its order.

    -1: all of it, Begin first.
    """

    covered: int


class OperationFailed(Message, frozen=True):
    """Nothing changed: the operation isn't sent again, and no `Operate.after` names it."""

    seq: int
    reason: str
    """One sentence."""
    category: Literal["user", "server"]


class Operate(Request[Operated | Behind | OperationFailed], frozen=True):
    """One operation on a model. It runs once: by `seq` a repeated one is answered from what came of it, while it is the newest of its model
    (or one of few before that). One at a time of each model; models don't wait for each other's answers.
    """

    idempotent: ClassVar[bool] = True
    model: str
    """A name that an adapter can have: 1 to 128 letters, digits, and characters of _ @ : + = -"""
    seq: int
    """From 0, which is Begin; it grows, perhaps with gaps."""
    after: int
    """`seq` of the newest operation before it that changed the model and did not fail (`changes`); -1 for Begin. What the trainer lacks of
    those it says in Behind; others may be left out when operations are sent again."""
    operation: Operation


# -- out of order ----------------------------------------------------------------------------------------------------------


class ForgetModel(Request[Ack], frozen=True):
    """The model is at its end: its adapter, its files of the trainer and its published versions go. What was saved stays."""

    idempotent: ClassVar[bool] = True
    model: str


class SamplerReady(Message, frozen=True):
    """Engines can have `version` of the adapter."""

    version: int


class SamplerRefused(Message, frozen=True):
    """`reason` is one sentence."""

    reason: str
    behind: bool = False
    """The trainer began anew, and lacks operations of the model, as in Behind."""


class PrepareSampler(Request[SamplerReady | SamplerRefused], frozen=True):
    """Publish what Save wrote into `folder` as an adapter of its own, for as long as this trainer lives, or until it is withdrawn."""

    idempotent: ClassVar[bool] = True
    adapter: str
    folder: str


class WithdrawSampler(Request[Ack], frozen=True):
    """Requests under it end as Aborted; it may be prepared again."""

    idempotent: ClassVar[bool] = True
    adapter: str


class Scored(Message, frozen=True):
    """Of each token the log-probability (float32 little-endian); of the first NaN. With `top` also the likeliest at each place."""

    logprobs: bytes
    top_ids: bytes = b""
    """int32 [T, top], likeliest first; of the first token -1."""
    top_logprobs: bytes = b""
    """float32 [T, top]."""


class Score(Request[Scored | SamplerRefused], frozen=True):
    """Log-probabilities of a sequence, under what Save wrote into `folder`, under a model as it stands, or under the base model."""

    idempotent: ClassVar[bool] = True
    tokens: bytes
    """int32 little-endian."""
    folder: str = ""
    model: str = ""
    top: int = 0
    version: int = 0
    """Of `model`, at least."""
