"""Rollouts that verifiers plays: its EnvServer runs a task, and asks its environment manager for each turn by token ids.

The session's recorder keeps what was sampled; the trace that comes back says what of it led to the reward.
"""

import asyncio
import importlib.util
import os
import subprocess
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from rubato.actors import plugins
from rubato.actors.envs.recorder import GaveUp, Recorder
from rubato.actors.envs.rollout import Rollout, RolloutContext, RolloutHook
from rubato.actors.envs.section import Task, resolved
from rubato.actors.envs.verifiers import MAKE, Settings, VerifiersTaskset, settings_of
from rubato.actors.gateway import token_api
from rubato.actors.gateway.answering import DIALECTS, answer_in
from rubato.actors.gateway.env_server import EnvServer, ServerFailed, ServerLost
from rubato.actors.gateway.server import Answering, SessionServer, body_of, decoded, until_gone
from rubato.actors.gateway.session import Ending, Session, SessionOver
from rubato.actors.gateway.traces import Trace
from rubato.bus.address import bind_listener
from rubato.runtime.actor import Actor
from rubato.runtime.errors import ConfigError, first_cause

if TYPE_CHECKING:
    from starlette.requests import Request

PLACE = "/verifiers"
"""Below it lie the routes that EnvServers ask: each of their requests names its session by `cache_salt`, the field that comes through."""

VERSIONS = (0, 4)
"""The oldest of verifiers whose protocol this is."""

TOLD = "import importlib.metadata as m; print(m.version('verifiers'))"
LOOK_S = 30.0


def check_host(config: Any) -> None:
    """Packages, and that each interpreter is there and has verifiers. Raises ConfigError."""
    if importlib.util.find_spec("starlette") is None:
        raise ConfigError("verifiers needs the package starlette: pip install -e '.[serve]'")
    for task in resolved(config.tasks, config.env, config.rollout, config.reward).values():
        if task.env.target != plugins.VERIFIERS:
            continue
        if task.env.agent:
            raise ConfigError(f"{task.key} has an agent and verifiers, whose harness takes the turns. Leave one of them out")
        if task.env.sandbox != "none":
            raise ConfigError(
                f"env.sandbox={task.env.sandbox} holds environments, and verifiers would run outside it. Leave one of them out"
            )
        for settings in (settings_of(_kwargs(task, purpose), _key(task)) for purpose in ("train", "eval")):
            check_python(settings.python, f"{_key(task)}.python")
            for name in ("taskset", "harness"):
                given = getattr(settings, name).get("id", "")
                if given.endswith(".py") and not os.path.isfile(given):
                    raise ConfigError(f"{_key(task)}.{name}: there is no file {given}.")


def check_python(python: str, key: str) -> None:
    """Raises ConfigError, one sentence, where it has no verifiers that is new enough."""
    make = f"Make one with {MAKE}, and set it to .venv-verifiers/bin/python."
    try:
        told = subprocess.run([python, "-c", TOLD], capture_output=True, text=True, timeout=LOOK_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"{key}: {python} is no interpreter of Python ({error.__class__.__name__}). {make}") from error
    if told.returncode:
        raise ConfigError(f"{key}: {python} has no verifiers. {make}")
    version = told.stdout.strip()
    if tuple(int(part) if part.isdigit() else 0 for part in version.split(".")[:2]) < VERSIONS:
        raise ConfigError(f"{key}: {python} has verifiers {version}, and 0.4 or newer is needed (plain pip resolves old ones). {make}")


def _key(task: Task) -> str:
    return "env.kwargs" if task.key == "env" else f"{task.key}.verifiers"


def _kwargs(task: Task, purpose: str) -> Mapping[str, Any]:
    """Those of one purpose. Where the config has none for held-out tasks, some of the taskset's are held out."""
    own = task.env.eval_kwargs
    if purpose == "eval":
        return {**task.env.kwargs, **(own or VerifiersTaskset.held_out)}
    return {**task.env.kwargs, **({} if own else {"split": "train"})}


class Episodes(RolloutHook):
    """EnvServers of one manager, and the server that they ask, on the loopback alone."""

    def __init__(self, manager: Actor, playing: Callable[[], Iterable[Rollout]]) -> None:
        super().__init__(manager, playing)
        self._server = SessionServer(manager.run.folder.name)
        self._listens = asyncio.Event()
        self._url = ""
        self._env_servers: dict[str, EnvServer] = {}
        config: Any = manager.config
        self._tasks = resolved(config.tasks, config.env, config.rollout, config.reward)
        self._settings = {
            (name, purpose): settings_of(_kwargs(task, purpose), _key(task))
            for name, task in self._tasks.items()
            if task.env.target == plugins.VERIFIERS
            for purpose in ("train", "eval")
        }
        plugins.load(plugins.GUARD)()

    async def run(self) -> None:
        """Serve until the manager ends."""
        from starlette.routing import Route  # for jobs alone that have sessions

        listening = bind_listener("127.0.0.1", 0)
        self._url = f"http://127.0.0.1:{listening.getsockname()[1]}{PLACE}/v1"
        self._listens.set()
        turn = Route(f"{PLACE}{token_api.PATH}", Answering(self._generate), methods=["POST"])
        await self._server.serve(listening, turn, Route(f"{PLACE}/v1/models", Answering(self._models), methods=["GET"]))

    def driver(self, context: RolloutContext) -> "EpisodeDriver | None":
        return EpisodeDriver(context, self) if context.env.target == plugins.VERIFIERS else None

    def open(self, context: RolloutContext, recorder: Recorder) -> Session:
        """A session by the recorder's ticket."""

        async def renders(tools: Any) -> Any:
            return context.renderer

        session = Session(renders, offload=self.manager.offload, idle_s=None, max_len=context.rollout.max_len, trains_all=True)
        session.begin(recorder)
        self._server.add(session)
        return session

    def close(self, session: Session) -> None:
        """It is over."""
        self._server.remove(session)

    async def play(self, context: RolloutContext, session: Session) -> Trace:
        """The trace of the ticket's task. Raises GaveUp and ServerLost."""
        recorder, section = session.recorder, context.env
        ticket = recorder.ticket
        settings = self._settings[ticket.task, ticket.purpose]
        env_server = self._env_server(settings, context)
        await self._listens.wait()
        with recorder.waiting("env.reset", f"env.build_timeout_s={section.build_timeout_s:g}"):
            dealer = await env_server.ready()
        at = settings.chosen(env_server.tasks, ticket.seed)
        recorder.info["task_row"] = at
        client = {
            "type": "train",
            "base_url": self._url,
            "api_key_var": "RUBATO_NO_KEY",
            "renderer": {"name": settings.renderer},
            "renderer_model_name": str(self.manager.run.folder / self._model_path),
        }
        sampling = {"max_tokens": recorder.sampling.max_new_tokens, "cache_salt": session.key}
        limit = f"env.agent_timeout_s={section.agent_timeout_s:g}"
        with recorder.waiting("agent", limit):
            try:
                async with asyncio.timeout(section.agent_timeout_s):
                    return await env_server.play(dealer, env_server.tasks[at], client, sampling, self.manager.run.folder.name)
            except TimeoutError:
                raise GaveUp("env_timeout", f"verifiers' task {at} was not through after {limit}") from None

    def _env_server(self, settings: Settings, context: RolloutContext) -> EnvServer:
        """The one of these settings, which runs from when the first rollout wants it."""
        limits = {"max_turns": context.rollout.max_turns, "max_total_tokens": context.rollout.max_len - context.rollout.max_new_tokens}
        key = repr((settings.python, settings.taskset, settings.harness, settings.limit, limits))
        found = self._env_servers.get(key)
        if found is None:
            name = f"{self.manager.name}-verifiers-{len(self._env_servers)}"
            found = self._env_servers[key] = EnvServer(settings, name, self.manager.run.folder, limits, start_s=context.env.build_timeout_s)
            self.manager.spawn(self._keep(found), name=name)
        return found

    async def _keep(self, env_server: EnvServer) -> None:
        try:
            await env_server.run(self.manager.offload, self.manager.notice)
        except ServerFailed as failed:
            self.manager.finish(str(failed), failed=True)

    @property
    def _model_path(self) -> str:
        config: Any = self.manager.config
        return config.model.path

    async def _generate(self, request: "Request") -> Any:
        body = await body_of(request)
        session = self._server.session_by(decoded(body, token_api.GenerateTokens).cache_salt or "")
        async with until_gone(request):
            return await answer_in(DIALECTS[token_api.PATH], session, body, self.manager.run.folder.name)

    async def _models(self, request: "Request") -> Any:
        config: Any = self.manager.config
        card = {"id": self.manager.run.folder.name, "object": "model", "owned_by": "rubato", "max_model_len": config.rollout.max_len - 1}
        return {"object": "list", "data": [card]}


class EpisodeDriver:
    """One episode of an EnvServer's."""

    def __init__(self, context: RolloutContext, episodes: Episodes) -> None:
        self._context, self._episodes = context, episodes

    async def drive(self, recorder: Recorder) -> None:
        """Play it. Raises GaveUp for every way in which it can end otherwise."""
        session = self._episodes.open(self._context, recorder)
        try:
            with ExitStack() as hooks:
                for hook in self._context.hooks:
                    hooks.enter_context(hook.turns())
                async with asyncio.TaskGroup() as tasks:
                    playing = tasks.create_task(self._play(session))
                    await session.drive(recorder)
                    session.settle()
                    trace = await playing
        except ExceptionGroup as group:
            raise first_cause(group) from None
        finally:
            self._episodes.close(session)
        assert trace is not None  # else the session failed, which is raised above
        recorder.transcripts = await self._episodes.manager.offload(trace.kept_in, session.forest)
        recorder.truncated = trace.truncated
        recorder.info.update(trace.info)

    async def _play(self, session: Session) -> Trace | None:
        """End the session by what came of its episode; the trace, where one did."""
        try:
            trace = await self._episodes.play(self._context, session)
            session.complete(Ending(trace.reward))
            return trace
        except ServerLost as lost:
            session.fail(GaveUp("env_lost", f"verifiers' EnvServer: {lost}", retry=True))
        except GaveUp as end:
            session.fail(end)
        except SessionOver:
            pass
        return None
