"""How long a run stands still where an actor is killed, and where it is drained: role by role, on one running job.

python tools/bench/drains.py [--times 3] [--roles ROLE…] [--window 8] [--json FILE] [key.sub=value …]

The quickstart's actors as processes; engines and trainer are scripted, so that a step takes a fraction of a second. *kill* is SIGKILL of the
newest actor of the role, which its supervisor restarts. *drain* is `rubato drain` of one that was added before; where a run has no more of a
role than it needs, it is `restart` of the monitor: drained, and started again. Both are followed for `--window` seconds. A figure is the
longest time in them without a new row of metrics.jsonl, the median of `--times`, beside that of windows in which nothing happens.
"""

import argparse
import asyncio
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from rubato.runtime.guest import Guest, join  # noqa: E402
from rubato.runtime.launch.agent_messages import AddActors, Added, DrainActors, RestartActors  # noqa: E402
from rubato.runtime.launch.children import start_module  # noqa: E402
from rubato.runtime.registry import NODE, list_actors, role_of  # noqa: E402

OVERRIDES = (
    "run.steps=1000000", "env.concurrency=64", f"engine.kind={ROOT}/tools/bench/peers/walker.py:Walker", "engine.scripted.token_s=0.002",
    "train.kind=scripted", "train.scripted.step_s=0.1", "train.scripted.weights_mib=0.01", "train.batch_groups=4", "check.enabled=false",
    "eval.every=0", "eval.final_num_tasks=0", 'report.finish=""', "actors.engine.restarts=100", "actors.env_manager.restarts=100",
)  # fmt: skip
ROLES = ("env_manager", "engine", "llm_proxy", "reward_service", "trainer", "sample_buffer", "fabric_controller")
ONE = ("trainer", "sample_buffer", "llm_proxy", "fabric_controller")
"""Roles of which a run has one: these are restarted."""
LOOK_S, START_S, ASK_S = 0.02, 180.0, 60.0


def clock() -> float:
    return time.monotonic()  # noqa: TID251


class Watched:
    """A run's rows, as they come."""

    def __init__(self, folder: Path) -> None:
        self._rows = folder / "metrics.jsonl"

    def size(self) -> int:
        return self._rows.stat().st_size if self._rows.exists() else 0

    async def grown(self, times: int) -> None:
        """Return after so many rows more. Raises TimeoutError."""
        async with asyncio.timeout(START_S):
            for _ in range(times):
                size = self.size()
                while self.size() == size:  # noqa: ASYNC110 - what another process writes sends no event
                    await asyncio.sleep(LOOK_S)

    async def longest_pause(self, seconds: float, act: Callable[[], Coroutine[Any, Any, object]]) -> float:
        """Without a row, from `act` on: until `seconds` are over and `act` has returned, and then to the next row."""
        began = last = clock()
        size, longest = self.size(), 0.0
        async with asyncio.TaskGroup() as tasks:
            acting = tasks.create_task(act())
            while clock() - began < seconds or not acting.done() or last < began + seconds:
                await asyncio.sleep(LOOK_S)
                if self.size() != size:
                    size, longest, last = self.size(), max(longest, clock() - last), clock()
                if clock() - last > START_S:
                    raise TimeoutError("the run stands still")
        return longest


async def measured(folder: Path, roles: Sequence[str], times: int, window_s: float) -> dict[str, dict[str, float]]:
    watched, found = Watched(folder), dict[str, dict[str, float]]()
    await watched.grown(10)
    async with join(folder) as me:
        quiet = [await watched.longest_pause(window_s, lambda: asyncio.sleep(0)) for _ in range(times)]
        found["nothing"] = {"kill": statistics.median(quiet), "drain": statistics.median(quiet)}
        for role in roles:
            pauses: dict[str, list[float]] = {"kill": [], "drain": []}
            for _ in range(times):
                for how, act in (("kill", kill), ("drain", drain)):
                    name = await chosen(me, role, add=role not in ONE and how == "drain")
                    pauses[how].append(await watched.longest_pause(window_s, lambda a=act, n=name: a(me, n)))
                    await watched.grown(3)
            found[role] = {how: statistics.median(each) for how, each in pauses.items()}
            print(f"{role:<18} kill {found[role]['kill']:5.2f} s   drain {found[role]['drain']:5.2f} s", flush=True)
    return found


async def chosen(me: Guest, role: str, *, add: bool) -> str:
    """The oldest actor of `role`, another of which was added before."""
    if add:
        assert isinstance(await me.ref(NODE).ask(AddActors(role, 1), timeout=ASK_S), Added)
        many = len(me.peers(role))
        async with asyncio.timeout(ASK_S):
            while len(me.peers(role)) <= many:
                await me.directory.change()
    async with asyncio.timeout(ASK_S):
        while not me.peers(role):
            await me.directory.change()
    return me.peers(role)[0]


async def kill(me: Guest, name: str) -> None:
    (pid,) = [record.pid for record in await list_actors(me.store) if record.name == name]
    os.kill(pid, signal.SIGKILL)


async def drain(me: Guest, name: str) -> None:
    one = role_of(name) in ONE
    request = RestartActors((name,)) if one else DrainActors((name,))
    reply = await me.ref(NODE).ask(request, timeout=ASK_S)  # pyright: ignore[reportArgumentType] - either has names
    assert getattr(reply, "names", ()) == (name,), reply


async def main() -> int:
    parser = argparse.ArgumentParser(description="How long a run stands still where an actor is killed, and where it is drained.")
    parser.add_argument("overrides", nargs="*", default=[], metavar="key.sub=value")
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--window", type=float, default=8.0)
    parser.add_argument("--roles", nargs="+", default=ROLES, choices=ROLES)
    parser.add_argument("--json", type=Path)
    given = parser.parse_intermixed_args()
    with tempfile.TemporaryDirectory(prefix="drains-") as place:
        folder = Path(place) / "run"
        words = ("launch", str(ROOT / "configs/quickstart.yaml"), *OVERRIDES, *given.overrides, "--run-dir", str(folder))
        with (Path(place) / "output").open("wb") as output:
            job = await start_module("rubato.runtime.cli", *words, more={"PYTHONPATH": str(ROOT)}, stdout=output, stderr=output)
        try:
            found = await measured(folder, given.roles, given.times, given.window)
        finally:
            job.send_signal(signal.SIGTERM)
            await job.wait()
    print(f"nothing            {found['nothing']['kill']:.2f} s")
    if given.json:
        given.json.write_text(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
