"""Engines as planners see them: which have GPUs of one server between them, what they run, and how fast they are at each degree."""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import cycle
from typing import NamedTuple

from pydantic import ValidationError

from rubato.actors import catalog
from rubato.actors.messages.orchestration import RequestSeen
from rubato.planning.demand import Demand
from rubato.planning.engine_info import EngineInfo, EngineProfile
from rubato.planning.language_model import ModelSpec
from rubato.planning.makespan import Instance, Load
from rubato.planning.rebalance import moved
from rubato.planning.roofline import Deployment, Roofline

PREFILL = "prefill"
"""What an engine serves that hands each request over once its first token is sampled."""


class GpuGroup(NamedTuple):
    """Engines that share GPUs by sleeping and waking: those of one host, pool and hardware. Each was started with `gpus` of them."""

    name: str
    profile: EngineProfile
    engines: tuple[EngineInfo, ...]

    @property
    def gpus(self) -> int:
        return self.profile.degree * len(self.engines)

    @property
    def restart_s(self) -> float:
        """What a change of degree takes the slowest of its engines, in seconds of its hardware; 0: they go on."""
        return max(each.restart_s for each in self.engines)

    @property
    def adds_up(self) -> bool:
        """The engines that are awake have all GPUs, and none twice."""
        return sum(each.degree for each in self.engines if not each.asleep) == self.gpus

    @property
    def settled(self) -> bool:
        """Every engine takes requests, or sleeps: none is on its way from one to the other."""
        return all(each.takes or each.asleep for each in self.engines)


def servers(engines: Iterable[EngineInfo], place_of: Callable[[str], str]) -> list[GpuGroup]:
    """`place_of` names an engine's host and pool; "": not known. None are found then, for GPUs may be shared with that engine.

    Skips engines whose hardware is not given, and those that only prefill, for they sample no tokens.
    """
    found: dict[tuple[str, EngineProfile], list[EngineInfo]] = defaultdict(list)
    for each in engines:
        if each.profile is not None and each.serves != PREFILL:
            if not (place := place_of(each.name)):
                return []
            found[place, each.profile].append(each)
    return [GpuGroup(place, profile, tuple(sorted(group, key=lambda each: each.name))) for (place, profile), group in sorted(found.items())]


class Speeds:
    """Rooflines, made once each."""

    def __init__(self, degrees: Sequence[int], own: Callable[[], ModelSpec]) -> None:
        """`degrees` are those that engines may have; empty: every power of two. `own` is the shape of the job's own model."""
        self._degrees = degrees
        self._own = own
        self._known: dict[tuple[str, str, int, int, float], Roofline | None] = {}

    def of(self, server: GpuGroup) -> dict[int, Roofline]:
        """By degree: those that its engines have, and may have."""
        allowed = self._degrees or [1 << power for power in range(server.gpus.bit_length())]
        base, most = server.profile.degree, server.gpus
        may = [each for each in allowed if each <= most and each % base == 0 and most % each == 0]
        slots = min(each.num_slots for each in server.engines)
        has = {each.degree for each in server.engines}
        restart_s = float(round(server.restart_s))
        found = {degree: self._roofline(server.profile, degree, slots, restart_s) for degree in sorted({*may, *has})}
        return {degree: roofline for degree, roofline in found.items() if roofline is not None}

    def model(self, profile: EngineProfile) -> ModelSpec:
        """The shape that counts."""
        return catalog.model(profile.model) if profile.model else self._own()

    def _roofline(self, profile: EngineProfile, degree: int, num_slots: int, restart_s: float) -> Roofline | None:
        """None where the model does not fit."""
        key = (profile.hardware, profile.model, degree, num_slots, restart_s)
        if key not in self._known:
            gpu, model = catalog.hardware(profile.hardware), self.model(profile)
            fits = model.heads % degree == 0 and degree <= gpu.gpus_per_server
            try:
                sizes = {"tp": degree, "num_slots": num_slots, "restart_s": restart_s}
                spec = Deployment(gpu=gpu, model=model, **sizes) if fits else None
            except ValidationError:
                spec = None
            self._known[key] = None if spec is None else Roofline(spec)
        return self._known[key]


def instances(
    servers: Iterable[GpuGroup], requests: Iterable[RequestSeen], loaded: Callable[[RequestSeen], Load], settling: Collection[str] = ()
) -> list[Instance]:
    """Engines that are awake and take requests, with theirs; those named in `settling` changed a moment ago."""
    loads: Mapping[str, list[Load]] = defaultdict(list)
    for each in requests:
        if each.engine:
            loads[each.engine].append(loaded(each))
    return [
        Instance(each.name, each.degree, tuple(loads[each.name]), server.name, each.name not in settling)
        for server in servers
        for each in server.engines
        if each.takes and not each.asleep
    ]


def expected(servers: Sequence[GpuGroup], requests: Iterable[RequestSeen]) -> dict[GpuGroup, list[RequestSeen]]:
    """Of each server, the requests that its engines have, and of those that wait at a proxy as many as it has GPUs among all."""
    at = {each.name: server for server in servers for each in server.engines}
    places = [server for server in servers for _ in range(server.gpus)]
    found: dict[GpuGroup, list[RequestSeen]] = {server: [] for server in servers}
    waiting = 0
    for each in requests:
        if each.engine in at:
            found[at[each.engine]].append(each)
        elif not each.engine and places:
            found[places[waiting % len(places)]].append(each)
            waiting += 1
    return found


def load(request: RequestSeen, left: float, wait_s: float = 0.0) -> Load:
    """One that has tokens has the cache of all but the last of them. Later turns come to the engine that has its session."""
    context = request.shown + request.sampled
    return Load(request.request_id, context, left, context - 1 if request.sampled else 0, wait_s)


def asleep_with(servers: Iterable[GpuGroup], requests: Iterable[RequestSeen]) -> dict[str, str]:
    """Where requests of engines that sleep are to go: engines of their server that are awake and take them.

    Where every engine of a pool that lives is asleep, a proxy gives them requests, which wait until it wakes. If then another one comes back
    in time to be given all GPUs, those that sleep are not woken.
    """
    found: dict[str, str] = {}
    waiting = [each for each in requests if each.engine and not each.moves]
    for server in servers:
        asleep = {each.name for each in server.engines if each.asleep}
        heirs = [each.name for each in server.engines if each.takes and not each.asleep]
        here = [each.request_id for each in waiting if each.engine in asleep]
        found |= dict(zip(here, cycle(heirs), strict=False))
    return found


def carried(
    requests: Iterable[RequestSeen], to: Mapping[str, str], degrees: Mapping[str, int], speeds: Mapping[int, Roofline]
) -> dict[str, str]:
    """Those of `to` (request → engine) whose cache goes along, by what their source, of one of `degrees`, is expected to decide."""
    found: dict[str, str] = {}
    for each in requests:
        target, speed = to.get(each.request_id, each.engine), speeds.get(degrees.get(each.engine, 0))
        if speed is not None and target != each.engine and moved(load(each, 0.0), speed, speed)[1].with_cache:
            found[each.request_id] = target
    return found


def cache_traffic(server: GpuGroup, requests: Iterable[RequestSeen], to: Mapping[str, str], model: ModelSpec) -> tuple[Demand, ...]:
    """Bytes of KV cache between engines, where requests change engines as `to` (by request id) says; none that is computed again."""
    if server.restart_s:
        return ()
    per_token = model.kv_bytes_per_token
    found: dict[tuple[str, str], int] = defaultdict(int)
    for each in requests:
        target = to.get(each.request_id, each.engine)
        if each.engine and target != each.engine:
            found[each.engine, target] += (each.shown + each.sampled) * per_token
    return tuple((*pair, size_bytes) for pair, size_bytes in sorted(found.items()))
