"""Actor: state that only its own handlers touch, reached by typed messages."""

import asyncio
import inspect
import random
import types
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    NamedTuple,
    Protocol,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

from bus.message import Message, Request, reply_types, tag_of

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger

    from runtime.blobs.blob import BlobStore
    from runtime.config import ActorConfig
    from runtime.config import Config as Job
    from runtime.observe.metrics import Metrics
    from runtime.observe.trace import Trace
    from runtime.observe.waits import Waits
    from runtime.ref import Ref
    from runtime.registry import ActorRecord
    from runtime.store.store import Store

ResultT = TypeVar("ResultT")


class RunInfo(NamedTuple):
    """The run every actor of a job belongs to. Paths below `folder` are laid out in the architecture page, section 5."""

    id: str
    folder: Path
    seed: int
    steps: int
    window_s: float = 0.0
    """The Store may forget what it acknowledged less than so many seconds ago."""


class HandlerSpec(NamedTuple):
    """One handler: which method takes which message, and how many run at once."""

    method: str
    message: type[Message]
    replies: Mapping[str, type[Message]]
    concurrency: int
    outlives_asker: bool


class Context(Protocol):
    """What the kernel gives an actor."""

    name: str
    node: str
    """The node agent of its host."""
    run: RunInfo
    store: "Store"
    blobs: "BlobStore"
    rng: random.Random
    log: "FilteringBoundLogger"
    metrics: "Metrics"
    waits: "Waits"
    trace: "Trace"

    @property
    def incarnation(self) -> int: ...
    def new_id(self, prefix: str) -> str: ...
    def spawn(self, work: Coroutine[Any, Any, ResultT], *, name: str) -> asyncio.Task[ResultT]: ...
    async def offload(self, fn: Callable[..., ResultT], *args: Any, cost_s: float = 0.0) -> ResultT: ...
    def ref(self, target: str) -> "Ref": ...
    def peers(self, role: str) -> tuple[str, ...]: ...
    def finish(self, reason: str, *, failed: bool = False) -> None: ...
    def progress(self, step: int, steps: int, row: dict[str, float]) -> None: ...
    def notice(self, text: str, *, good: bool = False) -> None: ...
    def find(self, name: str) -> "ActorRecord | None": ...
    async def change(self) -> None: ...
    async def bury(self, name: str) -> None: ...


def handler(method: Callable[..., Any] | None = None, *, concurrency: int = 1, outlives_asker: bool = False) -> Any:
    """Mark a method as the handler of the message its one argument is annotated with.

    With `concurrency` 1 messages are handled one after another, in order per sender. Above, each runs as a task of the actor
    and up to `concurrency` at once; order is lost. When the link to the asker breaks, the handler is cancelled, unless it
    `outlives_asker`: then it goes on, because the asker's successor will ask for the same thing again.
    """

    def mark(function: Any) -> Any:
        function.__rubato_handler__ = (concurrency, outlives_asker)
        return function

    return mark(method) if method is not None else mark


class Actor:
    """Base of every actor: subclass, declare `role`, `Config` and handlers. The kernel builds it, one instance per incarnation."""

    role: ClassVar[str] = ""
    Config: ClassVar["type[ActorConfig] | None"] = None
    """The sections it reads; None where it reads none."""
    handlers: ClassVar[Mapping[str, HandlerSpec]] = {}
    drain_order: ClassVar[int] = 50
    """When the job is drained and saved, actors of a lower order drain first."""
    least: ClassVar[int] = 0
    """A job that has the role starts with at least this many, and drains no further."""
    needs: ClassVar[tuple[str, ...]] = ()
    """Other roles without which this one can't work: a job that has it must have them."""
    most: ClassVar[int] = 1024
    """And never has more than this at once."""

    @classmethod
    def check(cls, job: "Job") -> None:
        """Compare what the sections of a job say with each other. Raises ValueError with one sentence that names the keys."""

    @classmethod
    def check_host(cls, config: Any) -> None:
        """Look whether this host has what the config names (packages, devices, user files), before the job's preparations.

        Quick, without heavy imports, and without running user code. Raises ConfigError, the sentence that ends the launch.
        """

    @classmethod
    def preflight(cls, config: Any, folder: Path) -> None:
        """Look at what this actor will need, before any process of the run in `folder` is started; quick, and without heavy imports.

        Raises ConfigError, the sentence that ends the launch.
        """

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        found = dict(cls.handlers)
        for name, member in list(vars(cls).items()):
            if hasattr(member, "__rubato_handler__"):
                spec = _inspect(cls, name, member)
                found[tag_of(spec.message)] = spec
        cls.handlers = found

    def __init__(self, config: Any, context: Context) -> None:
        self.config = config
        self._context = context
        self.name = context.name
        self.run = context.run
        self.store = context.store
        self.blobs = context.blobs
        self.rng = context.rng
        self.log = context.log
        self.metrics = context.metrics
        self.waits = context.waits
        self.trace = context.trace

    @property
    def incarnation(self) -> int:
        """Which life of `name` this is; an actor whose lease lapsed comes back under a higher one."""
        return self._context.incarnation

    async def on_start(self) -> None:
        """Load state and spawn loops. Messages are delivered, and the actor is announced ready, once this returns."""

    async def on_drain(self) -> None:
        """Take no new work and finish or hand back what runs. Handlers still answer meanwhile."""

    async def on_stop(self) -> None:
        """Release what the actor holds; called once, also after a failure in `on_start`."""

    async def on_peers(self, joined: tuple[str, ...], left: tuple[str, ...]) -> None:
        """Instances became ready or went away; one that restarted is in both (`left` happened first)."""

    def new_id(self, prefix: str) -> str:
        """An id unique in the run, from the actor's seed."""
        return self._context.new_id(prefix)

    def spawn(self, work: Coroutine[Any, Any, ResultT], *, name: str) -> asyncio.Task[ResultT]:
        """Run `work` as a task owned by this actor: its failure is the actor's, and it is cancelled when the actor stops."""
        return self._context.spawn(work, name=name)

    async def offload(self, fn: Callable[..., ResultT], *args: Any, cost_s: float = 0.0) -> ResultT:
        """Run blocking `fn` in a thread (live), or inline plus `cost_s` virtual seconds (simulation)."""
        return await self._context.offload(fn, *args, cost_s=cost_s)

    def ref(self, target: str) -> "Ref":
        """A reference to the actor called `target` (`engine-1`), or to any ready instance of that role (`engine`)."""
        return self._context.ref(target)

    def peers(self, role: str) -> tuple[str, ...]:
        """Names of the ready instances of `role`, sorted."""
        return self._context.peers(role)

    def finish(self, reason: str, *, failed: bool = False) -> None:
        """End the job: every actor is drained and stopped. `reason` is one sentence for the user."""
        self._context.finish(reason, failed=failed)

    def progress(self, step: int, row: dict[str, float]) -> None:
        """Tell the node agent that one more step of the job is done; `row` is its line of metrics.jsonl."""
        self._context.progress(step, self.run.steps, row)

    def notice(self, text: str, *, good: bool = False) -> None:
        """Show the user one sentence now, and log it. `good` tells of something that went well."""
        self._context.notice(text, good=good)


def _inspect(cls: type[Actor], name: str, member: Callable[..., Any]) -> HandlerSpec:
    """Check a handler's annotations against its message, when the class is defined."""
    where = f"{cls.__name__}.{name}"
    hints = get_type_hints(member)
    returned = hints.pop("return", None)
    parameters = [p for p in inspect.signature(member).parameters if p != "self"]
    if len(parameters) != 1 or parameters[0] not in hints or not inspect.iscoroutinefunction(member):
        raise TypeError(f"{where} must be async and take one annotated message")
    message = hints[parameters[0]]
    if not (isinstance(message, type) and issubclass(message, Message)):
        raise TypeError(f"{where} takes {message!r}, which is not a Message")
    replies: dict[str, type[Message]] = (
        dict(reply_types(cast("type[Request[Any]]", message))) if issubclass(message, Request) else {}
    )
    declared: set[str] = set() if returned in (None, type(None)) else {tag_of(t) for t in _members(returned)}
    if declared != set(replies):
        raise TypeError(f"{where} returns {sorted(declared)}, but {message.__name__} is answered by {sorted(replies)}")
    return HandlerSpec(name, message, replies, *member.__rubato_handler__)  # type: ignore[attr-defined]


def _members(annotation: Any) -> tuple[type[Message], ...]:
    return get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)
