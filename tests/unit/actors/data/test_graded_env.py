"""Data sets with a grader, and reasoning-gym's tasks, as environments."""

import asyncio
import json

import pytest
from pydantic import TypeAdapter

from rubato.actors.config import RewardSection, RolloutSection
from rubato.actors.data.datasets import columns_of, read_rows
from rubato.actors.data.graded_env import DataSetEnv
from rubato.actors.data.graders import exact, math, number, places
from rubato.actors.data.tasks import Tasks
from rubato.actors.envs.chat import ChatRenderer
from rubato.actors.envs.reasoning import ReasoningGymEnv
from rubato.actors.envs.section import EnvSection, resolved
from rubato.actors.envs.task_checks import check_prompts
from rubato.runtime.errors import ConfigError

OWN = """
def half(completion, answer, *, level, turn, task):
    return 0.5 + level if completion == answer else 0.0, "" if turn == 2 else f"again, {task}"

def other_names(q, gold, *, level, **columns):
    return level if gold == "4" and "q" not in columns else 0.0

async def all_of(completion, answer, **columns):
    return float(len(columns))
"""

TOLD = {"seed": 1, "task": "sums", "row": 1, "purpose": "train", "trajectory": "g0.1", "version": 3}


def env(tmp_path, grader):
    (tmp_path / "own.py").write_text(OWN)
    rows = [{"q": "1 + 1", "a": "2", "level": 1, "hint": "one more"}, {"q": "2 + 2", "a": "4", "level": 2}]
    (tmp_path / "x.jsonl").write_text("\n".join(map(json.dumps, rows)))
    read_rows.cache_clear()
    columns_of.cache_clear()
    named = grader if grader == "exact" else f"{tmp_path}/own.py:{grader}"
    return DataSetEnv(path=str(tmp_path / "x.jsonl"), prompt="q", answer="a", grader=named)


def test_the_row_is_shown_and_all_of_its_columns_are_the_info(tmp_path):
    played = env(tmp_path, "exact")

    assert played.reset(**TOLD) == ("2 + 2", {"q": "2 + 2", "a": "4", "level": 2, "hint": None})
    assert played.step(" 4\n") == ("", 1.0, True, False, {})


def test_a_grader_is_given_what_its_signature_names_and_may_reply(tmp_path):
    played = env(tmp_path, "half")
    played.reset(**TOLD)

    assert played.step("3") == ("again, sums", 0.0, False, False, {})
    assert played.step("4") == ("", 2.5, True, False, {})


def test_the_first_two_arguments_of_a_grader_may_be_called_like_columns(tmp_path):
    played = env(tmp_path, "other_names")
    played.reset(**TOLD)

    assert played.step("4")[1] == 2


def test_a_grader_that_takes_any_argument_is_given_all(tmp_path):
    played = env(tmp_path, "all_of")
    played.reset(**TOLD)

    given = {"task", "row", "purpose", "trajectory", "version", "turn", "q", "a", "level", "hint"}
    assert asyncio.run(played.step("4"))[1] == len(given)


@pytest.mark.parametrize(
    ("verify", "completion", "answer", "worth"),
    [
        (exact, " 4 ", 4, 1.0),
        (exact, "four", "4", 0.0),
        (number, "so it is $1,042.00.", "steps #### 1042", 1.0),
        (number, "1 or 2", "1", 0.0),
        (number, "from 5-10", "10", 1.0),
        (number, "12 - 17 = -5", "#### -5", 1.0),
        (number, "one of 1,2,3", "3", 1.0),
        (number, "-1,234,567.50", "-1234567.5", 1.0),
        (number, "12345,678", "678", 1.0),
        (number, "-.5", "-0.5", 1.0),
        (number, "none", "1", 0.0),
        (places, "abcd", "abzd", 0.75),
        (places, "abcdabcd", "abcd", 0.5),
        (places, "", "", 0.0),
    ],
)
def test_a_completion_has_its_worth(verify, completion, answer, worth):
    assert verify(completion, answer) == worth


def test_math_verify_compares_expressions():
    pytest.importorskip("math_verify")

    assert math(r"thus \boxed{\frac{1}{2}}", "0.5") == 1.0
    assert math("it is $x^2 + 2x + 1$", "(x+1)^2") == 1.0
    assert math("it is 3", "4") == 0.0


def test_reasoning_gym_holds_questions_out_by_their_text():
    pytest.importorskip("reasoning_gym")
    train, held_out = (ReasoningGymEnv(name="chain_sum", split=split) for split in ("train", "eval"))
    asked = {split: {each.reset(seed=n)[0] for n in range(60)} for split, each in (("t", train), ("e", held_out))}

    assert not asked["t"] & asked["e"]
    question, info = train.reset(seed=7)
    assert train.reset(seed=7)[0] == question
    assert train.step(f"I think <answer>{info['answer']}</answer>")[1:3] == (1.0, True)
    train.reset(seed=7)
    assert train.step("no idea")[1] < 1.0


@pytest.mark.parametrize("name", ["prime_factorization", "game_of_life", "boxnet"])
def test_what_a_task_of_reasoning_gym_can_not_read_is_a_wrong_answer(name):
    pytest.importorskip("reasoning_gym")
    played = ReasoningGymEnv(name=name)

    for answer in ("no idea", "<answer>[[1,2</answer>", '<answer>{"a": 1}</answer>'):
        played.reset(seed=2_000_000_011)
        assert played.step(answer) == ("", pytest.approx(0.0, abs=0.02), True, False, {})


def data_task(path, **limits):
    rows = TypeAdapter(Tasks).validate_python({"sums": {"data": {"path": path, "eval_rows": 1}}})
    rollout = RolloutSection(**{"max_len": 200, "max_new_tokens": 100, **limits})
    return resolved(rows, EnvSection(), rollout, RewardSection())["sums"]


def test_a_prompt_that_leaves_no_room_for_a_turn_is_named_with_its_row(tmp_path, model_folder):
    prompts = ["short", "x" * 60, "y" * 120, [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"prompt": prompt, "answer": "x"}) + "\n" for prompt in prompts))
    renderer = ChatRenderer(model_folder)

    check_prompts(data_task(str(path), max_len=300), renderer)
    with pytest.raises(ConfigError, match=r"a\.jsonl: row 3's prompt has 1\d\d tokens .* beyond rollout\.max_len, 200\. Leave"):
        check_prompts(data_task(str(path)), renderer)


def test_a_prompt_that_the_template_refuses_is_named_with_its_row(tmp_path, write_model):
    template = "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}{{ m.content }}{% endfor %}"
    folder = write_model(tmp_path / "model", template=template + "{% if add_generation_prompt %}>{% endif %}")
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"prompt": [{"role": "tool", "content": "42"}], "answer": "x"}) + "\n" + '{"prompt": "a", "answer": "b"}\n')

    with pytest.raises(ConfigError, match=r"row 1's prompt can't be shown to the model: .* no tools"):
        check_prompts(data_task(str(path)), ChatRenderer(folder))


@pytest.mark.parametrize("names", [["tokenizer.model"], ["vocab.json", "merges.txt"]])
def test_a_tokenizer_of_another_kind_is_refused_with_what_makes_one(model_folder, names):
    (model_folder / "tokenizer.json").unlink()
    for name in names:
        (model_folder / name).write_text("")

    with pytest.raises(ValueError, match=rf"no tokenizer\.json, only {' and '.join(names)}\. Make one: .*AutoTokenizer"):
        ChatRenderer(model_folder)
