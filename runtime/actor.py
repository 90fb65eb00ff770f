"""Actor: state that only its own handlers touch, reached by typed messages."""

import asyncio
import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from rubato.bus.message import Message, Request, reply_types, tag_of

if TYPE_CHECKING:
    from rubato.runtime.config import ActorConfig
    from rubato.runtime.config import Config as Job
    from rubato.runtime.courier import Ref
    from rubato.runtime.kernel import Kernel
    from rubato.runtime.registry import RankRecord

ResultT = TypeVar("ResultT")

current_kernel: "ContextVar[Kernel]" = ContextVar("rubato_kernel")
"""Set by each kernel for all tasks of its actor."""


def ref(target: str) -> "Ref":
    """The result of `Actor.ref`, for code that runs inside an actor without being handed it: an `async` environment, for instance.

    Raises LookupError outside of an actor: in a worker process, which has no way to the run, or in a program of its own.
    """
    try:
        return current_kernel.get().ref(target)
    except LookupError:
        raise LookupError(
            f"{target} can't be asked here: this code does not run inside an actor. Make the environment's methods async, "
            "so that it runs in the env_manager's own process."
        ) from None


class RunInfo(NamedTuple):
    """The run every actor of a job belongs to. Paths below `folder` are listed in docs/architecture.md, section 1."""

    id: str
    folder: Path
    seed: int
    steps: int
    window_s: float = 0.0
    """The Store may forget what it acknowledged less than so many seconds ago."""
    hidden: Callable[[str], str] = str
    """`run.hidden(text)` has the names of the config's variables instead of their values: for texts of user code that leave this process."""


class HandlerSpec(NamedTuple):
    """One handler: which method takes which message, whether it returns a future of its reply, and how many run at once."""

    method: str
    message: type[Message]
    replies: Mapping[str, type[Message]]
    returns_future: bool
    concurrency: int
    outlives_asker: bool


def handler(method: Callable[..., Any] | None = None, *, concurrency: int = 1, outlives_asker: bool = False) -> Any:
    """Mark a method as the handler of the message its one argument is annotated with.

    With `concurrency` 1 messages are handled one after another, in order per sender. Above, each runs as a task of the actor
    and up to `concurrency` at once; order is lost. When the link to the asker breaks, the handler is cancelled, unless it
    `outlives_asker`: then it goes on, because the asker's successor will ask for the same thing again.

    A method that is not `async` returns a future of its reply, and costs no task: for what waits long and often, and does little itself.
    It needs a `concurrency` above 1; to cancel the handler is to cancel the future.
    """

    def mark(function: Any) -> Any:
        function.__rubato_handler__ = (concurrency, outlives_asker)
        return function

    return mark(method) if method is not None else mark


OWN = frozenset({
    "_kernel", "blobs", "config", "directory", "finish", "log", "metrics", "name", "node", "notice", "offload", "peers", "progress",
    "ref", "run", "spawn", "store", "trace", "waits",
})  # fmt: skip
"""Names that `Actor.__init__` sets: a member of a subclass by such a name would be hidden by it."""


class Handles:
    """Base of what has handlers: an actor, and a plug-in that answers some of an actor's messages (`Actor.plugins`)."""

    handlers: ClassVar[Mapping[str, HandlerSpec]] = {}

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        found = dict(cls.handlers)
        for name, member in list(vars(cls).items()):
            if hasattr(member, "__rubato_handler__"):
                spec = _inspect(cls, name, member)
                found[tag_of(spec.message)] = spec
        cls.handlers = found


class Actor(Handles):
    """Base of every actor: subclass, declare `role`, `Config` and handlers. The kernel builds it, one instance per incarnation."""

    role: ClassVar[str] = ""
    Config: ClassVar["type[ActorConfig] | None"] = None
    """The sections it reads; None where it reads none."""
    plugins: Sequence[Handles] = ()
    """Mechanisms that its config names, set by its constructor: a message that one of them has a handler for is the actor's to take."""
    drain_order: ClassVar[int] = 50
    """When the job is drained and saved, actors of a lower order on the same host drain first."""
    drains_across: ClassVar[bool] = False
    """Also those of the launching host, where this one is on another: else hosts that joined drain first."""
    least: ClassVar[int] = 0
    """A job that has the role starts with at least this many, and drains no further."""
    provides: ClassVar[frozenset[str]] = frozenset()
    """Services that it has for others, which find it by them whatever its role: `peers` takes a role or such a word."""
    needs: ClassVar[tuple[str, ...]] = ()
    """Other roles, or what they provide, without which this one can't work: a job that has it must have them."""
    most: ClassVar[int] = 1024
    """And never has more than this at once."""

    @classmethod
    def check(cls, job: "Job") -> None:
        """Compare what the sections of a job say with each other. Raises ValueError with one sentence that names the keys."""

    @classmethod
    def brings(cls, tree: Mapping[str, Any]) -> Mapping[str, Any]:
        """The roles that a job needs beside this one for what its config, `tree`, says: name → section of `actors`. Those that it names itself
        stay as they are. `tree` is not checked yet.
        """
        return {}

    @classmethod
    def starts(cls, config: Any) -> bool:
        """False: its config says that the job is to go on without it, and no process of it is started."""
        return True

    @classmethod
    def plugin_classes(cls, job: "Job") -> "tuple[type[Handles], ...]":
        """Classes of `plugins` that a job has: their messages count to what its hosts must agree on."""
        return ()

    def plugin_for(self, tag: str) -> Handles | None:
        """The plug-in that takes messages of this tag, made now, where neither the actor nor `plugins` has a handler for it; None: there is none."""
        return None

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

    @classmethod
    def keeps_copies(cls, config: Any) -> bool:
        """Whether the actor keeps copies elsewhere, from which `bring_back` makes the run folder anew once that is gone."""
        return False

    @classmethod
    def bring_back(cls, config: Any, folder: Path) -> str:
        """Bring what the actor kept elsewhere into the run folder `folder`, before the run is resumed there; a sentence for the user.

        Blocks; raises ConfigError, the sentence that ends the launch.
        """
        return ""

    @classmethod
    def preload(cls, config: Any) -> tuple[str, ...] | None:
        """Modules that its process needs besides the one of its class. They are imported once per host, in a process of which it is forked.

        None for an actor that needs a process of its own from the start, such as one that uses CUDA.
        """
        return ()

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if hidden := sorted(name for name in OWN if hasattr(cls, name)):
            raise TypeError(f"{cls.__name__}.{hidden[0]} is what every actor has already: give it another name")

    def __init__(self, config: Any, kernel: "Kernel") -> None:
        self.config = config
        self.name = kernel.name
        self.node = kernel.node
        """The node agent of its host."""
        self.run = kernel.run
        self.store = kernel.store
        self.blobs = kernel.blobs
        self.log = kernel.log
        self.metrics = kernel.metrics
        self.waits = kernel.waits
        """`with self.waits.on(…):` around whatever takes long: the monitor shows it, and who is waited for."""
        self.trace = kernel.trace
        self.directory = kernel.directory
        """Actors that are in the run: `find(name)` has the record of a ready actor."""
        self.peers = kernel.directory.ready
        """`peers(role)`: names of the ready instances of that role, sorted."""
        self.ref = kernel.ref
        """`ref(target)`: a reference to the actor called `engine-1`, or to any ready `engine`, for asking and telling."""
        self.spawn = kernel.spawn
        """`spawn(work, name=…)` runs `work` as a task of this actor: its failure is the actor's, and it is cancelled when the actor stops."""
        self.offload = kernel.offload
        """`await offload(fn, *args, cost_s=0.0)` runs blocking `fn` in a thread (live), or inline plus `cost_s` virtual seconds (simulation)."""
        self.finish = kernel.finish
        """`finish(reason, failed=False)` ends the job: every actor is drained and stopped. `reason` is one sentence for the user."""
        self.progress = kernel.progress
        """`progress(step, row)` tells the node agent that one more step is done; `row` is its line of metrics.jsonl."""
        self.notice = kernel.notice
        """`notice(text, good=False)` shows the user one sentence now, and logs it. `good` tells of something that went well."""
        self._kernel = kernel

    @property
    def incarnation(self) -> int:
        """Which life of `name` this is; an actor whose lease lapsed comes back under a higher one."""
        return self._kernel.incarnation

    async def on_disk(self, path: Path, write: Callable[..., ResultT], *args: Any) -> ResultT:
        """As `offload`, for what writes to `path`: where its disk is full it waits for room, of which the user is told, and writes again.

        So `write` may be called after it failed half-way. Raises the OSError where there is no room and the actor is to stop.
        """
        return await self._kernel.on_disk(path, write, *args)

    async def saved(self, seconds: float) -> None:
        """Tell the node agent, at the end of `on_drain`, how long it took to save what the actor did."""
        await self._kernel.saved(seconds)

    def show_ranks(self, ranks: Sequence["RankRecord"]) -> None:
        """Let the actor's record, and the monitor, have the processes among which it shares out its work."""
        self._kernel.ranks = tuple(ranks)

    async def on_start(self) -> None:
        """Load state and spawn loops. Messages are delivered, and the actor is announced ready, once this returns."""

    async def on_drain(self) -> None:
        """Take no new work and finish or hand back what runs. Handlers still answer meanwhile."""

    async def on_stop(self) -> None:
        """Release what the actor holds; called once, also after a failure in `on_start`."""

    async def on_peers(self, joined: tuple[str, ...], left: tuple[str, ...]) -> None:
        """Instances became ready or went away; one that restarted is in both (`left` happened first)."""


def _inspect(cls: type[Handles], name: str, member: Callable[..., Any]) -> HandlerSpec:
    """Check a handler's annotations against its message, when the class is defined."""
    where = f"{cls.__name__}.{name}"
    hints = get_type_hints(member)
    returned = hints.pop("return", None)
    parameters = [p for p in inspect.signature(member).parameters if p != "self"]
    returns_future = get_origin(returned) is asyncio.Future and member.__rubato_handler__[0] > 1  # type: ignore[attr-defined]
    is_async = inspect.iscoroutinefunction(member)
    if len(parameters) != 1 or parameters[0] not in hints or is_async == returns_future:
        raise TypeError(f"{where} must be async (or return a Future, with a concurrency above 1) and take one annotated message")
    if returns_future:
        (returned,) = get_args(returned)
    message = hints[parameters[0]]
    if not (isinstance(message, type) and issubclass(message, Message)):
        raise TypeError(f"{where} takes {message!r}, which is not a Message")
    replies: dict[str, type[Message]] = dict(reply_types(cast("type[Request[Any]]", message))) if issubclass(message, Request) else {}
    declared: set[str] = set() if returned in (None, type(None)) else {tag_of(t) for t in _members(returned)}
    if declared != set(replies):
        raise TypeError(f"{where} returns {sorted(declared)}, but {message.__name__} is answered by {sorted(replies)}")
    return HandlerSpec(name, message, replies, returns_future, *member.__rubato_handler__)  # type: ignore[attr-defined]


def _members(annotation: Any) -> tuple[type[Message], ...]:
    return get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)
