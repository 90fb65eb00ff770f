"""The seam for mechanisms that go along with a proxy's requests and engines, besides its picker."""

from typing import TYPE_CHECKING

from actors.messages.generation import Aborted, Completion, Generate, GenerateReply, NotItsTurn
from planning.engine_info import EngineInfo
from runtime.actor import Handles

if TYPE_CHECKING:
    from actors.proxy.placement import EngineSeat, ProxyRequest
    from actors.proxy.proxy import LLMProxy


class ProxyHook(Handles):
    """A mechanism's view of one proxy. Subclass it and override what is wanted; messages that it has handlers for (`@handler`) are the
    proxy's to take.

    `actors/plugins.py` says which there are, and what makes a job have them: a section of the config, the first message of a type, or
    the first actor of a role. All is called in the proxy's event loop, between two messages, and returns at once.
    """

    def __init__(self, proxy: "LLMProxy") -> None:
        self.proxy = proxy

    async def run(self) -> None:
        """What the hook does beside requests, as a task of the proxy."""

    def came_or_went(self) -> None:
        """After a request came, or was answered."""

    def asked(self, engine: "EngineSeat", request: Generate) -> None:
        """Before an engine is asked."""

    def answered(self, engine: "EngineSeat", reply: GenerateReply) -> None:
        """After an engine answered."""

    def ended(self, request: "ProxyRequest", outcome: Completion | Aborted | Exception) -> None:
        """After a request has its answer."""

    def too_late(self, request: Generate, known: "ProxyRequest | None") -> NotItsTurn | None:
        """What an asker hears whose deadline passed, where it is not the usual sentence."""
        return None

    def engine_changed(self, info: EngineInfo) -> None:
        """After an engine told how it is now."""

    def peers_left(self, names: tuple[str, ...]) -> None:
        """After these actors went away, or were started again."""

    def version_began(self, version: int) -> None:
        """After the first token under these weights, on any engine."""
