"""The gateway: agents from outside play trajectories by their own requests over HTTP, and are trained, token for token.

    POST /sessions                   {"task"?, "metadata"?} → {"session_id", "api_key", "base_url", "task", "row", "seed", "purpose", "version", …}

and what actors/gateway/server.py answers in a session. A session is a ticket of the sample buffer: its group, its bound on age and its fate
are as those of any rollout.
"""

import asyncio
import importlib.util
import os
import re
import secrets
import socket
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple
from urllib.parse import urlsplit

import msgspec
from pydantic import AfterValidator, Field

from rubato.actors import plugins
from rubato.actors.envs.environment import Observation
from rubato.actors.envs.hosting import TOOLS, EnvHost, HostedEnv
from rubato.actors.envs.manager import CANCELLED, EnvManager
from rubato.actors.envs.recorder import GaveUp, Recorder
from rubato.actors.envs.rollout import EnvDriver, RolloutContext, RolloutHook
from rubato.actors.envs.section import EnvSection
from rubato.actors.gateway.deadlines import Deadlines
from rubato.actors.gateway.renderers import Renderers
from rubato.actors.gateway.server import Answering, SessionServer, body_of, decoded, until_gone
from rubato.actors.gateway.session import Refused, Session
from rubato.actors.messages.samples import GiveUp, Put
from rubato.bus.address import bind_listener, host_port, spelt
from rubato.runtime.config import Config as Job
from rubato.runtime.config import Section
from rubato.runtime.config.sections import ListenAddress
from rubato.runtime.errors import ConfigError
from rubato.runtime.kernel import Kernel

if TYPE_CHECKING:
    from starlette.requests import Request

FILE = "gateway.json"
"""Of the run's folder, for its owner alone: address and admin key."""

HOST = re.compile(r"[A-Za-z0-9._\-]{1,255}(:\d{1,5})?|\[[0-9A-Fa-f:.]{2,45}\](:\d{1,5})?")
"""A name or an address, and a port, as a header says it."""


CHANGES = "the model's chat template does not leave a conversation as it was when more follows: it {}"
FOLLOWS = {
    "append": ", while sessions go on with the tokens that were kept: a server that goes by that template shows the model others than it was "
    "trained on, unless gateway.history=rerender trains each turn behind what the template shows",
    "rerender": ", so by gateway.history=rerender each turn behind such a change begins a segment of its own",
}
"""By `gateway.history`."""


UNASKED = "agents that open sessions"
"""What it waits for while none does, and none plays."""


def run_over() -> Refused:
    """The job is complete."""
    return Refused(410, "run_over", "the run takes no more sessions")


def drained() -> Refused:
    """This gateway ends, and the run may go on with another."""
    return Refused(503, "draining", "the gateway takes no more sessions, and the run may go on with another at the same address: ask again")


class GatewaySection(Section):
    """Sessions for agents that come from outside, over HTTP."""

    listen: ListenAddress = Field(default="127.0.0.1:0", min_length=1)
    """HOST:PORT; port 0 takes a free one. RUN/gateway.json has the address and the key."""
    url: Annotated[str, Field(pattern=r"^(https?://[^\s?#]+)?$"), AfterValidator(lambda given: given.rstrip("/"))] = ""
    """Where agents reach it, such as https://train.example behind a proxy; empty: where the request that opens their session did."""
    wait_s: float = Field(default=600.0, gt=0)
    """Longest that POST /sessions waits for a place in a batch; after it 503, to be tried again."""
    queue_s: float = Field(default=600.0, gt=0)
    """A turn without its answer for so long, in line for an engine or sampled, is given up: 503, to be tried again in the same session."""
    idle_s: float = Field(default=600.0, gt=0)
    """A session without a request for so long is over, and another attempt takes its place."""
    train: Literal["main", "all"] = "main"
    """main: of a session what led to its last turn, or goes on from a turn that did; all: side requests too, such as one for a title."""
    history: Literal["append", "rerender"] = "append"
    """append: a turn follows the tokens that were kept. rerender: where the chat template shows earlier turns by others, such as without what
    was reasoned, it begins a segment of its own behind those."""
    max_waiting: int = Field(default=1024, ge=1)
    """Requests for sessions that may wait at once; more are answered 429."""


class Address(msgspec.Struct):
    """What clients need, in FILE."""

    url: str = ""
    admin_key: str = ""

    @property
    def port(self) -> int:
        """0: none."""
        return urlsplit(self.url).port or 0


class Opened(NamedTuple):
    """What an opening has waited for."""

    session: Session
    prompt: Observation
    """Of the environment's reset."""
    tools: Sequence[Mapping[str, Any]]
    """Those that the environment declares."""


class Waiting(NamedTuple):
    """An opening that waits for its session."""

    opened: asyncio.Future[Opened]
    task: str | None
    """Which it wants; None: any."""

    @property
    def waits(self) -> bool:
        return not self.opened.done()

    def leave(self) -> None:
        """The client that waited has gone: a session that came in that moment is never asked, and another attempt takes its place."""
        if not self.waits and not self.opened.cancelled() and self.opened.exception() is None:
            self.opened.result().session.fail(GaveUp(CANCELLED, retry=True), "cancelled")
        self.opened.cancel()


class Opening(msgspec.Struct):
    """Body of POST /sessions."""

    task: str | None = None
    """Of the config's tasks the one that is wanted; None: any."""
    metadata: Any = None
    row: Any = None
    seed: Any = None
    group: Any = None
    """These three are the sample buffer's to say: a group's sessions play one row under one seed."""


class Gateway(EnvManager):
    """An environment manager whose rollouts are played by clients that open sessions: it asks for as many tickets as openings wait."""

    role: ClassVar[str] = "gateway"
    provides: ClassVar[frozenset[str]] = frozenset({"env_manager"})
    least: ClassVar[int] = 0
    most: ClassVar[int] = 1

    class Config(EnvManager.Config):
        gateway: GatewaySection = GatewaySection()

    @classmethod
    def check(cls, job: Job) -> None:
        super().check(job)
        if "env_manager" in job.actors:
            raise ValueError("actors has gateway and env_manager, and both would play the same tasks: leave one of them out")
        tasks = job.section("tasks")
        if agent := next(filter(None, (job.section("env").agent, *(task.agent for task in tasks.values()))), ""):
            raise ValueError(
                f"actors has a gateway, whose agents come from outside, and agent={agent} is started by an env_manager: leave one out"
            )
        if plugins.VERIFIERS in (job.section("env").target, *(plugins.VERIFIERS for task in tasks.values() if task.verifiers)):
            raise ValueError("actors has a gateway, whose agents come from outside, and verifiers brings its own: leave one out")

    @classmethod
    def check_host(cls, config: Any) -> None:
        super().check_host(config)
        if importlib.util.find_spec("starlette") is None:
            raise ConfigError("rubato.actors.gateway.gateway needs the package starlette: pip install -e '.[serve]'")

    def __init__(self, config: Any, kernel: Kernel) -> None:
        super().__init__(config, kernel)
        self.hooks.append(Outside(self, self._playing))
        self._section: GatewaySection = config.gateway
        self._within = Deadlines(self._section.queue_s)
        self._server = SessionServer(self.run.folder.name, secrets.token_urlsafe(32))
        self._openings: deque[Waiting] = deque()
        self._unmatched: dict[OutsideDriver, str] = {}
        """Drivers that have no agent yet, and their tasks: their environments are being made ready, or none that waits wants the task."""
        self._wanted = asyncio.Event()
        """Another opening waits, or one less; a new one each time."""
        self._renderers = Renderers(self.run.folder / self.config.model.path, self.offload)
        self._unasked, self._is_unasked = self.waits.on(UNASKED, blocks_actor=True), False
        self._served: asyncio.Task[None] | None = None
        self._url = ""
        self._refusal: Refused | None = None
        """Of whatever would open a session: it takes no more."""

    async def on_start(self) -> None:
        """Listen; an address that can't be had ends the job with a sentence."""
        from starlette.routing import Route  # for jobs alone that have this actor

        host, port = host_port(self._section.listen)
        before = await self.offload(self._read_address)
        self._server.admin_key = before.admin_key or self._server.admin_key
        try:
            listening = await self._bound(host, port, before)
        except OSError as error:
            self.finish(
                f"the gateway can't listen at {self._section.listen}: {error.strerror}. Set gateway.listen=127.0.0.1:0 for a free port",
                failed=True,
            )
            return
        self._url = f"http://{spelt(host or '127.0.0.1')}:{listening.getsockname()[1]}"
        await super().on_start()
        opening = Route("/sessions", Answering(self._open, method="POST"))
        self._served = self.spawn(self._server.serve(listening, opening), name=f"{self.name}.http")
        await self.offload(self._write_address)
        self._tell_unasked()
        self.log.info("gateway_listening", url=self._url)

    async def on_stop(self) -> None:
        """Who still waits is not answered."""
        await super().on_stop()
        if self._served is not None:
            self._served.cancel()
            await asyncio.wait((self._served,))

    async def _bound(self, host: str, port: int, before: Address) -> socket.socket:
        """Where the config leaves the port open, the one of before, at which clients ask again. Raises OSError."""
        if port == 0 and before.port:
            with suppress(OSError):
                return bind_listener(host, before.port)
        return bind_listener(host, port)

    def _read_address(self) -> Address:
        """What a gateway of this run wrote before it ended; an empty one where there was none. Blocks."""
        try:
            return msgspec.json.decode((self.run.folder / FILE).read_bytes(), type=Address)
        except (OSError, msgspec.MsgspecError):
            return Address()

    def _write_address(self) -> None:
        path = self.run.folder / FILE
        draft = path.with_suffix(".draft")
        draft.unlink(missing_ok=True)
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(msgspec.json.encode(Address(self._url, self._server.admin_key)))
        draft.replace(path)

    # -- tickets ------------------------------------------------------------------------------------------------------

    def _hosts_of(self) -> dict[str, EnvHost]:
        """An environment is there where the config names one."""
        default = EnvSection.model_fields["target"].default
        for name, task in self._tasks.items():
            if task.env.target == default:
                self._tasks[name] = task._replace(env=task.env.model_copy(update={"target": plugins.OWN_TASKS, "kwargs": {}}))
        return super()._hosts_of()

    async def _admit(self) -> None:
        refusal = run_over()
        try:
            await super()._admit()
        except asyncio.CancelledError:
            refusal = drained()
            raise
        finally:
            self._refusal = refusal
            self._tell_unasked()
            while self._openings:
                opening = self._openings.popleft()
                if opening.waits:
                    opening.opened.set_exception(refusal)

    async def _look_at_tasks(self) -> None:
        """Show too what follows where the chat template changes earlier turns, in place of what follows for environments."""
        for change in [await self._renderers.change(context) for context in self._rollouts.values()]:
            if change:
                await self._show_once("reasoning_dropped", CHANGES.format(change) + FOLLOWS[self._section.history])
        await super()._look_at_tasks()

    def _room(self) -> int:
        named = Counter(each.task for each in self._openings if each.task is not None)
        coming = Counter(self._unmatched.values())
        own = (named & coming).total()  # have a ticket of the task that they name
        others = min(len(self._openings) - named.total(), coming.total() - own)  # one whose ticket is there may have left
        return min(len(self._openings) - own - others, self.config.env.concurrency - len(self._running))

    def begins(self, driver: "OutsideDriver", context: RolloutContext) -> None:
        """Its ticket is there, and its environment comes next."""
        self._unmatched[driver] = next(name for name, each in self._rollouts.items() if each is context)

    async def session_of(self, driver: "OutsideDriver", context: RolloutContext, recorder: Recorder, observation: Observation) -> Session:
        """A session for the agent that waits longest, of those that want this task or any; waits for one while agents wait for other tasks.

        Raises GaveUp where none waits any more: the ticket is issued again for the next one.
        """
        with recorder.waiting("agent", ""):
            while (opening := self._next(recorder.ticket.task)) is None:
                if not any(each.waits for each in self._openings):
                    raise GaveUp(CANCELLED, retry=True)
                await self._wanted.wait()
        del self._unmatched[driver]
        session = Session(
            partial(self._renderers.of, context),
            offload=self.offload,
            idle_s=self._section.idle_s,
            within=self._within,
            trains_all=self._section.train == "all",
            max_len=context.rollout.max_len,
            rerenders=self._section.history == "rerender",
            score_names=context.score_names,
        )
        session.begin(recorder)
        self._server.add(session)
        opening.opened.set_result(Opened(session, observation, context.host.declared.get(TOOLS, ())))
        return session

    def _next(self, task: str) -> Waiting | None:
        found = next((each for each in self._openings if each.waits and each.task in (None, task)), None)
        if found is not None:
            self._openings.remove(found)
        return found

    def _openings_changed(self) -> None:
        self._tell_unasked()
        self._changed.set()
        self._wanted.set()
        self._wanted = asyncio.Event()

    def _tell_unasked(self) -> None:
        is_unasked = not self._openings and not self._running and self._refusal is None
        if is_unasked != self._is_unasked:
            self._is_unasked = is_unasked
            (self._unasked.open if is_unasked else self._unasked.close)()

    async def _deliver(self, request: Put | GiveUp) -> str | None:
        """Its session's agent hears of the fate."""
        fate = await super()._deliver(request)
        ticket = request.trajectory.ticket if isinstance(request, Put) else request.ticket
        running = self._running.get((ticket.trajectory_id, ticket.attempt))
        if running is not None and isinstance(driver := running.rollout.driver, OutsideDriver) and driver.session is not None:
            driver.session.fate = fate
        return fate

    async def _run(self, running: Any) -> None:
        driver: OutsideDriver = running.rollout.driver
        try:
            await super()._run(running)
        finally:
            self._unmatched.pop(driver, None)
            if driver.session is not None:
                self._server.remove(driver.session)
            self._tell_unasked()

    # -- HTTP ---------------------------------------------------------------------------------------------------------

    async def _open(self, request: "Request") -> Any:
        self._server.check_admin(request)
        opening = decoded(await body_of(request), Opening)
        if opening.task is not None and opening.task not in self._tasks:
            raise Refused(
                404, "no_such_task", f"the run has no task {opening.task[:80]!r}; it has {', '.join(self._tasks) or 'one without a name'}"
            )
        if given := next((name for name in ("row", "seed", "group") if getattr(opening, name) is not None), None):
            why = f"{given}: which {given} a session has is the sample buffer's to say, and the answer tells it: leave it out"
            raise Refused(400, "invalid_request_error", why)
        if self._refusal is not None:
            raise self._refusal
        if len(self._openings) >= self._section.max_waiting:
            raise Refused(429, "too_many_waiting", f"gateway.max_waiting={self._section.max_waiting} openings wait already")
        waiting = Waiting(asyncio.get_running_loop().create_future(), opening.task)
        self._openings.append(waiting)
        self._openings_changed()
        try:
            with ExitStack() as undo:
                undo.callback(waiting.leave)
                async with asyncio.timeout(self._section.wait_s), until_gone(request):
                    session, prompt, tools = await waiting.opened
                undo.pop_all()
        except TimeoutError:
            raise Refused(503, "no_room", self._why_no_room()) from None
        finally:
            if waiting in self._openings:
                self._openings.remove(waiting)
            self._openings_changed()
        session.metadata = opening.metadata
        ticket = session.recorder.ticket
        return {
            "session_id": session.id,
            "api_key": session.key,
            "base_url": f"{self._reached_at(request)}/sessions/{session.id}/v1",
            "prompt": prompt,
            "tools": [*tools],
            "task": ticket.task,
            "row": ticket.row,
            "seed": ticket.seed,
            "purpose": ticket.purpose,
            "version": ticket.version,
            "expires_s": self._section.idle_s,
        }

    def _reached_at(self, request: "Request") -> str:
        """Where agents find the gateway: as its config says, or as the request that opens their session did."""
        host = request.headers.get("host", "")
        return self._section.url or (f"http://{host}" if HOST.fullmatch(host) else self._url)

    def _why_no_room(self) -> str:
        told = f"no place in a batch came free within gateway.wait_s={self._section.wait_s:g}"
        tasks = sorted({task for task in self._unmatched.values() if task})
        return told + (f"; agents are wanted for {', '.join(tasks)}, as the weights of the config's tasks have it" if tasks else "")


class Outside(RolloutHook):
    """Rollouts of the gateway are played by agents from outside."""

    manager: Gateway

    def driver(self, context: RolloutContext) -> "OutsideDriver":
        return OutsideDriver(context, self.manager)


class OutsideDriver(EnvDriver):
    """An environment's episode whose turns an agent from outside takes; its `step` scores the last one, where the agent says no reward."""

    session: Session | None = None

    def __init__(self, context: RolloutContext, gateway: Gateway) -> None:
        super().__init__(context)
        self._gateway = gateway
        gateway.begins(self, context)

    async def _play_turns(self, recorder: Recorder, env: HostedEnv, observation: Observation) -> None:
        session = self.session = await self._gateway.session_of(self, self._context, recorder, observation)
        await session.drive(recorder)
        if not session.rewarded:
            await self._step(recorder, env, session.answer)
