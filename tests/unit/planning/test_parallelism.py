"""Degrees of parallelism and moves: what the planners do on loads whose best answer is known."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml

from rubato.planning.makespan import Instance, Load, finish_s
from rubato.planning.parallelism import coming, divisions, within
from rubato.planning.rebalance import rebalance
from rubato.planning.roofline import Deployment, Roofline

CONFIGS = Path(__file__).resolve().parents[3] / "configs"
GPU = yaml.safe_load((CONFIGS / "hardware/h800.yaml").read_text())
MODEL = yaml.safe_load((CONFIGS / "models/qwen2.5-14b.yaml").read_text())


def engine(degree: int, **more: object) -> Roofline:
    return Roofline(Deployment.model_validate({"gpu": GPU, "model": MODEL, "tp": degree, **more}))


ENGINES = {degree: engine(degree) for degree in (1, 2, 4, 8)}


def many(num: int, remaining: float, cached: int = 0, prefix: str = "r") -> tuple[Load, ...]:
    return tuple(Load(f"{prefix}{i}", 500, remaining, cached) for i in range(num))


def standing(degrees: Sequence[int], loads: Sequence[Load]) -> list[Instance]:
    """Instances that took `loads` in turn, as they came."""
    return [Instance(f"e{at}", degree, tuple(loads[at :: len(degrees)])) for at, degree in enumerate(degrees)]


def test_two_requests_of_one_length_take_a_step_of_two_per_token():
    two = finish_s([Load("a", 100, 10, 100), Load("b", 100, 10, 100)], ENGINES[1])

    assert two == pytest.approx(10 * ENGINES[1].step_s(2, 210))


def test_a_full_engine_takes_the_next_one_when_one_leaves_and_waits_come_on_top():
    one_slot = engine(1, num_slots=1)
    loads = [Load("a", 100, 10, 100), Load("b", 100, 20, 100, wait_s=3.0)]

    assert finish_s(loads, one_slot) == pytest.approx(10 * one_slot.step_s(1, 105) + 20 * one_slot.step_s(1, 110) + 3)


def test_what_its_engine_lacks_of_the_cache_is_prefilled():
    whole, without = (finish_s([Load("a", 4000, 10, cached)], ENGINES[1]) for cached in (4000, 0))

    assert without - whole == pytest.approx(ENGINES[1].prefill_s(4000))


def test_many_short_requests_are_served_by_small_instances_and_few_long_ones_by_a_large_one():
    assert coming(many(2000, 300), 8, ENGINES).degrees[0] <= 2
    assert coming(many(1, 8000), 8, ENGINES).degrees == (8,)


def test_a_step_keeps_its_degrees_where_others_promise_little():
    loads = many(64, 1000)
    best = coming(loads, 8, ENGINES)
    kept = coming(loads, 8, ENGINES, current=standing(best.degrees, loads))

    assert (kept.degrees, kept.switched) == (best.degrees, False)
    assert "stay" in kept.why


def test_what_stays_is_counted_in_the_order_in_which_its_engine_serves_it():
    slots = {degree: engine(degree, num_slots=8) for degree in (4, 8)}
    last = (*many(44, 500), *many(4, 6000, prefix="t"))
    kept = coming(last, 8, slots, [Instance("a", 8, last)])

    assert kept.predicted_s == pytest.approx(finish_s(last, slots[8]))
    assert kept.predicted_s > 1.05 * coming(last, 8, {8: slots[8]}).predicted_s


def test_where_lengths_are_drawn_instances_get_as_many_for_each_gpu_and_a_queue_in_the_order_of_arrival():
    loads = [Load(f"r{i:02d}", 500, 300.0 * (i % 7 + 1)) for i in range(60)]
    one, two = {4: engine(4, num_slots=4)}, {2: engine(2, num_slots=4), 4: engine(4, num_slots=4)}

    [names] = coming(loads, 4, one, drawn=True).assigned
    mixed = coming(loads, 6, two, drawn=True)

    assert list(names) == [load.name for load in loads]
    assert coming(loads, 4, one, drawn=True).predicted_s == pytest.approx(finish_s(loads, one[4]))
    assert [len(part) for part in mixed.assigned] == [10 * degree for degree in mixed.degrees]


def test_what_waits_for_any_engine_comes_to_the_one_with_fewest():
    loads = many(3, 6000)
    plan = coming(loads, 2, {1: ENGINES[1]}, [Instance("a", 1, loads[:1]), Instance("b", 1)])

    assert sorted(map(len, plan.assigned)) == [1, 2]
    assert not plan.switched


def test_a_switch_that_one_step_does_not_pay_is_made_where_several_do():
    loads = many(4, 200)
    once, often = (coming(loads, 8, ENGINES, current=standing((1,) * 8, loads), steps=steps) for steps in (1, 4))

    assert not once.switched
    assert often.switched
    assert often.predicted_s < 0.95 * once.predicted_s


def test_a_switch_between_steps_is_made_where_it_pays_and_not_where_its_cost_is_above_the_gain():
    long, short = (coming(loads, 8, ENGINES, current=standing((1,) * 8, loads)) for loads in (many(4, 8000), many(4, 100)))

    assert long.switched
    assert "with the switch, TP1 x 8" in long.why
    assert (short.degrees, short.switched) == ((1,) * 8, False)


def test_a_long_tail_is_merged_and_the_reason_names_gain_and_cost():
    idle = [Instance(f"engine-{i}", 2) for i in (1, 2, 3)]
    straggler = Instance("engine-0", 2, many(2, 6000, cached=500))
    plan = within([straggler, *idle], ENGINES)

    [change] = plan.changes
    assert change.old == ("engine-0", "engine-1", "engine-2", "engine-3")
    assert change.degree == 8
    assert change.why == (
        f"merge engine-0 + engine-1 + engine-2 + engine-3 into degree 8: saves {change.saves_s:.1f} s of tail, costs {change.costs_s:.1f} s"
    )
    assert plan.after_s == pytest.approx(plan.before_s - change.saves_s + change.costs_s)


def test_a_merge_waits_while_many_run_and_is_made_when_the_tail_is_left():
    tails = [Load(f"t{i}", 500, 9000.0, 500) for i in range(4)]

    def pool(short: int) -> list[Instance]:
        own = [many(short, 1500, cached=500, prefix=f"s{i}-") for i in range(4)]
        return [Instance(f"e{i}", 2, (*own[i], tails[i])) for i in range(4)]

    assert "no switch" in within(pool(250), ENGINES).why
    assert [change.degree for change in within(pool(0), ENGINES).changes] == [8]


def test_a_step_whose_tail_is_merged_later_begins_with_smaller_instances():
    loads, two = [*many(1200, 1000), *many(4, 16000, prefix="t")], {degree: ENGINES[degree] for degree in (2, 8)}
    alone, merging = (coming(loads, 8, two, merges=merges) for merges in (False, True))

    assert merging.degrees[0] < alone.degrees[0]
    assert merging.predicted_s < alone.predicted_s


def test_a_tail_that_is_shorter_than_a_switch_is_left_alone():
    plan = within([Instance("a", 2, many(2, 100, cached=500)), Instance("b", 2)], ENGINES)

    assert not plan.changes
    assert "no switch" in plan.why


def test_a_large_instance_with_many_requests_is_split():
    plan = within([Instance("a", 8, many(2000, 1000))], ENGINES)

    [change] = plan.changes
    assert change.why.startswith("split a into")
    assert len(change.parts) * change.degree == 8


def test_where_engines_start_anew_a_split_costs_two_starts_and_a_merge_one():
    anew = {degree: engine(degree, restart_s=2.0) for degree in (2, 4, 8)}
    [split] = within([Instance("a", 8, many(2000, 1000))], anew).changes
    [merge] = within([Instance("a", 4, many(2, 6000)), Instance("b", 4)], anew).changes

    assert (len(split.parts), split.costs_s) == (4, 4.0)
    assert (len(merge.parts), merge.costs_s) == (1, 2.0)


def test_where_engines_start_anew_a_step_of_more_instances_begins_after_two_starts():
    anew = {degree: engine(degree, restart_s=2.0) for degree in (2, 4, 8)}
    split = coming(many(2000, 1000), 8, anew, current=[Instance("a", 8)])
    merged = coming(many(4, 8000), 8, anew, current=standing((2,) * 4, ()))

    assert (split.degrees, merged.degrees) == ((2,) * 4, (8,))
    assert split.predicted_s == pytest.approx(coming(many(2000, 1000), 8, anew).predicted_s + 4.0)
    assert merged.predicted_s == pytest.approx(coming(many(4, 8000), 8, anew).predicted_s + 2.0)


@pytest.mark.parametrize("other", [{"server": "elsewhere"}, {"settled": False}])
def test_no_merge_across_servers_nor_of_an_instance_that_has_just_changed(other: dict[str, object]):
    straggler = Instance("a", 2, many(2, 6000, cached=500))

    assert within([straggler, Instance("b", 2)], {2: ENGINES[2], 4: ENGINES[4]}).changes
    assert not within([straggler, Instance("b", 2)._replace(**other)], {2: ENGINES[2], 4: ENGINES[4]}).changes


def test_the_longest_remaining_goes_first_from_a_straggler_to_an_idle_engine():
    loads = tuple(Load(f"r{i}", 500, 1000.0 * (i + 1), 500) for i in range(2))
    full = {1: engine(1, num_slots=1)}
    plan = rebalance([Instance("a", 1, loads), Instance("b", 1)], full, now_s=0)

    assert [(move.request, move.source, move.target) for move in plan.moves] == [("r1", "a", "b")]
    assert plan.moves[0].why.startswith("2000 tokens left on a; ")


def test_a_cache_travels_where_its_link_is_faster_than_prefill_and_is_computed_again_where_it_is_not():
    waiting = tuple(Load(f"r{i}", 4000, 3000.0, 4000) for i in range(4))
    slow = {1: engine(1, num_slots=2, gpu=GPU | {"nic_busbw_bytes_s": 1e8})}
    fast = {1: engine(1, num_slots=2)}
    pair = [Instance("a", 1, waiting), Instance("b", 1)]

    assert all(move.carry.with_cache for move in rebalance(pair, fast, now_s=0).moves)
    assert not any(move.carry.with_cache for move in rebalance(pair, slow, now_s=0).moves)
    assert rebalance(pair, slow, now_s=0).moves


def test_a_request_moves_again_only_after_the_interval():
    pair = [Instance("a", 1, many(2, 3000, cached=500)), Instance("b", 1)]
    full = {1: engine(1, num_slots=1)}
    both = {"r0": 0.0, "r1": 0.0}

    assert not rebalance(pair, full, now_s=9.9, moved_s=both, interval_s=10).moves
    assert rebalance(pair, full, now_s=10.0, moved_s=both, interval_s=10).moves


def test_balanced_engines_are_left_alone_and_say_so():
    plan = rebalance([Instance("a", 1, many(8, 900)), Instance("b", 1, many(8, 920, prefix="s"))], ENGINES, now_s=0)

    assert not plan.moves
    assert "no moves shorten" in plan.why


def test_divisions_use_all_gpus_with_two_sizes_at_most():
    assert sorted(divisions(4, (1, 2, 4))) == [(1, 1, 1, 1), (1, 1, 2), (2, 2), (4,)]
