"""The reconciler: whatever a switch does in between, what is committed carries light, and once it behaves it has what is wanted."""

import asyncio
from functools import partial

from hypothesis import given, settings
from hypothesis import strategies as st

from rubato.actors.fabric.driver import FabricError
from rubato.actors.fabric.reconciler import CircuitLedger, Reconciler
from rubato.planning.circuits import Cross
from rubato.runtime.memory import MemoryStore
from rubato.runtime.observe.log import logger
from rubato.runtime.store.store import Fence
from rubato.sim.virtual import run_virtual
from tests.faulty_switch import FaultySwitch

PORTS = st.integers(0, 7)
FAULTS = st.sampled_from(["lies", "halves", "breaks", "empty", "stranger", "stalled", "kill", "none"])


@st.composite
def circuits(draw):
    """Any set of circuits that one switch can hold."""
    outputs = draw(st.permutations(range(8)))
    inputs = draw(st.sets(PORTS, min_size=1))
    return tuple(sorted(Cross(port, outputs[port]) for port in inputs))


class Killed(Exception):
    pass


class Job:
    """Incarnations of a controller, one after another, over one store and one switch."""

    def __init__(self):
        self.store, self.switch, self.changes = MemoryStore(), FaultySwitch(), []
        self.incarnation, self.kill_at, self.fault_at = 0, "", {}

    async def begin(self):
        self.incarnation += 1
        self.ledger = CircuitLedger(self.store, partial(Fence, "fabric_controller-1", self.incarnation), lease_s=30)
        await self.ledger.load()
        driver = self.switch.driver()
        self.reconciler = Reconciler(driver, self.ledger, logger("test"), self.enter, drain_s=0.0, tune_timeout_s=0.1)

    def enter(self, stage):
        if stage == self.kill_at:
            raise Killed
        self.fault_at.pop(stage, lambda: None)()

    def lit(self):
        return {cross for cross, status in self.switch.status().items() if status == "tuned"}

    async def reach(self, wanted):
        try:
            await self.reconciler.reach(wanted, "rollout")
        except FabricError:
            return False
        except Killed:
            self.kill_at = ""
            await self.begin()
            return False
        assert self.lit() == set(wanted)
        assert self.ledger.entry.good == wanted
        return True

    def harm(self, fault, stage):
        """What befalls the switch after the last look at it is seen only by the next reading."""
        before = "verify" if stage == "commit" else stage
        match fault:
            case "lies" | "halves" | "breaks":
                setattr(self.switch, fault, 1 + len(stage) % 3)
            case "empty":
                self.fault_at[before] = self.switch.empty
            case "stranger":
                self.fault_at[before] = lambda: self.switch.update((), (Cross(0, 7), Cross(7, 0)))
            case "stalled":
                self.switch.stalled = True
            case "kill":
                self.kill_at = stage

    def heal(self):
        self.switch.lies = self.switch.halves = self.switch.breaks = 0
        self.switch.stalled, self.kill_at, self.fault_at = False, "", {}


STAGES = st.sampled_from(["validate", "fence", "drain", "apply", "tune", "verify", "commit", "rollback"])


@settings(max_examples=80, deadline=None)
@given(st.lists(st.tuples(circuits(), FAULTS, STAGES), min_size=1, max_size=5), circuits())
def test_once_the_switch_behaves_it_holds_exactly_what_is_wanted(steps, last):
    async def main():
        job = Job()
        await job.begin()
        for wanted, fault, stage in steps:
            job.harm(fault, stage)
            await job.reach(wanted)
            job.changes.append(job.ledger.entry.change)
            job.heal()
            await asyncio.sleep(1)

        assert await job.reach(last)

        assert job.switch.status() == dict.fromkeys(last, "tuned")
        assert job.ledger.entry.stage == "committed"
        assert job.changes == sorted(job.changes)
        assert job.ledger.entry.change > max(job.changes)

    run_virtual(main, seed=1)
