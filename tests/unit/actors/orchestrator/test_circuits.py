"""A switch waits for the circuits that it was promised, and goes on without any where there are none."""

import asyncio

import pytest

from rubato.actors.messages.fabric import AskCircuits, AwaitCircuits, CircuitsPromised, CircuitsReady, NoCircuits, ReleaseCircuits
from rubato.actors.orchestrator.circuits import ANSWER_S, SwitchCircuits
from rubato.bus.message import Ack
from rubato.runtime.actor import Actor
from rubato.runtime.config import ActorConfig
from rubato.runtime.monitor.snapshot import snapshot
from rubato.runtime.monitor.text import render
from rubato.runtime.registry import ActorRecord

MOVE = (("engine-2", "engine-1", 7000),)
PROMISE = CircuitsPromised(0, 0.05, "changes")


class Asker(Actor):
    role = "orchestrator"


class Controller:
    """Answers as told; `heard` has what was asked, and when."""

    def __init__(self, promise=PROMISE, outcome=None, lit_s=0.05):
        self.promise, self.outcome, self.lit_s, self.heard = promise, outcome, lit_s, []

    async def __call__(self, message):
        self.heard.append((type(message), asyncio.get_running_loop().time()))
        if isinstance(message, AskCircuits):
            self.number = message.number
            return self.promise
        if isinstance(message, AwaitCircuits):
            await asyncio.sleep(self.lit_s)
            return self.outcome or CircuitsReady(message.number)
        return None

    @property
    def kinds(self):
        return [kind for kind, _ in self.heard]


@pytest.fixture
def switch(on_stage):
    def run(controller, traffic=MOVE):
        """When the block ran, and what the actor counted."""
        found = []

        async def main(context):
            if controller is not None:
                context.actors["fabric_controller"] = controller
            circuits = SwitchCircuits(Asker(ActorConfig(), context))
            async with circuits.lit(["merge engine-1 + engine-2"], traffic):
                found.append(asyncio.get_running_loop().time())
            found.append(context.metrics.snapshot())

        on_stage(main, name="orchestrator-1")
        return found

    return run


def test_the_switch_runs_once_the_circuits_are_lit_and_gives_them_back(switch):
    controller = Controller()

    at, counted = switch(controller)

    assert at == pytest.approx(0.05)
    assert controller.kinds == [AskCircuits, AwaitCircuits, ReleaseCircuits]
    assert counted["orchestrator/circuits"] == 1
    assert counted["orchestrator/agreed"] == controller.number > 0


@pytest.mark.parametrize(
    "controller",
    [Controller(promise=NoCircuits("electrical")), Controller(outcome=NoCircuits("the switch failed"))],
    ids=["refused", "failed"],
)
def test_where_there_are_none_the_electrical_path_carries_the_switch(switch, controller):
    _, counted = switch(controller)

    assert counted["orchestrator/electrical"] == 1
    assert "orchestrator/agreed" not in counted
    assert ReleaseCircuits not in controller.kinds


def test_circuits_are_kept_until_the_engines_at_both_ends_have_no_cache_to_fetch_any_more(on_stage):
    heard = []

    async def main(context):
        controller = context.actors["fabric_controller"] = Controller()

        def engine(name, carried_s):
            async def answer(message):
                heard.append((name, ReleaseCircuits in controller.kinds))
                await asyncio.sleep(carried_s)
                return Ack()

            return answer

        context.actors |= {"engine-1": engine("engine-1", 2.0), "engine-2": engine("engine-2", 3.0)}
        async with SwitchCircuits(Asker(ActorConfig(), context)).lit(["rebalancing by 1 moves"], MOVE):
            pass
        heard.append(dict(controller.heard)[ReleaseCircuits])

    on_stage(main, name="orchestrator-1")
    assert heard == [("engine-2", False), ("engine-1", False), pytest.approx(5.05)]


def test_why_names_the_switch_that_is_held_and_when_its_circuits_are_ready(on_stage):
    told = []

    async def main(context):
        async def controller(message):
            if isinstance(message, AskCircuits):
                return CircuitsPromised(message.number, 0.012, "changes")
            if isinstance(message, AwaitCircuits):
                await asyncio.sleep(0.004)
                waits = context.waits.snapshot(asyncio.get_running_loop().time())
                records = [
                    ActorRecord("orchestrator-1", "orchestrator", "", 1, 1, "", "ready", waits=waits),
                    ActorRecord("fabric_controller-1", "fabric_controller", "", 1, 1, "", "ready"),
                ]
                told.append(render(snapshot("r", records, [], {}), 120))
            return CircuitsReady(message.number) if isinstance(message, AwaitCircuits) else None

        context.actors["fabric_controller"] = controller
        async with SwitchCircuits(Asker(ActorConfig(), context)).lit(["merge engine-2 + engine-3"], MOVE):
            pass

    on_stage(main, name="orchestrator-1")

    first, second = told[0].splitlines()[:2]
    assert first.startswith("orchestrator-1 waits")
    assert first.endswith("for circuits: merge engine-2 + engine-3 waits for circuits, ready in 12 ms")
    assert second.startswith("  └ fabric_controller-1")


def test_a_controller_that_stands_still_costs_a_bounded_wait_and_the_old_circuits_come_back(switch):
    controller = Controller(lit_s=1000.0)

    at, counted = switch(controller)

    assert at == pytest.approx(0.05 + ANSWER_S)
    assert counted["orchestrator/electrical"] == 1
    assert controller.kinds[-1] is ReleaseCircuits


@pytest.mark.parametrize(("controller", "traffic"), [(None, MOVE), (Controller(), ())], ids=["no fabric", "no bytes"])
def test_nobody_is_asked_where_there_is_no_fabric_or_nothing_to_carry(switch, controller, traffic):
    at, counted = switch(controller, traffic)

    assert at == 0
    assert not any(name.startswith("orchestrator/") for name in counted)
    assert controller is None or controller.heard == []


def test_a_switch_that_is_given_up_while_it_waits_gives_its_circuits_back(on_stage):
    controller = Controller(lit_s=1.0)

    async def main(context):
        context.actors["fabric_controller"] = controller
        circuits = SwitchCircuits(Asker(ActorConfig(), context))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5), circuits.lit(["merge engine-1 + engine-2"], MOVE):
                pytest.fail("they were not lit yet")

    on_stage(main, name="orchestrator-1")
    assert controller.kinds == [AskCircuits, AwaitCircuits, ReleaseCircuits]
