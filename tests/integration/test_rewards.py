"""User reward functions in their workers: every failure has a name and costs no other trajectory."""

import asyncio
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace
from pydantic import TypeAdapter

from rubato.actors.config import RewardSection
from rubato.actors.data.tasks import Tasks
from rubato.actors.messages.samples import NotScored, Score, Scores
from rubato.actors.rewards.scorer import Scorer

pytestmark = pytest.mark.slow

USER = Path(__file__).parents[1] / "unit" / "actors" / "rewards" / "user_rewards.py"
PENALTY = "rubato.actors.rewards.functions:malformed_penalty"


def request(*texts, **columns):
    return Score("t1.1", texts, msgspec.msgpack.encode({"turns": len(texts), "invalid_turns": 0, **columns}))


@pytest.fixture
async def scorer_of():
    scorers = []

    async def start(*names, timeout_s=10.0, **section):
        functions = tuple(name if ":" in name else f"{USER}:{name}" for name in names)
        scorers.append(Scorer(RewardSection(functions=functions, timeout_s=timeout_s, memory_mb=512, **section)))
        assert await scorers[-1].start() == ""
        return scorers[-1]

    yield start
    for scorer in scorers:
        await scorer.close()


async def test_functions_are_given_turns_and_columns_and_answer_in_order(scorer_of):
    scorer = await scorer_of("lengths", "from_columns", PENALTY)

    replies = await scorer.score([request("a", "bc", answer=7), request("xyz", invalid_turns=1)])

    assert replies == [Scores((4.0, 11.0, 0.0)), Scores((3.0, 2.0, -0.1))]


async def test_one_bad_trajectory_costs_no_other_of_its_batch(scorer_of):
    scorer = await scorer_of("picky")

    replies = await scorer.score([request("good"), request("bad"), request("fine")])

    assert [type(reply) for reply in replies] == [Scores, NotScored, Scores]


async def test_a_wrong_number_of_results_is_found(scorer_of):
    scorer = await scorer_of("short")

    alone = await scorer.score([request("a")])

    assert alone == [Scores((1.0,))]
    assert await scorer.score([request("a"), request("b")]) == [Scores((1.0,))] * 2


async def test_a_function_that_can_not_be_loaded_is_told_in_one_sentence():
    scorer = Scorer(RewardSection(functions=(f"{USER}:missing",)))

    problem = await scorer.start()
    await scorer.close()

    assert problem == f"reward function {USER}:missing does not exist: {USER} defines no missing"


async def test_a_batch_that_hangs_as_a_whole_is_answered_within_a_few_timeouts(scorer_of):
    scorer = await scorer_of("hang", timeout_s=0.2)

    async with asyncio.timeout(10):
        replies = await scorer.score([request("a")] * 64)

    assert [reply.reason for reply in replies] == ["timeout"] * 64


async def test_a_slow_import_is_not_charged_to_the_first_call_after_a_restart(tmp_path):
    file = tmp_path / "slow.py"
    file.write_text(
        "import time\ntime.sleep(0.6)\ndef f(completions, die, **columns):\n    die[0] and 1 / 0 or die[0] is None and exit()\n    return [1.0]\n"
    )
    scorer = Scorer(RewardSection(functions=(f"{file}:f",), timeout_s=0.5))
    assert await scorer.start() == ""

    died = await scorer.score([request("a", die=None)])
    replies = await scorer.score([request("a", die=False)])

    await scorer.close()
    assert died[0].reason == "exited"
    assert replies == [Scores((1.0,))]


async def test_a_function_is_asked_for_the_tasks_that_have_it_and_given_what_its_signature_names():
    named = {name: f"{USER}:{name}" for name in ("lengths", "strict")}
    tasks = TypeAdapter(Tasks).validate_python(
        {"a": {"class": "m:A", "rewards": [named["strict"]]}, "b": {"class": "m:B"}, "c": {"class": "m:C", "rewards": []}}
    )
    scorer = Scorer(RewardSection(functions=(named["lengths"],)), tasks)
    try:
        assert await scorer.start() == ""
        requests = [replace(request("xyz", task=name, row=4, other=1), task=name) for name in ("a", "b", "c")]

        assert await scorer.score(requests) == [Scores((4.0,)), Scores((3.0,)), Scores(())]
    finally:
        await scorer.close()


async def test_a_reward_much_later_than_its_tasks_correct_ones_ends_as_a_timeout_and_costs_no_other(scorer_of):
    def asked(task, seconds, worth):
        columns = msgspec.msgpack.encode({"seconds": seconds, "worth": worth})
        return Score(f"{task}.1", ("text",), columns, task)

    scorer = await scorer_of("slow", timeout_s=60.0, deadline_factor=1.5, deadline_least_s=0.5)
    assert await scorer.score([asked("quick", 0.0, 1)]) == [Scores((1.0,))]

    late, in_time, unknown = await scorer.score([asked("quick", 50, 1), asked("quick", 0.0, 1), asked("new", 1.0, 0)])

    assert isinstance(late, NotScored)
    assert late.reason == "timeout"
    assert (in_time, unknown) == (Scores((1.0,)), Scores((0.0,)))
