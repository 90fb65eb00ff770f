"""The scheduler alone: who runs, what is cached, who waits."""

from rubato.actors.engines.engine import Work
from rubato.actors.engines.scheduler import Row, Scheduler, Sequence
from rubato.actors.messages.generation import Sampling


def sequence(name: str, length: int, num: int = 4, session: str = "", first: int = 0) -> Sequence:
    prompt = tuple(range(first, first + length))
    return Sequence(Work(name, session, prompt, Sampling(num)), max_len=1000)


def step(scheduler: Scheduler, token: int = 99) -> list[Row]:
    """Run one step in which every row that can samples `token`."""
    rows = scheduler.schedule()
    ended = []
    for one in scheduler.computed(rows):
        one.sampled(token, -1.0, 0)
        if one.finish_reason:
            ended.append(one)
    scheduler.retire(ended)
    return rows


def sizes(rows: list[Row]) -> dict[str, tuple[int, int]]:
    return {row.sequence.work.request_id: (row.start, row.end) for row in rows}


def test_several_prompts_are_prefilled_in_one_step_and_then_decode_together():
    scheduler = Scheduler(4, 100)
    scheduler.add(sequence("a", 5))
    scheduler.add(sequence("b", 9))

    first, second = step(scheduler), step(scheduler)

    assert sizes(first) == {"a": (0, 5), "b": (0, 9)}
    assert sizes(second) == {"a": (5, 6), "b": (9, 10)}


def test_prefill_joins_a_step_of_those_who_decode():
    scheduler = Scheduler(4, 100)
    scheduler.add(sequence("a", 5))
    step(scheduler)
    scheduler.add(sequence("b", 9))

    rows = step(scheduler)

    assert sizes(rows) == {"a": (5, 6), "b": (0, 9)}


def test_a_long_prefill_is_cut_to_the_step_and_never_starves_decode():
    scheduler = Scheduler(4, 10)
    scheduler.add(sequence("a", 3, num=8))
    step(scheduler)
    scheduler.add(sequence("long", 25))

    pieces = [sizes(step(scheduler)) for _ in range(4)]

    assert [piece["long"] for piece in pieces] == [(0, 9), (9, 18), (18, 25), (25, 26)]
    assert all("a" in piece for piece in pieces)


def test_requests_wait_for_a_slot_first_come_first_served():
    scheduler = Scheduler(2, 100)
    for name in "abcd":
        scheduler.add(sequence(name, 3, num=1))

    first, second = step(scheduler), step(scheduler)

    assert list(sizes(first)) == ["a", "b"]
    assert list(sizes(second)) == ["c", "d"]
    assert (scheduler.num_running, scheduler.num_waiting) == (0, 0)


def test_a_sessions_next_turn_computes_only_what_is_new():
    scheduler = Scheduler(2, 100)
    scheduler.add(sequence("a", 20, num=1, session="s"))
    step(scheduler)
    scheduler.add(sequence("b", 32, num=1, session="s"))

    rows = step(scheduler)

    assert sizes(rows) == {"b": (20, 32)}


def test_at_least_the_last_token_is_computed_and_a_changed_history_is_not_reused():
    scheduler = Scheduler(2, 100)
    scheduler.add(sequence("a", 20, num=1, session="s"))
    step(scheduler)
    scheduler.add(sequence("same", 20, num=1, session="s"))
    same = step(scheduler)
    scheduler.add(sequence("other", 20, num=1, session="s", first=7))

    other = step(scheduler)

    assert sizes(same) == {"same": (19, 20)}
    assert sizes(other) == {"other": (0, 20)}


def test_the_least_recently_used_idle_session_gives_its_slot_up():
    scheduler = Scheduler(2, 100)
    for session in ("old", "new"):
        scheduler.add(sequence(session, 20, num=1, session=session))
        step(scheduler)
    scheduler.add(sequence("third", 20, num=1, session="third"))
    step(scheduler)
    scheduler.add(sequence("again", 22, num=1, session="new"))

    rows = step(scheduler)

    assert sizes(rows) == {"again": (20, 22)}
    assert len(scheduler._slots._idle) == 2


def test_without_a_prefix_cache_every_slot_is_free_at_once():
    scheduler = Scheduler(2, 100, prefix_cache=False)
    scheduler.add(sequence("a", 20, num=1, session="s"))
    step(scheduler)

    assert len(scheduler._slots._idle) == 0


def test_after_new_weights_running_requests_are_computed_again_and_idle_histories_are_gone():
    scheduler = Scheduler(4, 100)
    scheduler.add(sequence("idle", 20, num=1, session="s"))
    scheduler.add(sequence("run", 5, num=9))
    step(scheduler)

    scheduler.forget_caches()
    rows = step(scheduler)

    assert sizes(rows) == {"run": (0, 6)}
    assert len(scheduler._slots._idle) == 0


def test_a_removed_sequence_leaves_its_place_whether_it_waits_or_runs():
    scheduler = Scheduler(1, 100)
    runs, waits = sequence("runs", 5), sequence("waits", 5)
    scheduler.add(runs)
    scheduler.add(waits)
    step(scheduler)

    scheduler.remove(waits)
    scheduler.remove(runs)
    scheduler.remove(runs)
    scheduler.add(sequence("next", 5))

    assert list(sizes(step(scheduler))) == ["next"]


def test_two_requests_of_one_session_at_once_take_two_slots():
    scheduler = Scheduler(2, 100)
    scheduler.add(sequence("a", 5, num=1, session="s"))
    scheduler.add(sequence("b", 6, num=1, session="s"))

    rows = step(scheduler)

    assert len({row.sequence.work.request_id for row in rows}) == 2
    assert len(scheduler._slots._idle) == 1


def test_a_first_token_that_is_wanted_at_once_is_a_chunk_and_the_next_chunk_is_as_long_as_any():
    at_once = Sequence(Work("a", "s", (1, 2), Sampling(9), first_at_once=True), max_len=1000)
    other = Sequence(Work("b", "s", (1, 2), Sampling(9)), max_len=1000)
    lengths = []
    for token in range(5):
        for each in (at_once, other):
            each.sampled(token, 0.0, 0)
        if at_once.has_chunk(4):
            lengths.append(len(at_once.chunk().tokens.ids) // 4)
        assert other.has_chunk(4) == (token >= 3)

    assert lengths == [1, 4]
