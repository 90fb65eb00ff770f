"""Virtual time: order, waiting, and what an event is."""

from rubato.sim.timeline import Cancelled, Timeline


def test_what_is_due_at_one_moment_goes_on_in_the_order_in_which_it_was_set():
    timeline, order = Timeline(), []

    async def sleeps(name: str, seconds: float) -> None:
        await timeline.sleep(seconds)
        order.append((name, timeline.now))

    for name, seconds in (("late", 2.0), ("first", 1.0), ("second", 1.0)):
        timeline.start(sleeps(name, seconds))
    timeline.run()

    assert order == [("first", 1.0), ("second", 1.0), ("late", 2.0)]


def test_a_process_hands_its_result_to_everybody_who_waits_for_it():
    timeline, heard = Timeline(), []

    async def computes() -> int:
        await timeline.sleep(3.0)
        return 7

    process = timeline.start(computes())

    async def waits() -> None:
        heard.append((await process.ended, timeline.now))

    timeline.start(waits())
    timeline.start(waits())
    timeline.run()

    assert heard == [(7, 3.0), (7, 3.0)]


def test_an_event_that_has_happened_holds_nobody_up_and_keeps_its_first_value():
    timeline = Timeline()
    event = timeline.event()
    event.set("first")
    event.set("second")

    async def waits() -> str:
        return await event

    process = timeline.start(waits())
    timeline.run()

    assert process.ended.value == "first"
    assert timeline.now == 0.0


def test_a_run_stops_where_its_event_happens():
    timeline = Timeline()

    async def ticks() -> None:
        while True:
            await timeline.sleep(1.0)

    async def ends() -> None:
        await timeline.sleep(2.5)

    timeline.start(ticks())
    timeline.run(until=timeline.start(ends()).ended)

    assert timeline.now == 2.5


def test_a_cancelled_process_ends_where_it_waits_and_may_go_on_with_something_else():
    timeline, told = Timeline(), []
    never = timeline.event()

    async def works() -> None:
        try:
            await never
        except Cancelled:
            told.append(timeline.now)
        await timeline.sleep(1.0)
        told.append(timeline.now)

    process = timeline.start(works())
    timeline.at(2.0, process.cancel)
    timeline.at(2.0, process.cancel)
    timeline.at(2.5, never.set)
    timeline.run()

    assert told == [2.0, 3.0]


def test_a_cancel_in_the_moment_of_its_event_comes_first_and_once():
    timeline, told = Timeline(), []
    event = timeline.event()

    async def works() -> None:
        try:
            await event
            told.append("went on")
        except Cancelled:
            told.append("cancelled")
        await timeline.sleep(1.0)
        told.append("ended")

    process = timeline.start(works())
    event.set()
    process.cancel()
    timeline.run()

    assert told == ["cancelled", "ended"]
