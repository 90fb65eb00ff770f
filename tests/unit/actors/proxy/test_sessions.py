"""The memory of sessions is bounded."""

from types import SimpleNamespace

from rubato.actors.config import ProxySection
from rubato.actors.messages.generation import Generate, Sampling
from rubato.actors.proxy.picker import LeastLoaded, PickerHost
from rubato.actors.proxy.placement import EngineSeat, Placement, ProxyRequest
from rubato.planning.engine_info import EngineInfo


async def test_the_least_recently_used_session_is_forgotten_first():
    placement = Placement(max_waiting=1, on_turn=print)
    config = SimpleNamespace(proxy=ProxySection(sessions_kept=2))
    host = PickerHost(None, config, placement.seats, {}, lambda: 0, placement.look)
    picker = placement.picker = LeastLoaded(host)
    placement.join(EngineSeat(EngineInfo("engine-1", 8), ref=None))

    for session in "abac":
        placement.try_take(ProxyRequest(Generate(session, session, b"", Sampling(1))))

    assert list(picker._sessions) == ["a", "c"]
