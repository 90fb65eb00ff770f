"""The seam for mechanisms that go along with an engine and its requests."""

from typing import TYPE_CHECKING

from actors.engines.engine import Engine, Work
from actors.messages.generation import GenerateReply
from planning.engine_info import EngineInfo
from runtime.actor import Handles

if TYPE_CHECKING:
    from actors.engines.worker import EngineRequest, EngineWorker


class EngineHook(Handles):
    """A mechanism's view of one engine. Subclass it and override what is wanted; messages that it has handlers for (`@handler`) are the
    worker's to take.

    `actors/plugins.py` says which there are, and what makes a job have them: a section of the config, the first message of a type, or
    the route of a request.
    """

    def __init__(self, worker: "EngineWorker") -> None:
        self.worker = worker

    def told(self, info: EngineInfo) -> EngineInfo:
        """What others are told of the engine, where its own word is not enough."""
        return info

    async def begin(self, engine: Engine) -> None:
        """After the engine has loaded its model, before it takes newer weights."""

    def swapped(self) -> None:
        """After new weights are in place."""

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
