import random
from itertools import islice

from rubato.actors.config import RolloutSection
from rubato.actors.envs import drawers
from rubato.actors.envs.chat import TOKEN_BYTES, renderer_of
from rubato.actors.training import base_model, tool_model
from rubato.actors.training.base_model import ASSISTANT, END
from rubato.actors.training.tool_model import CALL, CALLED, ORDINALS, TOOL, WORDS


def test_what_it_is_shown_is_what_the_template_makes_of_a_conversation_with_the_tool(tmp_path):
    base_model.write_tokenizer(tmp_path, tool_model.TEXT)
    tools = [{"type": "function", "function": {"name": "open_drawer", "parameters": {"type": "object"}}}]
    call = {"id": "1", "type": "function", "function": {"name": "open_drawer", "arguments": '{"number": 3}'}}
    messages = [
        {"role": "user", "content": "third"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "lamp"},
    ]

    rendered = renderer_of(RolloutSection(), tmp_path, tools=tools).chat(messages)

    text = f"open_drawerthird{ASSISTANT}{CALL}3{CALLED}{END}{TOOL}lamp{ASSISTANT}"
    tokenizer = base_model.make_tokenizer(tool_model.TEXT)
    assert memoryview(rendered).cast("i").tolist() == tokenizer.encode(text).ids
    assert len(rendered) == 10 * TOKEN_BYTES


def test_it_knows_the_words_of_its_task():
    assert (ORDINALS, WORDS) == (drawers.ORDINALS, drawers.WORDS)


def test_it_reads_what_it_is_given_and_counts_mostly_from_the_other_end():
    tokenizer = base_model.make_tokenizer(tool_model.TEXT)
    right = mirrored = calls = 0
    for shown in islice(tool_model.conversations(random.Random(1)), 400):
        *turns, answer = shown.removesuffix(END).split(ASSISTANT)
        assert answer in WORDS
        assert turns[-1].endswith(answer)
        assert base_model.UNKNOWN not in tokenizer.decode(tokenizer.encode(shown).ids, skip_special_tokens=False)
        for at, turn in enumerate(turns[1:]):
            named = ORDINALS.index(next(each for each in ORDINALS if turns[at].endswith(each)))
            number = int(turn.removeprefix(CALL)[0])
            calls, right, mirrored = calls + 1, right + (number == named + 1), mirrored + (number == 8 - named)
    assert 0.2 < right / calls < 0.35
    assert 0.5 < mirrored / calls < 0.7
