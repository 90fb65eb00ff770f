"""Two vLLM engines of one device become one of two, and two again, by the live orchestrator and with requests under way."""

import asyncio
import json
import sys
from pathlib import Path

import pytest

from rubato.actors.engines.engine import Work
from rubato.actors.messages.generation import Completion, Generate, Sampling
from rubato.bus.message import pack_i32
from rubato.runtime.guest import Guest, join
from tests.contract.engines import prompt_of
from tests.contract.test_engine import worst
from tests.models import write_model
from tools.bench.paced_job import ROOT, job
from tools.bench.peers.told_orchestrator import Become, SetArm

LIMIT_S = 900.0
"""Of each wait: vLLM starts in 10 to 150 s, as busy as the machine is."""

NUM, TOKENS = 48, 480

KEPT = ("actor", "event", "degree", "requests", "moved", "seconds", "export_s", "stop_s", "start_s", "weights_s", "error")
"""Of the log's lines, what is printed."""

CONFIG = {
    "run": {"name": "vllm-switch"},
    "actors": {
        "llm_proxy": {"class": "rubato.actors.proxy.proxy:LLMProxy"},
        "engine": {"class": "rubato.actors.engines.worker:EngineWorker", "count": 2},
        "orchestrator": {"class": f"{ROOT}/tools/bench/peers/told_orchestrator.py:ToldOrchestrator"},
    },
    "orchestrator": {"enabled": True, "planners": ["rebalance"], "degrees": [1, 2]},
    "engine": {"kind": "vllm", "hardware": "xeon-8480", "num_slots": 4, "max_len": 512, "vllm": {"kv_cache_memory_bytes": 32 << 20}},
    "report": {"finish": ""},
}


def work_of(batch: str, place: int, turn: int = 0) -> Work:
    name = f"{batch}{place}.{turn}"
    return Work(name, name, prompt_of(place), Sampling(TOKENS, seed=place + NUM * turn, stop_token_ids=()))


def works(batch: str) -> list[Work]:
    return [work_of(batch, place) for place in range(NUM)]


async def answer(me: Guest, work: Work) -> Completion:
    request = Generate(work.request_id, work.session, pack_i32(work.prompt), work.sampling)
    reply = await me.ref("llm_proxy").ask(request, timeout=LIMIT_S)
    assert isinstance(reply, Completion), reply
    return reply


async def both_here(me: Guest) -> None:
    """Returns once the proxy knows both: the first to start would have answered all before the other one came."""
    await me.ref("orchestrator").ask(SetArm(("rebalance",), fleet=2), timeout=LIMIT_S)


async def played(me: Guest, batch: str, degrees: tuple[int, ...], turns: range) -> list[tuple[Work, Completion]]:
    """Requests and their answers, NUM of them under way while the engines take on these degrees, and so many turns of each at most."""
    found: list[tuple[Work, Completion]] = []
    switched = asyncio.Event()

    async def keep_on(place: int) -> None:
        for turn in turns:
            work = work_of(batch, place, turn)
            found.append((work, await answer(me, work)))
            if switched.is_set():
                return

    async with asyncio.TaskGroup() as tasks:
        first = tasks.create_task(answer(me, Work(f"{batch}first", "", prompt_of(99), Sampling(8))))
        for place in range(NUM):
            tasks.create_task(keep_on(place))
        await first
        await me.ref("orchestrator").ask(Become(degrees, 2), timeout=LIMIT_S)
        switched.set()
    return found


def told(folder: Path, role: str, *events: str) -> list[dict]:
    """Lines of the role's logs, by time."""
    files = (folder / "logs").glob(f"{role}-*.jsonl")
    lines = [json.loads(line) for path in files for line in path.read_text().splitlines()]
    return sorted((line for line in lines if line.get("event") in events), key=lambda line: line["t"])


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(3 * LIMIT_S)
@pytest.mark.filterwarnings("default")  # vLLM and what it imports warn in many places of their own
async def test_two_engines_merge_and_split_again_and_every_request_is_answered_with_the_models_log_probs(tmp_path):
    pytest.importorskip("vllm")
    model = write_model(tmp_path / "model")
    async with job("vllm-switch", CONFIG, [f"model.path={model}", "model.device=cpu"], LIMIT_S) as folder:
        async with join(folder) as me:
            await both_here(me)
            # The engine that grows goes on serving until the other one sleeps: only a load without an end is sure to reach it.
            merged = await played(me, "a", (2,), range(sys.maxsize))
            # The one that shrinks does so at once, and serves while the other one starts: more load would keep that waiting for minutes.
            split = await played(me, "b", (1, 1), range(1))
        changes = told(folder, "engine", "asleep", "awake", "reconfigured")
        switched = told(folder, "orchestrator", "switched", "switch_failed")
    for each in (*changes, *switched):
        print({key: value for key, value in each.items() if key in KEPT})

    found = [(work, completion.tokens) for work, completion in merged + split]
    print(f"{len(found)} requests")
    assert len(found) >= 2 * NUM
    assert {len(tokens.ids) // 4 for _, tokens in found} == {TOKENS}
    assert worst(model, found) < 1e-4
    assert [line["event"] for line in switched] == ["switched", "switched"]
    assert [(line["event"], line["degree"]) for line in changes] == [
        ("asleep", 1), ("reconfigured", 2), ("reconfigured", 1), ("awake", 1)
    ]  # fmt: skip
    assert all(line["requests"] for line in changes if line["event"] == "reconfigured")
    assert switched[0]["moved"] > 0
