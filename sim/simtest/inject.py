"""Carries faults out on a world, each at its step, and heals them."""

import asyncio
import contextvars
import random
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from rubato.actors.messages.moves import Move
from rubato.actors.ranks.head import RanksLost
from rubato.bus.errors import AskFailed
from rubato.runtime.errors import NotRunning
from rubato.sim.simtest.actors import SimBuffer
from rubato.sim.simtest.blobs import corrupted, half
from rubato.sim.simtest.checks import InvariantChecks
from rubato.sim.simtest.faults import Fault
from rubato.sim.simtest.network import HEARTBEAT_S
from rubato.sim.simtest.process import ActorProcess, Killed
from rubato.sim.simtest.store import LOSS_S
from rubato.sim.simtest.world import World

UP_S = 40.0
"""A fault whose target is down waits so long for it to come back."""

TAKE_OVER_S = 0.5
"""Time from the freezing of a process until another takes its name."""

NAMING_TICKS = 12
"""Of the loop, from the writing of a checkpoint until COMMIT has left, and a few more."""


MISHAPS = 0.1
"""Share of moves whose links are hit."""

SLOW_TOKEN_S = 0.1
"""While requests move: each lives for several moves."""


async def _told(asker: Any, order: Move) -> None:
    with suppress(AskFailed):
        await asker.ref("llm_proxy").ask(order, timeout=30.0, retry=False)


class Injector:
    """`active` counts faults under way; `healed_at` is when the last one ended."""

    def __init__(self, world: World, faults: list[Fault], monitor: InvariantChecks) -> None:
        self._world, self._faults, self._monitor = world, faults, monitor
        self._rng = random.Random(f"{world.setup.seed}/inject")
        self._context = contextvars.copy_context()
        self._tasks: asyncio.TaskGroup
        self.active = 0
        self.fired = 0
        self.healed_at = 0.0
        self._acts: dict[str, Callable[[Fault], Awaitable[None]]] = {
            "link_snap": self._snap,
            "link_delay": self._delay,
            "partition": self._partition,
            "kill": self._kill,
            "freeze": self._freeze,
            "zombie": self._zombie,
            "slow_loop": self._slow,
            "resume": self._resume,
            "store_latency": self._store_latency,
            "store_reply_lost": self._reply_lost,
            "store_restart": self._store_restart,
            "store_loss": self._store_restart,
            "store_loss_kill": self._store_restart,
            "zombie_fence_lost": self._fence_lost,
            "script_cache_lost": self._scripts,
            "publish_lost": self._publish_lost,
            "weights_corrupt": self._spoil,
            "weights_half": self._spoil,
            "cancel": self._cancel,
            "moves": self._moves,
        }

    def start(self, tasks: asyncio.TaskGroup) -> None:
        self._tasks = tasks
        for number, fault in enumerate(self._faults):
            tasks.create_task(self._carry_out(fault), name=f"fault.{number}.{fault.kind}")

    def thaw(self, process: ActorProcess) -> None:
        """It goes on, with everything that happened meanwhile before it."""
        loop: Any = asyncio.get_running_loop()
        process.thawed_at = loop.time()
        loop.thaw(process)

    async def _carry_out(self, fault: Fault) -> None:
        world, loop = self._world, asyncio.get_running_loop()
        while world.step < fault.step and world.ending is None:
            await world.moved.wait()
        await asyncio.sleep(fault.after_s)
        if fault.target:
            await self._is_up(fault.target)
        world.record.say(f"FAULT {fault}")
        self.fired += 1
        self.active += 1
        try:
            await self._acts.get(fault.kind, self._arm)(fault)
        finally:
            self.active -= 1
            self.healed_at = loop.time()

    async def _is_up(self, name: str) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(UP_S):
                await self._world.ready(name)

    # -- the network --------------------------------------------------------------------------------------------

    async def _snap(self, fault: Fault) -> None:
        self._world.network.snap(fault.target, fault.other, "the link broke")
        self._world.network.snap(fault.other, fault.target, "the link broke")

    async def _delay(self, fault: Fault) -> None:
        self._world.network.cut(fault.target, fault.other, fault.seconds)
        self._world.network.cut(fault.other, fault.target, fault.seconds)
        await asyncio.sleep(fault.seconds)

    async def _partition(self, fault: Fault) -> None:
        self._world.network.cut(fault.target, fault.other, fault.seconds)
        await asyncio.sleep(fault.seconds)

    async def _publish_lost(self, fault: Fault) -> None:
        self._world.network.lose_next("trainer-1", "engine-*", asyncio.get_running_loop().time() + 20.0)

    # -- processes ----------------------------------------------------------------------------------------------

    async def _kill(self, fault: Fault) -> None:
        self._world.processes[fault.target].kill()

    async def _freeze(self, fault: Fault) -> None:
        await self._frozen(self._world.processes[fault.target], fault.seconds)

    async def _zombie(self, fault: Fault) -> None:
        await self._become_zombie(self._world.processes[fault.target], fault.seconds)

    async def _become_zombie(self, process: ActorProcess, seconds: float) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._frozen(process, seconds), name=f"frozen.{process.name}")
            await asyncio.sleep(TAKE_OVER_S)
            if process.alive and self._world.processes[process.name] is process:
                self._world.replace(process)

    async def _frozen(self, process: ActorProcess, seconds: float) -> None:
        """Links bear a silence only so long."""
        process.frozen = True
        await asyncio.sleep(min(seconds, HEARTBEAT_S))
        if seconds > HEARTBEAT_S and process.transport is not None:
            self._world.network.silence(process.transport)
            await asyncio.sleep(seconds - HEARTBEAT_S)
        self.thaw(process)

    async def _resume(self, fault: Fault) -> None:
        self._world.resume(self._rng.randint(0, self._world.setup.alpha))

    async def _slow(self, fault: Fault) -> None:
        process = self._world.processes[fault.target]
        process.slowness_s = 0.01
        await asyncio.sleep(fault.seconds)
        process.slowness_s = 0.0
        process.thawed_at = asyncio.get_running_loop().time()

    async def _cancel(self, fault: Fault) -> None:
        """Holders hear that about half of what runs is in vain, which is wrong: it costs them other attempts, and nothing else."""
        buffer: Any = self._world.processes[fault.target].actor
        if not isinstance(buffer, SimBuffer) or not hasattr(buffer, "_groups"):
            return
        groups = buffer._groups  # pyright: ignore[reportPrivateUsage]
        for name, member in groups.running():
            if self._rng.random() < 0.5:
                groups.cancels.setdefault((member.holder, member.incarnation), []).append((name, member.attempt))
        buffer._slots.set()  # pyright: ignore[reportPrivateUsage]

    # -- the store ----------------------------------------------------------------------------------------------

    async def _store_latency(self, fault: Fault) -> None:
        self._world.store.slow_until = asyncio.get_running_loop().time() + fault.seconds
        await asyncio.sleep(fault.seconds)

    async def _reply_lost(self, fault: Fault) -> None:
        self._world.store.lose_replies += self._rng.randint(1, 8)

    async def _scripts(self, fault: Fault) -> None:
        self._world.store.forget_scripts += 20

    async def _store_restart(self, fault: Fault) -> None:
        store = self._world.store
        if not store.is_up:
            return
        if fault.kind != "store_restart" and not store.durable:
            store.begin_window()
            self._monitor.window_begins()
            await asyncio.sleep(self._rng.uniform(0.0, LOSS_S))
        store.crash()
        self._monitor.store_lost()
        self._world.record.say("the store is down")
        if fault.kind == "store_loss_kill":
            self._world.processes["sample_buffer-1"].kill()
        await asyncio.sleep(fault.seconds)
        store.restart()

    async def _fence_lost(self, fault: Fault) -> None:
        """The buffer is frozen, another takes its name, and the Store forgets that it did; then the frozen one goes on."""
        store, process = self._world.store, self._world.processes["sample_buffer-1"]
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._frozen(process, fault.seconds), name=f"frozen.{process.name}")
            await asyncio.sleep(TAKE_OVER_S)
            if not store.is_up or not process.alive or self._world.processes[process.name] is not process:
                return
            if not store.durable:
                store.begin_window()
                self._monitor.window_begins()
            self._world.replace(process)
            await asyncio.sleep(self._rng.uniform(0.0, LOSS_S))
            store.crash()
            self._monitor.store_lost()
            self._world.record.say("the store is down")
            await asyncio.sleep(0.1)
            store.restart()

    # -- requests that move ------------------------------------------------------------------------------------------

    async def _moves(self, fault: Fault) -> None:
        """Engines are slow, and requests move to and fro between them; now and then the links break that a move needs."""
        loop, rng = asyncio.get_running_loop(), self._rng
        ends, names = loop.time() + fault.seconds, self._world.setup.names
        async with asyncio.TaskGroup() as mishaps:
            while loop.time() < ends:
                await asyncio.sleep(rng.uniform(0.0, 0.1))
                for name in names:
                    if name.startswith("engine-"):
                        self._slow_tokens(name, SLOW_TOKEN_S)
                running = self._running()
                if not running:
                    continue
                shared, unlucky = rng.choice(running), rng.random() < MISHAPS
                source = shared.engine
                seats = self._world.processes["llm_proxy-1"].actor.placement.seats
                targets = sorted(name for name in seats if name != source)
                if not targets:
                    continue
                target = rng.choice(targets)
                if unlucky:
                    mishaps.create_task(self._mishap(shared.request.request_id, source, target), name="mishap")
                else:
                    self._ask_to_move(shared.request.request_id, target)
        for name in names:
            if name.startswith("engine-"):
                self._slow_tokens(name, 0.0)

    def _slow_tokens(self, name: str, token_s: float) -> None:
        """An engine's tokens take so long; 0: as long as its config says."""
        engine = self._world.processes[name].actor and self._world.processes[name].actor._engine
        if engine is not None:
            section = engine._section.scripted
            engine._script = section.model_copy(update={"token_s": token_s}) if token_s else section

    def _running(self) -> list[Any]:
        """Requests that the proxy has on engines, where it and a manager that asks it are up."""
        proxy, manager = self._world.processes["llm_proxy-1"], self._world.processes[self._world.setup.managers[0]]
        if not all(p.alive and not p.frozen and p.kernel and p.kernel.ready.is_set() for p in (proxy, manager)):
            return []
        return [shared for shared in proxy.actor.requests.running.values() if shared.asked is not None]

    def _ask_to_move(self, request_id: str, target: str) -> None:
        manager = self._world.processes[self._world.setup.managers[0]]
        with suppress(NotRunning):
            told = _told(manager.actor, Move(request_id, target))
            manager.context.run(lambda: manager.actor.spawn(told, name="move"))

    async def _mishap(self, request_id: str, source: str, target: str) -> None:
        """The target comes late for the request: the proxy has lost it meanwhile, and has the request move again."""
        network, seconds = self._world.network, self._rng.uniform(0.1, 1.5)
        network.cut(target, source, seconds)
        self._ask_to_move(request_id, target)
        await asyncio.sleep(self._rng.uniform(0.01, 0.1))
        network.snap("llm_proxy-1", target, "the link broke")
        for other in self._world.setup.names:
            if other.startswith("engine-") and other not in (source, target):
                await asyncio.sleep(self._rng.uniform(0.01, 0.1))
                self._ask_to_move(request_id, other)
        await asyncio.sleep(seconds)

    # -- the trainer and its weights ----------------------------------------------------------------------------

    async def _arm(self, fault: Fault) -> None:
        """Something happens when the trainer comes to a certain point."""
        world = self._world
        match fault.kind:
            case "crash_before_save":
                world.at_save["before_save"] = self._crash
            case "crash_after_save":
                world.at_save["after_save"] = self._crash
            case "crash_named":
                world.at_save["named"] = self._crash
            case "crash_before_commit":
                world.at_commit["before"] = ActorProcess.kill
            case "crash_after_commit":
                world.at_commit["after"] = ActorProcess.kill
            case "rank_lost":
                world.at_save[fault.other] = self._lose_rank
            case "zombie_before_commit":
                ticks = self._rng.randint(0, NAMING_TICKS)
                world.at_save["written"] = lambda process: self._soon(process, ticks, fault.seconds)
            case _:
                raise ValueError(f"{fault.kind} is no fault")

    def _crash(self, process: ActorProcess) -> None:
        process.kill()
        raise Killed(process.name)

    def _lose_rank(self, process: ActorProcess) -> None:
        """As a trainer finds it, whose ranks are actors: the call under way fails, and it begins again."""
        raise RanksLost(f"a rank of {process.name} is gone")

    def _soon(self, process: ActorProcess, ticks: int, seconds: float) -> None:
        """Before the checkpoint gets its name, between that and COMMIT, or after it."""
        if ticks:
            loop = asyncio.get_running_loop()
            loop.call_soon(self._soon, process, ticks - 1, seconds, context=self._context)
        elif process.alive:
            self._zombify(process, seconds)

    def _zombify(self, process: ActorProcess, seconds: float) -> None:
        """Called inside the process itself: what follows must not belong to it."""
        process.frozen = True

        def go_on() -> None:
            self._tasks.create_task(self._become_zombie(process, seconds), name="zombie")

        asyncio.get_running_loop().call_soon(go_on, context=self._context)

    async def _spoil(self, fault: Fault) -> None:
        self._world.blobs.spoiled[fault.target] = corrupted if fault.kind == "weights_corrupt" else half
