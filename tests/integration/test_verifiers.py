"""Tasksets of verifiers: played by a scripted EnvServer that speaks its protocol, and by verifiers' own where `.ci/environments` made it one."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import pytest

from rubato.runtime.config.yaml_core import read_yaml
from rubato.runtime.errors import ExitCode
from tests import jobs
from tests.chaos.test_kills import actors_of, until
from tests.jobs import LEARNING, SMALL, clean_environment, left_behind, rubato, write_model
from tests.scripted_verifiers import peer

pytestmark = pytest.mark.slow

HERE = Path(__file__).resolve().parent
REAL = HERE.parents[1] / ".venv-verifiers" / "bin" / "python"
"""Of an environment with verifiers, which .ci/environments makes."""

needs_verifiers = pytest.mark.skipif(not REAL.exists(), reason="needs verifiers in .venv-verifiers: .ci/environments install")


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "model")


def config(place: Path, task: dict, *, base: str = SMALL, **sections: dict) -> None:
    tree = read_yaml(base)
    tree["tasks"] = {"words": {"verifiers": task}}
    for name, section in sections.items():
        tree[name] = {**tree.get(name, {}), **section}
    (place / "small.yaml").write_text(json.dumps(tree))


def ran(place: Path, model: Path, *more: str):
    return rubato("launch", "small.yaml", "--run-dir", "run", f"model.path={model}", *more, cwd=place)


def scripted(place: Path, do: str = "well", **more: str) -> dict:
    return {"taskset": {"id": "scripted", "do": do}, "python": str(peer(place / "peer")), **more}


def samples(place: Path) -> list[dict]:
    return [json.loads(line) for line in (place / "run" / "samples.jsonl").read_text().splitlines()]


def test_a_taskset_is_played_by_its_own_interpreter_and_trained_by_its_rewards(tmp_path, model):
    config(tmp_path, scripted(tmp_path), eval={"final_num_tasks": 2})

    ended = ran(tmp_path, model)

    assert ended.code == ExitCode.DONE, ended.out + ended.err
    used = [line for line in samples(tmp_path) if line["fate"] in ("trained", "zero_spread")]
    assert len(used) == 2 * 4
    assert {(line["turns"], line["reward"]) for line in used} == {(2, 1.0)}
    assert [json.loads(line)["reward"] for line in (tmp_path / "run" / "evals.jsonl").read_text().splitlines()] == [1.0]
    assert left_behind(tmp_path) == []


def test_it_may_be_the_one_environment_of_a_job(tmp_path, model):
    tree = read_yaml(SMALL)
    tree["env"] = {"class": "rubato.actors.envs.verifiers:VerifiersTaskset", "kwargs": scripted(tmp_path)}
    (tmp_path / "small.yaml").write_text(json.dumps(tree))

    ended = ran(tmp_path, model)

    assert ended.code == ExitCode.DONE, ended.out + ended.err
    assert Counter(line["fate"] for line in samples(tmp_path))["zero_spread"] == 2 * 4


@pytest.mark.parametrize(
    ("do", "reason", "said"),
    [
        ("foreign", "env_bad_result", "sent tokens that this job did not sample: they are not trained"),
        ("nan", "env_bad_result", "sent a reward given of nan"),
        ("text", "env_bad_result", "sent a message that is no delta of a trace: Expected `float`, got `str`"),
        ("fail", "env_step_failed", "TaskError: the reward raised"),
        ("hang", "env_timeout", "was not through after env.agent_timeout_s=1"),
    ],
)
def test_a_server_that_lies_or_fails_ends_its_rollouts_with_what_it_did(tmp_path, model, do, reason, said):
    config(tmp_path, scripted(tmp_path, do))

    ended = ran(tmp_path, model, "env.agent_timeout_s=1")

    assert ended.code == ExitCode.FAILED, ended.out + ended.err
    assert f"a rollout ended as {reason} (task words, row " in ended.out + ended.err
    assert said in ended.out + ended.err
    assert "Traceback" not in ended.out + ended.err
    assert left_behind(tmp_path) == []


@pytest.mark.parametrize(
    ("taskset", "said"),
    [
        ("nothing", "can't serve: ModuleNotFoundError: taskset 'nothing' not found"),
        ("two", "the environment of two has 2 agents (agent, judge): one alone can be trained"),
        ({"id": "scripted", "do": "die"}, "ended 5 times in a row before an episode got through: it ended with 3"),
    ],
)
def test_a_server_that_can_t_be_had_ends_the_job_with_its_sentence(tmp_path, model, taskset, said):
    config(tmp_path, scripted(tmp_path) | {"taskset": taskset})

    ended = ran(tmp_path, model)

    assert ended.code == ExitCode.FAILED, ended.out + ended.err
    assert said in ended.out + ended.err
    assert "Traceback" not in ended.out + ended.err
    assert left_behind(tmp_path) == []


def test_what_is_not_there_is_refused_before_anything_starts(tmp_path, model):
    python = str(peer(tmp_path / "old", "0.1.10"))
    wrong = {
        "no interpreter of Python": {"taskset": "scripted", "python": "no/such/python"},
        "has no verifiers. Make one with rubato env make verifiers --run": {"taskset": "scripted", "python": sys.executable},
        "has verifiers 0.1.10, and 0.4 or newer is needed": {"taskset": "scripted", "python": python},
        "there is no file": {"taskset": "no_such.py", "python": str(peer(tmp_path / "peer"))},
        "contains unknown field `tasks`": {"taskset": "scripted", "python": python, "tasks": 3},
        "missing required field `taskset`": {"python": python},
        "tasks.words.verifiers.taskset: its id": {"taskset": {"split": "train"}, "python": python},
    }
    for said, task in wrong.items():
        config(tmp_path, task)
        ended = ran(tmp_path, model)
        assert ended.code == ExitCode.REFUSED, ended.out + ended.err
        assert said in ended.err


@pytest.fixture
def job(model):
    """The folder of a run of processes that lasts until the test ends. It is short, so that the servers' sockets lie in it."""
    with tempfile.TemporaryDirectory(prefix="rubato-") as folder:
        place = Path(folder)
        config(place, scripted(place, "spawn"), run={"steps": 100_000})
        command = [sys.executable, "-m", "rubato.runtime.cli", "launch", "small.yaml", f"model.path={model}"]
        with (place / "said").open("wb") as said:
            launcher = subprocess.Popen(
                [*command, "--run-dir", "run"], cwd=place, env=clean_environment(), stdout=said, stderr=said, start_new_session=True
            )
        yield place / "run"
        launcher.send_signal(signal.SIGTERM)
        launcher.wait(60)
        until(lambda: left_behind(place) == [], "the end of all that was started")


def steps_of(run: Path) -> int:
    file = run / "metrics.jsonl"
    return len(file.read_text().splitlines()) if file.exists() else 0


def servers(run: Path) -> list[int]:
    """Ids of processes that serve a taskset to it."""
    return pids(f"verifiers_host.py.*{run}")


def spawned(run: Path) -> list[int]:
    """Ids of what those started."""
    return pids(f"sleep\\(3600\\) ipc://{run}")


def pids(pattern: str) -> list[int]:
    found = subprocess.run(["pgrep", "-f", pattern], capture_output=True, text=True, check=False).stdout.split()
    return [int(pid) for pid in found]


def test_a_server_that_is_killed_is_started_again_and_the_run_goes_on(job):
    (first,) = until(lambda: servers(job), "a server")
    until(lambda: steps_of(job) >= 2, "two steps")
    started = spawned(job)
    assert len(started) == 1

    os.kill(first, signal.SIGKILL)

    until(lambda: not set(started) & set(spawned(job)), "the end of what it had started")
    until(lambda: servers(job) not in ([], [first]), "another server")
    before = steps_of(job)
    until(lambda: steps_of(job) >= before + 2, "two steps more")


def test_a_server_ends_with_a_manager_that_is_killed_and_the_run_goes_on(job):
    (first,) = until(lambda: servers(job), "a server")
    manager = until(lambda: actors_of(job).get("env_manager-1", {}).get("pid"), "the manager")
    started = until(lambda: spawned(job), "what it starts")

    os.kill(manager, signal.SIGKILL)

    until(lambda: first not in servers(job) and not set(started) & set(spawned(job)), "the end of its server and what that had started")
    before = steps_of(job)
    until(lambda: steps_of(job) >= before + 2, "two steps more")


TASKSET = '''
import verifiers.v1 as vf
from openai import AsyncOpenAI


class Data(vf.TaskData):
    letters: str


class Letters(vf.Task[Data]):
    @vf.reward
    async def share(self, trace) -> float:
        """Of the answer's letters that are wanted."""
        said = trace.last_reply or ""
        return sum(letter in self.data.letters for letter in said) / max(1, len(said))


class LettersTaskset(vf.Taskset[Letters, vf.TasksetConfig]):
    def load(self):
        for row in range(20):
            yield Letters(Data(prompt=f"letters {row}", letters="aeiou0123456789 "), self.config.task)


class Asking(vf.Harness[vf.HarnessConfig]):
    """Two turns, in the server's own process."""

    APPENDS_SYSTEM_PROMPT, EXECUTES_CODE, NEEDS_CONTAINER = True, False, False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, tool_interception_url=None):
        _, prompt = self.resolve_prompt(data)
        messages = [{"role": "user", "content": prompt}]
        async with AsyncOpenAI(base_url=endpoint, api_key=secret) as client:
            for _ in range(2):
                answer = await client.chat.completions.create(model=ctx.model, messages=messages)
                text = answer.choices[0].message.content or ""
                messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "more"}]
        return vf.ProgramResult(exit_code=0, stdout=text, stderr="")


__all__ = ["LettersTaskset", "Asking"]
'''

REAL_ENGINE = {"kind": "torch", "max_len": 1024}
REAL_S = 240.0
"""verifiers alone is imported in ten seconds, and its chat loop is made and started as a process for each episode."""


LOADED = "env.build_timeout_s=200"
"""Beside other work the import takes a minute."""


@needs_verifiers
@pytest.mark.timeout(2 * REAL_S)
def test_a_taskset_and_a_harness_of_one_s_own_are_trained_by_verifiers_itself(tmp_path, model, monkeypatch):
    monkeypatch.setattr(jobs, "COMMAND_S", REAL_S)
    (tmp_path / "letters.py").write_text(TASKSET)
    task = {"taskset": "letters.py", "harness": "letters.py", "python": str(REAL)}
    config(tmp_path, task, base=LEARNING, engine=REAL_ENGINE, rollout={"max_len": 256, "max_new_tokens": 8}, eval={"final_num_tasks": 4})

    ended = ran(tmp_path, model, "train.group_size=4", LOADED)

    assert ended.code == ExitCode.DONE, ended.out + ended.err
    used = [line for line in samples(tmp_path) if line["fate"] in ("trained", "zero_spread")]
    assert Counter(line["turns"] for line in used) == {2: 2 * 2 * 4}
    assert any(line["fate"] == "trained" for line in used)
    assert len({line["reward"] for line in used}) > 1
    assert left_behind(tmp_path) == []


@needs_verifiers
@pytest.mark.timeout(2 * REAL_S)
def test_the_taskset_openenv_that_comes_with_verifiers_is_trained_with_its_own_chat_loop(tmp_path, model, monkeypatch):
    monkeypatch.setattr(jobs, "COMMAND_S", REAL_S)
    with subprocess.Popen([REAL, HERE / "openenv_server.py"], stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            port = int(server.stdout.readline().split()[1])
            taskset = {"id": "openenv", "base_url": f"http://127.0.0.1:{port}", "resets": [{"seed": seed} for seed in range(8)]}
            task = {"taskset": taskset, "python": str(REAL)}
            config(tmp_path, task, base=LEARNING, engine=REAL_ENGINE, rollout={"max_len": 1024, "max_new_tokens": 8})
            ended = ran(tmp_path, model, "env.concurrency=2", "run.steps=1", LOADED)
        finally:
            server.kill()

    assert ended.code == ExitCode.DONE, ended.out + ended.err
    used = [line for line in samples(tmp_path) if line["fate"] in ("trained", "zero_spread")]
    assert Counter(line["turns"] for line in used) == {2: 4}
    assert left_behind(tmp_path) == []
