"""The whole job inside your own asyncio program: memory transport, memory store, no subprocess. Usage: embedded_job.py [FOLDER]"""

import asyncio
import sys
from pathlib import Path

from rubato.actors.training.base_model import make
from rubato.runtime.config.compose import from_mapping
from rubato.runtime.embed import embed

JOB = {
    "run": {"name": "embedded", "steps": 3},
    "actors": {
        "sample_buffer": {"class": "rubato.actors.samples.buffer:SampleBuffer"},
        "llm_proxy": {"class": "rubato.actors.proxy.proxy:LLMProxy"},
        "engine": {"class": "rubato.actors.engines.worker:EngineWorker"},
        "env_manager": {"class": "rubato.actors.envs.manager:EnvManager"},
        "trainer": {"class": "rubato.actors.training.trainer:Trainer"},
    },
    "model": {"path": "model"},
    "env": {"class": "rubato.actors.envs.frozen_lake:FrozenLakeText", "isolation": "inline"},
    "rollout": {"max_new_tokens": 2},
    "train": {"batch_groups": 4, "group_size": 4},
    "eval": {"every": 0, "final_num_tasks": 0},
}


async def main(folder: Path) -> None:
    if not (folder / "model").exists():
        make(folder / "model", seed=1, progress=lambda what, share: None)
    async with embed(from_mapping(JOB, sys.argv[2:]), folder) as job:
        async for row in job.rows():
            print(f"step {row['step']:.0f}: reward {row['reward/mean']:.2f}, age {row['staleness/max']:.0f}")
        print(await job.done())


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/embedded")))
