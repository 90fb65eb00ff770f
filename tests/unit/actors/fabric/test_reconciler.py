"""The reconciler against switches that lie, stall, fail a port, do half of it, or come back empty; time jumps."""

import asyncio
import json

import httpx
import pytest

from rubato.actors.fabric.driver import NoSuchPort, NotTheWriter, NotTuned, PartlyApplied, PortConflict, SwitchTimedOut, SwitchUnreachable
from rubato.actors.fabric.reconciler import LEASE, CircuitLedger, LedgerUnavailable, PortsFailed, Reconciler
from rubato.planning.circuits import Cross
from rubato.runtime.memory import MemoryStore
from rubato.runtime.store.store import Fence, Fenced, StoreUnavailable
from tests.faulty_switch import FaultySwitch

A, B = (Cross(0, 4), Cross(4, 0)), (Cross(0, 5), Cross(5, 0))
C = (Cross(1, 6), Cross(6, 1))


class Scene:
    def __init__(self, context, store, switch):
        self.switch, self.store = switch, store
        self.stages = []
        self.at = {}
        self.incarnation = context.incarnation
        self.ledger = CircuitLedger(store, lambda: Fence("fabric_controller-1", self.incarnation), lease_s=30)
        driver = switch.driver()
        self.reconciler = Reconciler(driver, self.ledger, context.log, self.enter, drain_s=0.001, tune_timeout_s=1.0)

    def enter(self, stage):
        self.stages.append(stage)
        self.at.get(stage, lambda: None)()

    def lit(self):
        return tuple(c for c, status in self.switch.status().items() if status == "tuned")


@pytest.fixture
def scene(on_stage):
    def run(play, store=None):
        store = store or MemoryStore()

        async def main(context):
            await play(Scene(context, store, FaultySwitch()))

        on_stage(main, name="fabric_controller-1", store=store)

    return run


def test_a_change_goes_through_all_stages_and_is_committed(scene):
    async def play(stage):
        outcome = await stage.reconciler.reach(A, "rollout")

        assert outcome.circuits == dict.fromkeys(A, "tuned")
        assert stage.stages == ["validate", "fence", "drain", "apply", "tune", "verify", "commit", "idle"]
        entry = stage.ledger.entry
        assert (entry.change, entry.stage, entry.phase, entry.good, entry.draining) == (1, "committed", "rollout", A, ())
        assert asyncio.get_running_loop().time() == pytest.approx(0.010)

    scene(play)


def test_what_goes_dark_is_announced_before_it_does(scene):
    async def play(stage):
        await stage.reconciler.reach((*A, *C), "rollout")
        seen = []

        def look():
            seen.append((stage.ledger.entry.draining, stage.lit()))

        stage.at["drain"] = look
        await stage.reconciler.reach((*B, *C), "weight_sync")

        assert seen == [(A, tuple(sorted((*A, *C))))]

    scene(play)


@pytest.mark.parametrize("fault", ["lies", "halves", "breaks"])
def test_a_change_that_is_not_made_is_tried_again(scene, fault):
    async def play(stage):
        await stage.reconciler.reach(A, "rollout")
        setattr(stage.switch, fault, 1)

        await stage.reconciler.reach((*B, *C), "weight_sync")

        assert stage.lit() == tuple(sorted((*B, *C)))
        assert stage.ledger.entry.good == (*B, *C)

    scene(play)


@pytest.mark.parametrize(("fault", "error"), [("lies", NotTuned), ("halves", (PartlyApplied, NotTuned)), ("breaks", SwitchTimedOut)])
def test_a_switch_that_goes_on_like_that_gets_its_last_good_circuits_back(scene, fault, error):
    async def play(stage):
        await stage.reconciler.reach(A, "rollout")
        setattr(stage.switch, fault, 2)

        with pytest.raises(error):
            await stage.reconciler.reach((*B, *C), "weight_sync")

        assert stage.lit() == A
        assert (stage.ledger.entry.stage, stage.ledger.entry.good) == ("committed", A)
        assert "rollback" in stage.stages

    scene(play)


def test_circuits_that_never_tune_are_given_up(scene):
    async def play(stage):
        stage.switch.stalled = True

        with pytest.raises(NotTuned, match="2 of 2 circuits carry no light"):
            await stage.reconciler.reach(A, "rollout")

        assert stage.ledger.entry.stage == "changing"
        assert asyncio.get_running_loop().time() < 4

    scene(play)


def test_a_dead_port_is_named_and_the_other_circuits_stay(scene):
    async def play(stage):
        stage.switch.dead_ports.add(4)

        with pytest.raises(PortsFailed) as failed:
            await stage.reconciler.reach((*A, *C), "rollout")

        assert failed.value.ports == {0, 4}
        assert stage.lit() == C

    scene(play)


@pytest.mark.parametrize("at", ["apply", "tune", "verify"])
def test_a_switch_that_comes_back_empty_meanwhile_is_filled_again(scene, at):
    async def play(stage):
        await stage.reconciler.reach(A, "rollout")

        def once():
            stage.switch.empty()
            stage.at.clear()

        stage.at[at] = once
        await stage.reconciler.reach((*A, *C), "weight_sync")

        assert stage.lit() == tuple(sorted((*A, *C)))

    scene(play)


def test_circuits_of_a_stranger_and_invalid_ones_are_cleared_away(scene):
    async def play(stage):
        stage.switch.update((), (Cross(0, 7), Cross(2, 3)))
        stage.switch.update((), (Cross(0, 4), Cross(2, 5)))
        await asyncio.sleep(1)

        await stage.reconciler.reach(A, "rollout")

        assert stage.switch.status() == dict.fromkeys(A, "tuned")

    scene(play)


def test_what_is_there_already_is_not_asked_for(scene):
    async def play(stage):
        await stage.reconciler.reach(A, "rollout")
        await stage.reconciler.reach(A, "rollout")

        assert stage.switch.requests == 1

    scene(play)


@pytest.mark.parametrize(
    ("circuits", "error", "sentence"),
    [
        ((*A, Cross(0, 6)), PortConflict, "input port 0 is wanted by 0→4 and 0→6"),
        ((*A, Cross(1, 4)), PortConflict, "output port 4 is wanted by 0→4 and 1→4"),
        ((Cross(0, 8),), NoSuchPort, "ports 0 to 7, not 8"),
    ],
)
def test_a_plan_that_no_switch_can_hold_never_reaches_it(scene, circuits, error, sentence):
    async def play(stage):
        with pytest.raises(error, match=sentence):
            await stage.reconciler.reach(circuits, "rollout")

        assert stage.switch.requests == 0

    scene(play)


def test_a_controller_that_was_replaced_changes_nothing(scene):
    store = MemoryStore()

    async def play(stage):
        await store.lease(LEASE, 2, b"fabric_controller-1", 30)

        with pytest.raises(NotTheWriter):
            await stage.reconciler.reach(A, "rollout")

        assert stage.switch.requests == 0

    scene(play, store)


@pytest.mark.parametrize(("attempt", "error"), [(1, NotTheWriter), (2, PartlyApplied)])
def test_a_controller_that_is_replaced_in_mid_change_leaves_the_switch_alone_from_then_on(scene, attempt, error):
    async def play(stage):
        await stage.reconciler.reach(A, "rollout")
        stage.switch.halves = 2
        applied = []

        def replace():
            applied.append(True)
            if len(applied) == attempt:
                stage.store._leases[LEASE] = stage.store._leases[LEASE]._replace(token=stage.incarnation + 1)

        stage.at["apply"] = replace
        with pytest.raises(error):
            await stage.reconciler.reach(B, "weight_sync")

        assert stage.switch.requests == 1 + attempt

    scene(play)


def test_the_lease_is_taken_anew_with_every_attempt(scene):
    async def play(stage):
        await stage.reconciler.reach(A, "rollout")
        stage.switch.stalled = True
        left = []

        async def look():
            left.append((await stage.store.leases(LEASE))[LEASE].remaining_s)

        apply = stage.reconciler.driver.apply

        async def applied(delete, add):
            await look()
            await apply(delete, add)

        stage.reconciler.driver.apply = applied
        with pytest.raises(NotTuned):
            await stage.reconciler.reach(B, "weight_sync")

        assert asyncio.get_running_loop().time() > 3
        assert left == pytest.approx([30] * 3, abs=0.01)

    scene(play)


def test_a_zombie_ends_at_its_next_write(scene):
    store = MemoryStore()

    async def play(stage):
        async def replaced():
            await store.write({}, fence=Fence("fabric_controller-1", 2))

        await replaced()
        with pytest.raises(Fenced):
            await stage.reconciler.reach(A, "rollout")

        assert stage.switch.requests == 0

    scene(play, store)


def test_a_controller_that_registered_anew_goes_on_as_its_newer_incarnation(scene):
    async def play(stage):
        await stage.reconciler.reach(A, "rollout")
        stage.incarnation += 1
        await stage.store.write({}, fence=Fence("fabric_controller-1", stage.incarnation))

        await stage.reconciler.reach(B, "rollout")

        assert stage.ledger.entry.good == B

    scene(play)


def test_without_the_store_the_circuits_stay(scene):
    class Away(MemoryStore):
        async def write(self, changes, *, fence=None):
            raise StoreUnavailable("gone")

    async def play(stage):
        with pytest.raises(LedgerUnavailable):
            await stage.reconciler.reach(A, "rollout")

        assert stage.switch.requests == 0

    scene(play, Away())


def test_an_unreachable_switch_is_named(scene):
    async def play(stage):
        def broken(request):
            raise httpx.ConnectError("refused")

        stage.reconciler.driver._client._client._transport = httpx.MockTransport(broken)

        with pytest.raises(SwitchUnreachable):
            await stage.reconciler.reach(A, "rollout")

    scene(play)


def test_the_request_on_the_wire_is_the_documented_one(scene):
    async def play(stage):
        await stage.reconciler.reach(A, "rollout")
        sent, answer = [], stage.switch.answer

        def watch(request):
            if request.method == "POST":
                sent.append((request.url.path, json.loads(request.content)))
            return answer(request)

        stage.reconciler.driver._client._client._transport = httpx.MockTransport(watch)
        await stage.reconciler.reach(B, "weight_sync")

        add = [{"cross_connect_id": "1A-6B", "a_side": "1A", "b_side": "6B"}, {"cross_connect_id": "6A-1B", "a_side": "6A", "b_side": "1B"}]  # fmt: skip
        body = {"sonic-ocs:input": {"delete": ["1A-5B", "5A-1B"], "add": add}}
        assert sent == [("/restconf/operations/sonic-ocs:bulk-update", body)]

    scene(play)
