"""Agents that the job starts: one for each ticket, which plays the trajectory by requests to its environment manager.

`env.agent` names it: an async function, a plain one, or a command; where `env.sandbox` names one, each is a process in a sandbox. The
environment's reset says what its task is; the reward is what the agent says, else what the environment's step says of its answer.
"""

import asyncio
import importlib.util
import inspect
from collections.abc import Callable, Iterable, Mapping
from contextvars import copy_context
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from rubato.actors import plugins
from rubato.actors.envs.coroutines import Coroutines
from rubato.actors.envs.environment import Observation
from rubato.actors.envs.hosting import HostedEnv, Hung, Raised, is_plain
from rubato.actors.envs.recorder import GaveUp, Recorder
from rubato.actors.envs.rollout import EnvDriver, Rollout, RolloutContext, RolloutHook
from rubato.actors.gateway.command import AgentEnded, clear_places, run_command, words_of
from rubato.actors.gateway.renderers import Renderers
from rubato.actors.gateway.server import SessionServer
from rubato.actors.gateway.session import Ending, Refused, Session, SessionOver
from rubato.bus.address import bind_listener
from rubato.bus.message import well_formed
from rubato.runtime.actor import Actor
from rubato.runtime.errors import ConfigError, first_cause
from rubato.runtime.importer import check_module, load_configured
from rubato.runtime.pool.values import text_of

KEY = "env.agent"

END_S = 5.0
"""An agent that said by a request that it is complete may go on for so long."""


@dataclass(frozen=True)
class AgentTask:
    """What an agent is given. `base_url` and `api_key` are for a client of OpenAI's API, `url` is the session's own address."""

    url: str
    base_url: str
    api_key: str
    model: str
    prompt: Observation
    """Of the environment's reset: a text, or chat messages; empty where there is no environment."""
    task: str
    row: int
    seed: int
    purpose: str
    """train or eval."""
    info: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Of the environment's reset."""

    @property
    def plain(self) -> dict[str, Any]:
        """All of it that JSON can hold."""
        return vars(self) | {"info": {key: value for key, value in self.info.items() if isinstance(key, str) and is_plain(value)}}

    @property
    def variables(self) -> dict[str, str]:
        """For a process: clients find their address and key in these."""
        return {
            "OPENAI_BASE_URL": self.base_url,
            "OPENAI_API_KEY": self.api_key,
            "ANTHROPIC_BASE_URL": self.url,
            "ANTHROPIC_API_KEY": self.api_key,
            "RUBATO_SESSION": self.url.rpartition("/")[2],
            "RUBATO_SESSION_URL": self.url,
        }


def check_host(config: Any) -> None:
    """Packages, and that something is at each agent's path. Raises ConfigError."""
    if importlib.util.find_spec("starlette") is None:
        raise ConfigError(f"{KEY} needs the package starlette: pip install -e '.[serve]'")
    own = {f"tasks.{name}.agent": task.agent for name, task in config.tasks.items()}
    for key, agent in ({KEY: config.env.agent} | own).items():
        try:
            is_function = agent and not words_of(agent)
        except ValueError as error:
            raise ConfigError(f"{key}={agent} is no command: {error}. Close the quote.") from None
        if is_function:
            check_module(agent, key=key)


class Agents(RolloutHook):
    """Those of one manager, and the server that they talk to, on the loopback alone."""

    def __init__(self, manager: Actor, playing: Callable[[], Iterable[Rollout]]) -> None:
        super().__init__(manager, playing)
        self._server = SessionServer(manager.run.folder.name)
        self._port = 0
        self._listens = asyncio.Event()
        self._renderers = Renderers(manager.run.folder / manager.config.model.path, manager.offload)
        config: Any = manager.config
        named = {config.env.agent, *(task.agent for task in config.tasks.values())}
        self._sandbox = None
        if config.env.sandbox != "none":
            self._sandbox = plugins.load(plugins.AGENT_SANDBOX)(config.env, self._server, lambda: self._port)
        own = named if self._sandbox is None else ()  # in a sandbox all run as processes
        self._functions = {agent: load_configured(agent, key=KEY) for agent in own if agent and not words_of(agent)}
        self._coroutines = Coroutines(self._blocked)
        self._blocking: set[str] = set()
        plugins.load(plugins.GUARD)()

    async def run(self) -> None:
        """Serve until the manager ends."""
        await self.manager.offload(clear_places)
        listening = bind_listener("127.0.0.1", 0)
        self._port = listening.getsockname()[1]
        self._listens.set()
        try:
            await self._server.serve(listening)
        finally:
            await self._coroutines.close()

    def driver(self, context: RolloutContext) -> "AgentDriver | None":
        return AgentDriver(context, self) if context.env.agent else None

    async def open(self, context: RolloutContext, recorder: Recorder, prompt: Observation) -> tuple[Session, AgentTask]:
        """A session by the recorder's ticket, and what its agent is given."""
        renderer = partial(self._renderers.of, context)
        session = Session(
            renderer, offload=self.manager.offload, idle_s=None, max_len=context.rollout.max_len, score_names=context.score_names
        )
        session.begin(recorder)
        await self._listens.wait()
        self._server.add(session)
        url, ticket = f"http://127.0.0.1:{self._port}/sessions/{session.id}", recorder.ticket
        told = AgentTask(
            url=url,
            base_url=f"{url}/v1",
            api_key=session.key,
            model=self.manager.run.folder.name,
            prompt=prompt,
            task=ticket.task,
            row=ticket.row,
            seed=ticket.seed,
            purpose=ticket.purpose,
            info=dict(recorder.info),
        )
        return session, told

    def close(self, session: Session) -> None:
        """It is over."""
        self._server.remove(session)

    async def play(self, agent: str, limit_s: float, session: Session, told: AgentTask) -> None:
        """Run the agent, and end its session by what came of it, unless that is over already."""
        try:
            async with asyncio.timeout(limit_s):
                said = await self._run(agent, told)
            if session.over is None:
                _complete(session, said)
        except TimeoutError:
            session.fail(GaveUp("agent_timeout", f"{agent} was not through after env.agent_timeout_s={limit_s:g}"))
        except AgentEnded as end:
            session.fail(GaveUp("agent_failed", f"{agent} {end}"))
        except SessionOver:
            pass

    async def _run(self, agent: str, told: AgentTask) -> Mapping[str, Any]:
        """What it returned, or said at its end: a `reward`, an `answer`, or neither."""
        function, sandbox = self._functions.get(agent), self._sandbox
        if sandbox is not None:
            words = words_of(agent, is_process=True)
            return await run_command(words, told.variables, told.plain, start=sandbox.start, most_output=sandbox.most_output)
        if function is None or not inspect.iscoroutinefunction(function):
            return await run_command(words_of(agent, is_process=True), told.variables, told.plain)
        call = self._coroutines.begin(function(told), agent, copy_context())
        try:
            said = await call.result(float("inf"))
        except Raised as raised:
            raise AgentEnded(f"raised {text_of(raised.error)}") from raised.error
        except Hung:
            raise AssertionError from None
        finally:
            await call.end()
        if not isinstance(said, str | int | float | None):
            raise AgentEnded(f"returned {type(said).__name__}: an agent returns its reward, its answer as a text, or None")
        return {} if said is None else {"answer" if isinstance(said, str) else "reward": said}

    def _blocked(self, agent: str, took_s: float) -> None:
        if agent not in self._blocking:
            self._blocking.add(agent)
            self.manager.notice(
                f"the agent {agent} blocked its environment manager for {took_s * 1000:.0f} ms: all rollouts there stand still meanwhile. "
                "Await what takes long, or make it a plain function, which runs in a process of its own"
            )


class AgentDriver(EnvDriver):
    """An environment's episode whose turns an agent takes."""

    def __init__(self, context: RolloutContext, agents: Agents) -> None:
        super().__init__(context)
        self._agents = agents

    async def _play_turns(self, recorder: Recorder, env: HostedEnv, observation: Observation) -> None:
        agents, section = self._agents, self._context.env
        session, told = await agents.open(self._context, recorder, observation)
        try:
            with recorder.waiting("agent", f"env.agent_timeout_s={section.agent_timeout_s:g}"):
                async with asyncio.TaskGroup() as tasks:
                    playing = tasks.create_task(agents.play(section.agent, section.agent_timeout_s, session, told))
                    await session.drive(recorder)
                    session.settle()
                    await asyncio.wait((playing,), timeout=END_S)
                    playing.cancel()
        except ExceptionGroup as group:
            raise first_cause(group) from None
        finally:
            agents.close(session)
        if not session.rewarded:
            await self._step(recorder, env, session.answer)


def _complete(session: Session, said: Mapping[str, Any]) -> None:
    """End it by the agent's own `reward`, or its `answer`. Raises AgentEnded for what is neither, and SessionOver."""
    reward, answer = (said.get("reward"), said.get("answer"))
    if isinstance(answer, int | float) and not isinstance(answer, bool):
        answer = f"{answer}"
    if not isinstance(reward, int | float | None) or not isinstance(answer, str | None):
        raise AgentEnded("said a result that is none: a reward is a number, and an answer a text")
    try:
        session.complete(Ending(None if reward is None else float(reward), answer=answer and well_formed(answer)))
    except Refused as refused:
        raise AgentEnded(f"said a {refused}") from refused
    except OverflowError:
        raise AgentEnded("said a reward that is out of range") from None
