"""Evaluations of a whole job: beside training, exact in their version, and what becomes of them when engines die."""

import asyncio
import json

import pytest

from rubato.runtime.config.compose import from_mapping
from rubato.runtime.embed import embed
from rubato.sim.simtest.toys import write_tokenizer
from tests.virtual import virtual


class Slow:
    """Two turns, which take a held-out rollout as long as many training steps."""

    held_out = {"step_s": 3.0}

    def __init__(self, step_s=0.01):
        self.step_s = step_s

    async def reset(self, *, seed):
        self.turns = 0
        return "go", {}

    async def step(self, action):
        await asyncio.sleep(self.step_s)
        self.turns += 1
        return "go on", float(len(action) % 2), self.turns == 2, False, {}

    async def close(self):
        pass


@pytest.fixture
def model_folder(tmp_path):
    return write_tokenizer(tmp_path / "model")


def job(folder, engines, **changes):
    roles = {
        "sample_buffer": "rubato.actors.samples.buffer:SampleBuffer",
        "llm_proxy": "rubato.actors.proxy.proxy:LLMProxy",
        "engine": "rubato.actors.engines.worker:EngineWorker",
        "env_manager": "rubato.actors.envs.manager:EnvManager",
        "trainer": "rubato.actors.training.trainer:Trainer",
    }
    tree = {
        "run": {"steps": 40},
        "actors": {role: {"class": target} for role, target in roles.items()},
        "model": {"path": str(folder)},
        "env": {"class": f"{__file__}:Slow", "concurrency": 16, "isolation": "inline"},
        "engine": {"kind": "scripted", "num_slots": 4, "max_len": 512, "scripted": {"vocab_size": 8}},
        "rollout": {"max_new_tokens": 4, "max_len": 256},
        "train": {"kind": "scripted", "batch_groups": 2, "group_size": 2, "scripted": {"step_s": 0.0, "weights_mib": 0.01}},
        "check": {"enabled": False},
        "eval": {"every": 10, "num_tasks": 6, "final_num_tasks": 12},
        "report": {"finish": ""},
    }
    tree["actors"]["engine"]["count"] = engines
    return from_mapping(tree | changes)


def lines(folder, name):
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


@pytest.mark.parametrize("engines", [1, 2, 3])
def test_evaluations_are_exact_and_training_goes_on_beside_them(engines, model_folder, tmp_path):
    @virtual
    async def run():
        async with embed(job(model_folder, engines), tmp_path / "run") as running:
            await running.done()

    run()
    evals, steps = lines(tmp_path / "run", "evals.jsonl"), lines(tmp_path / "run", "metrics.jsonl")

    assert [(row["num"], row["failed"]) for row in evals] == [(6, 0)] * (len(evals) - 1) + [(12, 0)]
    assert evals[0]["version"] == 0
    assert evals[-1]["version"] == 40
    assert [row["step"] for row in steps] == list(range(1, 41))
    carried = [row for row in steps if "eval/version" in row]
    assert carried[-1]["eval/version"] == 40
    assert {row["eval/version"] for row in carried} <= {row["version"] for row in evals}
    # It takes six seconds and a step a tenth: one engine lets training run to the end of what may train without newer weights.
    assert len([row for row in steps if row["time/wall_s"] < 6.0]) >= (2 if engines == 1 else 30)


@virtual
async def test_an_engine_that_dies_in_the_last_evaluation_costs_nothing_but_time(model_folder, tmp_path):
    async with embed(job(model_folder, 2, eval={"every": 0, "final_num_tasks": 12}), tmp_path / "run") as running:
        async for row in running.rows():
            if row["step"] == 39:
                break
        await asyncio.sleep(4.0)
        running._agent.host._hosted["engine-1"].instance.kill()
        await running.done()

    (row,) = lines(tmp_path / "run", "evals.jsonl")
    assert (row["version"], row["num"], row["failed"]) == (40, 12, 0)
