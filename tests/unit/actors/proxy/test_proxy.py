"""LLMProxy without a bus: engines are functions, time jumps."""

import asyncio

import pytest

from rubato.actors.messages.generation import Abort, Aborted, Generate, Resume, Suspend, VersionSpan
from rubato.actors.messages.phases import PhaseIntent
from rubato.actors.proxy.picker import ProxyHook
from rubato.bus.errors import Failed
from rubato.planning.engine_info import WeightsId


def test_a_request_is_answered_by_an_engine(scene, ids_of):
    async def play(stage):
        engine = await stage.joins("engine-1")
        asking = await stage.ask("r1")

        engine.complete("r1", [5, 6, 99])

        assert ids_of(await asking) == [5, 6, 99]

    scene(play)


class Counts(ProxyHook):
    """How many requests run, each time that one came or went."""

    def __init__(self, proxy):
        super().__init__(proxy)
        self.running = []

    def came_or_went(self):
        self.proxy.spawn(self._look(), name="look")

    async def _look(self):
        self.running.append(len(self.proxy.requests.running))


def test_requests_whose_asker_went_away_are_told_of_as_those_that_ended(scene):
    async def play(stage):
        await stage.joins("engine-1")
        counts = Counts(stage.proxy)
        stage.proxy.hooks.append(counts)
        asking = [await stage.ask("r1"), await stage.ask("r2")]

        for each in asking:
            each.cancel()
        await stage.settle()

        assert counts.running[-1] == 0
        assert stage.proxy.metrics.snapshot()["proxy/in_flight"] == 0

    scene(play)


def test_a_burst_is_spread_over_the_engines(scene):
    async def play(stage):
        one, two = await stage.joins("engine-1"), await stage.joins("engine-2")

        asking = [await stage.ask(f"r{i}") for i in range(8)]

        assert (len(one.open), len(two.open)) == (4, 4)
        for task in asking:
            task.cancel()

    scene(play)


def test_a_session_stays_on_its_engine(scene):
    async def play(stage):
        one, two = await stage.joins("engine-1"), await stage.joins("engine-2")
        for turn in range(6):
            asking = await stage.ask(f"s.{turn}", session="s")
            next(e for e in (one, two) if e.open).complete(f"s.{turn}", [99])
            await asking

        assert {len(one.generates), len(two.generates)} == {0, 6}

    scene(play)


def test_requests_beyond_the_room_wait_in_order_until_one_is_answered(scene):
    async def play(stage):
        engine = await stage.joins("engine-1", num_slots=1)
        asking = [await stage.ask(f"r{i}") for i in range(5)]
        assert engine.asked == ["r0", "r1"]

        for i in range(5):
            engine.complete(f"r{i}", [99])
            await stage.settle()

        assert engine.asked == [f"r{i}" for i in range(5)]
        assert [(await task).request_id for task in asking] == engine.asked

    scene(play)


def test_a_request_waits_for_the_first_engine(scene, ids_of):
    async def play(stage):
        asking = await stage.ask("r1")

        (await stage.joins("engine-1")).complete("r1", [99])

        assert ids_of(await asking) == [99]

    scene(play)


def test_a_dead_engines_requests_move_with_the_tokens_they_had_streamed(scene, ids_of):
    async def play(stage):
        one = await stage.joins("engine-1", version=3)
        asking = await stage.ask("r1")
        await stage.sampled("engine-1", "r1", [11, 12], version=3)
        await stage.sampled("engine-1", "r1", [13], version=4, start=2)
        two = await stage.joins("engine-2", version=4)

        await stage.leaves("engine-1")
        await asyncio.sleep(1)
        two.complete("r1", [14, 99], version=4)
        completion = await asking

        assert one.cancelled == ["r1"]
        assert ids_of(completion) == [11, 12, 13, 14, 99]
        assert two.generates[0].resumed.spans == (VersionSpan(3, 0, 2), VersionSpan(4, 2, 3))
        assert len(completion.tokens.logprobs) == 5 * 4
        assert stage.context.notices == ["engine-1 is gone: 1 request goes to engine-2 with the 3 tokens sampled so far"]

    scene(play)


def test_an_engine_that_restarts_gets_its_requests_again_as_a_new_one(scene, ids_of):
    async def play(stage):
        await stage.joins("engine-1")
        asking = await stage.ask("r1")
        await stage.sampled("engine-1", "r1", [11])

        reborn = stage.engine("engine-1")
        await stage.proxy.on_peers(("engine-1",), ("engine-1",))
        await stage.settle()
        reborn.complete("r1", [99])

        assert ids_of(await asking) == [11, 99]
        assert ids_of_resumed(reborn) == [11]

    def ids_of_resumed(engine):
        return list(memoryview(engine.generates[0].resumed.ids).cast("i"))

    scene(play)


def test_a_request_whose_last_token_was_streamed_ends_without_another_engine(scene, ids_of):
    async def play(stage):
        await stage.joins("engine-1")
        stopped = await stage.ask("r1")
        long = await stage.ask("r2", max_new_tokens=2)
        await stage.sampled("engine-1", "r1", [7, 99])
        await stage.sampled("engine-1", "r2", [7, 8])

        await stage.leaves("engine-1")

        assert ((await stopped).finish_reason, (await long).finish_reason) == ("stop", "length")
        assert ids_of(await stopped) == [7, 99]

    scene(play)


def test_a_drained_engine_hands_its_requests_back_with_all_their_tokens(scene, ids_of):
    async def play(stage):
        one = await stage.joins("engine-1")
        asking = await stage.ask("r1")
        two = await stage.joins("engine-2")

        one.end("r1", [21, 22])
        await stage.settle()
        await stage.leaves("engine-1")
        two.complete("r1", [99])
        await asyncio.sleep(1)

        assert ids_of(await asking) == [21, 22, 99]
        assert stage.context.notices == ["engine-1 was drained: 1 request goes to engine-2 with the 2 tokens sampled so far"]

    scene(play)


def test_a_request_under_which_engines_keep_dying_is_aborted(scene, ids_of):
    async def play(stage):
        asking = await stage.ask("r1")
        for i in range(3):
            await stage.joins(f"engine-{i}")
            await stage.leaves(f"engine-{i}")
            await asyncio.sleep(1)

        result = await asking

        assert isinstance(result, Aborted)
        assert result.reason == "3 engines died while they ran it; it may be the cause"

    scene(play)


def test_an_engine_that_was_only_cut_off_is_told_to_drop_what_moved_on(scene):
    async def play(stage):
        one, two = await stage.joins("engine-1"), await stage.joins("engine-2")
        asking = await stage.ask("r1")
        first, second = (one, two) if one.open else (two, one)
        await stage.leaves(first.name)
        await asyncio.sleep(1)
        first.running = ("r1",)

        stage.context.actors[first.name] = first
        await stage.proxy.on_peers((first.name,), ())
        await stage.settle()

        assert first.aborts == ["r1"]
        second.complete("r1", [99])
        await asking

    scene(play)


def test_a_second_ask_with_the_same_id_joins_the_first(scene):
    async def play(stage):
        engine = await stage.joins("engine-1")
        first, second = await stage.ask("r1"), await stage.ask("r1")

        engine.complete("r1", [99])

        assert await first == await second
        assert await (await stage.ask("r1")) == await first
        assert engine.asked == ["r1"]

    scene(play)


def test_when_the_first_asker_goes_the_request_goes_on_for_the_second(scene, ids_of):
    async def play(stage):
        engine = await stage.joins("engine-1")
        first, second = await stage.ask("r1"), await stage.ask("r1")

        first.cancel()
        await stage.settle()
        engine.complete("r1", [11, 99])

        assert ids_of(await second) == [11, 99]
        assert (engine.asked, engine.cancelled) == (["r1"], [])

    scene(play)


def test_a_cancelled_ask_frees_its_slot(scene):
    async def play(stage):
        engine = await stage.joins("engine-1", num_slots=1)
        asking = [await stage.ask(f"r{i}") for i in range(4)]

        asking[2].cancel()
        asking[0].cancel()
        await stage.settle()

        assert engine.asked == ["r0", "r1", "r3"]
        assert engine.cancelled == ["r0"]
        for task in asking:
            task.cancel()
        await stage.settle()
        await stage.proxy.on_drain()

    scene(play)


def test_a_request_whose_ask_is_ended_by_a_stop_begins_no_other(scene):
    async def play(stage):
        await stage.joins("engine-1")
        asking = await stage.ask("r1")
        spawned = len(stage.context.spawned)

        stage.context.spawned[-1].cancel()
        await stage.settle()

        assert asking.cancelled()
        assert len(stage.context.spawned) == spawned

    scene(play)


def test_a_restarted_proxy_finds_running_and_finished_requests_on_their_engines(scene):
    async def play(stage):
        one, two = stage.engine("engine-1"), stage.engine("engine-2")
        one.running, two.finished = ("r1", "r2"), ("r3",)
        await stage.proxy.on_start()

        asking = [await stage.ask(f"r{i}") for i in (1, 2, 3)]

        assert (one.asked, two.asked) == (["r1", "r2"], ["r3"])
        for task in asking:
            task.cancel()

    scene(play)


def test_a_waiting_request_can_be_aborted(scene):
    async def play(stage):
        asking = await stage.ask("r1")

        await stage.proxy.abort(Abort("r1", "too old"))

        assert (await asking).reason == "too old"

    scene(play)


def test_a_running_request_is_aborted_on_its_engine_and_keeps_its_tokens(scene):
    async def play(stage):
        engine = await stage.joins("engine-1")
        asking = await stage.ask("r1")

        await stage.proxy.abort(Abort("r1", "too old"))

        assert (await asking).reason == "too old"
        assert engine.aborts == ["r1"]

    scene(play)


def test_aborting_what_an_unreachable_engine_runs_ends_it_with_the_streamed_tokens(scene, ids_of):
    async def play(stage):
        await stage.joins("engine-1")
        asking = await stage.ask("r1")
        await stage.sampled("engine-1", "r1", [11])
        await stage.leaves("engine-1")

        await stage.proxy.abort(Abort("r1", "too old"))

        assert (await asking).reason == "too old"
        assert ids_of(await asking) == [11]

    scene(play)


def test_suspended_engines_get_no_requests_until_they_resume(scene):
    async def play(stage):
        one = await stage.joins("engine-1")
        await stage.proxy.suspend(Suspend())
        two = await stage.joins("engine-2")
        asking = await stage.ask("r1")
        assert (one.suspended, two.suspended) == (True, True)
        assert one.asked + two.asked == []

        await stage.proxy.resume(Resume())
        await stage.settle()

        assert one.asked + two.asked == ["r1"]
        asking.cancel()

    scene(play)


def test_a_suspend_that_an_engine_does_not_obey_is_a_failure_naming_it(scene):
    async def play(stage):
        await stage.joins("engine-1")
        del stage.context.actors["engine-1"]

        with pytest.raises(Failed, match="Suspend did not reach engine-1"):
            await stage.proxy.suspend(Suspend())

    scene(play)


def test_nobody_waits_longer_than_the_deadline(scene):
    async def play(stage):
        request = Generate("r1", "s", b"", sampling=None)

        reply = await stage.proxy.generate(request)

        assert isinstance(reply, Aborted)
        assert "no engine had room before the deadline" in reply.reason
        assert asyncio.get_running_loop().time() == pytest.approx(30, abs=0.1)

    scene(play, request_timeout_s=30)


def test_a_full_queue_answers_aborted_and_says_what_to_raise(scene):
    async def play(stage):
        waiting = await stage.ask("r1")

        refused = await (await stage.ask("r2"))

        assert refused.reason == ("1 requests wait for an engine already: add engines, or raise proxy.max_waiting")
        waiting.cancel()

    scene(play, max_waiting=1)


def test_a_picker_of_the_users_decides_which_engine_takes_a_request(scene, tmp_path):
    (tmp_path / "mine.py").write_text(
        "from rubato.actors.proxy.picker import LeastLoaded\n"
        "class Last(LeastLoaded):\n"
        "    def usable(self, request):\n"
        "        return [max(self.host.engines.values(), key=lambda engine: engine.name)]\n"
    )

    async def play(stage):
        for number in range(1, 4):
            await stage.joins(f"engine-{number}")

        asking = [await stage.ask(f"r{i}") for i in range(3)]

        assert stage.engines["engine-3"].asked == ["r0", "r1", "r2"]
        for task in asking:
            task.cancel()

    scene(play, picker=f"{tmp_path / 'mine.py'}:Last")


def test_a_version_of_one_adapter_says_nothing_of_the_other_weights(scene):
    async def play(stage):
        seen = []
        stage.proxy.placement.picker.version_began = seen.append
        engine = await stage.joins("engine-1")
        told, answered = [await stage.ask(name, adapter="maths") for name in ("told", "answered")]

        await stage.sampled("engine-1", "told", [11], version=7, adapter="maths")
        await stage.sampled("engine-1", "of another proxy", [11], version=8, adapter="maths")
        after_telling = stage.proxy.placement.seats["engine-1"].info.holds
        engine.complete("answered", [99], version=9)
        await answered
        told.cancel()

        assert after_telling == (WeightsId(0), WeightsId(8, "maths"))
        assert stage.proxy.placement.seats["engine-1"].info.holds == (WeightsId(0), WeightsId(9, "maths"))
        assert seen == [0]

    scene(play)


def test_the_fabric_hears_of_each_version_once(scene):
    async def play(stage):
        told = []

        async def fabric(message):
            told.append(message)

        stage.context.actors["fabric_controller"] = fabric
        engine = await stage.joins("engine-1")
        for i, version in enumerate((0, 1, 1)):
            asking = await stage.ask(f"r{i}")
            engine.complete(f"r{i}", [99], version=version)
            await asking
            await stage.settle()

        assert told == [PhaseIntent("rollout", 0, 0.0), PhaseIntent("rollout", 1, 0.0)]

    scene(play)


def test_a_held_engine_goes_on_with_what_it_may_serve_and_evaluations_go_first(scene, changed):
    async def play(stage):
        engine = await stage.joins("engine-1", num_slots=1, version=1)
        await changed(stage, "engine-1", 1, pinned=True)
        newer = [await stage.ask(f"new{i}", min_version=2) for i in range(3)]
        older = await stage.ask("old", min_version=1)
        running, waiting = [await stage.ask(f"more{i}", min_version=1) for i in range(2)]
        exact = await stage.ask("exact", min_version=1, exact=True)
        assert engine.asked == ["old", "more0"]

        engine.complete("old", [99])
        await stage.settle()
        assert engine.asked[-1] == "exact"
        for name in ("more0", "exact", "more1"):
            engine.complete(name, [99])
            await stage.settle()
        assert engine.asked == ["old", "more0", "exact", "more1"]

        await changed(stage, "engine-1", 2, pinned=False)
        await stage.settle()
        assert engine.asked[4:] == ["new0", "new1"]
        await asyncio.gather(older, running, waiting, exact)
        for task in newer:
            task.cancel()

    scene(play)


def test_an_exact_request_ends_at_once_where_nobody_holds_its_version_any_more(scene, changed):
    async def play(stage):
        engine = await stage.joins("engine-1", num_slots=1, version=1)
        early = await stage.ask("early", min_version=1, exact=True)
        await changed(stage, "engine-1", 1, pinned=True)
        asking = [await stage.ask(f"r{i}", min_version=1, exact=True) for i in range(3)]
        assert engine.asked == ["r0", "r1"]

        await changed(stage, "engine-1", 2, pinned=False)

        assert [(await task).reason for task in (early, asking[2])] == ["no engine holds version 1 any more"] * 2
        for task in asking[:2]:
            task.cancel()

    scene(play)


def test_an_exact_request_whose_engine_died_does_not_go_on_under_other_weights(scene, changed):
    async def play(stage):
        await stage.joins("engine-1", version=1)
        await changed(stage, "engine-1", 1, pinned=True)
        asking = await stage.ask("r", min_version=1, exact=True)
        await stage.joins("engine-2", version=2)

        await stage.leaves("engine-1")

        assert (await asking).reason == "no engine holds version 1 any more"

    scene(play)
