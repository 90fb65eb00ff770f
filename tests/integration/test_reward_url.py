"""Rewards behind a URL: a real server on loopback that is there, slow, cold, down, or answers nonsense."""

import asyncio
import json
import socket
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import msgspec
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.responses import Response
from starlette.routing import Route

from rubato.actors.config import RewardSection
from rubato.actors.messages.samples import NotScored, Score, Scores
from rubato.actors.rewards import invoke
from rubato.actors.rewards.scorer import Scorer
from rubato.actors.rewards.serve import RewardServer
from rubato.runtime.http_server import HttpServer
from rubato.runtime.observe.figures import Metrics

USER = Path(__file__).parents[1] / "unit" / "actors" / "rewards" / "user_rewards.py"


def request(*texts, name="t1.1", **columns):
    return Score(name, texts, msgspec.msgpack.encode({"turns": len(texts), **columns}))


@asynccontextmanager
async def listening(app):
    """The URL of `app` on a free port."""
    with socket.create_server(("127.0.0.1", 0)) as bound:
        server = HttpServer(uvicorn.Config(app, lifespan="off", ws="none", log_level="warning"))
        async with asyncio.TaskGroup() as tasks:
            serving = tasks.create_task(server.serve(sockets=[bound]))
            yield f"http://127.0.0.1:{bound.getsockname()[1]}/"
            server.end()
            server.end()  # without waiting for a handler that hangs
            await serving


class Scripted:
    """Answers each POST by the next of `answers`, then by the last for ever; `bodies` and `keys` are what came."""

    def __init__(self, *answers):
        self._answers, self.bodies, self.keys = list(answers), [], []
        self.app = Starlette(routes=[Route("/", self._answer, methods=["POST"])])

    async def _answer(self, request):
        self.bodies.append(json.loads(await request.body()))
        self.keys.append(request.headers["Idempotency-Key"])
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        found = answer(self.bodies[-1])
        return await found if asyncio.iscoroutine(found) else found


def good(body):
    return Response(json.dumps({"scores": [float(len(text)) for text in body["completions"]]}))


def said(text, status=200, **headers):
    return lambda body: Response(text, status, headers)


async def never(body):
    await asyncio.Event().wait()


@asynccontextmanager
async def scorer_at(url, timeout_s=5.0):
    metrics = Metrics()
    scorer = Scorer(RewardSection(url=url, timeout_s=timeout_s), metrics=metrics)
    try:
        yield scorer, metrics
    finally:
        await scorer.close()


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr(invoke, "PAUSE_S", 0.01)


async def test_a_batch_goes_as_one_call_with_its_columns_and_a_key_for_each_trajectory():
    server = Scripted(good)
    async with listening(server.app) as url, scorer_at(url) as (scorer, _):
        assert await scorer.start() == ""

        replies = await scorer.score([request("ab", "c", name="t1", answer=7), request("x", name="t2")])

    assert replies == [Scores((4.0,)), Scores((1.0,))]
    body = server.bodies[-1]
    assert (body["completions"], body["columns"]["answer"]) == (["ab\nc", "x"], [7, None])
    assert len(set(body["keys"])) == 2
    assert body["deadline_s"] == 5.0


async def test_a_try_that_is_answered_503_or_not_in_time_is_made_again_with_the_same_keys():
    server = Scripted(good, said("warming", 503, **{"Retry-After": "0"}), never, good)
    async with listening(server.app) as url, scorer_at(url, timeout_s=0.3) as (scorer, metrics):
        assert await scorer.start() == ""

        replies = await scorer.score([request("abc")])

    assert replies == [Scores((3.0,))]
    assert len({tuple(body["keys"]) for body in server.bodies[1:]}) == len(set(server.keys[1:])) == 1
    assert len(server.bodies) == 4
    figures = metrics.snapshot()
    assert (figures["reward/retries"], figures["reward/cold_starts"]) == (2, 1)


async def test_another_text_of_the_same_trajectory_has_another_key():
    assert invoke.key_of(request("a")) == invoke.key_of(request("a"))
    assert len({invoke.key_of(request(text, name=name)) for text in "ab" for name in ("t1", "t2")}) == 4


NONSENSE = [
    (said("<html>hello"), "wrong_type", "answered no JSON: <html>hello"),
    (said("[1.0]"), "wrong_type", 'answered no {"scores": […]}: [1.0]'),
    (said('{"scores": []}'), "wrong_length", "answered 0 scores for 1 trajectories"),
    (said('{"scores": ["one"]}'), "wrong_type", "returned a str instead of a number"),
    (said('{"scores": [1e31]}'), "out_of_range", "returned 1e+31, more than ±1e+30"),
    (said("no such function", 404), "refused", "answered 404 Not Found: no such function"),
    (said("oh", 500), "unreachable", "answered 500 Internal Server Error: oh"),
    (said("x" * (11 << 20)), "too_large", "answered more than 10,485,760 bytes"),
    (never, "timeout", "gave no answer within 0.2 s"),
    (said('{"scores": [{"reason": "raised", "detail": "f raised KeyError"}]}'), "raised", ": f raised KeyError"),
]


@pytest.mark.parametrize(("answer", "reason", "words"), NONSENSE, ids=[f"{row[1]}: {row[2]}" for row in NONSENSE])
async def test_what_is_no_score_has_a_name_and_is_never_a_reward_of_0(answer, reason, words):
    server = Scripted(said('{"scores": []}'), answer)
    async with listening(server.app) as url, scorer_at(url, timeout_s=0.2 if answer is never else 5.0) as (scorer, _):
        assert await scorer.start() == ""

        (reply,) = await scorer.score([request("a")])

    assert isinstance(reply, NotScored)
    assert reply.reason == reason
    assert reply.detail.startswith(url)
    assert words in reply.detail


async def test_one_bad_number_costs_no_other_of_its_batch():
    def picky(body):
        return Response(json.dumps({"scores": [float("nan") if text == "bad" else 1.0 for text in body["completions"]]}))

    async with listening(Scripted(picky).app) as url, scorer_at(url) as (scorer, _):
        replies = await scorer.score([request("good", name="a"), request("bad", name="b")])

    assert [type(reply) for reply in replies] == [Scores, NotScored]


async def test_a_url_that_is_down_at_the_start_is_told_in_one_sentence():
    async with scorer_at("http://127.0.0.1:9/score") as (scorer, _):
        problem = await scorer.start()

    assert problem == (
        "reward function http://127.0.0.1:9/score can't be reached: All connection attempts failed. "
        "Is this its URL, and does its server run?"
    )


async def test_a_url_that_is_too_slow_at_the_start_is_told_in_one_sentence(monkeypatch):
    monkeypatch.setattr(invoke, "COLD_START_S", 0.2)
    async with listening(Scripted(never).app) as url, scorer_at(url) as (scorer, _):
        assert "gave no answer within 0.2 s" in await scorer.start()


async def test_the_start_waits_for_a_cold_server():
    async def late(body):
        await asyncio.sleep(0.3)
        return good(body)

    async with listening(Scripted(late, good).app) as url, scorer_at(url, timeout_s=0.1) as (scorer, _):
        assert await scorer.start() == ""


@asynccontextmanager
async def serving(name, file=USER, **settings):
    """A RewardServer of a user's function."""
    metrics = Metrics()
    section = RewardSection(functions=(f"{file}:{name}",), memory_mb=512, **settings)
    scorer = Scorer(section, metrics=metrics)
    try:
        assert await scorer.start() == ""
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(scorer.run())
            async with listening(RewardServer(name, scorer, metrics, tasks).app) as url:
                yield url, metrics
            running.cancel()
    finally:
        await scorer.close()


async def test_a_served_function_is_asked_as_if_it_were_here():
    async with serving("from_columns") as (url, _), scorer_at(url) as (scorer, _):
        assert await scorer.start() == ""

        assert await scorer.score([request("a", "bc", answer=7)]) == [Scores((11.0,))]


async def test_a_failure_of_a_served_function_keeps_its_name_and_costs_no_other():
    async with serving("picky") as (url, _), scorer_at(url) as (scorer, _):
        replies = await scorer.score([request("good", name="a"), request("bad", name="b")])

    assert replies[0] == Scores((1.0,))
    assert replies[1].reason == "raised"
    assert "picky raised KeyError('bad')" in replies[1].detail


async def test_a_key_that_was_answered_is_not_computed_again():
    async with serving("lengths") as (url, metrics), scorer_at(url) as (scorer, _):
        first = await scorer.score([request("abc")])
        again = await scorer.score([request("abc")])

        assert first == again == [Scores((3.0,))]
        assert metrics.snapshot()["reward/scored"] == 1


SLOW = """
import time
from pathlib import Path

def f(completions):
    open({calls!r}, "a").write("x")
    while not Path({gate!r}).exists():
        time.sleep(0.01)
    return [5.0]
"""


async def test_a_call_that_outlives_its_deadline_goes_on_and_the_next_try_finds_its_result(tmp_path):
    calls = tmp_path / "calls"
    calls.touch()
    calls.chmod(0o666)
    file = tmp_path / "slow.py"
    file.write_text(SLOW.format(calls=str(calls), gate=str(tmp_path / "open")))
    async with serving("f", file) as (url, _):
        body = {"keys": ["k"], "completions": ["a"], "deadline_s": 0.1}
        async with httpx.AsyncClient() as client:
            late = await client.post(url, json=body)
        async with scorer_at(url, timeout_s=1.5) as (scorer, metrics), asyncio.TaskGroup() as tasks:
            scoring = tasks.create_task(scorer.score([request("abc")]))
            while not metrics.snapshot().get("reward/retries"):  # noqa: ASYNC110 - its first try ends by its deadline
                await asyncio.sleep(0.02)
            (tmp_path / "open").touch()
            replies = await scoring

    assert (late.status_code, "deadline_s=0.1" in late.json()["error"]) == (504, True)
    assert replies == [Scores((5.0,))]
    assert metrics.snapshot()["reward/retries"] >= 1
    assert calls.read_text() == "xx"  # one of each key


BAD_BATCHES = [
    ("[1", 400, "this is no batch"),
    ('{"completions": ["a"], "columns": {"row": []}}', 400, "row has not one entry for each of 1 completions"),
    ('{"completions": ["a", "b"], "keys": ["k"]}', 400, "keys has not one entry"),
    ("x" * (65 << 20), 413, "67,108,864 bytes"),
]


@pytest.mark.parametrize(("body", "status", "words"), BAD_BATCHES, ids=[row[2] for row in BAD_BATCHES])
async def test_what_is_no_batch_is_refused_with_a_sentence(body, status, words):
    async with serving("lengths") as (url, _), httpx.AsyncClient() as client:
        response = await client.post(url, content=body)
        health = await client.get(f"{url}health")

    assert response.status_code == status
    assert words in response.json()["error"]
    assert health.json()["function"] == "lengths"


async def test_a_served_pool_is_empty_while_nobody_asks_and_its_cold_start_is_counted(monkeypatch):
    monkeypatch.setattr("rubato.planning.autoscale.KEPT_STARTS", 0.1)
    async with serving("lengths", min_workers=0, workers=2) as (url, served), scorer_at(url) as (scorer, metrics):
        async with asyncio.timeout(20):
            while served.snapshot()["reward/workers"]:  # noqa: ASYNC110 - only time passes
                await asyncio.sleep(0.05)

        assert await scorer.score([request("abc")]) == [Scores((3.0,))]
        assert metrics.snapshot()["reward/cold_starts"] == 1


async def test_without_the_token_a_served_function_refuses(monkeypatch):
    monkeypatch.setenv(invoke.TOKEN, "secret")
    async with serving("lengths") as (url, _):
        async with scorer_at(url) as (scorer, _):
            assert await scorer.score([request("abc")]) == [Scores((3.0,))]
        monkeypatch.setenv(invoke.TOKEN, "wrong")
        async with scorer_at(url) as (scorer, _):
            (reply,) = await scorer.score([request("abc")])

    assert (reply.reason, "401" in reply.detail) == ("refused", True)
