"""A host that joined looks for the first one, and for no other."""

from types import SimpleNamespace

from rubato.runtime.launch import launcher
from rubato.runtime.launch.launcher import follow
from rubato.runtime.memory import MemoryStore


async def test_a_host_leaves_a_run_whose_first_host_is_gone_though_node_10_is_up(monkeypatch):
    monkeypatch.setattr(launcher, "FOLLOW_S", 0.0)
    ended: list[str] = []

    store = MemoryStore()
    await store.lease("actor/node-10", 1, b"", 60.0)
    screen = SimpleNamespace(notice=lambda *_, **__: None)
    agent = SimpleNamespace(store=store, screen=screen, end=lambda outcome: ended.append(outcome.kind))

    await follow(agent, 0.01)

    assert ended == ["lost"]
