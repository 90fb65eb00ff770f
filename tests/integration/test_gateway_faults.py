"""What clients of a gateway meet when they leave, wait or come too late, and when an actor behind it is killed."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import httpx
import pytest

from rubato.runtime.config.compose import from_mapping
from rubato.runtime.config.yaml_core import read_yaml
from rubato.runtime.embed import embed
from tests.chaos.test_kills import actors_of, rows_of, until
from tests.jobs import SMALL, clean_environment, left_behind, rubato, write_model

pytestmark = pytest.mark.slow

CONFIG = SMALL.replace(
    'env_manager: {class: "rubato.actors.envs.manager:EnvManager"}', 'gateway: {class: "rubato.actors.gateway.gateway:Gateway"}'
)
LONG = "rollout.max_new_tokens=400"
SLOW = ("engine.scripted={token_s: 0.25, stop_share: 0.0}", LONG)
"""A turn of 400 tokens takes longer than any test waits, and one of a single token a quarter of a second."""

CHAT = {"messages": [{"role": "user", "content": "wind 1"}]}
SHORT = {**CHAT, "max_tokens": 1}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "model")


@asynccontextmanager
async def served(folder: Path, model: Path, *overrides: str):
    """A client with the admin key of a job's gateway."""
    tree = read_yaml(CONFIG)
    async with embed(from_mapping(tree, [f"model.path={model}", "run.steps=100000", *overrides]), folder):
        address = folder / "gateway.json"
        while not address.exists():  # noqa: ASYNC110 - another process writes it
            await asyncio.sleep(0.1)
        told = json.loads(address.read_text())
        headers = {"Authorization": f"Bearer {told['admin_key']}"}
        async with httpx.AsyncClient(base_url=told["url"], headers=headers, timeout=60) as client:
            yield client


async def opened(client) -> tuple[str, dict]:
    told = (await client.post("/sessions", json={})).json()
    return f"/sessions/{told['session_id']}", {"Authorization": f"Bearer {told['api_key']}"}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_in_mid_request_frees_its_slot(tmp_path, model, stream):
    async with served(tmp_path / "run", model, "engine.num_slots=1", *SLOW) as client:
        (one, key), (other, other_key) = await opened(client), await opened(client)
        with pytest.raises(httpx.ReadTimeout):
            async with client.stream(
                "POST", f"{one}/v1/chat/completions", json={**CHAT, "stream": stream}, headers=key, timeout=1.5
            ) as left:
                await left.aread()
        next_in_line = await client.post(f"{other}/v1/chat/completions", json=SHORT, headers=other_key)
        again = await client.post(f"{one}/v1/chat/completions", json=SHORT, headers=key)
        ended = await client.post(f"{one}/complete", json={"reward": 1.0}, headers=key)

    assert [told.status_code for told in (next_in_line, again, ended)] == [200, 200, 200]


async def test_a_stream_that_waits_gets_comments(tmp_path, model):
    async with served(tmp_path / "run", model, "engine.scripted={token_s: 0.25, stop_share: 0.0}", "rollout.max_new_tokens=60") as client:
        one, key = await opened(client)
        async with client.stream("POST", f"{one}/v1/chat/completions", json={**CHAT, "stream": True}, headers=key) as answer:
            lines = [line async for line in answer.aiter_lines() if line]

    assert lines[0].startswith(": ")
    assert lines[-1] == "data: [DONE]"


async def test_an_answer_that_does_not_come_in_time_is_to_be_tried_again_and_the_session_goes_on(tmp_path, model):
    async with served(tmp_path / "run", model, "gateway.queue_s=2", "engine.num_slots=1", *SLOW) as client:
        one, key = await opened(client)
        at = f"{one}/v1/chat/completions"
        waiting = [client.post(at, json=CHAT, headers=key) for _ in range(2)]
        late = await asyncio.gather(*waiting)
        async with client.stream("POST", at, json={**CHAT, "stream": True}, headers=key) as answer:
            streamed = [line async for line in answer.aiter_lines() if line]
        soon = await client.post(at, json=SHORT, headers=key)
        ended = await client.post(f"{one}/complete", json={"reward": 1.0}, headers=key)

    assert [(told.status_code, told.json()["error"]["code"], told.headers["Retry-After"]) for told in late] == [(503, "no_answer", "1")] * 2
    assert json.loads(streamed[-1].removeprefix("data: "))["error"]["code"] == "no_answer"
    assert (soon.status_code, ended.status_code, ended.json()["segments"]) == (200, 200, 1)


async def test_openings_wait_in_a_line_of_bounded_length_and_time(tmp_path, model):
    async with served(tmp_path / "run", model, "env.concurrency=1", "gateway.wait_s=3", "gateway.max_waiting=1") as client:
        await opened(client)
        told = await asyncio.gather(*(client.post("/sessions", json={}) for _ in range(3)))

    found = Counter((each.status_code, each.json()["error"]["code"]) for each in told)
    assert found == {(503, "no_room"): 1, (429, "too_many_waiting"): 2}
    assert all(each.headers["Retry-After"] for each in told)


async def test_a_body_beyond_the_limit_and_an_ending_that_is_none_are_refused(tmp_path, model):
    async with served(tmp_path / "run", model) as client:
        one, key = await opened(client)
        large = await client.post(f"{one}/v1/chat/completions", content=b" " * (16 * 2**20 + 1), headers=key)
        bad = [
            await client.post(f"{one}/complete", content=body, headers=key)
            for body in (b"{", b"[]", b'{"reward": NaN}', b'{"reward": 1e999}', b'{"reward": "much"}')
        ]
        after = await client.post(f"{one}/v1/chat/completions", json=CHAT, headers=key)

    assert (large.status_code, large.json()["error"]["code"]) == (413, "too_large")
    assert [each.status_code for each in bad] == [400] * 5
    assert after.status_code == 200


@pytest.fixture
def job(request, tmp_path, model):
    """The folder of a run of processes, until the test ends, with the overrides that it names."""
    (tmp_path / "small.yaml").write_text(CONFIG)
    command = [sys.executable, "-m", "rubato.runtime.cli", "launch", "small.yaml", f"model.path={model}", "run.steps=100000"]
    command += request.param
    with (tmp_path / "said").open("wb") as said:
        launcher = subprocess.Popen(
            [*command, "--run-dir", "run"], cwd=tmp_path, env=clean_environment(), stdout=said, stderr=said, start_new_session=True
        )

    def stop():
        launcher.send_signal(signal.SIGTERM)
        launcher.wait(60)

    yield tmp_path / "run", stop
    stop()
    assert left_behind(tmp_path / "run") == []


THREE_SECONDS = ("engine.scripted={token_s: 0.05, stop_share: 0.0}", "rollout.max_new_tokens=60")
"""That a turn takes."""


@pytest.mark.nightly
@pytest.mark.timeout(400)  # six kills, each in the middle of a turn
@pytest.mark.parametrize("job", [(*THREE_SECONDS, "env.concurrency=16", "staleness.alpha=4")], indirect=True, ids=["slow turns"])
def test_whoever_is_killed_in_mid_request_the_client_is_answered_once_and_the_sample_has_one_fate(job):
    run, stop = job
    address = until(lambda: (run / "gateway.json").exists() and json.loads((run / "gateway.json").read_text()), "the gateway")
    client = httpx.Client(base_url=address["url"], timeout=120)
    admin = {"Authorization": f"Bearer {address['admin_key']}"}

    def open_one():
        told = until(lambda: (got := client.post("/sessions", json={}, headers=admin)).status_code == 200 and got.json(), "a session")
        return f"/sessions/{told['session_id']}", {"Authorization": f"Bearer {told['api_key']}"}

    def answers(session, key, *, stream):
        """Of one request: how often it was answered, and how often told of an error."""
        told = client.post(f"{session}/v1/chat/completions", json={**CHAT, "stream": stream}, headers=key)
        if not stream or told.status_code != 200:
            return (told.status_code == 200, told.status_code in (410, 503))
        events = [line.removeprefix("data: ") for line in told.text.splitlines() if line.startswith("data: ")]
        return (events.count("[DONE]"), sum("error" in json.loads(event) for event in events if event != "[DONE]"))

    def finish(session, key, reward):
        return client.post(f"{session}/complete", json={"reward": reward}, headers=key).status_code

    rewards = {}
    with client, ThreadPoolExecutor(2) as threads:
        for at, (role, stream) in enumerate(
            (role, stream) for role in ("llm_proxy", "engine", "sample_buffer") for stream in (False, True)
        ):
            session, key = open_one()
            asked = threads.submit(answers, session, key, stream=stream)
            until(lambda: actors_of(run).get("engine-1", {}).get("metrics", {}).get("engine/running", 1), "the turn")
            os.kill(actors_of(run)[f"{role}-1"]["pid"], signal.SIGKILL)
            assert sorted(asked.result()) == [0, 1], (role, stream)
            rewards[at + 2.0] = finish(session, key, at + 2.0)
        before = len(rows_of(run))
        for at in range(200):
            session, key = open_one()
            client.post(f"{session}/v1/chat/completions", json=SHORT, headers=key)
            finish(session, key, float(at % 2))
            if len(rows_of(run)) > before:
                break
    trained = len(rows_of(run)) - before
    stop()

    ledger = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    assert trained >= 1
    assert max(Counter(line["trajectory_id"] for line in ledger).values()) == 1
    ours = Counter(line["reward"] for line in ledger if line["reward"] in rewards)
    assert set(ours.values()) <= {1}
    assert list(rewards.values()) == [200] * 6


IMPATIENT = """
from rubato.actors.samples.policy import PolicyPlugin
from rubato.planning.staleness import HandOver, min_version

class Impatient(PolicyPlugin):
    def next_batch(self, view):
        oldest = min_version(view.step, view.alpha)
        usable = [at for at, version in enumerate(view.ready) if version >= oldest][: view.batch_groups]
        return HandOver(len(usable) == view.batch_groups, oldest, "whatever is ready", tuple(usable))
"""


async def play(client) -> int:
    """One session from its opening to its end; the weights that it was opened under."""
    told = (await client.post("/sessions", json={})).json()
    path, key = f"/sessions/{told['session_id']}", {"Authorization": f"Bearer {told['api_key']}"}
    (await client.post(f"{path}/v1/chat/completions", json=SHORT, headers=key)).raise_for_status()
    (await client.post(f"{path}/complete", json={"reward": 1.0}, headers=key)).raise_for_status()
    return told["version"]


@pytest.mark.parametrize("late", ["turn", "stream", "end", "nothing"])
async def test_a_session_that_training_left_behind_is_over_as_stale(tmp_path, model, late):
    (tmp_path / "impatient.py").write_text(IMPATIENT)
    policy = f"samples.policy={tmp_path / 'impatient.py'}:Impatient"
    async with served(tmp_path / "run", model, policy, "train.batch_groups=1", "staleness.alpha=1") as client:
        one, key = await opened(client)
        post = partial(client.post, headers=key)
        before = await post(f"{one}/v1/chat/completions", json=SHORT)
        await (play(client) if late == "nothing" else opened(client))  # the other one of its group
        while await play(client) < 2:
            pass
        if late == "nothing":
            while (told := await client.get(one)).status_code == 200:
                await play(client)
        elif late == "end":
            told = await post(f"{one}/complete", json={"reward": 1.0})
        else:
            told = await post(f"{one}/v1/chat/completions", json={**SHORT, "stream": late == "stream"})
        again = await post(f"{one}/complete", json={"reward": 1.0})

    assert before.status_code == 200
    if late == "end":
        assert told.json() == again.json() == {"session_id": one.rpartition("/")[2], "fate": "stale", "segments": 1, "unused": 0}
    else:
        assert [(each.status_code, each.json()["error"]["code"]) for each in (told, again)] == [(410, "stale")] * 2
    ledger = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    assert all(line["age"] <= 1 for line in ledger if line["fate"] == "trained")


async def test_a_session_that_is_not_heard_of_expires_whatever_is_asked_of_it_then(tmp_path, model):
    async with served(tmp_path / "run", model, "gateway.idle_s=0.5") as client:
        one, key = await opened(client)
        post = partial(client.post, headers=key)
        before = await post(f"{one}/v1/chat/completions", json=SHORT)
        while (await client.get(one)).status_code == 200:  # noqa: ASYNC110 - seen from outside alone
            await asyncio.sleep(0.1)
        messages = {"messages": CHAT["messages"], "max_tokens": 1}
        asked = {
            "/v1/chat/completions": SHORT,
            "/v1/responses": {"input": "wind 1", "stream": True},
            "/v1/messages": messages,
            "/v1/messages/count_tokens": messages,
            "/inference/v1/generate": {"token_ids": [40]},
            "/complete": {"reward": 1.0},
        }
        late = {path: await post(one + path, json=body) for path, body in asked.items()}
        later = await play(client)

    assert before.status_code == 200
    assert {path: (told.status_code, told.json()["error"]["code"]) for path, told in late.items()} == dict.fromkeys(asked, (410, "expired"))
    assert later >= 0


LEASES = ("samples.ticket_ttl_s=3", "rollout.hold_s=1", "staleness.alpha=0", "env.concurrency=16")


@pytest.mark.parametrize("job", [LEASES], indirect=True, ids=["short leases"])
def test_a_session_whose_lease_lapsed_while_its_gateway_stood_still_is_over_and_another_has_its_place(job):
    run, stop = job
    address = until(lambda: (run / "gateway.json").exists() and json.loads((run / "gateway.json").read_text()), "the gateway")
    client = httpx.Client(base_url=address["url"], timeout=60, headers={"Authorization": f"Bearer {address['admin_key']}"})
    with client, ThreadPoolExecutor(1) as threads:
        first = [client.post("/sessions", json={}).json() for _ in range(4)]  # all places of the batch
        for told in first:
            client.post(f"/sessions/{told['session_id']}/v1/chat/completions", json=SHORT).raise_for_status()
        opening = threads.submit(client.post, "/sessions", json={})
        until(lambda: '"stage":"slots"' in rubato("monitor", run, "--json", cwd=run).out, "the opening to wait")
        gateway = actors_of(run)["gateway-1"]["pid"]
        os.kill(gateway, signal.SIGSTOP)
        try:
            until(lambda: "lease_lapsed" in (run / "logs" / "sample_buffer-1.jsonl").read_text(), "the leases to lapse")
        finally:
            os.kill(gateway, signal.SIGCONT)
        later = opening.result()
        until(lambda: 410 in [client.get(f"/sessions/{told['session_id']}").status_code for told in first], "the gateway to hear of it")
        turns = {told["session_id"]: client.post(f"/sessions/{told['session_id']}/v1/chat/completions", json=SHORT) for told in first}
        over = [told for told in turns.values() if told.status_code == 410]
        for name in (*turns, later.json()["session_id"]):
            client.post(f"/sessions/{name}/complete", json={"reward": 1.0})
    stop()

    assert later.status_code == 200
    assert [told.json()["error"]["code"] for told in over] == ["cancelled"]
    ledger = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    assert max(Counter(line["trajectory_id"] for line in ledger).values()) == 1
