"""The job's own engines behind an OpenAI-compatible server: what it answers, and a judge of rewards that asks it."""

import json
import runpy
import socket
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from rubato.runtime.config.compose import from_mapping
from rubato.runtime.embed import embed
from tests.jobs import write_model

pytestmark = pytest.mark.slow

EXAMPLE = Path(__file__).parents[2] / "examples" / "embedded_job.py"
JUDGE = """
from rubato.actors.rewards.judge import judge
score = judge("http://127.0.0.1:{port}/v1", "own", prompt="Rate {{completion}}", read=lambda verdict: len(verdict) / 100, max_tokens=3)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "model")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as bound:
        return bound.getsockname()[1]


@asynccontextmanager
async def running(folder: Path, model: Path, port: int, *overrides: str):
    """The embedded example with a chat server."""
    tree = runpy.run_path(str(EXAMPLE))["JOB"]
    actors = {**tree["actors"], "chat_server": {"class": "rubato.actors.gateway.chat_server:ChatServer"}}
    actors["reward_service"] = {"class": "rubato.actors.rewards.service:RewardService"}
    tree = {**tree, "actors": actors, "model": {"path": str(model)}, "chat": {"port": port}}
    async with embed(from_mapping(tree, overrides), folder) as job:
        yield job


async def test_a_chat_is_answered_by_the_engines_and_what_cannot_be_had_is_refused_in_a_sentence(tmp_path, model, monkeypatch):
    monkeypatch.setenv("RUBATO_CHAT_TOKEN", "secret")
    port, chat = free_port(), {"messages": [{"role": "user", "content": "wind 1"}], "max_tokens": 4}
    async with running(tmp_path, model, port, "run.steps=100000") as job:
        async for _ in job.rows():
            break  # everybody is there
        async with httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{port}/v1", headers={"Authorization": "Bearer secret"}, timeout=60
        ) as client:
            told = (await client.post("/chat/completions", json=chat)).json()
            greedy = await client.post("/chat/completions", json={**chat, "temperature": 0, "seed": 1})
            models = (await client.get("/models")).json()
            streamed = await client.post("/chat/completions", json={**chat, "stream": True, "n": 2})
            refused = {
                what: await client.post("/chat/completions", json={**chat, **odd})
                for what, odd in {
                    "`$.n`": {"n": 0},
                    "`$.stop[0]`": {"stop": [""]},
                    "frequency_penalty": {"frequency_penalty": 0.5},
                    "`$.messages`": {"messages": []},
                    "leaves no room in engine.max_len": {"messages": [{"role": "user", "content": "7 " * 5000}]},
                }.items()
            }
            no_json = await client.post("/chat/completions", content=b"{")
            stranger = await client.post("/chat/completions", json=chat, headers={"Authorization": "Bearer other"})

    assert told["choices"][0]["message"]["role"] == "assistant"
    assert told["choices"][0]["finish_reason"] in ("stop", "length")
    assert 1 <= told["usage"]["completion_tokens"] <= 4
    assert told["usage"]["total_tokens"] == told["usage"]["prompt_tokens"] + told["usage"]["completion_tokens"]
    assert greedy.status_code == 200
    events = [json.loads(line.removeprefix("data: ")) for line in streamed.text.split("\n\n") if line.startswith("data: {")]
    assert {event["choices"][0]["index"] for event in events} == {0, 1}
    assert streamed.text.endswith("data: [DONE]\n\n")
    assert models["data"][0]["id"] == tmp_path.name
    assert {answer.status_code for answer in refused.values()} == {400}
    assert all(what in answer.json()["error"]["message"] for what, answer in refused.items()), [answer.text for answer in refused.values()]
    assert (no_json.status_code, stranger.status_code) == (400, 401)


async def test_a_judge_asks_the_job_s_own_engines(tmp_path, model):
    port = free_port()
    (tmp_path / "my_judge.py").write_text(JUDGE.format(port=port))
    judged = f"reward={{functions: ['{tmp_path / 'my_judge.py'}:score'], timeout_s: 60}}"
    async with running(tmp_path / "run", model, port, judged, "run.steps=2", "rollout.reward_timeout_s=60") as job:
        await job.done()

    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2]
    assert all(row["reward/score"] > 0 for row in rows), "each verdict has a token"


async def test_an_address_that_is_taken_ends_the_job_with_a_sentence(tmp_path, model):
    with socket.create_server(("127.0.0.1", 0)) as bound:
        port = bound.getsockname()[1]
        with pytest.raises(Exception, match=f"can't listen at 127.0.0.1:{port}.*chat.port=0"):
            async with running(tmp_path, model, port) as job:
                await job.done()
