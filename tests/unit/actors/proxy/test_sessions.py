"""The memory of sessions is bounded."""

from actors.messages.generation import Generate, Sampling
from actors.proxy.placement import EngineSeat, Placement, ProxyRequest
from actors.proxy.stages import Stages


async def test_the_least_recently_used_session_is_forgotten_first():
    placement = Placement(max_waiting=1, sessions_kept=2, on_turn=print, stages=Stages(None, 0.0))
    placement.join(EngineSeat("engine-1", ref=None, num_slots=8, version=0, suspended=False))

    for session in "abac":
        placement.try_take(ProxyRequest(Generate(session, session, b"", Sampling(1))))

    assert list(placement._sessions) == ["a", "c"]
