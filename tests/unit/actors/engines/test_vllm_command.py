"""The line that starts a server for a job."""

import shlex
from pathlib import Path

import pytest
import yaml

from rubato.actors.config import ModelSection
from rubato.actors.engines.section import EngineSection
from rubato.actors.engines.vllm_command import line
from rubato.runtime.cli import main

CONFIG = Path(__file__).resolve().parents[4] / "configs/quickstart_vllm.yaml"
SERVER = ["engine.kind=vllm_server", "engine.url=http://127.0.0.1:8123"]


def flags_of(words):
    """Flag → value, or None where it has none."""
    named = [(at, word) for at, word in enumerate(words) if word.startswith("--")]
    return {word: (words[at + 1] if at + 1 < len(words) and not words[at + 1].startswith("--") else None) for at, word in named}


def test_the_line_has_what_the_engine_will_ask_for_and_what_the_config_says(capsys, tmp_path):
    code = main(["vllm-command", str(CONFIG), *SERVER, "engine.api_key_env=MY_KEY", "model.device=cpu", "--run-dir", str(tmp_path)])
    printed = capsys.readouterr().out
    words = shlex.split(printed)
    flags = flags_of(words)

    assert code == 0
    assert printed.startswith('VLLM_SERVER_DEV_MODE=1 VLLM_API_KEY="$MY_KEY" ')
    assert flags["--model"] == str(tmp_path / "model")
    assert flags["--worker-extension-cls"] == "rubato.actors.engines.vllm_weights.WorkerExtension"
    assert yaml.safe_load(flags["--weight-transfer-config"]) == {"backend": "rubato"}
    assert flags["--logprobs-mode"] == "processed_logprobs"
    assert {"--enable-scale-out", "--skip-tokenizer-init", "--enforce-eager", "--no-enable-chunked-prefill"} <= set(flags)
    assert (flags["--host"], flags["--port"], flags["--max-model-len"]) == ("127.0.0.1", "8123", "256")
    assert flags["--kv-cache-memory-bytes"] == "67108864"


def test_a_gpu_has_its_graphs_unless_asked_otherwise():
    told = line(Path("/m"), ModelSection(device="auto"), EngineSection(kind="vllm_server", url="https://gpu.example.com"))
    asked = line(
        Path("/m"), ModelSection(device="auto"), EngineSection(kind="vllm_server", url="https://gpu.example.com", enforce_eager=True)
    )

    assert told.words[:4] == ("vllm", "serve", "--model", "/m")
    assert flags_of(told.words)["--host"] == "127.0.0.1"
    assert "--no-enforce-eager" in told.words
    assert "--enforce-eager" in asked.words


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "engine.kind is vllm: only engine.kind=vllm_server has a server that others start."),
        (SERVER, "model.path model starts at the run's folder: name that with --run-dir, or give the whole path."),
        ([SERVER[0], "engine.url=http://10.1.1.1:1"], "goes to 10.1.1.1 in the clear"),
        ([*SERVER, "engine.api_key_env='A\"$(id)'"], "engine.api_key_env is"),
        ([*SERVER, "engine.vllm={logprobs-mode: raw_logits}"], "engine.vllm.logprobs-mode can't be set: this runtime needs it to be"),
        ([*SERVER, "engine.vllm={max_num_seqs: 4}"], "engine.vllm.max_num_seqs has another place here: set engine.num_slots instead."),
        ([*SERVER, "train.lora={rank: 4}"], "engine.kind=vllm_server takes no adapter, and train.lora trains one"),
    ],
)
def test_a_config_without_such_a_server_is_refused(capsys, words, sentence):
    code = main(["vllm-command", str(CONFIG), *words])

    assert code == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize(("name", "revision"), [("acme/tiny", None), ("acme/tiny@v1", "v1")])
def test_a_model_at_the_hub_is_named_as_the_hub_does_until_the_run_has_it(capsys, tmp_path, name, revision):
    words = ["vllm-command", str(CONFIG), *SERVER, f"model.path={name}"]

    main(words)
    before = flags_of(shlex.split(capsys.readouterr().out))
    (tmp_path / name).mkdir(parents=True)
    main([*words, "--run-dir", str(tmp_path)])
    after = flags_of(shlex.split(capsys.readouterr().out))

    assert (before["--model"], before.get("--revision")) == ("acme/tiny", revision)
    assert (after["--model"], after.get("--revision")) == (str(tmp_path / name), None)


def test_each_pool_with_a_server_of_its_own_has_a_line(capsys, tmp_path):
    pools = "{near: {set: {engine.url: 'http://127.0.0.1:8001'}}, far: {set: {engine.url: 'http://127.0.0.1:8002', engine.num_slots: 7}}}"
    words = [f"actors.engine={{class: 'rubato.actors.engines.worker:EngineWorker', pools: {pools}}}", "--run-dir", str(tmp_path)]

    main(["vllm-command", str(CONFIG), *SERVER, *words])

    told = [flags_of(shlex.split(line)) for line in capsys.readouterr().out.splitlines()]
    assert [(flags["--port"], flags["--max-num-seqs"]) for flags in told] == [("8001", "64"), ("8002", "7")]
