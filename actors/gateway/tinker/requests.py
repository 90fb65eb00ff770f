"""Bodies of Tinker's requests in JSON, as its SDK sends them. Keys that aren't known are passed over."""

import asyncio
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import msgspec

from rubato.actors.gateway.dialect import MOST_STOPS, STOP_LENGTH, UNREADABLE
from rubato.actors.gateway.session import Refused
from rubato.actors.gateway.tinker.journal import NAME
from rubato.actors.messages.tinker import OptimStep

if TYPE_CHECKING:
    from starlette.requests import Request

BodyT = TypeVar("BodyT")

MOST_SAMPLES = 1024
"""Completions of one request."""

MOST_TOP = 32

MOST_DAYS = 3650

MOST_RANK = 512
"""Of train.lora.rank too."""

Number = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
"""By which a client tells what it makes or asks of one thing; it becomes a part of names. Clients of a handle count from a random billion on."""

MOST_IDS = 256
"""That end a completion."""


LEAST_TOP_P = 1e-6


async def body_of(request: "Request", most: int, limit_s: float, *, kept: int = 0) -> tuple[bytes, bool]:
    """The body, and whether it is whole: of one beyond `most` bytes its first `kept`. Raises Refused for one that does not come whole."""
    from starlette.requests import ClientDisconnect

    body, size = bytearray(), 0
    try:
        async with asyncio.timeout(limit_s):
            async for piece in request.stream():
                size += len(piece)
                if size <= most:
                    body += piece
                elif kept > 0:
                    body = (body + piece)[:kept] if len(body) < kept else body[:kept]
                if size > 8 * most:
                    break  # its client is not heard out
    except TimeoutError:
        raise Refused(408, "timeout", f"the request did not come whole within {limit_s:g} s") from None
    except ClientDisconnect:
        raise Refused(400, "invalid_request_error", "the request did not come whole") from None
    return bytes(body), size <= most


def read(body: bytes, kind: type[BodyT]) -> BodyT:
    """Raises Refused for a body that is none of that kind."""
    try:
        return msgspec.json.decode(body or b"{}", type=kind)
    except UNREADABLE as error:
        raise invalid(f"the body is not what is asked for here: {error}") from None


def invalid(why: str) -> Refused:
    return Refused(400, "invalid_request_error", why)


class Numbered(msgspec.Struct, frozen=True):
    """Of any request to a model: which, and its turn."""

    model_id: str
    seq_id: int


class CreateSession(msgspec.Struct, frozen=True):
    tags: list[str] = []
    user_metadata: dict[str, Any] | None = None
    sdk_version: str = ""
    display_name: str | None = None


class OfSession(msgspec.Struct, frozen=True):
    session_id: str


class OfModel(msgspec.Struct, frozen=True):
    model_id: str


class OfPath(msgspec.Struct, frozen=True):
    tinker_path: str = ""
    path: str = ""


class LoraConfig(msgspec.Struct, frozen=True):
    rank: int
    seed: int | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True

    def check(self) -> None:
        """Raises Refused."""
        if not 1 <= self.rank <= MOST_RANK:
            raise invalid(f"lora_config.rank is {self.rank}; it is 1 to {MOST_RANK}")
        if not self.train_mlp and not self.train_attn:
            raise invalid(
                "lora_config has neither train_mlp nor train_attn, and the unembedding can have no adapter here: set one of the two"
            )


class OptimizerConfig(msgspec.Struct, frozen=True):
    type: str = "adamw"

    def check(self) -> None:
        """Raises Refused."""
        if self.type != "adamw":
            raise invalid(f"optimizer_config.type={self.type[:64]} is not there: models here are trained by adamw")


class CreateModel(msgspec.Struct, frozen=True):
    session_id: str
    model_seq_id: Number
    base_model: str
    user_metadata: dict[str, Any] | None = None
    lora_config: LoraConfig | None = None
    optimizer_config: OptimizerConfig = OptimizerConfig()


class AdamParams(msgspec.Struct, frozen=True):
    learning_rate: float = 0.0001
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


class OptimStepRequest(msgspec.Struct, frozen=True):
    model_id: str
    seq_id: int
    adam_params: AdamParams | None = None
    optimizer_params: dict[str, Any] | None = None

    def step(self) -> OptimStep:
        """Raises Refused."""
        if self.adam_params is None:
            kind = (self.optimizer_params or {}).get("type", "")
            raise invalid(f"optimizer {str(kind)[:64] or 'without adam_params'} is not there: models here are trained by adamw")
        given = self.adam_params
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(given, name) < 1:
                raise invalid(f"adam_params.{name} is {getattr(given, name):g}; it is from 0 to less than 1")
        for name in ("learning_rate", "eps", "weight_decay"):
            if getattr(given, name) < 0:
                raise invalid(f"adam_params.{name} is {getattr(given, name):g}; it is 0 at least")
        clip = max(given.grad_clip_norm, 0.0)
        return OptimStep(given.learning_rate, given.beta1, given.beta2, given.eps, given.weight_decay, clip)


class SaveWeights(msgspec.Struct, frozen=True):
    """Of save_weights and save_weights_for_sampler."""

    model_id: str
    seq_id: int
    path: str | None = None
    ttl_seconds: int | None = None
    overwrite: bool = False
    user_metadata: dict[str, str] | None = None
    sampling_session_seq_id: Number | None = None
    kind: str = "snapshot"

    def check(self) -> None:
        """Raises Refused."""
        if self.path is not None and not NAME.fullmatch(self.path):
            raise invalid(f"path {self.path[:128]!r} is no name: that has up to 128 letters, digits, and characters of _ . -")
        if self.kind not in ("snapshot", "inflight"):
            raise invalid(f"kind {self.kind[:64]!r} is neither snapshot nor inflight")
        if self.ttl_seconds is not None and not 0 < self.ttl_seconds <= MOST_DAYS * 86_400:
            raise invalid(f"ttl_seconds is {self.ttl_seconds}; it is 1 to ten years")


class LoadWeights(msgspec.Struct, frozen=True):
    path: str
    optimizer: bool
    model_id: str | None = None
    seq_id: int | None = None
    session_id: str | None = None
    model_seq_id: Number | None = None
    base_model: str | None = None
    user_metadata: dict[str, Any] | None = None
    optimizer_config: OptimizerConfig | None = None
    weights_access_token: str | None = None

    def check(self) -> None:
        """Raises Refused."""
        if self.weights_access_token:
            raise invalid("weights_access_token is not there: a tenant's paths are its own")
        if self.optimizer_config is not None:
            self.optimizer_config.check()


class CreateSampler(msgspec.Struct, frozen=True):
    session_id: str
    sampling_session_seq_id: Number
    base_model: str | None = None
    model_path: str | None = None


class Chunk(msgspec.Struct, frozen=True):
    type: str = "encoded_text"
    tokens: list[int] = []


class Prompt(msgspec.Struct, frozen=True):
    chunks: list[Chunk]


class SamplingParams(msgspec.Struct, frozen=True):
    max_tokens: int | None = None
    seed: int | None = None
    stop: str | list[str | int] | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0

    def ends(self) -> tuple[tuple[int, ...] | None, tuple[str, ...] | None]:
        """Token ids and texts that end a completion; None and None: the model's own end. Raises Refused."""
        if self.stop is None:
            return None, None
        given = [self.stop] if isinstance(self.stop, str) else self.stop
        ids = tuple(each for each in given if isinstance(each, int))
        texts = tuple(each for each in given if isinstance(each, str))
        if ids and texts:
            raise invalid("sampling_params.stop has texts and token ids: one of the two can be had")
        return (ids, None) if ids else (None, texts or None)


class SampleRequest(msgspec.Struct, frozen=True):
    prompt: Prompt
    sampling_params: SamplingParams
    num_samples: int = 1
    sampling_session_id: str | None = None
    seq_id: Number | None = None
    base_model: str | None = None
    model_path: str | None = None
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: int = 0
    topk_sample_logprobs: int = 0
    target_prompt_logprobs: Any = None
    prompt_alt_tokens_k: int = 0
    prompt_logprobs_last_n: int | None = None
    record_stability_info: bool | None = None

    def tokens(self) -> list[int]:
        """Raises Refused."""
        if strange := next((chunk.type for chunk in self.prompt.chunks if chunk.type != "encoded_text"), None):
            raise invalid(f"the prompt has a chunk of type {strange[:64]!r}: models here read text alone")
        return [token for chunk in self.prompt.chunks for token in chunk.tokens]

    def check(self) -> None:
        """Raises Refused, which names what can't be had."""
        absent = {
            "topk_sample_logprobs": self.topk_sample_logprobs,
            "target_prompt_logprobs": self.target_prompt_logprobs,
            "prompt_alt_tokens_k": self.prompt_alt_tokens_k,
            "record_stability_info": self.record_stability_info,
            "sampling_params.top_k": self.sampling_params.top_k > 0,
        }
        if named := [name for name, value in absent.items() if value]:
            raise invalid(f"{named[0]} can't be had here: leave it out")
        if not 1 <= self.num_samples <= MOST_SAMPLES:
            raise invalid(f"num_samples is {self.num_samples}; it is 1 to {MOST_SAMPLES}")
        wanted, length = self.sampling_params, len(self.tokens())
        if wanted.max_tokens is not None and wanted.max_tokens < 1:
            raise invalid(f"sampling_params.max_tokens is {wanted.max_tokens}; it is 1 at least")
        if not 0 <= wanted.temperature <= 100:
            raise invalid(f"sampling_params.temperature is {wanted.temperature:g}; it is 0 to 100")
        if not 0 <= wanted.top_p <= 1:
            raise invalid(f"sampling_params.top_p is {wanted.top_p:g}; it is 0 to 1")
        ids, texts = wanted.ends()
        if len(texts or ()) > MOST_STOPS or not all(0 < len(text) <= STOP_LENGTH for text in texts or ()):
            raise invalid(f"sampling_params.stop is up to {MOST_STOPS} texts of 1 to {STOP_LENGTH} characters, or token ids")
        if len(ids or ()) > MOST_IDS or not all(0 <= each < 2**31 for each in ids or ()):
            raise invalid(f"sampling_params.stop is up to {MOST_IDS} token ids, or texts")
        if not 0 <= self.topk_prompt_logprobs <= MOST_TOP:
            raise invalid(f"topk_prompt_logprobs is {self.topk_prompt_logprobs}; it is 0 to {MOST_TOP}")
        if self.topk_prompt_logprobs and not self.prompt_logprobs:
            raise invalid("topk_prompt_logprobs goes with prompt_logprobs")
        if self.prompt_logprobs_last_n is not None and not 1 <= self.prompt_logprobs_last_n <= max(length - 1, 1):
            raise invalid(f"prompt_logprobs_last_n is {self.prompt_logprobs_last_n}; the prompt has {length} tokens")


class Retrieve(msgspec.Struct, frozen=True):
    request_id: str
    allow_metadata_only: bool = False
