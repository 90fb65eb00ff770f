"""Plans for the engines of one server, carried out: moves of requests, and engines that merge and split, in two phases.

Prepare: requests leave the engines that are to sleep, one by one and while all others go on, and these sleep, so that no request comes to
them. Commit: engines have their new degrees. What fails before the commit is over is taken back; what can't be, since an actor is gone, is
found by the next look at the engines, whose state is the only one there is.
"""

import asyncio
from collections.abc import Awaitable, Collection, Iterable, Mapping, Sequence
from itertools import cycle
from typing import Any, NamedTuple

from rubato.actors.messages.engines import Obeyed, Reconfigure, SleepEngine, WakeEngine
from rubato.actors.messages.moves import Move, Moved
from rubato.actors.messages.orchestration import OutOfDate, Survey, Surveyed
from rubato.actors.orchestrator.fleet import GpuGroup
from rubato.bus.errors import AskFailed, BusError
from rubato.bus.message import Request
from rubato.planning.engine_info import EngineInfo
from rubato.planning.parallelism import Change, StepPlan
from rubato.runtime.actor import Actor

SURVEY_S = 5.0
MOVE_S = 40.0
"""Longer than the proxy takes to see a move through."""
ORDER_S = 600.0
"""Longer than any change of an engine takes: vLLM starts in minutes with a large model. One that dies meanwhile fails at once."""
AT_ONCE = 16
"""Moves of one change that are under way together."""
ROUNDS = 3
"""Times that the requests of an engine which is to sleep are looked for."""


class CommandFailed(BusError):
    """One sentence: what did not happen."""


class Superseded(CommandFailed):
    """A later orchestrator is at work."""


class Shape(NamedTuple):
    """What an engine is to be."""

    degree: int
    asleep: bool = False


class Reshape(NamedTuple):
    """Engines of one server that change together."""

    name: str
    """Such as `merge engine-2 + engine-3`."""
    wanted: Mapping[str, Shape]
    requests: Mapping[str, str]
    """Request → its engine afterwards; one that is not named goes anywhere."""
    why: str


class Commands:
    """Of one orchestrator: each bears its term, and has no effect once a later one asked."""

    def __init__(self, actor: Actor) -> None:
        self._actor = actor
        self._after: dict[str, int] = {}

    # -- what is ---------------------------------------------------------------------------------------------------

    async def look(self) -> tuple[Surveyed, Mapping[str, str]]:
        """All surveys as one, with what ended since the last such look, and which proxy has each request. Raises CommandFailed.

        Rollouts of a manager that does not answer are seen by their requests alone.
        """
        found, rollouts = await asyncio.gather(self._survey(), self._rollouts())
        self._after |= {asked: reply.num_ended for asked, reply in (found | rollouts).items()}
        return _joined(found | rollouts)

    async def _survey(self) -> dict[str, Surveyed]:
        term, proxies = self._actor.incarnation, self._actor.peers("llm_proxy")
        asks = [self._ask(proxy, Survey(term, self._after.get(proxy, 0)), SURVEY_S) for proxy in proxies]
        found: dict[str, Surveyed] = {}
        for proxy, reply in zip(proxies, await asyncio.gather(*asks), strict=True):
            if isinstance(reply, OutOfDate):
                raise Superseded(f"the orchestrator of term {reply.term} has taken over from {self._actor.name}")
            found[proxy] = reply
        return found

    async def _rollouts(self) -> dict[str, Surveyed]:
        term, managers = self._actor.incarnation, self._actor.peers("env_manager")
        asks = [self._ask(each, Survey(term, self._after.get(each, 0)), SURVEY_S) for each in managers]
        replies = await asyncio.gather(*asks, return_exceptions=True)
        for reply in replies:
            if isinstance(reply, BaseException) and not isinstance(reply, CommandFailed):
                raise reply
        return {each: reply for each, reply in zip(managers, replies, strict=True) if isinstance(reply, Surveyed)}

    # -- moves -----------------------------------------------------------------------------------------------------

    async def move(self, moves: Iterable[tuple[str, str]], whose: Mapping[str, str]) -> list[str]:
        """Each request to its engine; returns those that went. One that stays, or ended, is no error."""
        places = asyncio.Semaphore(AT_ONCE)

        async def one(request_id: str, target: str) -> str:
            async with places:
                order = Move(request_id, target, self._actor.incarnation)
                try:
                    reply = await self._ask(whose[request_id], order, MOVE_S)
                except CommandFailed as error:
                    self._actor.log.info("not_moved", request=request_id, target=target, why=str(error))
                    return ""
            if not isinstance(reply, Moved):
                self._actor.log.info("not_moved", request=request_id, target=target, why=reply.why)
                return ""
            return request_id

        async with asyncio.TaskGroup() as tasks:
            done = [tasks.create_task(one(*each)) for each in moves if each[0] in whose]
        return [request_id for task in done if (request_id := task.result())]

    # -- switches --------------------------------------------------------------------------------------------------

    async def reshape(self, change: Reshape, engines: Sequence[EngineInfo]) -> list[str]:
        """Raises CommandFailed where the change did not come about; engines are then as they were, as far as they can be reached.

        Returns the requests that moved.
        """
        before = {each.name: Shape(each.degree, each.asleep) for each in engines if each.name in change.wanted}
        to_sleep = [name for name, want in change.wanted.items() if want.asleep and not before[name].asleep]
        moved: list[str] = []
        try:
            moved += await self._empty(to_sleep, change, meanwhile=True)
            await all_tried(self._be(name, SleepEngine(term=self._actor.incarnation)) for name in to_sleep)
            moved += await self._empty(to_sleep, change)
            await self.shape(change.wanted, before)
        except Superseded:
            raise
        except CommandFailed:
            await self._take_back(before)
            raise
        _, whose = _joined(await self._survey())
        return moved + await self.move(change.requests.items(), whose)

    async def shape(self, wanted: Mapping[str, Shape], before: Mapping[str, Shape]) -> None:
        """First what frees GPUs, then what takes them. Raises CommandFailed."""
        term = self._actor.incarnation
        awake = [name for name, want in wanted.items() if not want.asleep]
        smaller = [name for name in awake if not before[name].asleep and wanted[name].degree < before[name].degree]
        await all_tried(self._be(name, Reconfigure(wanted[name].degree, term)) for name in smaller)
        await all_tried(self._be(name, SleepEngine(term=term)) for name, want in wanted.items() if want.asleep and not before[name].asleep)
        await all_tried(self._be(name, WakeEngine(term)) for name in awake if before[name].asleep)
        others = [name for name in awake if name not in smaller and wanted[name].degree != before[name].degree]
        await all_tried(self._be(name, Reconfigure(wanted[name].degree, term)) for name in others)

    async def _take_back(self, before: Mapping[str, Shape]) -> None:
        try:
            surveyed, _ = _joined(await self._survey())
            now = {each.name: Shape(each.degree, each.asleep) for each in surveyed.engines if each.name in before}
            await self.shape({name: want for name, want in before.items() if name in now}, now)
        except CommandFailed as error:
            self._actor.log.warning("switch_not_taken_back", engines=sorted(before), error=str(error))

    async def _empty(self, names: Sequence[str], change: Reshape, meanwhile: bool = False) -> list[str]:
        """Move all requests off the engines `names`, to where they belong or to those that stay; `meanwhile`, others may come and are left there.

        Raises CommandFailed where some can't be moved.
        """
        stay = sorted(name for name, want in change.wanted.items() if not want.asleep and name not in names)
        moved, first = list[str](), None
        for rounds in range(ROUNDS if names else -1, -1, -1):
            surveyed, whose = _joined(await self._survey())
            here = [each.request_id for each in surveyed.requests if each.engine in names]
            first = frozenset(here) if first is None else first
            left = [name for name in here if name in first] if meanwhile else here
            if not left:
                break
            if not rounds:
                raise CommandFailed(f"{len(left)} requests stay on {', '.join(names)}, such as {left[0]}")
            asleep = {each.name for each in surveyed.engines if each.asleep}
            heirs = [name for name in stay if name not in asleep]
            if not heirs:
                raise CommandFailed(f"no engine of {', '.join(stay)} is awake to go on with {len(left)} requests")
            planned = [change.requests.get(name, "") for name in left]
            to = [name if name in heirs else heir for name, heir in zip(planned, cycle(heirs), strict=False)]
            moved += await self.move(zip(left, to, strict=True), whose)
        return moved

    async def _be(self, engine: str, order: SleepEngine | WakeEngine | Reconfigure) -> Obeyed:
        return await self._ask(engine, order, ORDER_S)

    async def _ask(self, target: str, request: Request[Any], timeout_s: float) -> Any:
        try:
            return await self._actor.ref(target).ask(request, timeout=timeout_s)
        except AskFailed as error:
            raise CommandFailed(f"{target} did not answer {type(request).__name__}: {error}") from error


def _joined(found: Mapping[str, Surveyed]) -> tuple[Surveyed, Mapping[str, str]]:
    """Of each proxy and manager, as `look` returns it."""
    whose = {each.request_id: proxy for proxy, reply in found.items() for each in reply.requests}
    engines = {each.name: each for reply in found.values() for each in reply.engines}
    requests = tuple(each for reply in found.values() for each in reply.requests)
    ended = tuple(each for reply in found.values() for each in reply.ended)
    trajectories = tuple(each for reply in found.values() for each in reply.trajectories)
    return Surveyed(requests, tuple(engines[name] for name in sorted(engines)), ended, 0, trajectories), whose


async def all_tried(orders: Iterable[Awaitable[Any]]) -> None:
    """All of them at once. Once every one is over, raises what one of those that failed raised: a CommandFailed only where nothing else was."""
    results = await asyncio.gather(*orders, return_exceptions=True)
    failed = [result for result in results if isinstance(result, BaseException)]
    if failed:
        raise min(failed, key=lambda error: type(error) is CommandFailed)


def reset(engines: Sequence[EngineInfo], degree: int) -> Mapping[str, Shape]:
    """Every engine as it was started: what puts any server right."""
    return {each.name: Shape(degree) for each in engines}


# -- what planned degrees mean for the engines of one server ------------------------------------------------------------


def as_merge(server: GpuGroup, change: Change) -> Reshape:
    """The engine with the largest cache stays, for the others' requests travel."""
    by_name = {each.name: each for each in server.engines}
    keeps = max(change.old, key=lambda name: (by_name[name].degree, name))
    wanted = {name: Shape(change.degree) if name == keeps else Shape(server.profile.degree, True) for name in change.old}
    requests = dict.fromkeys(change.parts[0], keeps)
    return Reshape(f"merge {' + '.join(change.old)}", wanted, requests, change.why)


def as_split(server: GpuGroup, change: Change) -> Reshape | None:
    """Engines that sleep wake for the parts; None where there are too few."""
    (old,) = change.old
    asleep = [each.name for each in server.engines if each.asleep]
    names = [old, *asleep[: len(change.parts) - 1]]
    if len(names) < len(change.parts):
        return None
    requests = {request: name for name, part in zip(names, change.parts, strict=True) for request in part}
    return Reshape(f"split {old}", dict.fromkeys(names, Shape(change.degree)), requests, change.why)


def as_step(server: GpuGroup, plan: StepPlan, here: Collection[str]) -> Reshape:
    """Engines that have a planned degree keep it; the largest of the others take the largest of the rest, and those left over sleep.

    Requests that are `here` go where they are planned; those that still wait at a proxy are for the router.
    """
    free = sorted(server.engines, key=lambda each: (each.asleep, -each.degree, each.name))
    taken: dict[int, EngineInfo] = {}
    places = sorted(range(len(plan.degrees)), key=lambda place: -plan.degrees[place])
    for place in places:
        if same := [each for each in free if not each.asleep and each.degree == plan.degrees[place]]:
            taken[place] = same[0]
            free.remove(same[0])
    for place in places:
        if place not in taken:
            taken[place] = free.pop(0)
    wanted = {each.name: Shape(server.profile.degree, True) for each in free}
    wanted |= {each.name: Shape(plan.degrees[place]) for place, each in taken.items()}
    requests = {request: each.name for place, each in taken.items() for request in plan.assigned[place] if request in here}
    return Reshape(f"shape for the step of {server.engines[0].name}", wanted, requests, plan.why)
