"""A job that is trained by agents from outside, which open sessions at its gateway and talk as OpenAI's clients do."""

import asyncio
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
from collections import Counter
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import openai
import pytest

from rubato.actors.report.transcripts.reading import Filters, decoder, find, sample_of
from rubato.actors.training import tool_model
from rubato.actors.training.base_model import build
from rubato.runtime.config.compose import from_mapping
from rubato.runtime.config.yaml_core import read_yaml
from rubato.runtime.embed import embed
from rubato.runtime.errors import ConfigError
from tests.chaos.test_kills import actors_of, until
from tests.jobs import SMALL, clean_environment, left_behind, write_model

pytestmark = pytest.mark.slow

MANAGER = 'env_manager: {class: "rubato.actors.envs.manager:EnvManager"}'
EXAMPLE = Path(__file__).parents[2] / "examples" / "outside_agent.py"

GATEWAY = 'gateway: {class: "rubato.actors.gateway.gateway:Gateway"}'


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "model")


@asynccontextmanager
async def served(folder: Path, model: Path, *overrides: str):
    """The job, and a client of its gateway that has the admin key."""
    tree = read_yaml(SMALL.replace(MANAGER, GATEWAY))
    async with embed(from_mapping(tree, [f"model.path={model}", *overrides]), folder) as job:
        address = folder / "gateway.json"
        while not address.exists():  # noqa: ASYNC110 - another process writes it
            await asyncio.sleep(0.1)
        told = json.loads(address.read_text())
        headers = {"Authorization": f"Bearer {told['admin_key']}"}
        async with httpx.AsyncClient(base_url=told["url"], headers=headers, timeout=120) as client:
            yield job, client


async def play(client, at, members, *, turns=2):
    """One session of an agent; how it ended. The members of a group, which have a row in common, are rewarded in turns."""
    opened = (await client.post("/sessions", json={})).json()
    if "error" in opened:
        return opened["error"]["code"]
    messages = [{"role": "user", "content": f"wind {at}"}]
    async with openai.AsyncOpenAI(base_url=opened["base_url"], api_key=opened["api_key"], max_retries=0) as agent:
        for turn in range(turns):
            try:
                answer = await agent.chat.completions.create(messages=messages, model="any", temperature=0.3)
            except openai.APIStatusError as error:
                return error.code
            messages += [answer.choices[0].message.model_dump(), {"role": "user", "content": f"and {turn}"}]
    shown = (await client.get(f"/sessions/{opened['session_id']}")).json()
    members[opened["row"]] += 1
    ending = {"rewards": {"luck": members[opened["row"]] % 2, "effort": 0.0}}
    told = (await client.post(f"/sessions/{opened['session_id']}/complete", json=ending)).json()
    return (shown, told) if "error" not in told else told["error"]["code"]


async def test_agents_from_outside_train_a_job_token_for_token(tmp_path, model):
    ends, members = [], Counter()

    async with served(tmp_path / "run", model, "run.steps=3") as (job, client):

        async def agents(first):
            for at in range(first, 1000, 4):
                ends.append(await play(client, at, members))
                if ends[-1] == "run_over":
                    return

        async with asyncio.TaskGroup() as tasks:
            for first in range(4):
                tasks.create_task(agents(first))
            rows = [row async for row in job.rows()]

    mode = stat.S_IMODE((tmp_path / "run" / "gateway.json").stat().st_mode)
    assert mode == 0o600
    assert [row["step"] for row in rows] == [1, 2, 3]
    whole = [end for end in ends if isinstance(end, tuple)]
    assert len(whole) >= 12
    for shown, told in whole:
        (segment,) = shown["segments"]
        assert (shown["turns"], told["segments"]) == (2, 1)
        assert sum(segment["mask"]) == sum(end - start for _, start, end in segment["versions"])
    ledger = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    assert sum(line["fate"] == "trained" for line in ledger) == 3 * 4
    assert all(line["age"] <= 1 for line in ledger if line["fate"] == "trained")
    assert all(line["scores"] == {"env": 0.0, "luck": line["reward"], "effort": 0.0} for line in ledger if line["fate"] == "trained")
    assert all(told["fate"] in ("", "stale", "surplus") for _, told in whole)


async def by_responses(agent, stream):
    """Two turns of OpenAI's client, which sends the items that it got."""
    items = [{"role": "user", "content": "wind 1"}]
    for turn in range(2):
        told = await agent.responses.create(model="any", input=items, max_output_tokens=64, stream=stream)
        if stream:
            events = [event async for event in told]
            assert [event.sequence_number for event in events] == [*range(len(events))]
            told = events[-1].response
            assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == told.output_text
        assert 1 <= told.usage.output_tokens <= 2
        items += [item.model_dump(exclude_none=True) for item in told.output]
        items += [{"role": "user", "content": [{"type": "input_text", "text": f"and {turn}"}]}]


async def by_messages(client, key, path):
    """Two turns in Anthropic's form; the second answer is a stream, whose blocks would be sent on."""
    messages, headers = [{"role": "user", "content": "wind 1"}], {"x-api-key": key, "anthropic-version": "2023-06-01"}
    asked = {"model": "any", "max_tokens": 64, "messages": messages}
    told = (await client.post(f"{path}/v1/messages", json=asked, headers=headers)).json()
    assert (told["type"], told["role"]) == ("message", "assistant")
    messages += [{"role": "assistant", "content": told["content"]}, {"role": "user", "content": [{"type": "text", "text": "and 0"}]}]
    count = (await client.post(f"{path}/v1/messages/count_tokens", json=asked, headers=headers)).json()["input_tokens"]
    streamed = await client.post(f"{path}/v1/messages", json=asked | {"stream": True}, headers=headers)
    events = [json.loads(line[6:]) for line in streamed.text.splitlines() if line.startswith("data: ")]
    assert [event["type"] for event in (events[0], *events[-2:])] == ["message_start", "message_delta", "message_stop"]
    assert events[0]["message"]["usage"]["input_tokens"] == count


async def by_tokens(client, key, path):
    """Two turns of token ids, as vLLM takes them."""
    tokens, headers = [40, 41, 42], {"Authorization": f"Bearer {key}"}
    for turn in range(2):
        asked = {"token_ids": tokens, "sampling_params": {"max_tokens": 64, "logprobs": 0}}
        (choice,) = (await client.post(f"{path}/inference/v1/generate", json=asked, headers=headers)).json()["choices"]
        assert len(choice["logprobs"]["content"]) == len(choice["token_ids"]) == choice["weight_versions"][-1]["end"]
        tokens += [*choice["token_ids"], 50 + turn]


async def test_agents_of_other_dialects_train_a_job_token_for_token_as_well(tmp_path, model):
    shown = {}

    async with served(tmp_path / "run", model, "run.steps=1") as (job, client):

        async def agent(kind, reward):
            opened = (await client.post("/sessions", json={})).json()
            path = f"/sessions/{opened['session_id']}"
            if kind.startswith("responses"):
                async with openai.AsyncOpenAI(base_url=opened["base_url"], api_key=opened["api_key"], max_retries=0) as agent:
                    await by_responses(agent, kind == "responses as a stream")
            else:
                await {"messages": by_messages, "tokens": by_tokens}[kind](client, opened["api_key"], path)
            shown[kind] = (await client.get(path)).json()
            await client.post(f"{path}/complete", json={"reward": reward})

        async with asyncio.TaskGroup() as tasks:
            for at, kind in enumerate(("responses", "responses as a stream", "messages", "tokens")):
                tasks.create_task(agent(kind, at % 2))
            rows = [row async for row in job.rows()]

    assert [row["step"] for row in rows] == [1]
    for kind, session in shown.items():
        (segment,) = session["segments"]
        assert (kind, session["turns"]) == (kind, 2)
        assert sum(segment["mask"]) == sum(end - start for _, start, end in segment["versions"])
    ledger = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    assert sum(line["fate"] == "trained" for line in ledger) == 4


async def test_what_can_not_be_had_is_refused_with_a_status_that_clients_understand(tmp_path, model):
    async with served(tmp_path / "run", model, "run.steps=100000", "rollout.max_len=64") as (_, client):
        opened = (await client.post("/sessions", json={"metadata": {"who": "me"}})).json()
        one, other = opened["session_id"], (await client.post("/sessions", json={})).json()
        key, chat = {"Authorization": f"Bearer {opened['api_key']}"}, {"messages": [{"role": "user", "content": "wind 1"}]}

        async def ask(body, path=f"/sessions/{one}/v1/chat/completions", headers=key):
            told = await client.post(path, content=body if isinstance(body, bytes) else json.dumps(body), headers=headers)
            return told.status_code, told.json().get("error", {}).get("code")

        async with openai.AsyncOpenAI(base_url=opened["base_url"], api_key=opened["api_key"], max_retries=0) as agent:
            stream = await agent.chat.completions.create(model="m", stream=True, stream_options={"include_usage": True}, **chat)
            chunks = [chunk async for chunk in stream]
        exact = (await client.post("/v1/chat/completions", json={**chat, "return_token_ids": True, "logprobs": True}, headers=key)).json()
        refused = [
            await client.post("/sessions", json={}, headers={"Authorization": "Bearer no"}),
            await client.post("/sessions", json={"task": "none"}),
            *[await client.post("/sessions", json={key: 3}) for key in ("row", "seed", "group")],
            await client.get("/nothing/here"),
            await client.get(f"/sessions/{one}/v1/chat/completions"),
            await client.post("/v1/models/"),
        ]
        found = {
            "no json": await ask(b"{"),
            "no messages": await ask({"messages": []}),
            "n": await ask({**chat, "n": 65}),
            "tool_choice": await ask({**chat, "tool_choice": "required"}),
            "too long": await ask({"messages": [{"role": "user", "content": "wind " * 100}]}),
            "unknown key": await ask(chat, headers={"Authorization": "Bearer rbt-none"}),
            "another's key": await ask(chat, path=f"/sessions/{other['session_id']}/v1/chat/completions"),
            "a reward that is none": await ask(b'{"reward": 1e999}', path=f"/sessions/{one}/complete"),
            "token ids that the model has not": await ask(
                {"token_ids": [10**6], "sampling_params": {}}, path=f"/sessions/{one}/inference/v1/generate"
            ),
            "known keys beside others": await ask({**chat, "store": False, "metadata": {}, "top_k": 3}),
        }
        messages = await client.post(f"/sessions/{one}/v1/messages", json={}, headers={"x-api-key": "rbt-none"})
        complete = [await client.post(f"/sessions/{one}/complete", json={"reward": reward}, headers=key) for reward in (1, 1, 2)]
        over = await ask(chat)
        of_another = {"Authorization": f"Bearer {other['api_key']}"}
        over_by_another = await ask(chat, headers=of_another), await ask({"reward": 2}, f"/sessions/{one}/complete", of_another)

    assert [told.status_code for told in refused] == [401, 404, 400, 400, 400, 404, 405, 404]
    assert [told.json()["error"]["code"] for told in refused[-3:]] == ["not_found", "method_not_allowed", "not_found"]
    assert found == {
        "no json": (400, "invalid_request_error"),
        "no messages": (400, "invalid_request_error"),
        "n": (400, "invalid_request_error"),
        "tool_choice": (400, "invalid_request_error"),
        "too long": (400, "context_length_exceeded"),
        "unknown key": (401, "invalid_api_key"),
        "another's key": (401, "invalid_api_key"),
        "a reward that is none": (400, found["a reward that is none"][1]),
        "token ids that the model has not": (400, "generation_failed"),
        "known keys beside others": (200, None),
    }
    assert (messages.status_code, messages.json()["error"]["type"]) == (401, "authentication_error")
    assert [told.status_code for told in complete] == [200, 200, 409]
    assert complete[0].json() == complete[1].json() == {"session_id": one, "fate": "", "segments": 1, "unused": 2}
    assert complete[2].json()["error"]["code"] == "ended_otherwise"
    assert over == (410, "complete")
    assert over_by_another == ((401, "invalid_api_key"),) * 2
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert chunks[-1].usage.completion_tokens == 2
    choice = exact["choices"][0]
    assert len(choice["token_ids"]) == len(choice["logprobs"]["content"]) == exact["usage"]["completion_tokens"]
    assert len(exact["prompt_token_ids"]) == exact["usage"]["prompt_tokens"]


async def test_a_session_that_its_agent_left_is_over_and_another_takes_its_place(tmp_path, model):
    async with served(tmp_path / "run", model, "run.steps=100000", "gateway.idle_s=0.5") as (_, client):
        left = (await client.post("/sessions", json={})).json()
        while (told := await client.get(f"/sessions/{left['session_id']}")).status_code == 200:  # noqa: ASYNC110 - seen from outside alone
            await asyncio.sleep(0.1)
        again = (await client.post("/sessions", json={})).json()

    assert (told.status_code, told.json()["error"]) == (410, told.json()["error"] | {"type": "session_over", "code": "expired"})
    assert again["session_id"] != left["session_id"]


async def test_a_data_set_gives_sessions_their_prompt_and_its_grader_scores_their_answers(tmp_path, model):
    rows = [{"prompt": f"add {number}", "answer": str(number)} for number in range(4)]
    (tmp_path / "sums.jsonl").write_text("\n".join(map(json.dumps, rows)))
    data = f"tasks.sums.data={{path: {tmp_path / 'sums.jsonl'}}}"

    async with served(tmp_path / "run", model, data, "run.steps=1") as (job, client):

        async def agent(at):
            told = (await client.post("/sessions", json={})).json()
            body = {"messages": [{"role": "user", "content": told["prompt"]}]}
            headers = {"Authorization": f"Bearer {told['api_key']}"}
            (await client.post("/v1/chat/completions", json=body, headers=headers)).raise_for_status()
            answer = told["prompt"].removeprefix("add ") if at % 2 else "none"
            (await client.post(f"/sessions/{told['session_id']}/complete", json={"answer": answer}, headers=headers)).raise_for_status()

        async with asyncio.TaskGroup() as tasks:
            for at in range(4):
                tasks.create_task(agent(at))
            assert [row["step"] async for row in job.rows()] == [1]

    ledger = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    assert Counter(line["reward"] for line in ledger if line["step"] == 1) == {0.0: 2, 1.0: 2}


TWO = ("tasks.sums.data={path: PATH}", "tasks.words.data={path: PATH}", "run.steps=2")


def two_tasks(tmp_path) -> list[str]:
    rows = [{"prompt": f"add {number}", "answer": str(number)} for number in range(4)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return [each.replace("PATH", str(tmp_path / "rows.jsonl")) for each in TWO]


@pytest.mark.parametrize("named", [True, False])
async def test_a_session_that_names_its_task_gets_one_of_it_and_the_weights_hold(tmp_path, model, named):
    opened = []
    async with served(tmp_path / "run", model, *two_tasks(tmp_path)) as (job, client):

        async def agents(task):
            while (told := await client.post("/sessions", json={"task": task} if task else {})).status_code == 200:
                session = told.json()
                opened.append((task, session["task"]))
                body = {"messages": [{"role": "user", "content": session["prompt"]}]}
                headers = {"Authorization": f"Bearer {session['api_key']}"}
                (await client.post("/v1/chat/completions", json=body, headers=headers)).raise_for_status()
                await client.post(f"/sessions/{session['session_id']}/complete", json={"reward": len(opened) % 2}, headers=headers)
            assert told.json()["error"]["code"] == "run_over"

        async with asyncio.TaskGroup() as tasks:
            for task in ("sums", "words", *((None,) if not named else ())):
                tasks.create_task(agents(task))
            rows = [row async for row in job.rows()]

    assert [row["step"] for row in rows] == [1, 2]
    assert all(task in (None, got) for task, got in opened)
    assert any(task is None for task, _ in opened) != named
    ledger = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    assert Counter(line["task"] for line in ledger if line["step"]) == {"sums": 4, "words": 4}


async def test_where_no_agent_comes_for_a_task_the_others_are_told_which_one(tmp_path, model):
    async with served(tmp_path / "run", model, *two_tasks(tmp_path), "gateway.wait_s=2") as (_, client):
        told = await asyncio.gather(*(client.post("/sessions", json={"task": "sums"}) for _ in range(12)))
        late = await client.post("/sessions", json={"task": "words"})
        unknown = await client.post("/sessions", json={"task": "none"})

    got = [each.json() for each in told if each.status_code == 200]
    late_ones = [each.json()["error"] for each in told if each.status_code != 200]
    assert {each["task"] for each in got} == {"sums"}
    assert {(each.status_code, late.status_code) for each in told} == {(200, 200), (503, 200)}
    assert all("agents are wanted for words" in each["message"] for each in late_ones)
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "no_such_task")


SLOW = """
import asyncio

class Slow:
    held_out = {}

    async def reset(self, *, seed):
        await asyncio.sleep(1.0)
        return "go", {}

    async def step(self, action):
        return "", 0.0, True, False, {}

    async def close(self): ...
"""


async def test_an_agent_that_leaves_while_its_environment_is_made_ready_takes_no_place_of_another(tmp_path, model):
    (tmp_path / "slow.py").write_text(SLOW)
    async with served(tmp_path / "run", model, f"env.class={tmp_path / 'slow.py'}:Slow", "run.steps=100000") as (_, client):
        with pytest.raises(httpx.ReadTimeout):
            await client.post("/sessions", json={}, timeout=0.5)
        told = [await client.post("/sessions", json={}) for _ in range(2)]

    assert [(each.status_code, each.json()["prompt"]) for each in told] == [(200, "go"), (200, "go")]


async def test_the_program_of_the_examples_trains_a_job_to_its_end(tmp_path, model):
    async with served(tmp_path / "run", model, "run.steps=3") as (job, _):
        program = await asyncio.create_subprocess_exec(sys.executable, EXAMPLE, tmp_path / "run", env=clean_environment())
        rows = [row async for row in job.rows()]
        assert await program.wait() == 0

    assert [row["step"] for row in rows] == [1, 2, 3]
    assert len(EXAMPLE.read_text().splitlines()) <= 40


FORGETS = (
    "{% for m in messages %}{% if m.role != 'assistant' %}{{ m.content }}{% else %}<|assistant|>"
    "{% if loop.index + 1 == messages | length %}{{ m.content }}{% else %}...{% endif %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""A template that shows the newest of the model's turns alone."""


@pytest.mark.parametrize(("history", "segments"), [("append", {1}), ("rerender", {2, 3})])
async def test_turns_may_follow_what_the_template_shows_of_earlier_ones_behind_each_change_in_a_segment_of_its_own(
    tmp_path, model, history, segments
):
    settings = json.loads((model / "tokenizer_config.json").read_text())
    forgets = tmp_path / "forgets"
    shutil.copytree(model, forgets)
    (forgets / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": FORGETS}))

    members, ends = Counter(), []
    async with served(tmp_path / "run", forgets, "run.steps=1", f"gateway.history={history}") as (job, client):
        async with asyncio.TaskGroup() as tasks:
            for at in range(4):
                tasks.create_task(play(client, at, members, turns=3)).add_done_callback(lambda task: ends.append(task.result()))
            assert [row["step"] async for row in job.rows()] == [1]
        notices = [text for text in job.notices if "does not leave a conversation as it was" in text]

    assert len(ends) == 4
    assert {told["segments"] for _, told in ends} <= segments  # what was sampled may have no text, or have it of other tokens
    assert all((len(shown["segments"]), told["fate"]) == (told["segments"], "") for shown, told in ends)
    assert len(notices) == 1
    assert "gateway.history=rerender" in notices[0]
    ledger = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    assert sum(line["fate"] == "trained" for line in ledger) == 4
    shown = [sample_of(row, decoder(tmp_path / "run")) for row in find(tmp_path / "run", Filters(fate="trained")).kept]
    assert sorted(len(sample.branches) for sample in shown) == sorted(told["segments"] for _, told in ends)
    assert {len(sample.turns) for sample in shown} == {3}


OPEN_DRAWER = {"type": "function", "function": {"name": "open_drawer", "parameters": {"type": "object", "properties": {}}}}


async def test_agents_that_force_calls_train_a_job_token_for_token(tmp_path):
    build(tmp_path / "model", 1, lambda model, tokenizer: None, tool_model.TEXT)
    found = []
    async with served(tmp_path / "run", tmp_path / "model", "run.steps=1") as (job, client):

        async def agent(choice):
            opened = (await client.post("/sessions", json={})).json()
            history = [{"role": "user", "content": "first"}]
            async with openai.AsyncOpenAI(base_url=opened["base_url"], api_key=opened["api_key"], max_retries=0) as agent:
                for tool_choice in (choice, "auto"):
                    told = await agent.chat.completions.create(
                        model="m", messages=history, tools=[OPEN_DRAWER], tool_choice=tool_choice, extra_body={"return_token_ids": True}
                    )
                    history += [told.choices[0].message.model_dump(exclude_none=True), {"role": "user", "content": "go on"}]
                    found.append((tool_choice, told))
            shown = (await client.get(f"/sessions/{opened['session_id']}")).json()
            ending = {"reward": float(choice == "required")}
            (await client.post(f"/sessions/{opened['session_id']}/complete", json=ending)).raise_for_status()
            return shown

        named = {"type": "function", "function": {"name": "open_drawer"}}
        async with asyncio.TaskGroup() as tasks:
            agents = [tasks.create_task(agent(choice)) for choice in ("required", named, "required", named)]
            assert [row["step"] async for row in job.rows()] == [1]

    for shown in (each.result() for each in agents):
        (segment,) = shown["segments"]
        assert segment["carries"]
        told = [each.choices[0] for _, each in found if segment["token_ids"][: len(each.prompt_token_ids)] == each.prompt_token_ids]
        assert sum(segment["mask"]) in [len(one.token_ids) + len(other.token_ids) for one in told for other in told]
    for choice, told in found:
        message = told.choices[0].message
        assert choice == "auto" or message.tool_calls or message.content.startswith(tool_model.CALL.partition('{"number"')[0])


@pytest.fixture
def job(tmp_path, model):
    """The folder of a run of processes, until the test ends."""
    config = SMALL.replace(MANAGER, GATEWAY)
    (tmp_path / "small.yaml").write_text(config)
    command = [sys.executable, "-m", "rubato.runtime.cli", "launch", "small.yaml", f"model.path={model}", "run.steps=100000"]
    with (tmp_path / "said").open("wb") as said:
        launcher = subprocess.Popen(
            [*command, "--run-dir", "run"], cwd=tmp_path, env=clean_environment(), stdout=said, stderr=said, start_new_session=True
        )
    yield tmp_path / "run"
    launcher.send_signal(signal.SIGTERM)
    launcher.wait(60)
    assert left_behind(tmp_path / "run") == []


def test_a_gateway_that_is_killed_comes_back_where_its_clients_look_and_its_sessions_are_others(job):
    address = until(lambda: (job / "gateway.json").exists() and json.loads((job / "gateway.json").read_text()), "the gateway")
    chat = {"messages": [{"role": "user", "content": "wind 1"}]}

    def asked(path, body, key=address["admin_key"]):
        try:
            return httpx.post(address["url"] + path, json=body, headers={"Authorization": f"Bearer {key}"}, timeout=60)
        except httpx.TransportError:
            return None

    before = asked("/sessions", {}).json()
    turn = asked("/v1/chat/completions", chat, before["api_key"])
    os.kill(actors_of(job)["gateway-1"]["pid"], signal.SIGKILL)
    after = until(
        lambda: (told := asked("/sessions", {})) is not None and told.status_code == 200 and told.json(), "a session after the kill"
    )
    lost = asked("/v1/chat/completions", chat, before["api_key"])
    again = asked("/v1/chat/completions", chat, after["api_key"])
    ended = asked(f"/sessions/{after['session_id']}/complete", {"reward": 1.0})

    assert (turn.status_code, again.status_code, ended.status_code) == (200, 200, 200)
    assert (lost.status_code, lost.json()["error"]["code"]) == (401, "invalid_api_key")


def test_a_job_has_one_gateway(model):
    """Its address is in one file."""
    with pytest.raises(ConfigError, match="a job needs at most 1 gateway"):
        from_mapping(read_yaml(SMALL.replace(MANAGER, GATEWAY)), [f"model.path={model}", "actors.gateway.count=2"])


def test_a_gateway_and_environment_managers_are_refused_together(model):
    tree = read_yaml(SMALL.replace(MANAGER, f"{MANAGER}\n  {GATEWAY}"))

    with pytest.raises(ConfigError, match="actors has gateway and env_manager"):
        from_mapping(tree, [f"model.path={model}"])
    with pytest.raises(ConfigError, match=r"agent=mine\.py:play is started by an env_manager: leave one out"):
        from_mapping(read_yaml(SMALL.replace(MANAGER, GATEWAY)), [f"model.path={model}", "env.agent=mine.py:play"])
    taskset = {"tasks": {"words": {"verifiers": {"taskset": "words", "python": "python"}}}}
    with pytest.raises(ConfigError, match="verifiers brings its own: leave one out"):
        from_mapping(read_yaml(SMALL.replace(MANAGER, GATEWAY)) | taskset, [f"model.path={model}"])
