"""User reward functions in their workers: every failure has a name and costs no other trajectory."""

from pathlib import Path

import msgspec
import pytest

from actors.config import RewardSection
from actors.messages.rewards import NotScored, Score, Scores
from actors.rewards.local import LocalScorer

USER = Path(__file__).parents[1] / "unit" / "actors" / "rewards" / "user_rewards.py"
PENALTY = "actors.rewards.functions:malformed_penalty"


def request(*texts, **columns):
    return Score("t1.1", texts, msgspec.msgpack.encode({"turns": len(texts), "invalid_turns": 0, **columns}))


@pytest.fixture
async def scorer_of():
    scorers = []

    async def start(*names, timeout_s=10.0):
        functions = tuple(name if ":" in name else f"{USER}:{name}" for name in names)
        scorers.append(LocalScorer(RewardSection(functions=functions, timeout_s=timeout_s)))
        assert await scorers[-1].start() == ""
        return scorers[-1]

    yield start
    for scorer in scorers:
        await scorer.close()


async def test_functions_are_given_turns_and_columns_and_answer_in_order(scorer_of):
    scorer = await scorer_of("lengths", "from_columns", PENALTY)

    replies = await scorer.score([request("a", "bc", answer=7), request("xyz", invalid_turns=1)])

    assert replies == [Scores((4.0, 11.0, 0.0)), Scores((3.0, 2.0, -0.1))]


FAILURES = [
    ("picky", "raised", "KeyError('bad')"),
    ("hang", "timeout", "no answer within 0.4 s"),
    ("leave", "died", "exit code 4"),
    ("nan", "not_finite", "returned nan"),
    ("words", "wrong_type", "a str instead of a number"),
    ("scalar", "wrong_type", "a float instead of a list"),
]


@pytest.mark.parametrize(("name", "reason", "words"), FAILURES)
async def test_a_failing_function_is_named_and_never_worth_zero(scorer_of, name, reason, words):
    scorer = await scorer_of(name, timeout_s=0.4 if name == "hang" else 10.0)

    (reply,) = await scorer.score([request("bad")])

    assert isinstance(reply, NotScored)
    assert reply.reason == reason
    assert f"{USER}:{name}" in reply.detail
    assert words in reply.detail


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
    scorer = LocalScorer(RewardSection(functions=(f"{USER}:missing",)))

    problem = await scorer.start()
    await scorer.close()

    assert problem == f"reward function {USER}:missing does not exist: {USER} defines no missing"
