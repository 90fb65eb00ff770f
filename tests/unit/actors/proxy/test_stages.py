"""What the proxy knows of the stages of its engines."""

from types import SimpleNamespace

import pytest

from actors.messages.generation import Generate, Sampling
from actors.proxy.placement import ProxyRequest
from actors.proxy.stages import DECODE, PREFILL, Stages
from planning.routing import EngineView
from tests.virtual import virtual


class Told:
    """Keeps what an actor tells its user."""

    def __init__(self):
        self.notices = []
        self.log = SimpleNamespace(info=lambda event, **fields: None)

    def notice(self, text):
        self.notices.append(text)


@pytest.fixture
def stages():
    made = Stages(actor=Told(), period_s=0.0)
    for name, serves in (("engine-1", PREFILL), ("engine-2", PREFILL), ("engine-3", DECODE)):
        made.join(SimpleNamespace(name=name, serves=serves))
        made.see(EngineView(name, 0, 4, 0))
    return made


def request(name="r", min_version=0):
    return ProxyRequest(Generate(name, "s", b"", Sampling(1), min_version=min_version))


@virtual
async def test_one_that_moved_finished_its_stage_once(stages):
    shared = request()
    for name in ("engine-1", "engine-2"):
        shared.engine = name
        stages.seated(shared, name)
    for name in ("engine-1", "engine-2"):
        stages.left(shared, name)

    assert stages._watches[PREFILL].finished == 1
    assert not any(has for has, _ in stages._busy.values())


@virtual
async def test_one_that_was_seated_before_stages_were_apart_leaves_nobody_busy_or_idle(stages):
    before, now = request("before"), request("now")
    before.engine = now.engine = "engine-1"
    stages.seated(now, "engine-1")
    stages.left(before, "engine-1")

    assert stages._busy["engine-1"][0] == {"now"}


@virtual
async def test_where_an_evaluation_holds_all_engines_of_a_stage_the_others_serve_it(stages):
    views = {name: EngineView(name, 1, 4, 0) for name in ("engine-1", "engine-2", "engine-3")}
    for name in ("engine-1", "engine-2"):
        stages.see(EngineView(name, 0, 4, 0, held=True))

    assert {view.name for view in stages.usable(request(min_version=0), views)} == {"engine-1", "engine-2"}
    assert {view.name for view in stages.usable(request(min_version=1), views)} == set(views)


@virtual
async def test_where_all_engines_of_a_stage_sleep_the_others_serve_it(stages):
    views = {name: EngineView(name, 0, 4, 0) for name in ("engine-1", "engine-2", "engine-3")}
    stages.see(EngineView("engine-1", 0, 4, 0, asleep=True))
    assert {view.name for view in stages.usable(request(), views)} == {"engine-1", "engine-2"}
    assert stages.hands_over(request(), "engine-2")

    stages.see(EngineView("engine-2", 0, 4, 0, asleep=True))
    stages.see(EngineView("engine-3", 0, 4, 0, asleep=True))

    assert {view.name for view in stages.usable(request(), views)} == set(views)
    assert not stages.hands_over(request(), "engine-2")


@virtual
async def test_a_stage_that_falls_back_is_told_once_with_the_reason_and_again_only_after_it_was_served(stages):
    told = stages._actor.notices
    views = {name: EngineView(name, 0, 4, 0) for name in ("engine-1", "engine-2", "engine-3")}
    stages.forget("engine-3")

    assert not any(stages.hands_over(request(), name) for name in ("engine-1", "engine-2"))
    assert told == ["requests to decode go to engines that prefill for now: no engine that decodes is up"]

    stages.join(SimpleNamespace(name="engine-3", serves=DECODE))
    stages.see(views["engine-3"])
    stages.hands_over(request(), "engine-1")
    assert len(told) == 1

    stages.see(views["engine-3"]._replace(asleep=True))
    stages.hands_over(request(), "engine-1")
    assert told[1:] == ["requests to decode go to engines that prefill for now: the engines that decode are asleep"]


@virtual
async def test_a_stage_that_an_evaluation_holds_is_told_once_however_many_requests_fall_back(stages):
    views = {name: EngineView(name, 1, 4, 0) for name in ("engine-1", "engine-2", "engine-3")}
    for name in ("engine-1", "engine-2"):
        stages.see(EngineView(name, 0, 4, 0, held=True))

    for oldest in (1, 0, 1):
        stages.usable(request(min_version=oldest), views)

    assert stages._actor.notices == [
        "requests to prefill go to engines that decode for now: the engines that prefill are held at an older version "
        "for an evaluation"
    ]


@virtual
async def test_where_every_engine_sleeps_or_is_gone_nothing_falls_back(stages):
    for name in ("engine-1", "engine-2", "engine-3"):
        stages.see(EngineView(name, 0, 4, 0, asleep=True))
    stages.usable(request(), {})
    for name in ("engine-1", "engine-2", "engine-3"):
        stages.forget(name)
    stages.usable(request(), {})

    assert stages._actor.notices == []
