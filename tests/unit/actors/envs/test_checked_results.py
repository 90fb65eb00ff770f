"""What an environment may return, and the sentence for everything else."""

import math

import numpy
import pytest

from rubato.actors.envs.hosting import EnvFailure, check_reset, check_step

WRONG_STEPS = [
    (("x", 1.0, True, False), "4 values instead of"),
    (None, "a NoneType instead of"),
    (["x", 1.0, True, False, {}], "a list instead of"),
    ((3, 1.0, True, False, {}), "an observation of type int"),
    (([{"role": "user"}], 1.0, True, False, {}), "a chat message"),
    (("x", math.nan, True, False, {}), "a reward of nan, which is not finite"),
    (("x", math.inf, True, False, {}), "a reward of inf"),
    (("x", "1", True, False, {}), "a reward of type str"),
    (("x", 1.0, "no", False, {}), "terminated of type str"),
    (("x", 1.0, True, False, None), "info of type NoneType"),
]


@pytest.mark.parametrize(("result", "words"), WRONG_STEPS)
def test_a_wrong_step_is_named_for_what_it_is(result, words):
    with pytest.raises(EnvFailure) as caught:
        check_step(result)

    assert caught.value.outcome == "env_bad_result"
    assert words in caught.value.what


@pytest.mark.parametrize(
    ("result", "words"), [("x", "a str instead of"), (("x",), "1 values"), ((b"x", {}), "type bytes"), (("x", 1), "info")]
)
def test_a_wrong_reset_is_named_for_what_it_is(result, words):
    with pytest.raises(EnvFailure, match=words):
        check_reset(result)


def test_numbers_of_numpy_are_numbers():
    step = check_step(("x", numpy.float32(0.5), numpy.bool_(True), False, {}))

    assert step == ("x", 0.5, True, False, {})
    assert [type(value) for value in step[1:4]] == [float, bool, bool]


def test_chat_messages_are_an_observation():
    messages = [{"role": "user", "content": "hello"}]

    assert check_reset((messages, {"answer": 4})) == (messages, {"answer": 4})
