"""Agents that the job starts: functions and commands that talk to their environment manager as to OpenAI's API."""

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import pytest

from rubato.actors.training import tool_model
from rubato.runtime.config.yaml_core import read_yaml
from rubato.runtime.errors import ExitCode
from tests.chaos.test_kills import actors_of, until
from tests.jobs import SMALL, clean_environment, left_behind, rubato, write_model

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]

AGENTS = '''
import asyncio, json, os, subprocess, sys, time
import openai


class Echo:
    """Rewards an answer that is what was asked for."""

    held_out = {}

    def reset(self, *, seed):
        self.word = f"word {seed % 2}"
        return self.word, {"word": self.word}

    def step(self, action):
        return "", float(action == self.word), True, False, {}

    def close(self): ...


async def ask(task, turns=2):
    messages = [{"role": "user", "content": task.prompt}]
    async with openai.AsyncOpenAI(base_url=task.base_url, api_key=task.api_key) as client:
        for _ in range(turns):
            answer = await client.chat.completions.create(model=task.model, messages=messages)
            messages += [answer.choices[0].message.model_dump(), {"role": "user", "content": "on"}]


async def answers(task):
    await ask(task)
    return task.info["word"] if task.seed % 3 else "another"


def plain(task):
    client = openai.OpenAI(base_url=task.base_url, api_key=task.api_key)
    client.chat.completions.create(model="any", messages=[{"role": "user", "content": task.prompt}])
    return task.row % 2


async def raises(task):
    await ask(task, 1)
    raise RuntimeError(f"no luck with {task.row}")


async def hangs(task):
    await ask(task, 1)
    await asyncio.sleep(3600)


async def says_nan(task):
    await ask(task, 1)
    return float("nan")


async def says_a_list(task):
    await ask(task, 1)
    return []


async def asks_nothing(task):
    return 1.0
'''

COMMAND = """
import json, os, subprocess, sys, urllib.request
task = json.load(open(os.environ["RUBATO_TASK_FILE"]))
body = json.dumps({"messages": [{"role": "user", "content": task["prompt"]}]}).encode()
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
urllib.request.urlopen(urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)).read()
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)", os.getcwd()])  # left behind, under a name that is looked for
print("some noise")
print(json.dumps({"reward": task["seed"] % 2}))
"""


@pytest.fixture
def place(tmp_path) -> Path:
    (tmp_path / "mine.py").write_text(AGENTS)
    (tmp_path / "agent.py").write_text(COMMAND)
    (tmp_path / "small.yaml").write_text(SMALL)
    write_model(tmp_path / "model")
    return tmp_path


def ran(place: Path, agent: str, *more: str):
    """How a job of two steps ended whose agent is `agent`."""
    return rubato(
        "launch", "small.yaml", "--run-dir", "run", f"model.path={place / 'model'}", "env.class=mine.py:Echo", f"env.agent={agent}",
        "env.isolation=auto", *more, cwd=place,
    )  # fmt: skip


def samples(place: Path) -> list[dict]:
    return [json.loads(line) for line in (place / "run" / "samples.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(("agent", "turns"), [("mine.py:answers", 2), ("mine.py:plain", 1), ("python agent.py", 1)])
def test_an_agent_of_each_kind_is_trained_by_the_reward_that_it_or_its_environment_says(place, agent, turns):
    ended = ran(place, agent)

    assert ended.code == ExitCode.DONE, ended.out + ended.err
    trained = [line for line in samples(place) if line["fate"] in ("trained", "zero_spread")]
    assert len(trained) == 2 * 4
    assert Counter(line["turns"] for line in trained) == {turns: 8}
    assert {line["reward"] for line in trained} <= {0.0, 1.0}
    assert left_behind(place) == []


@pytest.mark.parametrize(
    ("agent", "said"),
    [
        ("mine.py:raises", "agent_failed (task"),
        ("mine.py:hangs", "agent_timeout (task"),
        ("mine.py:says_nan", "agent_failed (task"),
        ("mine.py:says_a_list", "returned list: an agent returns its reward, its answer as a text, or None"),
        ("mine.py:asks_nothing", "agent_idle (task"),
        ("python -c 'import sys; sys.exit(\"no agent here\")'", "ended with 1: no agent here"),
        ("no-such-command", "can't be started: No such file or directory: no-such-command"),
    ],
)
def test_an_agent_that_never_gets_through_ends_the_job_with_what_it_did(place, agent, said):
    ended = ran(place, agent, "env.agent_timeout_s=1")

    assert ended.code == ExitCode.FAILED, ended.out + ended.err
    assert said in ended.out + ended.err
    assert "Traceback" not in ended.out + ended.err
    assert left_behind(place) == []


def test_an_agent_at_whose_path_is_no_file_is_refused_before_anything_starts_and_no_function_soon_after(place):
    no_file, no_function = ran(place, "nine.py:answers"), ran(place, "mine.py:answer")

    assert no_file.code == ExitCode.REFUSED
    assert "env.agent: " in no_file.err
    assert no_function.code == ExitCode.FAILED
    assert "env.agent: " in no_function.err
    assert "Did you mean answers?" in no_function.err


def test_a_task_may_have_an_agent_alone_beside_one_that_has_an_environment(place):
    tree = read_yaml(SMALL)
    tree["tasks"] = {
        "own": {"agent": "mine.py:plain"},
        "echo": {"class": "mine.py:Echo", "agent": "mine.py:answers"},
        "walk": {"class": "rubato.actors.envs.frozen_lake:FrozenLakeText"},
    }
    (place / "small.yaml").write_text(json.dumps(tree))

    ended = rubato("launch", "small.yaml", "--run-dir", "run", "run.steps=4", f"model.path={place / 'model'}", cwd=place)

    assert ended.code == ExitCode.DONE, ended.out + ended.err
    used = Counter(line["task"] for line in samples(place) if line["fate"] in ("trained", "zero_spread"))
    assert set(used) == {"own", "echo", "walk"}


@contextmanager
def lasting(place, *arguments):
    """The folder of a run of processes, until the block ends."""
    command = [sys.executable, "-m", "rubato.runtime.cli", "launch", "small.yaml", f"model.path={place / 'model'}", "--run-dir", "run"]
    with (place / "said").open("wb") as said:
        launcher = subprocess.Popen(
            [*command, *arguments], cwd=place, env=clean_environment(), stdout=said, stderr=said, start_new_session=True
        )
    try:
        yield place / "run"
    finally:
        launcher.send_signal(signal.SIGTERM)
        launcher.wait(60)
    assert left_behind(place) == []


@pytest.fixture
def job(place):
    """Its agents are commands that last."""
    (place / "agent.py").write_text(COMMAND + "import time; time.sleep(3600)")
    with lasting(place, f"env.agent={sys.executable} agent.py") as folder:
        yield folder


def managers_end(folder: Path) -> None:
    """Kill the manager, and return once it is back, and what it had started is gone."""
    before = until(lambda: actors_of(folder).get("env_manager-1", {}).get("pid"), "the manager")
    first = children_of(before)
    os.kill(before, signal.SIGKILL)
    until(lambda: actors_of(folder).get("env_manager-1", {}).get("pid") not in (None, before), "the manager's return")
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in first), "the end of its agents")


def test_agents_end_with_a_manager_that_is_killed(job):
    place = str(job.parent)

    def sleepers():
        return [line for line in left_behind(job.parent) if "sleep(3600)" in line and line.endswith(place)]

    until(sleepers, "agents that play")
    managers_end(job)


def children_of(pid: int) -> list[int]:
    """Processes that it started."""
    return [int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()]


@pytest.mark.nightly
def test_the_recipe_s_agent_of_pydantic_ai_opens_drawers_by_calls_of_its_model(tmp_path, monkeypatch):
    pytest.importorskip("pydantic_ai")
    monkeypatch.setattr(tool_model, "WARM_UP_STEPS", 150)
    tool_model.make(tmp_path / "model", 1, lambda what, share: None)

    ended = rubato(
        "launch", ROOT / "configs" / "agent.yaml", "--run-dir", "run", "prepare=[]", f"model.path={tmp_path / 'model'}", "run.steps=2",
        "train.batch_groups=4", "eval.every=0", "eval.final_num_tasks=0", cwd=tmp_path,
    )  # fmt: skip

    assert ended.code == ExitCode.DONE, ended.out + ended.err
    used = [line for line in samples(tmp_path) if line["fate"] in ("trained", "zero_spread")]
    assert len(used) > 2 * 4 * 6, "the framework gives up on a model that calls too badly: those rollouts fail"
    assert max(line["turns"] for line in used) > 1
    assert {line["reward"] for line in used} == {0.0, 1.0}
