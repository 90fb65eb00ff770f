"""What `monitor --why` says while a healthy job starts, trains and loses an engine to a drain: no circle, nobody missing or dead."""

import asyncio

from rubato.runtime.monitor.snapshot import snapshot
from rubato.runtime.monitor.text import explain
from rubato.runtime.registry import list_seen
from tests.faulty_job import FreezingLoop, starting

LOOK_S = 0.23


async def looks_at(folder):
    """Every line of the tree, and every blocked stage that is not only slow or starting, at each look."""
    found = []

    async def look(job):
        while True:
            await FreezingLoop.sleep(LOOK_S)
            seen = await list_seen(job.store)
            silent = {one.record.name: one.silent_s for one in seen}
            shown = snapshot("healthy", [one.record for one in seen], [], {}, silent=silent)
            blocked = [row for row in shown["blocked"] if row["kind"] not in ("slow", "starting")]
            found.append(([cause.text for cause in explain(shown)], blocked))

    async with starting(folder) as job:
        looking = asyncio.get_running_loop().create_task(look(job))
        await job.step(20)
        await FreezingLoop.sleep(5.0)
        await job.agent.host.drain("engine-2", 20.0)
        await FreezingLoop.sleep(3.0)
        looking.cancel()
    return found


def test_a_healthy_job_is_told_without_a_circle_a_missing_actor_or_a_dead_one(tmp_path):
    looks = FreezingLoop.run(lambda: looks_at(tmp_path), seed=1)

    lines = [line for told, _ in looks for line in told]
    assert len(looks) > 30
    assert any("trainer-1 waits" in line for line in lines)
    assert [line for line in lines if "circle" in line or "no such actor" in line] == []
    assert [row for _, blocked in looks for row in blocked if row["holder"] != "engine-2"] == []
