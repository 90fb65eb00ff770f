"""A session's forest: which turn a request goes on from, with which tokens, and which transcripts led to the last one."""

import json
from array import array

import pytest

from rubato.actors.envs.chat import Transcript
from rubato.actors.gateway.forest import Forest, Written, meaning_of
from rubato.actors.messages.generation import Tokens, VersionSpan

USER = {"role": "user", "content": "add 2 and 3"}
CALL = {"id": "call-1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2, "b": 3}'}}
CALLED = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "call-1", "content": "5"}


def ids(*tokens: int) -> bytes:
    return array("i", tokens).tobytes()


def play(forest: Forest, messages: list[dict], said: dict, shown: bytes, sampled: bytes, tools=()):
    """One request, whose new messages have the tokens `shown`, and its answer."""
    place = forest.place(messages, tools)
    transcript = forest.opened(place, shown)
    num = len(sampled) // 4
    transcript.sample(Tokens(sampled, bytes(len(sampled)), (VersionSpan(1, 0, num),)))
    return place, forest.sampled(place, transcript, said)


@pytest.fixture
def forest():
    return Forest()


@pytest.mark.parametrize(
    "again",
    [
        CALLED,
        {"role": "assistant", "tool_calls": [CALL]},
        {"role": "assistant", "content": "", "tool_calls": [CALL | {"id": "other"}]},
        {"role": "assistant", "content": [], "tool_calls": [CALL | {"function": {"name": "add", "arguments": '{"b":3,"a":2}'}}]},
        {"role": "assistant", "content": "", "tool_calls": [CALL | {"function": {"name": "add", "arguments": {"a": 2.0, "b": 3}}}]},
        {
            "role": "assistant",
            "content": None,
            "refusal": None,
            "tool_calls": [CALL | {"function": {"name": "add", "arguments": {"a": 2, "b": 3}}}],
        },
    ],
)
def test_a_history_that_means_the_same_goes_on_with_the_tokens_that_were_kept(forest, again):
    _, first = play(forest, [USER], CALLED, ids(1, 2), ids(7, 8))

    place, second = play(forest, [USER, again, RESULT], {"role": "assistant", "content": "5"}, ids(3), ids(9))

    assert place.before is first
    assert place.new == [RESULT]
    assert second.transcript is first.transcript
    assert second.transcript.prompt == ids(1, 2, 7, 8, 3, 9)
    assert bytes(second.transcript.segment().mask) == bytes([0, 0, 1, 1, 0, 1])


@pytest.mark.parametrize(
    "changed",
    [
        [{**USER, "content": "add 2 and 4"}, CALLED, RESULT],
        [USER, {"role": "assistant", "content": "no"}, RESULT],
        [USER, {**CALLED, "tool_calls": [CALL | {"function": {"name": "add", "arguments": '{"a": 2, "b": 4}'}}]}, RESULT],
        [{"role": "system", "content": "be brief"}, USER, CALLED, RESULT],
    ],
)
def test_an_edited_history_begins_a_tree_of_its_own(forest, changed):
    _, first = play(forest, [USER], CALLED, ids(1, 2), ids(7, 8))

    place, second = play(forest, changed, {"role": "assistant", "content": "5"}, ids(4, 5), ids(9))

    assert place.before is None
    assert place.new == changed
    assert second.transcript is not first.transcript
    assert second.transcript.prompt == ids(4, 5, 9)


def test_other_tools_are_another_history(forest):
    play(forest, [USER], CALLED, ids(1), ids(7), tools=[{"name": "add"}])

    assert forest.place([USER, CALLED, RESULT], []).before is None
    assert forest.place([USER, CALLED, RESULT], [{"name": "add"}]).before is not None


def test_a_second_request_behind_the_same_turn_branches_and_samples_nothing_of_it_twice(forest):
    _, first = play(forest, [USER], CALLED, ids(1, 2), ids(7, 8))
    _, one = play(forest, [USER, CALLED, RESULT], {"role": "assistant", "content": "5"}, ids(3), ids(9))

    _, other = play(forest, [USER, CALLED, RESULT], {"role": "assistant", "content": "five"}, ids(3), ids(6))

    assert one.transcript is first.transcript
    assert other.transcript is not first.transcript
    assert other.before is first
    assert other.transcript.prompt == ids(1, 2, 7, 8, 3, 6)
    assert bytes(other.transcript.segment().mask) == bytes([0, 0, 0, 0, 0, 1])


def test_requests_at_once_behind_one_turn_do_not_share_a_transcript(forest):
    play(forest, [USER], CALLED, ids(1), ids(7))
    place = forest.place([USER, CALLED, RESULT])

    one, other = forest.opened(place, ids(3)), forest.opened(forest.place([USER, CALLED, RESULT]), ids(3))

    assert one is not other
    assert one.prompt == other.prompt == ids(1, 7, 3)


def test_of_two_equal_answers_the_newest_is_gone_on_from(forest):
    answer = {"role": "assistant", "content": "5"}
    play(forest, [USER], answer, ids(1), ids(7))
    _, newest = play(forest, [USER], answer, ids(1), ids(8))

    assert forest.place([USER, answer, USER]).before is newest


def test_transcripts_that_led_to_the_last_turn_carry_and_a_title_does_not(forest):
    answer, five = {"role": "assistant", "content": "5"}, {"role": "assistant", "content": "five"}
    _, title = play(forest, [{"role": "user", "content": "a title, please"}], answer, ids(4), ids(6))
    _, first = play(forest, [USER], CALLED, ids(1), ids(7))
    _, unchosen = play(forest, [USER, CALLED, RESULT], five, ids(3), ids(5))
    _, chosen = play(forest, [USER, CALLED, RESULT], answer, ids(3), ids(9))
    _, last = play(forest, [USER, CALLED, RESULT, answer, USER], answer, ids(2), ids(8))

    carrying = forest.carrying(last)

    assert title.transcript not in carrying
    # The unchosen one goes on from the first turn within the same transcript; the chosen one has its own.
    assert carrying == [first.transcript, chosen.transcript]
    assert unchosen.transcript is first.transcript


def test_meaning_knows_a_developer_as_a_system_message():
    assert meaning_of({"role": "developer", "content": "x"}) == meaning_of({"role": "system", "content": [{"type": "text", "text": "x"}]})


@pytest.mark.parametrize("depth", [10, 450, 700, 100_000])
def test_arguments_may_be_nested_as_deep_as_they_like(forest, depth):
    deep = CALLED | {"tool_calls": [CALL | {"function": {"name": "add", "arguments": '{"a":' * depth + "1" + "}" * depth}}]}
    _, turn = play(forest, [USER], deep, ids(10), ids(20))

    assert forest.place([USER, deep, RESULT]).before is turn


def test_a_transcript_without_turns_is_none(forest):
    assert isinstance(forest.opened(forest.place([USER]), ids(1)), Transcript)
    assert forest.turns == []


@pytest.mark.parametrize("kept", [{"reasoning_content": "hm"}, {}])
def test_a_history_may_leave_out_what_the_model_reasoned(forest, kept):
    _, first = play(forest, [USER], CALLED | {"reasoning_content": "hm"}, ids(1), ids(7))

    place = forest.place([USER, CALLED | kept, RESULT])

    assert (place.before, place.new) == (first, [RESULT])
    assert forest.place([USER, CALLED | {"reasoning_content": "other"}, RESULT]).before is None


@pytest.mark.parametrize("thinks_first", [True, False])
def test_of_answers_that_differ_by_what_was_reasoned_a_history_leads_to_the_one_that_it_has(forest, thinks_first):
    answers = [{"role": "assistant", "content": "x", "reasoning_content": "because"}, {"role": "assistant", "content": "x"}]
    turns = {}
    for number, said in enumerate(answers if thinks_first else answers[::-1]):
        turns["reasoning_content" in said] = play(forest, [USER], said, ids(1), ids(7 + number))[1]

    assert forest.place([USER, answers[0], USER]).before is turns[True]
    assert forest.place([USER, answers[1], USER]).before is turns[False]


@pytest.mark.parametrize("arguments", ["", None, "{ }", {}])
def test_a_call_without_arguments_is_the_same_however_that_is_written(forest, arguments):
    def called(arguments):
        return CALLED | {"tool_calls": [CALL | {"function": {"name": "look", "arguments": arguments}}]}

    _, turn = play(forest, [USER], called("{}"), ids(1), ids(7))

    assert forest.place([USER, called(arguments), RESULT]).before is turn


def choose(forest, place, shown, sampled, said):
    """One of several answers to a request."""
    transcript = forest.opened(place, shown, alone=True)
    transcript.sample(Tokens(sampled, bytes(len(sampled)), (VersionSpan(1, 0, len(sampled) // 4),)))
    return forest.sampled(place, transcript, said, choice=1)


def test_answers_that_the_agent_chose_another_in_place_of_carry_nothing_nor_does_what_goes_on_from_them(forest):
    five, six = {"role": "assistant", "content": "5"}, {"role": "assistant", "content": "6"}
    _, first = play(forest, [USER], CALLED, ids(1), ids(7))
    place = forest.place([USER, CALLED, RESULT])
    unchosen, chosen = choose(forest, place, ids(3), ids(6), six), choose(forest, place, ids(3), ids(5), five)
    _, behind = play(forest, [USER, CALLED, RESULT, six, USER], five, ids(1), ids(5))
    _, last = play(forest, [USER, CALLED, RESULT, five, USER], five, ids(1), ids(5))

    assert behind.before is unchosen
    assert last.before is chosen
    assert first.transcript.prompt == ids(1, 7)
    assert forest.carrying(last) == [first.transcript, chosen.transcript]
    assert bytes(chosen.transcript.segment().mask) == bytes([0, 0, 0, 1, 0, 1])


def test_of_the_last_request_all_answers_carry(forest):
    _, first = play(forest, [USER], CALLED, ids(1), ids(7))
    place = forest.place([USER, CALLED, RESULT])
    answers = [choose(forest, place, ids(3), ids(at), {"role": "assistant", "content": f"{at}"}) for at in range(2)]

    assert forest.carrying(answers[-1]) == [first.transcript, *(answer.transcript for answer in answers)]


@pytest.mark.parametrize(
    ("prompt", "depth"),
    [(ids(1, 2, 7, 3, 8, 4), 2), (ids(1, 2, 7, 3, 8), 2), (ids(1, 2, 7, 4), 1), (ids(1, 2, 7), 1), (ids(1, 2, 6, 3, 8), 0), (ids(1, 2), 0)],
)
def test_a_prompt_of_tokens_goes_on_from_the_deepest_turn_that_it_begins_with(forest, prompt, depth):
    _, first = play(forest, [USER], CALLED, ids(1, 2), ids(7))
    _, second = play(forest, [USER, CALLED, RESULT], CALLED, ids(3), ids(8))

    assert forest.place_tokens(prompt).before is (None, first, second)[depth]


def test_messages_that_come_again_as_they_were_written_are_not_read_again(forest):
    read = []

    def written(*messages):
        return Written([json.dumps(message).encode() for message in messages], lambda part: read.append(part) or json.loads(part))

    _, first = play(forest, written(USER), CALLED, ids(1), ids(7))
    read.clear()

    place, second = play(forest, written(USER, CALLED, RESULT), {"role": "assistant", "content": "5"}, ids(3), ids(9))

    assert place.before is first
    assert place.new == [RESULT]
    assert json.dumps(USER).encode() not in read
    assert forest.place(written(USER, CALLED, RESULT, {"role": "assistant", "content": "5"}, USER)).before is second
    assert forest.place(written(USER, CALLED, RESULT, {"role": "assistant", "content": "6"}, USER)).before is first
    assert forest.place([USER, CALLED, RESULT, {"role": "assistant", "content": "5"}, USER]).before is second


def test_a_message_that_is_none_is_refused_each_time(forest):
    for _ in range(2):
        with pytest.raises(ValueError, match="Expecting value"):
            forest.place(Written([json.dumps(USER).encode(), b"?"], json.loads))
