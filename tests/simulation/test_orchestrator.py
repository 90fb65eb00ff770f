"""The orchestrator, real proxy and real workers with paced engines, in virtual time: moves, merges, and whoever is killed in them."""

import asyncio
from contextlib import asynccontextmanager

import pytest

from rubato.actors import plugins
from rubato.actors.engines.section import EngineSection, PaceSection, ScriptedSection
from rubato.actors.engines.worker import EngineWorker
from rubato.actors.fabric.controller import FabricController
from rubato.actors.fabric.emulated import EmulatedSwitch
from rubato.actors.fabric.section import FabricSection
from rubato.actors.messages.engines import Obeyed, Reconfigure, SleepEngine, WakeEngine
from rubato.actors.messages.fabric import AwaitCircuits, CircuitsReady, NoCircuits
from rubato.actors.messages.generation import Generate, Route, Sampling
from rubato.actors.messages.moves import Move, MovePrepared, NotMoved, PrepareMove
from rubato.actors.messages.orchestration import OutOfDate, RequestEnded, Survey, Surveyed, TrajectorySeen
from rubato.actors.messages.phases import PhaseIntent
from rubato.actors.moves.departures import EngineMoves
from rubato.actors.moves.orders import Orders
from rubato.actors.orchestrator.orchestrator import Orchestrator
from rubato.actors.orchestrator.section import OrchestratorSection
from rubato.actors.orchestrator.switches import Reshape, Shape
from rubato.actors.proxy.proxy import LLMProxy
from rubato.bus.errors import Failed
from rubato.bus.message import pack_i32
from rubato.runtime.actor import handler
from rubato.sim.simtest.toys import write_tokenizer
from tests.simulation.test_cluster_jobs import STEPS, config, run
from tests.simulation.test_proxy_on_the_bus import Asker, Cluster
from tests.virtual import virtual

STOP = 1
LONG, SHORT = 1950, 40
FABRIC = FabricSection(enabled=True, ports=16, reconfiguration_s=0.05)
WORKER = EngineWorker.Config(
    engine=EngineSection(
        kind="scripted",
        num_slots=64,
        max_len=65536,
        max_batch_tokens=8192,
        stream_every=8,
        prefix_cache=False,
        scripted=ScriptedSection(told_lengths=True, vocab_size=65536),
        pace=PaceSection(hardware="h800", model="qwen2.5-14b"),
    )
)


class Halt:
    """Of all actors of one test: the first that is asked for `at` stops, until the test goes on."""

    at: type | None = None
    reached: asyncio.Event
    go_on: asyncio.Event

    @classmethod
    async def halt(cls, order) -> None:
        if type(order) is cls.at:
            cls.at = None
            cls.reached.set()
            await cls.go_on.wait()


class HaltingMoves(EngineMoves):
    @handler(concurrency=64, outlives_asker=True)
    async def prepare_move(self, request: PrepareMove) -> MovePrepared | NotMoved:
        await Halt.halt(request)
        return await super().prepare_move(request)


class HaltingOrders(Orders):
    @handler(concurrency=4, outlives_asker=True)
    async def sleep_engine(self, order: SleepEngine) -> Obeyed:
        await Halt.halt(order)
        if self.worker.name in HaltingWorker.stay_awake:
            raise RuntimeError(f"{self.worker.name} stays awake")
        return await super().sleep_engine(order)

    @handler(concurrency=4, outlives_asker=True)
    async def wake_engine(self, order: WakeEngine) -> Obeyed:
        await Halt.halt(order)
        return await super().wake_engine(order)

    @handler(concurrency=4, outlives_asker=True)
    async def reconfigure(self, order: Reconfigure) -> Obeyed:
        await Halt.halt(order)
        return await super().reconfigure(order)


class HaltingWorker(EngineWorker):
    stay_awake: frozenset[str] = frozenset()

    def make(self, path):
        made = {plugins.ENGINE_MOVES: HaltingMoves, plugins.ORDERS: HaltingOrders}
        return made[path](self) if path in made else super().make(path)


class HaltingController(FabricController):
    @handler(concurrency=16)
    async def await_circuits(self, request: AwaitCircuits) -> CircuitsReady | NoCircuits:
        await Halt.halt(request)
        return await super().await_circuits(request)


class Manager(Asker):
    """Tells of rollouts, as a manager of environments does."""

    ended: tuple[RequestEnded, ...] = ()
    trajectories: tuple[TrajectorySeen, ...] = ()

    @handler
    async def survey(self, request: Survey) -> Surveyed | OutOfDate:
        new, self.ended = self.ended, ()
        return Surveyed((), (), new, 0, self.trajectories)


class Fleet(Cluster):
    switch_s = 1.0

    async def begin(self, planners, engines=2, pools=("",)):
        Halt.at, Halt.reached, Halt.go_on = None, asyncio.Event(), asyncio.Event()
        HaltingWorker.stay_awake = frozenset()
        self.pools = {f"engine-{number + 1}": pools[number % len(pools)] for number in range(engines)}
        for name in self.pools:
            await self.restart(name)
        await self.start(LLMProxy, "llm_proxy-1")
        await self.start(Manager, "env_manager-1")
        self.asker = self.actors["env_manager-1"]
        self.planners = planners
        await self.until(lambda: len(self.seats) == engines)

    async def restart(self, name):
        if name in self.serving:
            await self.kill(name)
        if name.startswith("engine"):
            serves = self.pools[name] if self.pools[name] in ("prefill", "decode") else "both"
            section = WORKER.engine.model_copy(update={"serves": serves})
            await self.start(HaltingWorker, name, self.pools[name], **dict(WORKER) | {"engine": section})
        elif name.startswith("llm"):
            await self.start(LLMProxy, name)
        elif name.startswith("fabric"):
            await self.start(HaltingController, name, fabric=FABRIC)
        else:
            section = OrchestratorSection(enabled=True, planners=self.planners, switch_s=self.switch_s)
            await self.start(Orchestrator, name, orchestrator=section)

    @property
    def seats(self):
        return self.actors["llm_proxy-1"].placement.seats

    @property
    def shapes(self):
        return sorted((seat.info.asleep, seat.info.degree) for seat in self.seats.values())

    def ask(self, number, length, shown=200, session=""):
        name = f"r{number}"
        prompt = pack_i32([length, number, *[7] * (shown - 2)])
        request = Generate(name, session or name, prompt, Sampling(2048, stop_token_ids=(STOP,)), route=Route(rollout=bool(session)))
        return self.tasks.create_task(self.asker.ref("llm_proxy").ask(request, timeout=900.0))

    def tail(self, servers=1):
        """Three long ones for each server, many short ones: what remains is worth a merge."""
        lengths = [LONG + place if place < 3 * servers else SHORT + place for place in range(12 * servers)]
        return lengths, [self.ask(place, length) for place, length in enumerate(lengths)]

    async def right(self, shape):
        async with asyncio.timeout(120):
            while self.shapes != shape:  # noqa: ASYNC110 - in virtual time
                await asyncio.sleep(0.1)

    async def fabric(self):
        """A switch and its controller, which knows who talks to whom."""
        await self.start(EmulatedSwitch, "optical_switch-1", fabric=FABRIC)
        await self.restart("fabric_controller-1")
        caches = (("engine-1", "engine-2", 1000), ("llm_proxy-1", "engine-1", 10), ("llm_proxy-1", "engine-2", 10))
        await self.asker.ref("fabric_controller").tell(PhaseIntent("rollout", 1, 0.0, caches))

    async def all_gpus(self, num=2):
        """Are used, each once."""
        async with asyncio.timeout(200):
            while sum(degree for asleep, degree in self.shapes if not asleep) != num:  # noqa: ASYNC110 - in virtual time
                await asyncio.sleep(0.1)


@asynccontextmanager
async def fleet(folder, planners=("rebalance", "switch"), engines=2, pools=("",)):
    async with asyncio.TaskGroup() as tasks:
        made = Fleet(tasks, folder)
        await made.begin(planners, engines, pools)
        yield made
        asking = ("orchestrator-1", "env_manager-1", "llm_proxy-1")
        for name in (*asking, *[name for name in made.serving if name not in asking]):
            if name in made.serving:
                await made.kill(name)


async def whole(lengths, asked):
    """Every answer has exactly the tokens that its request was to sample: none is lost, none doubled."""
    for length, each in zip(lengths, asked, strict=True):
        completion = await each
        assert completion.finish_reason == "stop"
        assert len(completion.tokens.ids) == 4 * length
        ends = [(span.start, span.end) for span in completion.tokens.spans]
        assert ends[0][0] == 0
        assert ends[-1][1] == length


@virtual
async def test_engines_merge_for_the_last_requests_and_these_are_through_sooner(tmp_path):
    loop = asyncio.get_running_loop()
    took = []
    for planners in ((), ("switch",)):
        async with fleet(tmp_path, planners) as made:
            await made.restart("orchestrator-1")
            began = loop.time()
            lengths, asked = made.tail()
            await whole(lengths, asked)
            took.append(loop.time() - began)
            assert made.shapes == ([(False, 2), (True, 1)] if planners else [(False, 1), (False, 1)])

    assert took[1] < 0.95 * took[0]  # nothing is known of lengths before the first ones end


@virtual
async def test_a_step_s_degrees_are_planned_at_its_beginning_once_lengths_are_known(tmp_path):
    apart, together = [(False, 1), (False, 1)], [(False, 2), (True, 1)]
    async with fleet(tmp_path, ("switch",)) as made:
        made.switch_s = 1e9  # no step is looked at again
        await made.restart("orchestrator-1")
        loop = asyncio.get_running_loop()
        took = []
        for step, shapes in enumerate((apart, together, together)):
            lengths = [LONG + place for place in range(4)]
            began = loop.time()
            await whole(lengths, [made.ask(4 * step + place, each) for place, each in enumerate(lengths)])
            took.append(loop.time() - began)
            assert made.shapes == shapes
        found = made.actors["orchestrator-1"].metrics.snapshot()

    assert found["orchestrator/switches"] == 1
    assert took[2] < took[1] < took[0]


@virtual
async def test_a_step_that_begins_in_its_environments_is_planned_once_its_requests_are_there(tmp_path):
    async with fleet(tmp_path, ("switch",)) as made:
        made.switch_s = 1e9  # no step is looked at again
        made.asker.ended = tuple(RequestEnded("", place, LONG, 0) for place in range(20))
        made.asker.trajectories = tuple(TrajectorySeen(f"a{n}", "", n, 0, 0.0, 2048, 0, away=True) for n in range(4))
        await made.restart("orchestrator-1")
        await asyncio.sleep(3)
        assert made.shapes == [(False, 1), (False, 1)]

        lengths = [LONG] * 4
        await whole(lengths, [made.ask(n, length, session=f"a{n}") for n, length in enumerate(lengths)])
        assert made.shapes == [(False, 2), (True, 1)]


@virtual
async def test_nothing_is_switched_while_no_length_is_known(tmp_path):
    async with fleet(tmp_path, ("switch",)) as made:
        await made.restart("orchestrator-1")
        lengths = [LONG] * 4
        await whole(lengths, [made.ask(place, each) for place, each in enumerate(lengths)])
        assert made.shapes == [(False, 1), (False, 1)]


@virtual
async def test_all_servers_switch_at_once(tmp_path):
    async with fleet(tmp_path, ("switch",), 4, ("left", "right")) as made:
        await made.restart("orchestrator-1")
        lengths, asked = made.tail(servers=2)
        Halt.at = SleepEngine
        await Halt.reached.wait()

        await made.right([(False, 1), (False, 1), (False, 2), (True, 1)])
        Halt.go_on.set()
        await whole(lengths, asked)

        assert made.shapes == [(False, 2), (False, 2), (True, 1), (True, 1)]


@virtual
async def test_a_server_whose_switch_fails_stays_as_it_was_and_another_one_switches(tmp_path):
    async with fleet(tmp_path, ("switch",), 4, ("left", "right")) as made:
        HaltingWorker.stay_awake = frozenset({"engine-1", "engine-3"})
        await made.restart("orchestrator-1")
        lengths, asked = made.tail(servers=2)
        await whole(lengths, asked)

        shapes = {name: (seat.info.asleep, seat.info.degree) for name, seat in made.seats.items()}
        assert shapes["engine-1"] == shapes["engine-3"] == (False, 1)
        assert sorted((shapes["engine-2"], shapes["engine-4"])) == [(False, 2), (True, 1)]
        assert made.actors["orchestrator-1"].metrics.snapshot()["orchestrator/switches"] == 1


@virtual
async def test_engines_merge_while_requests_wait_that_go_to_whichever_has_room(tmp_path):
    """Such as to one that is emptied, and does not sleep yet."""
    async with fleet(tmp_path, ()) as made:
        await made.restart("orchestrator-1")
        lengths = [LONG] * 600
        asked = [made.ask(place, length) for place, length in enumerate(lengths)]
        await made.until(lambda: len(made.actors["llm_proxy-1"].requests.running) >= 128)
        commands = made.actors["orchestrator-1"]._commands
        surveyed, _ = await commands.look()
        merge = Reshape("merge engine-1 + engine-2", {"engine-1": Shape(2), "engine-2": Shape(1, True)}, {}, "")

        moved = await commands.reshape(merge, surveyed.engines)

        assert made.shapes == [(False, 2), (True, 1)]
        assert len(moved) > 64
        await whole(lengths, asked)


@virtual
async def test_requests_leave_the_engine_that_would_be_last(tmp_path):
    loop = asyncio.get_running_loop()
    took = []
    for planners in ((), ("rebalance",)):
        async with fleet(tmp_path, planners) as made:
            lengths = [800] * 6
            asked = [made.ask(place, length, 30000) for place, length in enumerate(lengths)]
            await made.until(lambda: len(made.actors["llm_proxy-1"].requests.running) == 6)
            for place in range(6):
                await made.asker.ref("llm_proxy").ask(Move(f"r{place}", "engine-1"), timeout=60.0)
            began = loop.time()
            await made.restart("orchestrator-1")
            await whole(lengths, asked)
            took.append(loop.time() - began)

    assert took[1] < 0.8 * took[0]


@pytest.mark.parametrize("pools", [("left", "right"), ("decode", "prefill")])
@virtual
async def test_requests_move_within_their_pool_alone(tmp_path, pools):
    async with fleet(tmp_path, ("rebalance",), 4, pools) as made:
        lengths = [800] * 6
        asked = [made.ask(place, length, 30000) for place, length in enumerate(lengths)]
        running = made.actors["llm_proxy-1"].requests.running
        await made.until(lambda: len(running) == 6 and all(each.num_tokens > 8 for each in running.values()))
        for place in range(6):
            await made.asker.ref("llm_proxy").ask(Move(f"r{place}", "engine-1"), timeout=60.0)
        await made.restart("orchestrator-1")
        await whole(lengths, asked)

        assert {(await each).engine for each in asked} == {"engine-1", "engine-3"}
        assert made.actors["orchestrator-1"].metrics.snapshot()["orchestrator/moves"] >= 1


@pytest.mark.parametrize("stage", [PrepareMove, SleepEngine, Reconfigure])
@pytest.mark.parametrize("victim", ["orchestrator-1", "llm_proxy-1", "engine-1", "engine-2"])
@virtual
async def test_whoever_is_killed_in_a_switch_nothing_is_lost_or_doubled_and_every_gpu_is_used_again(tmp_path, stage, victim):
    async with fleet(tmp_path, ("switch",)) as made:
        await made.restart("orchestrator-1")
        lengths, asked = made.tail()
        Halt.at = stage
        await Halt.reached.wait()

        await made.restart(victim)
        Halt.go_on.set()

        await whole(lengths, asked)
        await made.all_gpus()


@pytest.mark.parametrize("victim", ["orchestrator-1", "llm_proxy-1", "engine-1", "engine-2"])
@virtual
async def test_whoever_is_killed_as_an_engine_wakes_for_a_split_nothing_is_lost_or_doubled(tmp_path, victim):
    async with fleet(tmp_path, ("switch",)) as made:
        await made.asker.ref("engine-2").ask(SleepEngine(), timeout=60.0)
        await made.asker.ref("engine-1").ask(Reconfigure(2, 1), timeout=60.0)
        await made.restart("orchestrator-1")
        await made.until(lambda: made.actors["llm_proxy-1"].hook(plugins.SURVEYS).term > 1)  # it looks on as the first ones end
        lengths = [10] * 64
        await whole(lengths[:8], [made.ask(place, length) for place, length in enumerate(lengths[:8])])
        assert made.shapes == [(False, 2), (True, 1)]
        asked = [made.ask(8 + place, length, 12000) for place, length in enumerate(lengths)]  # long prompts
        Halt.at = WakeEngine
        await Halt.reached.wait()

        await made.restart(victim)
        Halt.go_on.set()

        await whole(lengths, asked)
        await made.all_gpus()


@pytest.mark.parametrize("victim", ["orchestrator-1", "llm_proxy-1", "engine-1", "fabric_controller-1"])
@virtual
async def test_whoever_is_killed_while_a_switch_waits_for_circuits_nothing_is_lost_or_doubled(tmp_path, victim):
    async with fleet(tmp_path, ("switch",)) as made:
        await made.fabric()
        await made.restart("orchestrator-1")
        lengths, asked = made.tail()
        Halt.at = AwaitCircuits
        await Halt.reached.wait()

        await made.restart(victim)
        Halt.go_on.set()

        await whole(lengths, asked)
        await made.all_gpus()


@virtual
async def test_requests_that_came_to_an_engine_asleep_go_on_though_all_gpus_are_another_s(tmp_path):
    """As where the one that was to stay died in a merge, and came back in time to have its GPUs: until then all that lived slept."""
    async with fleet(tmp_path, ("switch",)) as made:
        await made.asker.ref("engine-2").ask(SleepEngine(), timeout=60.0)
        await made.kill("engine-1")
        await made.until(lambda: list(made.seats) == ["engine-2"])
        lengths = [SHORT] * 4
        asked = [made.ask(place, length) for place, length in enumerate(lengths)]
        await made.until(lambda: len(made.seats["engine-2"].requests) == len(asked))
        await made.restart("engine-1")
        await made.asker.ref("engine-1").ask(Reconfigure(2, 1), timeout=60.0)

        await made.restart("orchestrator-1")

        await whole(lengths, asked)
        assert made.shapes == [(False, 2), (True, 1)]


@virtual
async def test_engines_that_sleep_without_an_owner_are_woken(tmp_path):
    async with fleet(tmp_path, engines=4, pools=("left", "right")) as made:
        for name in ("engine-1", "engine-2"):
            await made.asker.ref(name).ask(SleepEngine(), timeout=60.0)
        await made.restart("orchestrator-1")
        await made.right([(False, 1)] * 4)


@virtual
async def test_orders_of_an_orchestrator_that_was_replaced_are_refused(tmp_path):
    async with fleet(tmp_path) as made:
        proxy, engine = made.asker.ref("llm_proxy"), made.asker.ref("engine-1")
        assert isinstance(await proxy.ask(Survey(7), timeout=5.0), Surveyed)
        await engine.ask(Reconfigure(2, 7), timeout=60.0)
        lengths = [SHORT]
        asked = [made.ask(0, SHORT)]

        assert await proxy.ask(Survey(6), timeout=5.0) == OutOfDate(7)
        moved = await proxy.ask(Move("r0", "engine-2", 6), timeout=60.0)
        assert isinstance(moved, NotMoved)
        assert "later orchestrator" in moved.why
        for order in (SleepEngine(term=6), WakeEngine(6), Reconfigure(1, 6)):
            with pytest.raises(Failed, match="refused an order of term"):
                await engine.ask(order, timeout=60.0)
        await whole(lengths, asked)


@virtual
async def test_lengths_that_ended_during_a_switch_are_told_at_the_next_look(tmp_path):
    async with fleet(tmp_path, ()) as made:
        await made.restart("orchestrator-1")
        commands = made.actors["orchestrator-1"]._commands
        await commands.look()
        await whole([SHORT], [made.ask(0, SHORT)])
        await commands.reshape(Reshape("merge nothing", {}, {}, ""), ())

        found, _ = await commands.look()

        assert [each.sampled for each in found.ended] == [SHORT]


@virtual
async def test_what_remains_of_rollouts_counts_turns_to_come_and_time_in_environments(tmp_path):
    """100 tokens and 30 s in environments each, of 20 before it: a request of the last 50 tokens alone takes half a second."""
    async with fleet(tmp_path, ("rebalance",)) as made:
        made.asker.ended = tuple(RequestEnded("swe", place, 100, 0, 30.0, 2.0) for place in range(20))
        await made.restart("orchestrator-1")
        metrics = made.actors["orchestrator-1"].metrics

        made.asker.trajectories = (TrajectorySeen("a", "swe", 99, 50, 15.0, 400, 0, away=True),)
        await asyncio.sleep(2)
        in_environment = metrics.snapshot()["orchestrator/remaining_s"]
        made.asker.trajectories = (TrajectorySeen("a", "swe", 99, 0, 15.0, 400, 0),)
        asked = made.ask(0, LONG, session="a")
        await asyncio.sleep(1)
        at_an_engine = metrics.snapshot()["orchestrator/remaining_s"]
        await asked
        made.asker.trajectories = ()
        await asyncio.sleep(2)

        assert in_environment == pytest.approx(16.0, abs=0.5)
        assert 10 < at_an_engine < 16
        assert metrics.snapshot()["orchestrator/forecast_s"] > 10


@virtual
async def test_a_turn_is_no_length_and_one_of_nobody_s_rollout_is(tmp_path):
    async with fleet(tmp_path, ()) as made:
        await made.restart("orchestrator-1")
        commands = made.actors["orchestrator-1"]._commands
        await commands.look()
        await whole([SHORT, SHORT], [made.ask(0, SHORT, session="a"), made.ask(1, SHORT)])

        found, _ = await commands.look()

        assert [each.sampled for each in found.ended] == [SHORT]


@pytest.mark.parametrize(("enabled", "counted"), [(True, "orchestrator/circuits"), (False, "orchestrator/electrical")])
@virtual
async def test_a_merge_waits_for_circuits_and_takes_the_electrical_path_where_there_are_none(tmp_path, enabled, counted):
    section = FabricSection(enabled=enabled, ports=16, reconfiguration_s=0.05)
    async with fleet(tmp_path, ("switch",)) as made:
        await made.start(EmulatedSwitch, "optical_switch-1", fabric=section)
        await made.start(FabricController, "fabric_controller-1", fabric=section)
        caches = (("engine-1", "engine-2", 1000), ("llm_proxy-1", "engine-1", 10), ("llm_proxy-1", "engine-2", 10))
        await made.asker.ref("fabric_controller").tell(PhaseIntent("rollout", 1, 0.0, caches))
        await made.restart("orchestrator-1")
        lengths, asked = made.tail()
        await whole(lengths, asked)

        found = made.actors["orchestrator-1"].metrics.snapshot()
        assert made.shapes == [(False, 2), (True, 1)]
        assert found[counted] == found["orchestrator/switches"] >= 1
        await made.kill("fabric_controller-1")
        await made.kill("optical_switch-1")


@virtual
async def test_a_job_whose_orchestrator_is_off_trains_what_it_trains_without_the_section(tmp_path):
    """Ids, fates and rewards are the same, each in the same step."""
    model = write_tokenizer(tmp_path / "model")
    off = ("actors.orchestrator={class: 'rubato.actors.orchestrator.orchestrator:Orchestrator'}", "orchestrator.enabled=false")
    without = await run(tmp_path / "without", config(model, "same"))

    with_it_off = await run(tmp_path / "off", config(model, "same", *off))

    assert len(without) == STEPS * 8
    assert {"trained"} <= {sample["fate"] for sample in without}
    assert len({sample["reward"] for sample in without}) > 1
    assert with_it_off == without
