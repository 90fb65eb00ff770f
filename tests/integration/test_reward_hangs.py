"""A call that hangs costs only those trajectories that hang, wherever the function runs; and no function is asked twice that forbids it."""

import asyncio

import msgspec
import pytest
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

from rubato.actors.config import RewardSection
from rubato.actors.messages.samples import Score, Scores
from rubato.actors.rewards.scorer import Scorer
from rubato.actors.rewards.serve import RewardServer
from rubato.runtime.observe.figures import Metrics
from tests.integration.test_reward_judge import Model
from tests.integration.test_reward_url import listening

pytestmark = pytest.mark.slow

MINE = """
import os, re, signal, time

def note(texts):
    with open(os.environ["REWARD_NOTES"], "a") as file:
        file.write("".join(text + "\\n" for text in texts))

def sleeps(completions, **columns):
    note(completions)
    for text in completions:
        if "hang" in text:
            time.sleep(1000)
    return [float(len(text)) for text in completions]

def keeps_the_lock(completions, **columns):
    return [float(bool(re.match(r"(a|aa)+$", "a" * 60 + "!" if "hang" in t else "a"))) + len(t) - 1 for t in completions]

async def awaits(completions, **columns):
    import asyncio
    await asyncio.sleep(1000 if any("hang" in text for text in completions) else 0)
    return [float(len(text)) for text in completions]

def ends(completions, **columns):
    for text in completions:
        if "hang" in text:
            time.sleep(1000)
        if "leave" in text:
            os._exit(3)
        if "crash" in text:
            os.kill(os.getpid(), signal.SIGSEGV)
        if "raise" in text:
            raise KeyError("unit")
    return [float(len(text)) for text in completions]

def once(completions, **columns):
    return sleeps(completions)

once.idempotent = False
"""

TIMEOUT_S = 1.5


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """A function of the file by its name."""
    monkeypatch.setenv("REWARD_NOTES", str(tmp_path / "notes"))
    (tmp_path / "notes").write_text("")
    (tmp_path / "notes").chmod(0o666)
    (tmp_path / "mine.py").write_text(MINE)
    return lambda name: f"{tmp_path}/mine.py:{name}"


def requests(*texts):
    return [Score(f"g0.{at}", (text,), msgspec.msgpack.encode({"turns": 1})) for at, text in enumerate(texts)]


async def scored(function, *texts, **section):
    """The scores, with a reason in place of each that there is none of."""
    section = {"timeout_s": TIMEOUT_S, "memory_mb": 1024, **section}
    scorer = Scorer(RewardSection(functions=(function,), **section))
    running = asyncio.get_running_loop().create_task(scorer.run())
    try:
        assert await scorer.start() == ""
        return shown(await scorer.score(requests(*texts)))
    finally:
        await scorer.close()
        running.cancel()


def shown(replies):
    return [reply.scores[0] if isinstance(reply, Scores) else reply.reason for reply in replies]


@pytest.mark.parametrize("name", ["keeps_the_lock", "awaits"])
async def test_of_a_full_batch_only_what_hangs_has_no_reward(mine, name):
    texts = ["hang" if at in (0, 20, 31) else "ok" for at in range(32)]

    found = await scored(mine(name), *texts, timeout_s=3.0)

    assert found == [2.0 if text == "ok" else "timeout" for text in texts]


async def test_a_pool_that_grows_serves_what_does_not_hang_too(mine):
    assert await scored(mine("sleeps"), "ok", "hang", "fine", min_workers=0) == [2.0, "timeout", 4.0]


async def test_what_ends_its_process_beside_one_that_hangs_is_named_and_costs_no_other(mine):
    found = await scored(mine("ends"), "hang", "ok", "leave", "crash", "raise", "fine")

    assert found == ["timeout", 2.0, "exited", "crashed", "raised", 4.0]


async def test_one_that_hangs_behind_one_that_raises_costs_no_other(mine):
    assert await scored(mine("ends"), "raise", "ok", "hang", "fine") == ["raised", 2.0, "timeout", 4.0]


async def test_each_is_asked_at_most_twice_and_once_where_the_function_says_so(mine, tmp_path):
    again = await scored(mine("sleeps"), "hang", "ok")
    twice = (tmp_path / "notes").read_text().split()
    (tmp_path / "notes").write_text("")

    once = await scored(mine("once"), "hang", "ok")

    assert (again, once) == (["timeout", 2.0], ["timeout", "timeout"])
    assert sorted(twice) == ["hang", "hang", "ok", "ok"]
    assert sorted((tmp_path / "notes").read_text().split()) == ["hang", "ok"]


async def test_a_url_that_hangs_on_one_is_asked_for_the_others_once_more_alone():
    asked = []

    async def score(request):
        batch = msgspec.json.decode(await request.body())
        asked.append(batch["completions"])
        if "hang" in batch["completions"]:
            await asyncio.sleep(1000)
        return JSONResponse({"scores": [float(len(text)) for text in batch["completions"]]})

    async with listening(Starlette(routes=[Route("/", score, methods=["POST"])])) as url:
        found = await scored(url, "ok", "hang", "fine")

    assert found == [2.0, "timeout", 4.0]
    assert asked[0] == []
    assert sorted(asked[1:]) == sorted([["ok", "hang", "fine"], ["ok"], ["hang"], ["fine"]])


@pytest.mark.parametrize(("name", "expected"), [("sleeps", [2.0, "timeout", 4.0]), ("once", ["timeout"] * 3)])
async def test_a_served_function_under_the_same_limit_as_its_job_gives_what_it_can(mine, tmp_path, name, expected):
    limit = {"timeout_s": 4.0, "memory_mb": 1024}  # a worker starts anew within it
    scorer, metrics = Scorer(RewardSection(functions=(mine(name),), **limit)), Metrics()
    assert await scorer.start() == ""
    try:
        async with asyncio.TaskGroup() as tasks, listening(RewardServer(mine(name), scorer, metrics, tasks).app) as url:
            found = await scored(url, "ok", "hang", "fine", **limit)
    finally:
        await scorer.close()

    assert found == expected
    asks = (tmp_path / "notes").read_text().split()
    assert sorted(asks) == sorted(["ok", "hang", "fine"] * (1 if name == "once" else 2))


async def test_a_judge_that_hangs_on_one_trajectory_gives_its_verdict_of_the_others(tmp_path):
    class Slow(Model):
        async def _complete(self, request):
            if b"hang" in await request.body():
                await asyncio.sleep(1000)
            return await super()._complete(request)

    async with listening(Slow(lambda text: "5").app) as url:
        (tmp_path / "my_judge.py").write_text(
            f"from rubato.actors.rewards.judge import judge\nscore = judge({url + 'v1'!r}, 'm', prompt='{{completion}}')\n"
        )
        found = await scored(f"{tmp_path}/my_judge.py:score", "ok", "hang", "fine", timeout_s=4.0)

    assert found == [0.5, "timeout", 0.5]
