"""A job that serves Tinker's API: the SDK's own client through every call, recipes of its cookbook as they are, and processes that are killed.

The SDK lies in an environment of its own, see `.ci/tinker install`; without it only the tests that speak as it does run.
"""

import asyncio
import json
import math
import os
import signal
import statistics
import subprocess
import sys
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import httpx
import numpy as np
import pytest
import yaml
from safetensors.numpy import load_file

from tests.hub import hub
from tests.jobs import clean_environment, left_behind
from tests.tinker_job import Client, datum, output_of, sampled_of
from tests.tinker_model import write

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]

SDK = Path(os.environ.get("RUBATO_TINKER_SDK", ROOT / ".venv-tinker")) / "bin" / "python"

with_sdk = pytest.mark.skipif(not SDK.exists(), reason="missing: .venv-tinker, which .ci/tinker install makes")

NAME = "Qwen/Qwen3-8B"

START_S = 300.0

RECIPE_S = 600.0

CONFIG = {
    "run": {"name": "tinker"},
    "actors": {"engine": {"class": "rubato.actors.engines.worker:EngineWorker"}},
    "engine": {"max_len": 512},
    "checkpoint": {"every": 2},
}


def processes() -> list[str]:
    """Of each that there is its number and its command line."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            found.append(f"{entry.parent.name} {entry.read_bytes().replace(bytes(1), b' ').decode(errors='replace')}")
    return found


class Served:
    """A run of `rubato tinker`."""

    def __init__(self, folder: Path):
        self.folder = folder
        told = json.loads((folder / "tinker.json").read_text())
        self.url, self.key = told["url"], told["api_key"]

    def client(self):
        return Client(self.url, self.key)

    def pids(self, actor: str) -> set[int]:
        """Of the processes that an actor lives in."""
        return {int(line.split()[0]) for line in processes() if str(self.folder) in line and actor in line.split()}

    async def kill(self, actor: str) -> None:
        """And wait until another process is there."""
        while not (before := self.pids(actor)):  # noqa: ASYNC110 - of another process
            await asyncio.sleep(0.2)
        for pid in before:
            os.kill(pid, signal.SIGKILL)
        while not self.pids(actor) - before:  # noqa: ASYNC110
            await asyncio.sleep(0.2)

    def adapter(self, model: str, name: str) -> dict[str, np.ndarray]:
        models = self.folder / "tinker" / "models" / model
        seq = json.loads((models / "names" / "weights" / name).read_text())["seq"]
        return load_file(models / "saves" / str(seq) / "adapter_model.safetensors")

    def run(self, *words, timeout: float = RECIPE_S, **environment) -> subprocess.CompletedProcess:
        """A program in the SDK's environment."""
        more = {"TINKER_BASE_URL": self.url, "TINKER_API_KEY": self.key, "TINKER_TELEMETRY": "0", "PYTHONPATH": "", "TQDM_DISABLE": "1"}
        env = {**os.environ, **more, **environment}
        done = subprocess.run([SDK, *words], env=env, cwd=self.folder.parent, capture_output=True, text=True, timeout=timeout, check=False)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
        return done


@contextmanager
def served(folder: Path, model: Path, **sections):
    config = {**CONFIG, "tinker": {"models": {NAME: str(model)}, **sections.pop("tinker", {})}, **sections}
    file = folder / "job.yaml"
    file.write_text(yaml.safe_dump(config))
    run = folder / "run"
    words = [sys.executable, "-m", "rubato.runtime.cli", "tinker", str(file), "--run-dir", str(run)]
    with open(folder / "out", "wb") as out:
        process = subprocess.Popen(words, cwd=folder, env=clean_environment(), stdout=out, stderr=subprocess.STDOUT)
    try:
        deadline = START_S
        while not (run / "tinker.json").exists() and process.poll() is None and deadline > 0:
            with subprocess.Popen(["sleep", "0.5"]) as pause:
                pause.wait()
            deadline -= 0.5
        assert (run / "tinker.json").exists(), (folder / "out").read_text()
        yield Served(run)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(120)
    assert left_behind(run) == []


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write(tmp_path_factory.mktemp("model") / "model")


@pytest.fixture(scope="module")
def run(tmp_path_factory, model):
    with served(tmp_path_factory.mktemp("served"), model) as found:
        yield found


@with_sdk
def test_the_sdks_own_client_goes_through_every_call(run):
    done = run.run(str(Path(__file__).with_name("tinker_calls.py")), NAME)
    seen = json.loads(done.stdout.splitlines()[-1])

    assert seen["models"] == [NAME]
    assert seen["info"] == [NAME, 8]
    assert seen["losses"][0] > seen["losses"][1] > seen["losses"][2] > 0
    assert all(norm > 0 for norm in seen["norms"])
    assert seen["custom"] == pytest.approx(-sum(seen["logprobs"]), rel=1e-4)
    ratios = [math.exp(each + 3) for each in seen["logprobs"]]
    assert seen["policy"]["importance_sampling"] == pytest.approx(-ratios[0] + ratios[2], rel=1e-3)
    assert seen["paths"] == ["weights/one", "sampler_weights/one"]
    assert seen["again"] == [pytest.approx(seen["logprobs"], abs=1e-5)] * 2
    assert seen["weights_info"] == 8
    for kind in ("base", "named", "snapshot", "inflight"):
        assert all(0 < len(tokens) <= 5 and len(tokens) == len(logprobs) for tokens, logprobs in seen[kind])
    tokens = {kind: [each for each, _ in seen[kind]] for kind in ("base", "named", "snapshot", "inflight")}
    assert tokens["named"] == tokens["snapshot"] == tokens["inflight"] != tokens["base"]
    assert seen["scores"] == pytest.approx(seen["snapshot prompt"], abs=1e-4)
    assert seen["greedy"][0] == seen["greedy"][1]
    assert seen["top"]
    assert seen["handle"] == 1
    user = ["RequestFailedError", "user"]
    assert {name: seen["errors"][name] for name in ("loss", "shape", "token")} == dict.fromkeys(("loss", "shape", "token"), user)
    assert seen["errors"] == {
        **dict.fromkeys(("loss", "shape", "token"), user),
        "path": ["NotFoundError", ""],
        "model": ["BadRequestError", ""],
        "top_k": ["BadRequestError", ""],
        "absent": ["NotFoundError", ""],
    }


@pytest.fixture(scope="module")
def offline(tmp_path_factory, model):
    """Variables of a process whose hub has the model's tokenizer and the recipes' data sets, under the names by which they ask for them."""
    card = "---\nconfigs:\n- config_name: {}\n  data_files:\n  - split: train\n    path: train.jsonl\n---\n"
    asked = [{"question": f"What is {a} plus {7 - a}?", "answer": "Added. #### 7"} for a in range(8)] * 32
    turns = [{"role": "user", "content": "What is 3 plus 4?"}, {"role": "assistant", "content": "It is 7"}]
    with hub() as found:
        for name, config, rows in (("openai/gsm8k", "main", asked), ("HuggingFaceH4/no_robots", "default", [{"messages": turns}] * 64)):
            lines = "".join(json.dumps(row) + "\n" for row in rows)
            found.add(name, {"README.md": card.format(config).encode(), "train.jsonl": lines.encode()}, kind="dataset")
        found.add(NAME, {path.name: path.read_bytes() for path in model.iterdir() if path.suffix == ".json"})
        slow = {"HF_HUB_ETAG_TIMEOUT": "120", "HF_HUB_DOWNLOAD_TIMEOUT": "120"}
        yield {**found.environment(tmp_path_factory.mktemp("hf")), **slow}


def recipe(run, offline, name, log, **settings):
    """Its rows of metrics."""
    words = [f"{key}={value}" for key, value in {"base_url": run.url, "model_name": NAME, "log_path": log, **settings}.items()]
    run.run("-m", f"tinker_cookbook.recipes.{name}", *words, **offline)
    return [json.loads(line) for line in (log / "metrics.jsonl").read_text().splitlines()]


@with_sdk
def test_the_cookbooks_rl_loop_teaches_as_it_is(run, offline, tmp_path):
    settings = {"batch_size": 8, "group_size": 8, "learning_rate": 0.003, "max_tokens": 8, "lora_rank": 8, "save_every": 8}
    rows = recipe(run, offline, "rl_loop", tmp_path / "log", max_steps=12, **settings)

    rewards = [row["reward/total"] for row in rows if "reward/total" in row]
    assert len(rewards) == 12
    assert statistics.mean(rewards[:2]) < 0.4
    assert statistics.mean(rewards[-3:]) > 0.7, rewards
    assert rows[0]["rubato/unknown_frac"] == 0.0
    checkpoints = [json.loads(line) for line in (tmp_path / "log" / "checkpoints.jsonl").read_text().splitlines()]
    assert [each["name"] for each in checkpoints] == ["000008", "final"]
    assert checkpoints[-1]["sampler_path"].endswith("/sampler_weights/final")


@with_sdk
def test_the_cookbooks_sl_loop_teaches_as_it_is(run, offline, tmp_path):
    settings = {"batch_size": 8, "learning_rate": 0.01, "max_length": 128, "lora_rank": 8, "save_every": 3}
    rows = recipe(run, offline, "sl_loop", tmp_path / "log", max_steps=6, **settings)

    losses = [row["train_mean_nll"] for row in rows if "train_mean_nll" in row]
    assert len(losses) == 6
    assert losses[-1] < 0.5 * losses[0]


LESSONS = [[[*prompt_tokens, digit] for digit in (3, 4)] for prompt_tokens in ([5, 6, 7], [8, 9], [10, 11, 12, 13], [14])]


async def taught(run, name, kills=()):
    """The adapter after eight steps; before the step of its number each of `kills` is killed."""
    async with run.client() as client:
        body = {"session_id": await client.session(), "model_seq_id": 0, "base_model": NAME, "lora_config": {"rank": 4, "seed": 5}}
        model = (await client.result(await client.asked("create_model", body)))["model_id"]
        promises = []
        for step in range(8):
            for actor in [actor for due, actor in kills if due == step]:
                await run.kill(actor)
            lesson, seq = [datum(tokens[:-1], tokens[1:]) for tokens in LESSONS[step % len(LESSONS)]], 2 * step + 1
            learn, move = partial(client.learn, model, *lesson, seq=seq), partial(client.step, model, 0.01, seq=seq + 1)
            promises += [await persistent(client, learn), await persistent(client, move)]
        promises.append(await persistent(client, partial(client.numbered_post, "save_weights", model, seq=17, path=name)))
        told = [await persistent_result(client, promise) for promise in promises]
        assert all(isinstance(each, bytes) or "error" not in each for each in told), told
    return run.adapter(model, name), [output_of(each)[1]["loss:sum"] for each in told if isinstance(each, bytes)]


async def persistent(client, send):
    """As the SDK: a request that meets no server is sent again."""
    while True:
        try:
            answer = await send()
        except httpx.TransportError:
            await asyncio.sleep(0.3)
            continue
        if answer.status_code == 200:
            return answer.json()
        assert answer.status_code in (429, 500, 503), answer.text
        await asyncio.sleep(0.3)


async def persistent_result(client, promise):
    while True:
        try:
            return await client.result(promise)
        except httpx.TransportError:
            await asyncio.sleep(0.3)


async def test_whatever_is_killed_the_weights_are_those_of_an_undisturbed_run(run):
    undisturbed, losses = await taught(run, "undisturbed")
    killed, again = await taught(run, "killed", [(2, "tinker-1"), (3, "trainer-1"), (5, "trainer-1"), (5, "tinker-1"), (6, "engine-1")])

    assert again == pytest.approx(losses, rel=1e-6)
    assert undisturbed.keys() == killed.keys()
    assert all(np.array_equal(undisturbed[key], killed[key]) for key in undisturbed)


async def test_samplers_outlive_whatever_is_killed(run):
    async with run.client() as client:
        session = await client.session()
        body = {"session_id": session, "model_seq_id": 0, "base_model": NAME, "lora_config": {"rank": 4}}
        model = (await client.result(await client.asked("create_model", body)))["model_id"]
        lesson = datum([5, 6, 7], [6, 7, 8])
        promises = [(await client.learn(model, lesson)).json(), (await client.step(model, 0.01)).json()]
        samplers = []
        for number, kind in enumerate(("snapshot", "inflight")):
            saved = await client.numbered_post("save_weights_for_sampler", model, sampling_session_seq_id=number, kind=kind)
            samplers.append((await client.result(saved.json()))["sampling_session_id"])
        for promise in promises:
            await client.result(promise)
        for actor in ("trainer-1", "engine-1", "tinker-1"):
            await run.kill(actor)
        for sampler in samplers:
            asked = await persistent(client, partial(client.sample, sampler, n=2, prompt=(5, 6, 7)))
            pairs, _ = sampled_of(await persistent_result(client, asked))
            assert len(pairs) == 2
