"""What the proxy knows of the stages of its engines."""

from types import SimpleNamespace

import msgspec
import pytest

from rubato.actors.config import ProxySection
from rubato.actors.messages.generation import Generate, HandedOver, Sampling, Tokens
from rubato.actors.proxy.picker import PickerHost
from rubato.actors.proxy.placement import EngineSeat, ProxyRequest
from rubato.actors.stages.picker import DECODE, PREFILL, StagePicker
from rubato.planning.engine_info import EngineInfo, WeightsId, WeightsNeed
from tests.virtual import virtual


class Told:
    """Keeps what an actor tells its user."""

    def __init__(self):
        self.notices = []
        self.log = SimpleNamespace(info=lambda event, **fields: None)

    def notice(self, text):
        self.notices.append(text)


class Staged(StagePicker):
    """Engines 1 and 2 prefill, engine 3 decodes."""

    def __init__(self):
        self.seats = {}
        config = SimpleNamespace(proxy=ProxySection())
        super().__init__(PickerHost(Told(), config, self.seats, {}, lambda: 0, lambda: None))  # pyright: ignore[reportArgumentType] - what is used of it
        for name, serves in (("engine-1", PREFILL), ("engine-2", PREFILL), ("engine-3", DECODE)):
            self.come(name, serves)

    def come(self, name, serves):
        seat = self.seats[name] = EngineSeat(EngineInfo(name, 4, serves=serves), ref=None)
        self.joined(seat)

    def go(self, name):
        self.left(self.seats.pop(name))

    def is_now(self, name, version=0, **told):
        seat = self.seats[name]
        seat.info = msgspec.structs.replace(seat.info, holds=(WeightsId(version),), **told)
        self.changed(seat)

    def names(self, request):
        return {engine.name for engine in self.usable(request)}

    @property
    def notices(self):
        return self._actor.notices


@pytest.fixture
def stages():
    return Staged()


def request(name="r", min_version=0):
    return ProxyRequest(Generate(name, "s", b"", Sampling(1), WeightsNeed(min_version)))


@virtual
async def test_one_that_moved_finished_its_stage_once(stages):
    shared, names = request(), ("engine-1", "engine-2")
    for name in names:
        stages.seated(shared, stages.seats[name])
        shared.seat = stages.seats[name]
    for name in names:
        stages.released(shared, stages.seats[name])

    assert stages._watches[PREFILL].finished == 1
    assert not any(has for has, _ in stages._busy.values())


@virtual
async def test_one_that_was_seated_before_stages_were_apart_leaves_nobody_busy_or_idle(stages):
    before, now = request("before"), request("now")
    before.seat = now.seat = stages.seats["engine-1"]
    stages.seated(now, now.seat)
    stages.released(before, before.seat)

    assert stages._busy["engine-1"][0] == {"now"}


@virtual
async def test_what_was_handed_over_is_decoded_where_its_cache_is_told_of_and_what_was_lost_begins_anew(stages):
    shared, first = request(), stages.seats["engine-1"]
    assert stages.route(shared, first).hand_over

    stages.after(shared, first, HandedOver("r", Tokens()))
    assert (stages.queue(shared), stages.names(shared)) == (DECODE, {"engine-3"})
    assert stages.route(shared, stages.seats["engine-3"]).cache_at == "engine-1"

    stages.after(shared, stages.seats["engine-3"], None)
    assert (stages.queue(shared), stages.route(shared, first).cache_at) == (PREFILL, "")


@virtual
async def test_where_an_evaluation_holds_all_engines_of_a_stage_the_others_serve_it(stages):
    stages.is_now("engine-3", version=1)
    for name in ("engine-1", "engine-2"):
        stages.is_now(name, pinned=True)

    assert stages.names(request(min_version=0)) == {"engine-1", "engine-2"}
    assert stages.names(request(min_version=1)) == set(stages.seats)


@virtual
async def test_where_all_engines_of_a_stage_sleep_the_others_serve_it(stages):
    stages.is_now("engine-1", asleep=True)
    assert stages.names(request()) == {"engine-1", "engine-2"}
    assert stages.hands_over(request(), "engine-2")

    stages.is_now("engine-2", asleep=True)
    stages.is_now("engine-3", asleep=True)

    assert stages.names(request()) == set(stages.seats)
    assert not stages.hands_over(request(), "engine-2")


@virtual
async def test_a_stage_that_falls_back_is_told_once_with_the_reason_and_again_only_after_it_was_served(stages):
    stages.go("engine-3")

    assert not any(stages.hands_over(request(), name) for name in ("engine-1", "engine-2"))
    assert stages.notices == ["requests to decode go to engines that prefill for now: no engine that decodes is up"]

    stages.come("engine-3", DECODE)
    stages.hands_over(request(), "engine-1")
    assert len(stages.notices) == 1

    stages.is_now("engine-3", asleep=True)
    stages.hands_over(request(), "engine-1")
    assert stages.notices[1:] == ["requests to decode go to engines that prefill for now: the engines that decode are asleep"]


@virtual
async def test_a_stage_that_an_evaluation_holds_is_told_once_however_many_requests_fall_back(stages):
    stages.is_now("engine-3", version=1)
    for name in ("engine-1", "engine-2"):
        stages.is_now(name, pinned=True)

    for oldest in (1, 0, 1):
        stages.usable(request(min_version=oldest))

    assert stages.notices == [
        "requests to prefill go to engines that decode for now: the engines that prefill are held at an older version for an evaluation"
    ]


@virtual
async def test_where_every_engine_sleeps_or_is_gone_nothing_falls_back(stages):
    names = list(stages.seats)
    for name in names:
        stages.is_now(name, asleep=True)
    stages.usable(request())
    for name in names:
        stages.go(name)
    stages.usable(request())

    assert stages.notices == []
