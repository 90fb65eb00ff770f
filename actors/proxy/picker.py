"""The seam for what decides which engine takes a request, and its default: the engine of the session's last turn, or the least loaded."""

from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from rubato.actors import plugins
from rubato.actors.messages.generation import Aborted, Completion, Generate, GenerateReply, NotItsTurn, Route
from rubato.planning.engine_info import EngineInfo
from rubato.planning.routing import Choice, Wait, choose
from rubato.runtime.actor import Actor, Handles
from rubato.runtime.importer import load_object

if TYPE_CHECKING:
    from rubato.actors.proxy.placement import EngineSeat, ProxyRequest
    from rubato.actors.proxy.proxy import LLMProxy


class PickerHost(NamedTuple):
    """The proxy as its picker sees it. The mappings are live: read them at each look, and change nothing in them."""

    actor: Actor
    config: Any
    """The proxy's sections, see actors/proxy/section.py."""
    engines: "Mapping[str, EngineSeat]"
    running: "Mapping[str, ProxyRequest]"
    """Requests that are not answered yet, those that wait included."""
    num_waiting: Callable[[], int]
    look: Callable[[], None]
    """Picks again for those that wait: for a picker that changed its mind without any engine having changed."""


class EnginePicker(Protocol):
    """Picks an engine for each request. `proxy.picker` names its class, which is built with a PickerHost; derive it from LeastLoaded.

    Everything is called in the proxy's event loop, between two messages: it must return at once. `pick` decides; by the other calls a picker
    hears what became of its choice, and none of them has to do anything.
    """

    def pick(self, request: "ProxyRequest") -> str | Wait:
        """The name of the engine that takes the request now; or why it waits. It is asked again as soon as any engine has changed."""
        ...

    def queue(self, request: "ProxyRequest") -> str:
        """Name of the queue in which the request waits. Where the first of a queue finds no engine, all of that queue wait, and no other."""
        ...

    def goes_first(self, request: "ProxyRequest") -> bool:
        """Whether it stands at the head of its queue."""
        ...

    def route(self, request: "ProxyRequest", engine: "EngineSeat") -> Route:
        """The route that goes to the engine along with the request."""
        ...

    def waits(self, request: "ProxyRequest") -> None:
        """It stands in line now."""

    def seated(self, request: "ProxyRequest", engine: "EngineSeat") -> None:
        """The engine is about to be asked."""

    def released(self, request: "ProxyRequest", engine: "EngineSeat") -> None:
        """The request has left that engine, answered or not."""

    def after(self, request: "ProxyRequest", engine: "EngineSeat", reply: GenerateReply | None) -> None:
        """The engine gave the request back or away by this reply, or (None) lost it: it is to be picked for again."""

    def ended(self, request: "ProxyRequest", outcome: GenerateReply | Exception) -> None:
        """After the request's asker has an answer."""

    def why(self, request: "ProxyRequest") -> str:
        """Half a sentence that says what the request waits for; may be empty."""
        ...

    def joined(self, engine: "EngineSeat") -> "EnginePicker":
        """A new engine may be picked from now on. Returns who picks from now on: itself, or a picker that engines of this kind need."""
        ...

    def changed(self, engine: "EngineSeat") -> None:
        """Its `info` has changed."""

    def left(self, engine: "EngineSeat") -> None:
        """It is not to be picked any more."""

    def version_began(self, version: int) -> None:
        """The first token was sampled under these weights, on any engine."""


class LeastLoaded(EnginePicker):
    """The engine that has the session's KV cache while that is fair to the others, else the one with the fewest requests for its slots."""

    def __init__(self, host: PickerHost) -> None:
        self.host = host
        self._sessions: dict[str, str] = {}
        """Session → engine of its last turn, the newest last. Forgetting one costs a recomputed cache, nothing else."""

    def usable(self, request: "ProxyRequest") -> "Collection[EngineSeat]":
        """The engines among which `pick` looks for the least loaded."""
        return self.host.engines.values()

    def pick(self, request: "ProxyRequest") -> str | Wait:
        return self.least_loaded(request, self.usable(request))

    def least_loaded(self, request: "ProxyRequest", engines: "Collection[EngineSeat]") -> str | Wait:
        """The least loaded of `engines`; see planning/routing.py."""
        asked = request.request
        found = choose(engines, asked.session, asked.weights, self.last_engine(request))
        return found.engine if isinstance(found, Choice) else found

    def last_engine(self, request: "ProxyRequest") -> str | None:
        """That of the session's last turn."""
        return self._sessions.get(self.session(request))

    def session(self, request: "ProxyRequest") -> str:
        """Name of the session, whose requests share one KV cache."""
        return request.request.session

    def queue(self, request: "ProxyRequest") -> str:
        return ""

    def goes_first(self, request: "ProxyRequest") -> bool:
        """One that has tokens already holds up a group whose others are further."""
        return request.num_tokens > 0

    def route(self, request: "ProxyRequest", engine: "EngineSeat") -> Route:
        return request.request.route

    def seated(self, request: "ProxyRequest", engine: "EngineSeat") -> None:
        session = self.session(request)
        self._sessions.pop(session, None)
        self._sessions[session] = engine.name
        if len(self._sessions) > self.host.config.proxy.sessions_kept:
            del self._sessions[next(iter(self._sessions))]

    def why(self, request: "ProxyRequest") -> str:
        return ""

    def joined(self, engine: "EngineSeat") -> EnginePicker:
        path = plugins.picker_for(engine.info) if type(self) is LeastLoaded else None
        return self if path is None else plugins.load(path)(self.host)


def picker_of(host: PickerHost) -> EnginePicker:
    """The picker that the config names: by `proxy.picker`, or by the section of a mechanism."""
    config = host.config
    path = plugins.picker_of(config)
    if config.proxy.picker:
        return load_object(config.proxy.picker)(host)
    return LeastLoaded(host) if path is None else plugins.load(path)(host)


class ProxyHook(Handles):
    """A mechanism's view of one proxy. Subclass it and override what is wanted; messages that it has handlers for (`@handler`) are the
    proxy's to take.

    `actors/plugins.py` says which there are, and what makes a job have them: a section of the config, the first message of a type, or
    the first actor of a role. All is called in the proxy's event loop, between two messages, and returns at once.
    """

    def __init__(self, proxy: "LLMProxy") -> None:
        self.proxy = proxy

    async def run(self) -> None:
        """Work of the hook beside requests, as a task of the proxy."""

    def came_or_went(self) -> None:
        """After a request came, or was answered."""

    def ended(self, request: "ProxyRequest", outcome: Completion | Aborted | Exception) -> None:
        """After a request has its answer."""

    def too_late(self, request: Generate, known: "ProxyRequest | None") -> NotItsTurn | None:
        """Answer to an asker whose deadline passed, where it is not the usual sentence."""
        return None

    def engine_changed(self, info: EngineInfo) -> None:
        """After an engine has sent its new state."""

    def peers_left(self, names: tuple[str, ...]) -> None:
        """After these actors went away, or were started again."""

    def version_began(self, version: int) -> None:
        """After the first token under these weights, on any engine."""
