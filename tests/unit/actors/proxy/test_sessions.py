"""The memory of sessions is bounded."""

from actors.proxy.placement import Sessions


def test_the_least_recently_used_session_is_forgotten_first():
    sessions = Sessions(2)
    sessions.served("a", "engine-1")
    sessions.served("b", "engine-2")
    sessions.served("a", "engine-1")

    sessions.served("c", "engine-1")

    assert [sessions.engine_of(s) for s in "abc"] == ["engine-1", None, "engine-1"]
