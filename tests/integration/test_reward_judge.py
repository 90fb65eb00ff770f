"""A language model as judge, behind an OpenAI-compatible server on loopback."""

import json
import re
from pathlib import Path

import msgspec
import pytest
from starlette.applications import Starlette
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from rubato.actors.config import RewardSection
from rubato.actors.data.graded_env import DataSetEnv
from rubato.actors.messages.samples import NotScored, Score, Scores
from rubato.actors.rewards.judge import judge, last_number
from rubato.actors.rewards.scorer import Scorer
from tests.integration.test_reward_url import listening

PROMPT = "{question} {completion}"


class Model:
    """Answers each chat with what `verdict` makes of its last message, after `refusals` answers of 503."""

    def __init__(self, verdict, refusals=0):
        self.verdict, self.refusals, self.asked = verdict, refusals, []
        self.app = Starlette(routes=[Route("/v1/chat/completions", self._complete, methods=["POST"])])

    async def _complete(self, request):
        body = json.loads(await request.body())
        self.asked.append({**body, "key": request.headers.get("authorization", "")})
        if self.refusals:
            self.refusals -= 1
            return Response("busy", 503)
        found = self.verdict(body["messages"][-1]["content"])
        return found if isinstance(found, Response) else JSONResponse({"choices": [{"message": {"content": found}}]})


async def test_each_trajectory_is_shown_with_its_columns_and_gets_the_last_number(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    model = Model(lambda text: f"It has 100 merits.\n{len(text)}")
    async with listening(model.app) as url:
        score = judge(f"{url}v1", "m", prompt=PROMPT, system="Be fair.", max_tokens=64)

        assert await score(["ab", "abcd"], question=["q", "r"], row=[1, 2]) == [0.4, 0.6]

    first = model.asked[0]
    assert (first["model"], first["max_tokens"], first["temperature"]) == ("m", 64, 0.0)
    assert [message["content"] for message in first["messages"]] == ["Be fair.", "q ab"]
    assert first["key"] == "Bearer secret"


async def test_a_judge_that_is_busy_is_asked_again():
    model = Model(lambda text: "7", refusals=1)
    async with listening(model.app) as url:
        assert await judge(f"{url}v1", "m")(["a"]) == [0.7]
    assert len(model.asked) == 2


async def test_a_verdict_that_was_given_is_not_asked_for_again():
    model = Model(lambda text: "none" if "bad" in text else "7")
    async with listening(model.app) as url:
        score = judge(f"{url}v1", "m")
        with pytest.raises(ValueError, match="gave no number: 'none'"):
            await score(["good", "bad"])

        assert await score(["good"]) == [0.7]
    assert len(model.asked) == 2


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (Response("<html>", 200), "answered 200, no completion: <html>"),
        (JSONResponse({"error": "no such model"}, 404), "answered 404, no completion"),
    ],
    ids=["nonsense", "refused"],
)
async def test_what_is_no_completion_is_told(answer, words):
    async with listening(Model(lambda text: answer).app) as url:
        with pytest.raises(RuntimeError, match=words):
            await judge(f"{url}v1", "m")(["a"])


async def test_a_judge_that_is_not_there_is_told_with_its_tries():
    with pytest.raises(RuntimeError, match=r"can't be reached.*, 2 times"):
        await judge("http://127.0.0.1:9/v1", "m", tries=2)(["a"])


@pytest.mark.parametrize(("verdict", "reward"), [("8", 0.8), ("Score: 7.5/10? No: 3", 0.3), ("-2", -0.2), ("99", 1.0)])
def test_the_last_number_counts(verdict, reward):
    assert last_number(verdict) == reward


async def test_a_file_that_makes_a_judge_is_a_reward_function(tmp_path):
    async with listening(Model(lambda text: "none" if "bad" in text else "5").app) as url:
        file = tmp_path / "my_judge.py"
        file.write_text(f"from rubato.actors.rewards.judge import judge\nscore = judge({url + 'v1'!r}, 'm', prompt={PROMPT!r})\n")
        scorer = Scorer(RewardSection(functions=(f"{file}:score",), memory_mb=1024))
        try:
            assert await scorer.start() == ""
            requests = [Score(text, (text,), msgspec.msgpack.encode({"question": "q", "turns": 1})) for text in ("good", "bad")]
            replies = await scorer.score(requests)
        finally:
            await scorer.close()

    assert replies[0] == Scores((0.5,))
    assert isinstance(replies[1], NotScored)
    assert "the judge gave no number" in replies[1].detail


async def test_the_documented_judge_is_shown_the_question_the_reference_and_the_answer(tmp_path):
    text = (Path(__file__).parents[2] / "docs" / "rewards.md").read_text()
    (example,) = re.findall(r"```python\n(# my_judge\.py\n.*?)```", text, re.DOTALL)
    (tmp_path / "sums.jsonl").write_text(json.dumps({"question": "1 + 1?", "answer": "2"}) + "\n")
    env = DataSetEnv(path=str(tmp_path / "sums.jsonl"), prompt="question", answer="answer", grader="exact")
    told = {"task": "sums", "row": 0, "purpose": "train", "trajectory": "g0.0", "version": 0}
    _, columns = env.reset(seed=1, **told)
    model = Model(lambda text: "7")
    async with listening(model.app) as url:
        (tmp_path / "my_judge.py").write_text(example.replace("http://127.0.0.1:8000/v1", f"{url}v1"))
        scorer = Scorer(RewardSection(functions=(f"{tmp_path}/my_judge.py:score",), memory_mb=1024))
        try:
            assert await scorer.start() == ""
            replies = await scorer.score([Score("g0.0", ("two",), msgspec.msgpack.encode({**columns, **told}))])
        finally:
            await scorer.close()

    assert replies == [Scores((0.7,))]
    asked = model.asked[0]["messages"][-1]["content"]
    assert asked.startswith("Question: 1 + 1?\nReference: 2\nAnswer: two\n")
