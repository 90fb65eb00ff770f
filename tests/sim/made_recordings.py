"""A run folder as a live run would leave it, made from known costs: what calibration must find again."""

import json
import random
from pathlib import Path

import yaml

TURN_S, PROXY_S, SCORE_S, BUFFER_S, NODE_S = 2e-4, 1e-4, 3e-4, 5e-4, 4e-4
"""CPU seconds: per turn of env_manager and llm_proxy, per trajectory of reward_service, sample_buffer and node."""

STEP_S, ROW_S, TOKEN_S, REQUEST_S, UPDATE_S = 2e-3, 5e-5, 2e-5, 1e-4, 3e-3
TRAIN_S, TRAIN_TOKEN_S, PUBLISH_S, SAVE_S = 0.1, 1e-4, 0.02, 0.15
PROMPT, SHOWN, SAMPLED = 5, 6, 1
GROUPS, SIZE, EVERY = 4, 2, 5


def write(folder: Path, *, steps: int = 30, engines: int = 2, foreign_cores: float = 0.0) -> Path:
    """Steps of one second of waiting each; turns and the share of trained tokens vary."""
    chance = random.Random(7)
    rows, samples = [], []
    cpu = dict.fromkeys(["env_manager-1", "llm_proxy-1", "reward_service-1", "sample_buffer-1", "node-1", "trainer-1"], 1.0)
    cpu |= {f"engine-{i + 1}": 1.0 for i in range(engines)}
    host, wall_s, saved_s = 100.0, 0.0, 0.0
    num = GROUPS * SIZE
    for step in range(1, steps + 1):
        turns = [chance.randint(1, 14) for _ in range(num)]
        tokens = sum(PROMPT + SAMPLED + (SHOWN + SAMPLED) * (t - 1) for t in turns)
        trained = tokens * chance.choice((0.5, 0.75))
        train_s = TRAIN_S + TRAIN_TOKEN_S * trained
        used = {
            "env_manager-1": sum(turns) * TURN_S, "llm_proxy-1": sum(turns) * PROXY_S, "reward_service-1": num * SCORE_S,
            "sample_buffer-1": num * BUFFER_S, "node-1": num * NODE_S, "trainer-1": train_s,
        }  # fmt: skip
        used |= {f"engine-{i + 1}": sum(turns) * REQUEST_S / engines for i in range(engines)}
        cpu = {name: cpu[name] + used[name] for name in cpu}
        took_s = 1.0 + train_s + PUBLISH_S + saved_s
        wall_s += took_s
        host += sum(used.values()) + foreign_cores * took_s
        rows.append(
            {
                "step": step, "time/wall_s": wall_s, "time/step": took_s, "time/wait_for_batch": 1.0, "time/train": train_s,
                "time/publish": PUBLISH_S, "time/train_cpu": train_s, "rollout/turns_mean": sum(turns) / num,
                "rollout/len_mean": tokens / num, "perf/samples_s": num / took_s, "perf/train_tokens_s": trained / train_s,
                "cpu/host": host, "cpu/cores": 2.0, "idle/trainer-1": 0.4,
            }
            | {f"cpu/{name}": seconds for name, seconds in cpu.items()}
            | {f"idle/engine-{i + 1}": 0.2 + 0.2 * i for i in range(engines)}
        )  # fmt: skip
        samples += [{"fate": "trained", "version_first": step - 1, "turns": t, "tokens": t * SAMPLED} for t in turns]
        saved_s = SAVE_S if step % EVERY == 0 else 0.0
    (folder / "logs").mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(config(engines, steps)))
    lines(folder / "metrics.jsonl", rows)
    lines(folder / "samples.jsonl", samples)
    all_turns = sum(sample["turns"] for sample in samples)
    for i in range(engines):
        timed = []
        for _ in range(100):
            n = chance.randint(1, 60)
            k = n * chance.randint(1, 12)
            timed.append([n, k, STEP_S + n * ROW_S + k * TOKEN_S])
        told = {"cpu_s": 9.0, "updates": steps, "update_cpu_s": steps * UPDATE_S, "sampled": timed}
        told["process_cpu_s"] = 9.0 + steps * UPDATE_S + all_turns * REQUEST_S / engines
        lines(folder / "logs" / f"engine-{i + 1}.jsonl", [{"event": "ready"}, {"event": "step_times"} | told])
    return folder


def config(engines: int, steps: int) -> dict:
    roles = ("sample_buffer", "llm_proxy", "env_manager", "reward_service", "trainer")
    actors = {role: {"class": f"a.b:{role}", "count": 1} for role in roles} | {"engine": {"class": "a.b:E", "count": engines}}
    return {
        "run": {"name": "made", "seed": 3, "steps": steps}, "actors": actors,
        "train": {"batch_groups": GROUPS, "group_size": SIZE}, "checkpoint": {"every": EVERY},
    }  # fmt: skip


def lines(path: Path, objects: list[dict]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in objects))
