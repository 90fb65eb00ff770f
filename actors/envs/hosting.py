"""Decides where an environment's code runs, and turns whatever it does into a checked result or a named failure."""

import asyncio
import inspect
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from numbers import Real
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast

from rubato.actors import plugins
from rubato.actors.envs.section import DATA_SETS, EnvSection
from rubato.actors.messages.samples import Purpose
from rubato.runtime.importer import LoadError, load_object
from rubato.runtime.pool.values import MAX_REPLY_BYTES, Traits, Unsendable, decode, encode, place_of, taken_by, text_of, type_name

if TYPE_CHECKING:
    from rubato.actors.envs.coroutines import Call, Coroutines
    from rubato.actors.envs.environment import Observation, Step
    from rubato.actors.envs.pooled import EnvWorkers

BUILT_IN = ("rubato.actors.envs.", "rubato.actors.data.")
"""Classes from here are trusted to import quickly, so no worker is started to look at them."""

HELD_OUT, TOOLS = "held_out", "tools"
DECLARED = (HELD_OUT, TOOLS)
"""Attributes of an environment class: see Environment."""

TOLD: Mapping[str, Any] = {"task": "", "row": 0, "purpose": "train", "trajectory": "", "version": 0}
"""Arguments that a `reset` may take besides the seed, with their values where no rollout asks."""


CONTAINERS, NUMBERS = frozenset({dict, list, tuple}), frozenset({bool, int, float})

CONTAINER_BYTES = 64
"""Of one that is empty. It also bounds how long many of them, or one that holds itself, keep the manager."""

MOST_NESTED = 100
"""Containers within each other, in what goes on to templates and reward functions."""

CLOSE_S = 5.0
"""An environment that can't close by then is left to its fate."""

TRIAL_SEEDS = 8
"""Tried at the start: where more than half of all tasks fail, these rarely all do."""

DEAR_TRIALS = 3
"""Of them, at most so many that hang, each up to its limit, or fail in the constructor, where the seed plays no part."""

EnvOutcome = Literal["env_reset_failed", "env_step_failed", "env_timeout", "env_bad_result", "env_lost", "no_worker"]


class Hung(Exception):
    """A call gave no answer within its limit."""


class Raised(Exception):
    """A call raised `error`, whatever its base class."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(error)
        self.error = error


@dataclass(eq=False)
class EnvFailure(Exception):
    """A call into an environment failed. `outcome` names how; `env_lost` and `no_worker` were not its own fault and may be tried again.

    `what` continues a sentence: "raised in reset: KeyError('goal')". `where` is the last frame, if known. `trials` is how many seeds
    failed at the start, where it ends the trial.
    """

    outcome: EnvOutcome
    method: str
    what: str
    where: str = ""
    trials: int = 0


def sentence(section: EnvSection, failure: EnvFailure, *, task: str = "", seed: int, log: str) -> str:
    """One line for the user: which environment did what, on which task, how often, and the `log` to look into."""
    raised, colon, cause = failure.what.partition(": ")
    on = "" if failure.method == "import" else f" (seed {seed})" if not task else f" ({task}, seed {seed})"
    grader = section.kwargs.get("grader") if section.target in DATA_SETS and failure.method == "step" else ""
    what = f"grader {grader}" if grader else f"env {section.target}"
    parts = [f"{what} {raised}{on}{colon}{cause}"]
    if failure.trials:
        what = "tries" if failure.method == "__init__" else "seeds"
        parts.append(f"{failure.trials} of {failure.trials} {what} failed")
    elif task and failure.method != "step":
        parts.append(f"{section.reset_tries} of {section.reset_tries} tries failed; its group is dropped")
    elif task:
        parts.append("The rollout leaves its group")
    return ". ".join([*parts, f"Log: {log}"])


class EnvHost:
    """Makes environments and keeps those that finished well for the next rollout of the same purpose."""

    def __init__(
        self,
        section: EnvSection,
        *,
        on_output: Callable[[str], None] | None = None,
        on_notice: Callable[[str], None] | None = None,
        on_size: Callable[[int], None] | None = None,
        shares: "EnvHost | None" = None,
        task: str = "",
    ) -> None:
        """`shares`: another task's host, whose workers are this one's too. `on_notice` gets sentences for the user, each once.

        `on_size` gets the number of workers, each time that it grew.
        """
        self._section = section
        self._task = task
        self._shares = shares
        self._pool: EnvWorkers | None = None
        self._tell = on_output, on_size
        self._on_notice = on_notice
        self._coroutines: Coroutines | None = None
        self._blocking: set[str] = set()
        self._is_built_in = section.target.startswith(BUILT_IN)
        self._class: Callable[..., Any] | None = None
        self._idle: dict[Purpose, list[HostedEnv]] = {"train": [], "eval": []}
        self._num_built = 0
        self._takes: Sequence[str] = ()
        self.declared: Mapping[str, Any] = {}
        """Of `DECLARED`, what the class has; known once it has started."""
        self._held_out: Mapping[str, Any] = section.eval_kwargs
        self.has_split = False
        """Whether held-out tasks have arguments of their own, or the class says that they need none; known once it has started."""

    @property
    def pool(self) -> "EnvWorkers":
        """The worker processes, which are there from when the first environment needs them."""
        if self._shares is not None:
            return self._shares.pool
        pool = self._pool = self._pool or plugins.load(plugins.ENV_WORKERS)(self._section, *self._tell)
        return pool

    async def start(self) -> None:
        """Find the class and decide where it runs. Raises EnvFailure when it can't be loaded."""
        isolation = self._section.isolation
        here = isolation == "inline" or self._is_built_in
        traits = _traits_of(self._load()) if here else await self.pool.inspected(self._section)
        shared = traits.inline or traits.asynchronous
        if isolation == "inline" or (isolation == "auto" and shared and (here or self._section.sandbox == "none")):
            self._class = self._load()
        self._takes, self.declared = traits.takes, traits.declared
        self.has_split = bool(self._held_out) or HELD_OUT in traits.declared
        self._held_out = self._held_out or traits.declared.get(HELD_OUT, {})
        if not isinstance(self._held_out, Mapping):
            what = f"declares held_out as {type_name(self._held_out)} instead of a dict of constructor arguments"
            raise EnvFailure("env_reset_failed", "import", what)

    @property
    def pooled(self) -> bool:
        """Whether its environments run in the workers; known once it has started."""
        return self._class is None

    async def borrow(self, purpose: Purpose) -> "HostedEnv":
        """An idle instance, or a new one. Raises EnvFailure when the constructor fails."""
        idle = self._idle[purpose]
        while idle:
            env = idle.pop()
            if env.usable and env.crowded:
                await env.abandon()
                break
            if env.usable:
                return env
        kwargs = {**self._section.kwargs, **(self._held_out if purpose == "eval" else {})}
        if self._class is None:
            self._num_built += 1
            return await self.pool.built(self._section, f"env-{self._task}-{self._num_built}", kwargs)
        make = partial(self._class, **kwargs)
        env = _called(self._calls, (self._class, "__init__"), make, "env_reset_failed", trusted=self._is_built_in)
        return InlineEnv(self._section, env, self._calls)

    async def begin(
        self, purpose: Purpose, seed: int, told: Mapping[str, Any] = TOLD
    ) -> "tuple[HostedEnv, Observation, Mapping[str, Any]]":
        """An environment that was reset, after up to `env.reset_tries` tries, each on another instance. Raises the last EnvFailure.

        Its `reset` is given what it takes of `told`.
        """
        tries_left = self._section.reset_tries
        while True:
            tries_left -= 1
            try:
                return await self._begin_once(purpose, seed, told)
            except EnvFailure:
                if not tries_left:
                    raise

    async def _begin_once(self, purpose: Purpose, seed: int, told: Mapping[str, Any]) -> "tuple[HostedEnv, Observation, Mapping[str, Any]]":
        env = await self.borrow(purpose)
        try:
            return env, *await env.reset(seed, {name: value for name, value in told.items() if name in self._takes})
        except EnvFailure:
            await env.close()
            raise
        except asyncio.CancelledError:
            await env.abandon()
            raise

    async def try_out(self, seed: int) -> list[EnvFailure]:
        """Build and reset one environment, with held-out arguments too where they differ; it is kept for the first rollout.

        `seed` is tried, and those after it while they fail; returns how they did. Raises the first EnvFailure where all fail.
        """
        purposes: tuple[Purpose, ...] = ("train", "eval") if self._held_out else ("train",)
        return [failure for purpose in purposes for failure in await self._try_seeds(purpose, seed)]

    async def _try_seeds(self, purpose: Purpose, seed: int) -> list[EnvFailure]:
        failures: list[EnvFailure] = []
        while len(failures) < TRIAL_SEEDS and sum(_is_dear(failure) for failure in failures) < DEAR_TRIALS:
            try:
                told = {**TOLD, "task": self._task, "row": len(failures), "purpose": purpose}
                env, _, _ = await self._begin_once(purpose, seed + len(failures), told)
            except EnvFailure as failure:
                failures.append(failure)
            else:
                self.give_back(env, purpose)
                return failures
        failures[0].trials = len(failures)
        raise failures[0]

    def give_back(self, env: "HostedEnv", purpose: Purpose) -> None:
        """Keep an instance that works for the next rollout."""
        self._idle[purpose].append(env)

    async def close(self) -> None:
        """Close idle environments, end what still runs in others, and kill the workers."""
        async with asyncio.TaskGroup() as tasks:
            for idle in self._idle.values():
                while idle:
                    tasks.create_task(idle.pop().close())
        if self._coroutines is not None:
            await self._coroutines.close()
        if self._pool is not None:
            await self._pool.close()

    def _calls(self) -> "Coroutines":
        """What runs a user's code in this process: there from when the first is to run."""
        found = self._coroutines = self._coroutines or plugins.load(plugins.ENV_COROUTINES)(self._blocked)
        return found

    def _blocked(self, what: tuple[Any, str], took_s: float) -> None:
        """The first time that a method does."""
        env, method = what
        if method in self._blocking or self._on_notice is None:
            return
        self._blocking.add(method)
        self._on_notice(
            f"{_name_of(self._section, env, method)} blocked its environment manager for {took_s * 1000:.0f} ms: all rollouts there "
            "stand still meanwhile. Await what takes long, run it in asyncio.to_thread, or set env.isolation=process"
        )

    def _load(self) -> Callable[..., Any]:
        """The class, imported here. What a user's starts ends with this process."""
        if not self._is_built_in:
            plugins.load(plugins.GUARD)()
        return _load(self._section.target)


class HostedEnv:
    """One environment instance, whose failures are EnvFailure and whose results are checked."""

    asynchronous = False
    """While it is waited for, the manager and its workers are free for others."""
    sent: ClassVar[bool] = False
    """Its results come from a worker, which bounds their size."""

    def __init__(self, section: EnvSection) -> None:
        self._section = section
        self._began: Callable[[], object] = _nothing

    @property
    def usable(self) -> bool:
        """False once it can't be called any more."""
        return True

    @property
    def crowded(self) -> bool:
        """Whether another instance would wait less for its process than this one."""
        return False

    async def reset(self, seed: int, told: Mapping[str, Any] = {}) -> "tuple[Observation, Mapping[str, Any]]":
        """Start an episode; `told` goes to `reset` beside the seed."""
        limit_s = self._section.reset_timeout_s
        result = await self._call("reset", "env_reset_failed", limit_s, seed=seed, **told)
        return check_reset(result, sent=self.sent)

    async def step(self, action: str, began: Callable[[], object] = lambda: None) -> "Step":
        """Apply the model's text. `began` is called once its process has time for it."""
        self._began = began
        result = await self._call("step", "env_step_failed", self._section.step_timeout_s, action)
        return check_step(result, sent=self.sent)

    async def close(self) -> None:
        """Close it; how that fails no longer matters."""
        with suppress(EnvFailure):
            await self._call("close", "env_step_failed", CLOSE_S)

    async def abandon(self) -> None:
        """Close it in the middle of a call; what it does in a worker process is not waited for."""
        await self.close()

    async def _call(self, method: str, outcome: EnvOutcome, limit_s: float, *args: Any, **kwargs: Any) -> Any:
        """What `method` returned; `_began`, where it is set, is called first and forgotten."""
        raise NotImplementedError

    def take_began(self) -> Callable[[], object]:
        began, self._began = self._began, _nothing
        return began


class InlineEnv(HostedEnv):
    """Runs in this process: coroutines under a deadline; a plain method can't be interrupted and is trusted."""

    def __init__(self, section: EnvSection, env: Any, calls: "Callable[[], Coroutines]") -> None:
        super().__init__(section)
        self._env = env
        self._calls = calls
        self._context = copy_context()
        self._under_way: Call | None = None
        self._is_built_in = type(env).__module__.startswith(BUILT_IN)
        self.asynchronous = inspect.iscoroutinefunction(getattr(env, "step", None))

    @property
    def usable(self) -> bool:
        """False once it was abandoned in a call."""
        return self._under_way is None or not self._under_way.abandoned

    async def close(self) -> None:
        """Close it, unless it was abandoned."""
        if self.usable:
            await super().close()

    async def abandon(self) -> None:
        """The call is cancelled first, and may clean up."""
        if self._under_way is not None:
            await self._under_way.end()
        await self.close()

    async def _call(self, method: str, outcome: EnvOutcome, limit_s: float, *args: Any, **kwargs: Any) -> Any:
        self.take_began()()
        run = partial(getattr(self._env, method), *args, **kwargs)
        result = _called(self._calls, (self._env, method), run, outcome, trusted=self._is_built_in)
        if not hasattr(result, "__await__"):
            return result
        call = self._under_way = self._calls().begin(result, (self._env, method), self._context)
        try:
            return await call.result(limit_s)
        except Hung:
            raise EnvFailure("env_timeout", method, f"hung in {method}: no answer within {limit_s:g} s") from None
        except Raised as raised:
            raise _raised(raised.error, method, outcome) from raised.error


def check_reset(result: Any, *, sent: bool = False) -> "tuple[Observation, Mapping[str, Any]]":
    """What `reset` returned, if it is (observation, info); else EnvFailure. `sent`: it came from a worker, which bounds what it sends."""
    if not isinstance(result, tuple) or len(result) != 2:
        raise _bad("reset", f"{_shape(result)} instead of (observation, info)")
    observation, info = result if sent else _as_sent(result, "reset")
    return _observation(observation, "reset", over=False), _info(info, "reset")


def check_step(result: Any, *, sent: bool = False) -> "Step":
    """What `step` returned, if it is (observation, reward, terminated, truncated, info) with a finite reward; else EnvFailure.

    `sent` as in `check_reset`. Where the episode is over there may be nothing to observe: None is "" there.
    """
    if not isinstance(result, tuple) or len(result) != 5:
        raise _bad("step", f"{_shape(result)} instead of (observation, reward, terminated, truncated, info)")
    observation, reward, terminated, truncated, info = result if sent else _as_sent(result, "step")
    if not isinstance(reward, Real):
        raise _bad("step", f"a reward of type {type_name(reward)} instead of a number{_element(reward)}")
    try:
        reward = float(reward)
    except OverflowError:
        reward = math.inf
    if not math.isfinite(reward):
        raise _bad("step", f"a reward of {reward}, which is not finite")
    for name, flag in (("terminated", terminated), ("truncated", truncated)):
        if not isinstance(flag, bool):
            raise _bad("step", f"{name} of type {type_name(flag)} instead of a bool{_element(flag)}")
    observation = _observation(observation, "step", over=terminated or truncated)
    return observation, reward, terminated, truncated, _info(info, "step")


def _as_sent(result: tuple[Any, ...], method: str) -> tuple[Any, ...]:
    """What would come of `result` if a worker sent it: not larger than that may be, and scalars of numpy and torch are plain ones."""
    try:
        size, plain = _weighed(result)
        encoded = b"" if plain or size > MAX_REPLY_BYTES else encode(result)
        if max(size, len(encoded)) <= MAX_REPLY_BYTES:
            return result if plain else tuple(decode(encoded))
    except Exception as error:  # a user's object may raise while it is read, and integers overflow
        raise unusable(method, f"its result can't be sent: {text_of(error)}") from error
    raise unusable(method, f"its result is too large: at most {MAX_REPLY_BYTES:,} bytes are taken")


def _weighed(result: object) -> tuple[int, bool]:
    """About the bytes that `result` takes, counted to MAX_REPLY_BYTES and no further; whether it consists of Python's plain types alone.

    What a container of another class holds is left to the encoder: its own methods may do anything.
    """
    size, plain = 0, True
    left = [result]
    while left and size <= MAX_REPLY_BYTES:
        value = left.pop()
        if type(value) in CONTAINERS:
            items = cast("Collection[Any]", value)
            size += CONTAINER_BYTES + len(items)
            if size <= MAX_REPLY_BYTES and type(value) is not dict and set(map(type, items)) <= NUMBERS:
                size += 8 * len(items)
            elif size <= MAX_REPLY_BYTES:
                left.extend(items)
                left.extend(cast("dict[Any, Any]", value).values() if type(value) is dict else ())
        elif isinstance(value, str | bytes):
            size += len(value)
            if isinstance(value, str) and not value.isascii() and size <= MAX_REPLY_BYTES:
                size += len(value.encode("utf-8", "surrogatepass")) - len(value)
            plain &= type(value) in (str, bytes)
        else:
            size += 8 if value is not None else 0
            plain &= value is None or type(value) in NUMBERS
    return size, plain


def _observation(value: Any, method: str, *, over: bool) -> "Observation":
    if over and (value is None or value == []):
        return ""
    if flaw := flaw_of(value):
        raise _bad(method, f"{flaw}{'' if over or value else ', though the episode goes on'}")
    return normal(value)


def normal(observation: Any) -> "Observation":
    """One without flaw, with the text parts of each message made one text, which is what templates that know of parts make of them.

    What a message has as None counts as absent: columns of a table have all keys in all rows.
    """
    if isinstance(observation, str):
        return observation
    return [
        {key: _joined(value) if key == "content" else value for key, value in message.items() if value is not None or key == "content"}
        for message in cast("list[dict[str, Any]]", observation)
    ]


def _joined(content: Any) -> Any:
    return "".join(part["text"] for part in cast("list[Any]", content)) if isinstance(content, list) else content


def flaw_of(observation: Any) -> str:
    """Half a sentence that says why `observation` is no text and no chat messages, as OpenAI's API has them; empty where it is."""
    if isinstance(observation, str):
        return ""
    if observation is None or observation == []:
        return f"nothing to observe ({observation})"
    if not isinstance(observation, list):
        return f"an observation of type {type_name(observation)} instead of a string or a list of chat messages"
    return next(filter(None, map(_flaw_of_message, cast("list[Any]", observation))), "")


def _flaw_of_message(message: Any) -> str:
    flaw = _flaw_in(message)
    return f"a chat message {str(message)[:80]!r} {flaw}" if flaw else ""


def _flaw_in(message: Any) -> str:
    if not isinstance(message, dict):
        return "that is not {'role': str, 'content': str}"
    told = cast("dict[Any, Any]", message)
    role, content, calls = told.get("role"), told.get("content"), told.get("tool_calls")
    if not isinstance(role, str) or not role or not all(isinstance(key, str) for key in told):
        return "that is not {'role': str, 'content': str}"
    if calls is not None and (flaw := _flaw_of_calls(calls)):
        return f"whose {flaw}"
    for key, value in told.items():
        if key in ("name", "tool_call_id", "reasoning_content") and not isinstance(value, str | None):
            return f"whose {key} is of type {type_name(value)} instead of a string"
        if not is_plain(value):
            return f"whose {key} holds what JSON can't"
    if isinstance(content, list):
        return next(filter(None, map(_flaw_of_part, cast("list[Any]", content))), "")
    if content is None and (calls or told.get("reasoning_content")):
        return ""
    return "" if isinstance(content, str) else f"whose content is of type {type_name(content)} instead of a string"


def _flaw_of_calls(calls: Any) -> str:
    wanted = "tool_calls are no list of {'function': {'name': str, 'arguments': dict}}"
    if not isinstance(calls, list):
        return wanted
    for call in cast("list[Any]", calls):
        function = cast("dict[str, Any]", call).get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict):
            return wanted
        named = cast("dict[str, Any]", function)
        if not isinstance(named.get("name"), str) or not isinstance(named.get("arguments"), dict | str | None):
            return wanted
    return ""


def _flaw_of_part(part: Any) -> str:
    told = cast("dict[str, Any]", part) if isinstance(part, dict) else {}
    kind = told.get("type")
    if kind == "text" and isinstance(told.get("text"), str):
        return ""
    if isinstance(kind, str) and kind != "text":
        return f"with a part of type {kind}: models here read text alone"
    return "with a part that is not {'type': 'text', 'text': str}"


def is_plain(value: Any, depth: int = MOST_NESTED) -> bool:
    """Whether it consists of what JSON and MessagePack both have, nested no deeper than that."""
    if isinstance(value, dict):
        items = cast("dict[Any, Any]", value).items()
        return depth > 0 and all(isinstance(key, str) and is_plain(item, depth - 1) for key, item in items)
    if isinstance(value, list | tuple) and not isinstance(value, Unsendable):
        return depth > 0 and all(is_plain(item, depth - 1) for item in cast("list[Any]", value))
    return value is None or isinstance(value, str | bool | float) or (isinstance(value, int) and abs(value) < 1 << 63)


def _info(info: Any, method: str) -> Mapping[str, Any]:
    if not isinstance(info, Mapping):
        raise _bad(method, f"info of type {type_name(info)} instead of a dict")
    return cast("Mapping[str, Any]", info)


def _element(value: Any) -> str:
    """What to do about an array that should be one number."""
    return ": take its one element, as .item() does" if type_name(value) in ("ndarray", "Tensor") else ""


def _is_dear(failure: EnvFailure) -> bool:
    return failure.method == "__init__" or failure.outcome == "env_timeout"


def _bad(method: str, what: str) -> EnvFailure:
    return EnvFailure("env_bad_result", method, f"returned a wrong result from {method}: {what}")


def unusable(method: str, why: str) -> EnvFailure:
    """For a result that can't be had."""
    return EnvFailure("env_bad_result", method, f"returned nothing usable from {method}: {why}")


def _shape(value: Any) -> str:
    return f"{len(cast('tuple[Any, ...]', value))} values" if isinstance(value, tuple) else f"a {type_name(value)}"


def _name_of(section: EnvSection, env: Any, method: str) -> str:
    """Which user code `method` of `env` is, with its file and line where Python knows them."""
    if section.target in DATA_SETS and method == "step":
        return f"grader {section.kwargs.get('grader')}"
    found = env if isinstance(env, type) else cast("type[Any]", type(env))
    code = getattr(inspect.unwrap(getattr(found, method)), "__code__", None)
    where = f" ({code.co_filename}:{code.co_firstlineno})" if code else f" of {section.target}"
    return f"{method} of {found.__name__}{where}"


def _nothing() -> None: ...


def _traits_of(found: Callable[..., Any]) -> Traits:
    """Traits of a class that is imported here."""
    declared = {name: getattr(found, name) for name in DECLARED if hasattr(found, name)}
    return Traits(getattr(found, "inline", False) is True, False, declared, taken_by(getattr(found, "reset", None)))


def _load(target: str) -> Callable[..., Any]:
    try:
        found = load_object(target)
    except LoadError as error:
        raise EnvFailure("env_reset_failed", "import", f"can't be loaded: {error}") from error
    except Exception as error:
        raise _raised(error, "import", "env_reset_failed") from error
    if not callable(found):
        raise EnvFailure("env_reset_failed", "import", f"can't be loaded: {target} is not a class")
    return found


def _called(calls: "Callable[[], Coroutines]", what: tuple[Any, str], run: Callable[[], Any], outcome: EnvOutcome, *, trusted: bool) -> Any:
    """The result of `run`, the method that `what` names. Raises EnvFailure; of one that is `trusted` no blocking is looked for."""
    try:
        return run() if trusted else calls().call(what, run)
    except Raised as raised:
        raise _raised(raised.error, what[1], outcome) from raised.error
    except (Exception, SystemExit) as error:  # a trusted class may wrap what is the user's
        raise _raised(error, what[1], outcome) from error


def _raised(error: BaseException, method: str, outcome: EnvOutcome) -> EnvFailure:
    return EnvFailure(outcome, method, f"raised in {method}: {text_of(error)}", place_of(error))
