"""Shares of tasks over hardware classes, by example: what is fitted, what is planned, and how the shares are dealt out."""

import random

import pytest

from rubato.actors import catalog
from rubato.planning.affinity import HardwareClass, TaskProfile, plan
from rubato.planning.binding import Binding, TaskProfiles, measured, planned
from rubato.planning.roofline import Deployment, Roofline
from rubato.planning.step_cost import StepCost, fit
from rubato.planning.step_sums import StepSums

COMPUTE = StepCost(prefill_s=3e-5, step_s=7e-3, token_s=0.0, context_s=6e-8)
BANDWIDTH = StepCost(prefill_s=2e-4, step_s=6e-3, token_s=0.0, context_s=5e-8)
CLASSES = (HardwareClass("h800", 1, 32, COMPUTE), HardwareClass("h20", 3, 32, BANDWIDTH))

READ = TaskProfile(requests=1, prompt=3000, prefill=3000, decode=8)
WRITE = TaskProfile(requests=1, prompt=100, prefill=100, decode=192)


def steps_of(hardware: str) -> tuple[Roofline, StepSums]:
    model = Roofline(Deployment(gpu=catalog.hardware(hardware), model=catalog.model("qwen3-8b")))
    sums, chance = StepSums(), random.Random(1)
    for _ in range(300):
        batch, prompts = chance.randint(0, 32), chance.choice((0, 0, 100, 3000))
        context = sum(chance.choice((200, 3000)) for _ in range(batch))
        seconds = model.prefill_s(prompts) + (model.step_s(batch, context) if batch else 0.0)
        sums.add(prompts, batch, context, seconds)
    return model, sums


@pytest.mark.parametrize("hardware", ["h800", "h20"])
def test_a_class_of_the_roofline_is_fitted_within_an_eighth_of_every_step(hardware):
    model, sums = steps_of(hardware)

    cost = fit(sums)

    for prompts, batch, context in ((3000, 0, 0), (100, 0, 0), (0, 1, 200), (0, 32, 9600), (0, 32, 96000)):
        seconds = model.prefill_s(prompts) + (model.step_s(batch, context) if batch else 0.0)
        assert cost.seconds(prompts, batch, context) == pytest.approx(seconds, rel=0.125)  # a straight line, and attention has a least


def test_sums_of_several_engines_and_of_parts_of_their_lives_are_added_up():
    _, whole = steps_of("h20")
    first, rest = StepSums(), StepSums()
    first.include(whole.values)
    before = tuple(first.values)
    first.add(100, 3, 900, 0.05)

    rest.include(first.values, since=before)
    rest.include(before)

    assert rest.values == pytest.approx(first.values)


def test_a_class_is_not_measured_before_it_has_both_prefilled_and_decoded():
    sums = StepSums()
    sums.add(100, 0, 0, 0.01, times=20)
    assert fit(sums) is None
    sums.add(0, 4, 400, 0.01, times=20)
    assert fit(sums) is not None


def test_prompts_go_to_compute_and_decoding_to_bandwidth():
    found = plan({"read": READ, "write": WRITE}, CLASSES, in_flight=16)

    assert found.shares == {"read": {"h800": 1.0}, "write": {"h20": 1.0}}
    assert found.why.startswith("task read → h800: 1.00; task write → h20: 1.00 (")


def test_a_class_with_room_to_spare_takes_part_of_the_other_task():
    found = plan({"read": READ, "write": WRITE}, CLASSES, in_flight=160)

    assert found.shares["write"] == {"h20": 1.0}
    assert 0.5 < found.shares["read"]["h800"] < 0.9


def test_a_plan_is_kept_while_another_gains_little():
    tasks = {"read": READ, "write": WRITE}
    present = plan(tasks, CLASSES, 160).shares

    a_little_longer = plan(tasks | {"write": WRITE._replace(decode=196)}, CLASSES, 160, present)
    the_other_way = plan({"read": WRITE, "write": READ}, CLASSES, 160, present)

    assert a_little_longer.shares == present
    assert the_other_way.shares["read"] == {"h20": 1.0}
    assert "x the map so far" in the_other_way.why


def test_equal_classes_stay_open_to_all():
    twins = (HardwareClass("a", 2, 32, COMPUTE), HardwareClass("b", 2, 32, COMPUTE))

    found = plan({"read": READ, "write": WRITE}, twins, 160)

    assert found.shares == {}
    assert found.why.startswith("every class stays open to all (")


def test_sessions_are_dealt_out_by_the_shares_and_keep_their_class():
    binding = Binding({"read": {"h800": 0.75, "h20": 0.25}})
    dealt = []
    for _ in range(40):
        dealt.append(binding.order("read")[0])
        binding.begun("read", dealt[-1])

    assert dealt.count("h800") == 30
    assert binding.order("read", kept="h20")[0] == "h20"
    assert set(binding.order("read", kept="h200")) == {"h800", "h20"}


def test_who_had_to_go_elsewhere_is_made_up_for():
    binding = Binding({"read": {"h800": 0.5, "h20": 0.5}})
    dealt = []
    for _ in range(4):
        binding.begun("read", "h20")
    for _ in range(4):
        dealt.append(binding.order("read")[0])
        binding.begun("read", dealt[-1])

    assert dealt == 4 * ["h800"]


def test_a_class_takes_no_more_than_its_share_and_a_little_while_another_has_no_room():
    binding, taken = Binding({"read": {"h800": 0.9, "h20": 0.1}}), 0
    while "h20" in binding.order("read"):
        binding.begun("read", "h20")
        taken += 1

    assert taken == 3
    assert binding.order("read") == ["h800"]


def test_a_task_without_shares_has_the_default_or_any_class():
    assert Binding({"read": {"h800": 1.0}}, default="h20").order("write") == ("h20",)
    assert not Binding({"read": {"h800": 1.0}}).order("write")


def seen(profiles: TaskProfiles, of: dict[str, TaskProfile], times: int = 32) -> None:
    for name, task in of.items():
        for _ in range(times):
            profiles.began(name, int(task.prompt), int(task.prefill))
            profiles.ended(name, int(task.decode))


@pytest.mark.parametrize("steps_before", [1, 5, 50])
def test_tasks_that_change_places_are_mapped_anew_within_three_steps(steps_before):
    profiles, shares = TaskProfiles(), {}
    for _ in range(steps_before):
        seen(profiles, {"a": READ, "b": WRITE})
        shares = plan(profiles.take(), CLASSES, 16, shares).shares
    assert shares == {"a": {"h800": 1.0}, "b": {"h20": 1.0}}

    for _ in range(3):
        seen(profiles, {"a": WRITE, "b": READ})
        shares = plan(profiles.take(), CLASSES, 16, shares).shares

    assert shares == {"a": {"h20": 1.0}, "b": {"h800": 1.0}}


def test_with_one_class_or_nothing_seen_there_is_no_plan():
    compute, bandwidth = (measured(name, 2, 32, steps_of(name)[1]) for name in ("h800", "h20"))
    tasks = {"a": READ, "b": WRITE}

    assert planned(tasks, [compute, bandwidth], 16, {}) is not None
    assert planned(tasks, [compute], 16, {}) is None
    assert planned({}, [compute, bandwidth], 16, {}) is None
    assert planned(tasks, [compute, measured("h20", 2, 32, StepSums())], 16, {}) is None


def test_a_task_that_is_gone_is_forgotten():
    profiles = TaskProfiles()
    seen(profiles, {"a": READ, "b": WRITE})
    for _ in range(20):
        seen(profiles, {"b": WRITE})
        profiles.take()

    assert set(profiles.profiles()) == {"b"}
