"""The three forms of embedding, each as a user has it: a copy of the example outside the checkout, and the installed package."""

import json
import runpy
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rubato.runtime.config.compose import from_mapping
from rubato.runtime.embed import embed
from rubato.runtime.memory import MemoryStore
from rubato.sim.audit import AuditLimits, audit
from tests.jobs import SMALL, clean_environment, left_behind, python, rubato, write_model

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).parent.parent.parent / "examples"
QUICKSTART = EXAMPLES.parent / "configs" / "quickstart.yaml"

MAX_LINES = 40


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "model")


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    """A folder of the user's with copies of the examples."""
    for example in EXAMPLES.glob("*.py"):
        shutil.copy(example, tmp_path)
    return tmp_path


@pytest.fixture
def running_job(elsewhere: Path, model: Path) -> Iterator[Path]:
    """The folder of a small run that goes on until it is stopped."""
    (elsewhere / "small.yaml").write_text(SMALL)
    command = [
        sys.executable,
        "-m",
        "rubato.runtime.cli",
        "launch",
        "small.yaml",
        "--run-dir",
        "run",
        "run.steps=100000",
        "staleness.alpha=50",  # whoever joins may be slow
        f"model.path={model}",
    ]
    with (elsewhere / "out").open("wb") as out:
        job = subprocess.Popen(command, cwd=elsewhere, env=clean_environment(), stdout=out, stderr=out)
    try:
        while job.poll() is None and not _rows(elsewhere / "run"):
            with pytest.raises(subprocess.TimeoutExpired):
                job.wait(0.1)
        assert job.poll() is None, (elsewhere / "out").read_text()
        yield elsewhere / "run"
    finally:
        rubato("stop", "--run", elsewhere / "run", "--now", cwd=elsewhere)
        job.wait(30)


@pytest.mark.parametrize("example", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_an_example_is_a_program_of_at_most_40_lines(example):
    assert len(example.read_text().splitlines()) <= MAX_LINES


def test_an_environment_and_a_reward_named_in_the_config_are_trained_on(elsewhere, model):
    shutil.copy(QUICKSTART, elsewhere)
    small = ("run.steps=2", "train.batch_groups=2", "train.group_size=2", "eval.final_num_tasks=4", "actors.engine.count=1")

    ended = rubato(
        "launch",
        "quickstart.yaml",
        "--run-dir",
        "run",
        "env.class=my_env.py:MyEnv",
        "reward.functions=[my_reward.py:brevity]",
        "prepare=[]",
        f"model.path={model}",
        *small,
        cwd=elsewhere,
    )

    assert ended.code == 0, ended.err + ended.out
    assert [row["step"] for row in _rows(elsewhere / "run")] == [1, 2]
    assert all(row["rollout/turns_mean"] == 3.0 for row in _rows(elsewhere / "run"))
    assert all(row["reward/brevity"] <= 0.0 for row in _rows(elsewhere / "run"))
    assert "eval/reward" in _rows(elsewhere / "run")[-1]
    assert left_behind(elsewhere / "run") == []


def test_the_actors_run_inside_a_program_of_the_users_own(elsewhere, model):
    shutil.copytree(model, elsewhere / "mine" / "model")

    ended = python("embedded_job.py", "mine", cwd=elsewhere)

    assert ended.code == 0, ended.err
    assert ended.out.splitlines()[-1] == "trained 3 steps"
    assert [line.split(":")[0] for line in ended.out.splitlines()[:-1]] == ["step 1", "step 2", "step 3"]
    assert [row["step"] for row in _rows(elsewhere / "mine")] == [1, 2, 3]


def test_an_embedded_job_replaces_the_one_before_and_keeps_its_model(elsewhere, model):
    shutil.copytree(model, elsewhere / "mine" / "model")
    example = elsewhere / "embedded_job.py"
    example.write_text(example.read_text().replace(", folder) as job", ", folder, force=True) as job"))

    for _ in range(2):
        ended = python("embedded_job.py", "mine", "run.steps=1", cwd=elsewhere)

        assert ended.code == 0, ended.err
        assert [row["step"] for row in _rows(elsewhere / "mine")] == [1]


async def test_a_job_that_was_cut_short_goes_on_with_the_store_that_it_had(elsewhere, model):
    shutil.copytree(model, elsewhere / "mine" / "model")
    tree = runpy.run_path(str(EXAMPLES / "embedded_job.py"))["JOB"]
    store = MemoryStore()

    async def cut_short():
        async with embed(from_mapping(tree, ["run.steps=20"]), elsewhere / "mine", store=store) as job:
            async for row in job.rows():
                if row["step"] == 3:
                    raise KeyError("the program ends here")

    with pytest.raises(KeyError):
        await cut_short()
    async with embed(from_mapping(tree, ["run.steps=5"]), elsewhere / "mine", store=store, resume=True) as job:
        await job.done()

    assert [row["step"] for row in _rows(elsewhere / "mine")] == [1, 2, 3, 4, 5]
    assert audit(elsewhere / "mine", AuditLimits(5, 4, 4, 1)).problems == []


def test_a_process_of_the_users_own_plays_rollouts_of_a_running_job(elsewhere, running_job):
    ended = python("join_job.py", running_job, cwd=elsewhere)

    assert ended.code == 0, ended.err
    assert 1 <= len(ended.out.splitlines()) <= 4, "it asked for up to four"
    assert all(line.endswith(": handed over") for line in ended.out.splitlines())


def test_a_guest_can_not_take_the_name_of_an_actor(elsewhere, running_job):
    (elsewhere / "impostor.py").write_text(
        "import asyncio, sys\nfrom rubato.runtime.guest import join\n"
        "async def main():\n    async with join(sys.argv[1], name='trainer-1'):\n        pass\n"
        "asyncio.run(main())\n"
    )

    ended = python("impostor.py", running_job, cwd=elsewhere)

    assert ended.err.splitlines()[-1].endswith("trainer-1 is taken in the run in " + str(running_job) + ". Join it under another name.")


def _rows(run: Path) -> list[dict[str, float]]:
    try:
        return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    except (OSError, ValueError):
        return []
