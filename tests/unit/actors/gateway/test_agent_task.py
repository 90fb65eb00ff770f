"""What an agent is given, for one in a process of its own, and what it may say at its end."""

import json

import pytest

from rubato.actors.gateway.agents import AgentTask, _complete
from rubato.actors.gateway.command import AgentEnded
from tests.scripted_sessions import scripted_session

TOLD = AgentTask(
    url="http://127.0.0.1:1/sessions/s1", base_url="http://127.0.0.1:1/sessions/s1/v1", api_key="rbt-k", model="m",
    prompt=[{"role": "user", "content": "hi"}], task="", row=3, seed=7, purpose="train", info={"word": "lamp", "raw": b"x", 5: 6},
)  # fmt: skip


def test_a_process_is_told_all_that_json_can_hold():
    told = json.loads(json.dumps(TOLD.plain))

    assert told["info"] == {"word": "lamp"}
    assert (told["prompt"], told["row"], told["seed"]) == (TOLD.prompt, 3, 7)


def test_clients_of_both_apis_find_their_address_in_the_environment():
    told = TOLD.variables

    assert told["OPENAI_BASE_URL"] == f"{told['ANTHROPIC_BASE_URL']}/v1" == TOLD.base_url
    assert told["RUBATO_SESSION"] == "s1"


@pytest.mark.parametrize("reward", [10**400, -(10**400), float("nan"), float("inf"), [], {"reward": 1}, "0.9"])
async def test_what_is_no_reward_is_the_agent_s_failure(reward):
    with pytest.raises(AgentEnded):
        _complete(scripted_session("hi"), {"reward": reward})


@pytest.mark.parametrize("answer", [["42"], {"is": 42}, True])
async def test_what_is_no_answer_is_the_agent_s_failure(answer):
    with pytest.raises(AgentEnded):
        _complete(scripted_session("hi"), {"answer": answer})


@pytest.mark.parametrize(
    ("told", "is_rewarded", "answer"), [({"answer": 42}, False, "42"), ({"reward": 0.5, "answer": "x"}, True, "x"), ({}, False, "")]
)
async def test_an_answer_is_no_reward_though_it_is_a_number(told, is_rewarded, answer):
    session = scripted_session("hi")

    _complete(session, told)

    assert (session.rewarded, session.answer) == (is_rewarded, answer)


async def test_an_answer_reaches_its_environment_as_a_text_that_a_wire_holds():
    session = scripted_session("hi")

    _complete(session, {"answer": "one \ud800 alone"})

    assert session.answer == "one \ufffd alone"
