"""Hardware affinity in the proxy: the config's map, what happens where a class can't serve, and a plan that follows what is seen."""

import asyncio

import pytest

from rubato.actors.affinity.picker import PATIENCE_S
from rubato.planning.step_cost import StepCost
from rubato.planning.step_sums import StepSums

MAP = {"read": "h800", "default": "h20"}
COMPUTE = StepCost(prefill_s=3e-5, step_s=7e-3, token_s=0.0, context_s=6e-8)
BANDWIDTH = StepCost(prefill_s=2e-4, step_s=6e-3, token_s=0.0, context_s=5e-8)
READ, WRITE = (3000, 8), (100, 192)


async def two_classes(stage, **kwargs):
    return await stage.joins("engine-1", "h800", **kwargs), await stage.joins("engine-2", "h20", **kwargs)


def test_tasks_go_to_the_class_that_the_map_names(scene):
    async def play(stage):
        near, far = await two_classes(stage, num_slots=8)

        for i in range(4):
            await stage.ask(f"r{i}", task="read")
            await stage.ask(f"w{i}", task="write")

        assert near.asked == ["r0", "r1", "r2", "r3"]
        assert far.asked == ["w0", "w1", "w2", "w3"]

    scene(ended(play), affinity=MAP)


def ended(play):
    """Let go of what still runs."""

    async def whole(stage):
        await play(stage)
        while stage.proxy.requests.running:
            for engine in stage.engines.values():
                for request_id in list(engine.open):
                    engine.end(request_id, reason="the test is over")
            await stage.settle()

    return whole


def test_a_task_whose_class_is_full_waits_and_holds_up_no_other(scene):
    async def play(stage):
        near, far = await two_classes(stage, num_slots=1)

        for i in range(4):
            await stage.ask(f"r{i}", task="read")
        await stage.ask("w0", task="write")

        assert (near.asked, far.asked) == (["r0", "r1"], ["w0"])
        near.complete("r0", [99])
        await stage.settle()
        assert near.asked == ["r0", "r1", "r2"]

    scene(ended(play), affinity=MAP)


def test_a_waiting_request_says_which_class_it_waits_for(scene):
    async def play(stage):
        await two_classes(stage, num_slots=1)
        for i in range(3):
            await stage.ask(f"r{i}", task="read")

        views = stage.proxy.waits.snapshot(0.0)
        assert {view.stage for view in views} == {"a free slot", "decode"}
        assert {view.detail for view in views} == {"task read → h800: 1.00"}

    scene(ended(play), affinity=MAP)


def test_without_an_engine_of_its_class_a_task_goes_elsewhere_and_that_is_said_once(scene):
    async def play(stage):
        far = await stage.joins("engine-2", "h20", num_slots=8)
        for i in range(3):
            await stage.ask(f"r{i}", task="read")
        assert far.asked == ["r0", "r1", "r2"]
        assert stage.context.notices == ["affinity: requests of task read go to h20 for now: no engine of h800 is up"]

        near = await stage.joins("engine-1", "h800", num_slots=8)
        await stage.ask("r3", task="read")
        assert near.asked == ["r3"]

    scene(ended(play), affinity=MAP)


def test_a_class_that_sleeps_is_as_one_that_is_not_there(scene, changed):
    async def play(stage):
        near, far = await two_classes(stage, num_slots=8)
        await changed(stage, "engine-1", asleep=True)
        await stage.ask("r0", task="read")
        await changed(stage, "engine-1")
        await stage.ask("r1", task="read")

        assert (near.asked, far.asked) == (["r1"], ["r0"])
        assert stage.context.notices == ["affinity: requests of task read go to h20 for now: no engine of h800 is up"]

    scene(ended(play), affinity=MAP)


def test_a_class_that_has_no_room_for_long_is_passed_over(scene):
    async def play(stage):
        _, far = await two_classes(stage, num_slots=1)
        for i in range(3):
            await stage.ask(f"r{i}", task="read")
        await asyncio.sleep(PATIENCE_S / 2)
        assert far.asked == []

        await asyncio.sleep(PATIENCE_S)

        assert far.asked == ["r2"]
        assert f"no h800 had room for {PATIENCE_S:g} s" in stage.context.notices[-1]

    scene(ended(play), affinity=MAP)


def test_a_busy_class_whose_requests_end_is_not_passed_over(scene):
    async def play(stage):
        near, far = await two_classes(stage, num_slots=1)
        for i in range(8):
            await stage.ask(f"r{i}", task="read")
        for i in range(6):
            await asyncio.sleep(PATIENCE_S / 2)
            near.complete(f"r{i}", [99])
            await stage.settle()

        assert near.asked == [f"r{i}" for i in range(8)]
        assert far.asked == []

    scene(ended(play), affinity=MAP)


def test_an_evaluation_goes_to_the_engine_that_is_held_for_it(scene):
    async def play(stage):
        _, far = await two_classes(stage, num_slots=4)
        stage.proxy.placement.changed(stage.proxy.placement.seats["engine-2"], pinned=True)

        await stage.ask("e", task="read", exact=True)

        assert far.asked == ["e"]

    scene(ended(play), affinity=MAP)


# -- learned --------------------------------------------------------------------------------------------------------


def observed(cost: StepCost) -> tuple[float, ...]:
    sums = StepSums()
    for prefill, batch in ((0, 1), (0, 4), (100, 4), (3000, 4), (0, 8), (3000, 0), (0, 2), (100, 0)) * 4:
        context = 500 * batch
        sums.add(prefill, batch, context, cost.seconds(prefill, batch, context))
    return tuple(sums.values)


async def play_step(stage, version, tasks, num=16):
    """`num` requests of each task come, and as engines take them they end, under weights that are new."""
    asked = {}
    for i in range(num):
        for task, (prompt, decode) in tasks.items():
            name = f"{task}.{version}.{i}"
            asked[name] = await stage.ask(name, task=task, prompt=prompt, max_new_tokens=decode)
    while left := [name for name, asking in asked.items() if not asking.done()]:
        engine, name = next((e, name) for e in stage.engines.values() for name in left if name in e.open)
        decode = tasks[name[0]][1]
        engine.complete(name, [1] * (decode - 1) + [99], version)
        await stage.settle()


async def measured_classes(stage):
    """One engine for prompts, three for decoding."""
    near = await stage.joins("engine-1", "h800", num_slots=32)
    near.steps = observed(COMPUTE)
    for number in range(2, 5):
        far = await stage.joins(f"engine-{number}", "h20", num_slots=32)
        far.steps = observed(BANDWIDTH)
    return near


def test_a_plan_is_learned_from_what_tasks_and_engines_do_and_told(scene):
    async def play(stage):
        near = await measured_classes(stage)
        await play_step(stage, 1, {"a": READ, "b": WRITE})
        near.generates.clear()
        await play_step(stage, 2, {"a": READ, "b": WRITE})
        assert stage.context.notices[-1].startswith("affinity: task a → h800: 1.00; task b → h20: 1.00 (")

        near.generates.clear()
        await play_step(stage, 3, {"a": READ, "b": WRITE})

        assert {request.route.task for request in near.generates} == {"a"}
        assert len(near.generates) == 16

    scene(play, affinity="learned")


def test_tasks_that_change_places_are_mapped_anew_within_three_steps(scene):
    async def play(stage):
        near = await measured_classes(stage)
        for version in range(1, 4):
            await play_step(stage, version, {"a": READ, "b": WRITE})
        for version in range(4, 7):
            await play_step(stage, version, {"a": WRITE, "b": READ})

        near.generates.clear()
        await play_step(stage, 7, {"a": WRITE, "b": READ})

        assert {request.route.task for request in near.generates} == {"b"}

    scene(play, affinity="learned")


@pytest.mark.parametrize("affinity", ["learned", ()])
def test_with_one_class_nothing_is_counted_and_no_plan_is_made(scene, affinity):
    async def play(stage):
        one = await stage.joins("engine-1", "h800", num_slots=32)
        two = await stage.joins("engine-2", "h800", num_slots=32)
        one.steps = two.steps = observed(COMPUTE)
        for version in range(1, 5):
            await play_step(stage, version, {"a": READ, "b": WRITE})

        assert one.measured == two.measured == 0
        assert stage.context.notices == []
        if affinity:
            assert stage.proxy.placement.picker._profiles.profiles() == {}

    scene(play, affinity=affinity)


def test_an_engine_that_does_not_observe_its_steps_is_told_of_once(scene):
    async def play(stage):
        for engine in await two_classes(stage, num_slots=32):
            engine.steps = ()
        for version in range(1, 4):
            await play_step(stage, version, {"a": READ, "b": WRITE})

        (notice,) = stage.context.notices
        assert "does not observe its steps, so nothing can be learned: map tasks to classes" in notice

    scene(play, affinity="learned")


def test_turns_that_find_their_sessions_cache_count_only_what_is_new(scene):
    async def play(stage):
        await measured_classes(stage)
        for turn in range(4):
            asking = await stage.ask(f"s.{turn}", session="s", task="a", prompt=100 * (turn + 1))
            next(e for e in stage.engines.values() if e.open).complete(f"s.{turn}", [1] * 49 + [99])
            await asking

        (profile,) = stage.proxy.placement.picker._profiles.profiles().values()
        assert (profile.prompt, profile.prefill, profile.decode) == (250, (100 + 3 * 50) / 4, 50)

    scene(play, affinity="learned")


def test_a_class_that_left_before_it_was_measured_is_new_when_it_comes_back(scene):
    async def play(stage):
        await measured_classes(stage)
        for version in range(1, 3):
            await play_step(stage, version, {"a": READ, "b": WRITE})
        await stage.joins("engine-5", "h200", num_slots=32)
        await stage.leaves("engine-5")
        del stage.engines["engine-5"]
        await play_step(stage, 3, {"a": READ, "b": WRITE})
        stage.context.notices.clear()

        await stage.joins("engine-5", "h200", num_slots=32)

        assert stage.context.notices == ["affinity: h200 is new, so every class is open to all until it is measured"]

    scene(play, affinity="learned")


def test_a_class_that_joins_later_is_open_to_all_until_it_is_measured(scene):
    async def play(stage):
        await measured_classes(stage)
        for version in range(1, 3):
            await play_step(stage, version, {"a": READ, "b": WRITE})

        new = await stage.joins("engine-5", "h200", num_slots=32)
        await play_step(stage, 3, {"a": READ, "b": WRITE})

        assert {request.route.task for request in new.generates} == {"a", "b"}
        assert any("h200 is new, so every class is open to all" in notice for notice in stage.context.notices)

    scene(play, affinity="learned")
