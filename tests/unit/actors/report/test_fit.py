"""`rubato fit`: the processes of a job on the GPUs that are stated, and every command of docs/models.md."""

import json
import re
import shlex
from pathlib import Path

import pytest

from rubato.actors.report import fit
from rubato.runtime.config.compose import load
from rubato.runtime.errors import ConfigError
from tests.models import write_model

ROOT = Path(__file__).parents[4]
PAGE = (ROOT / "docs" / "models.md").read_text()
COMMANDS = [line for line in PAGE.splitlines() if line.startswith("rubato fit ") and "CONFIG" not in line]


def fitted(capsys, *arguments: str) -> tuple[int, dict]:
    code = fit.main([*arguments, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_the_page_has_a_command_for_each_size_and_number_of_gpus():
    stated = {(found[1], found[2]) for line in COMMANDS if (found := re.search(r"--gpus (\S+) --shape (\S+)", line))}

    assert len(COMMANDS) == 12
    assert {gpus for gpus, _ in stated} == {"1x80GiB", "2x80GiB", "8x80GiB", "4x8x80GiB"}
    assert {shape for _, shape in stated} == {"qwen3-0.6b", "qwen3-8b", "qwen3-30b-a3b"}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_the_page_fits_what_it_states(command, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)

    code, told = fitted(capsys, *shlex.split(command)[2:])

    assert code == 0
    assert told["fits"] is True
    assert told["next_key"] == ""
    assert {each["actor"].rpartition("-")[0] for each in told["processes"]} <= {"engine", "trainer", "trainer_rank"}


@pytest.mark.parametrize(("gpus", "shape"), [("1x80GiB", "qwen3-8b"), ("2x80GiB", "qwen3-8b"), ("2x80GiB", "qwen3-30b-a3b")])
def test_what_the_page_says_does_not_fit_does_not_and_a_key_is_named(gpus, shape, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)

    code, told = fitted(capsys, "configs/gsm8k_qwen3_0.6b.yaml" if gpus == "1x80GiB" else "sized", "--gpus", gpus, "--shape", shape)

    assert code == 1
    assert told["fits"] is False
    assert told["next_key"]


def test_ranks_are_on_the_first_host_and_engines_that_are_brought_on_others(capsys):
    brought = "launch.hosts={far: {count: 3, pools: {serve: 8}}}"
    keys = ["train.mesh.shard=8", "actors.engine.pools.serve.count=0", "bus.host=10.0.0.1", brought]

    _, told = fitted(capsys, "sized", "--gpus", "4x8x80GiB", "--shape", "qwen3-30b-a3b", *keys)

    hosts = {(each["actor"].rpartition("-")[0], each["device"].partition(":")[0]) for each in told["processes"]}
    assert hosts == {("trainer_rank", "host-1"), ("engine", "host-2"), ("engine", "host-3"), ("engine", "host-4")}
    assert len(told["processes"]) == 32


def test_engine_and_trainer_without_pools_share_a_gpu(capsys, monkeypatch):
    monkeypatch.chdir(ROOT)

    _, told = fitted(capsys, "configs/gsm8k_qwen3_0.6b.yaml", "--gpus", "1x24GiB", "--shape", "qwen3-8b")

    assert {each["device"] for each in told["processes"]} == {"cuda:0"}
    assert told["fits"] is False


@pytest.mark.parametrize(
    ("gpus", "words", "key", "verdict"),
    [
        ("8x80GiB", ["train.mesh.shard=8"], "train.mesh.shard=7", "trainer_rank-8 would have cuda:8, but of 8 GPUs there is none left."),
        ("8x80GiB", ["train.mesh={shard: 4, replicate: 2}"], "train.mesh.shard=3", "trainer_rank-8 would have cuda:8"),
        ("4x80GiB", ["train.lora={}", "actors.engine.pools.serve.count=5"], "actors.engine.pools.serve.count=3", "would have cuda:5"),
        ("1x80GiB", [], "", "trainer-1 would have cuda:1, but of 1 GPUs there is none left."),
    ],
)
def test_gpus_that_are_not_there_are_told_and_no_key_that_would_not_do_with_those_that_are(gpus, words, key, verdict, capsys):
    words = ["sized", "--gpus", gpus, "--shape", "qwen3-8b", *words]

    code, told = fitted(capsys, *words)
    fit.main(words)

    assert (code, told["fits"], told["next_key"]) == (1, False, key)
    said = capsys.readouterr().out
    assert verdict in said
    assert said.rstrip().endswith(f"Set {key}." if key else "left.")


def test_an_adapter_of_a_mixture_is_of_its_attention(capsys):
    words = ["sized", "--gpus", "2x80GiB", "--shape", "qwen3-30b-a3b"]

    _, told = fitted(capsys, *words)
    fit.main(words)
    (given,) = shlex.split(capsys.readouterr().out.rpartition(" Set ")[2].rstrip().removesuffix("."))
    code, then = fitted(capsys, *words, given)

    assert given == told["next_key"] == 'train.lora={"targets": ["q_proj", "k_proj", "v_proj", "o_proj"]}'
    assert (code, then["fits"]) == (0, True)
    with pytest.raises(ConfigError, match=r"train\.lora\.targets names gate_proj, and routed experts get no adapter"):
        fit.main([*words, "train.lora={}"])


def test_more_ranks_than_there_are_may_be_the_key(capsys):
    _, told = fitted(capsys, "sized", "--gpus", "8x80GiB", "--shape", "qwen3-30b-a3b", "train.mesh.shard=2")

    assert told["next_key"] == "train.mesh.shard=7"


def test_a_host_without_gpus_is_not_taken_for_one_where_a_job_on_gpus_fits(monkeypatch):
    monkeypatch.setattr(fit, "_gpu_sizes", list)

    with pytest.raises(ConfigError, match=r"^model\.device is cuda, but torch sees no CUDA device here: say with --gpus"):
        fit.main(["sized", "--shape", "qwen3-0.6b"])


def test_a_run_has_its_model_in_its_folder(capsys, tmp_path):
    write_model(tmp_path / "model")
    (tmp_path / "config.yaml").write_text(load("quickstart").dump())

    code, told = fitted(capsys, str(tmp_path / "config.yaml"), "model.device=cpu")

    assert (code, len(told["processes"])) == (0, 3)


def test_a_model_without_a_shape_is_named(tmp_path):
    with pytest.raises(ConfigError, match=f"^model.path={tmp_path} has no config.json yet that says a model's shape"):
        fit.main(["sized", f"model.path={tmp_path}"])


def test_a_scripted_job_holds_no_model(capsys):
    keys = ["train.kind=scripted", "engine.kind=scripted"]

    code, told = fitted(capsys, "quickstart", "--gpus", "1x80GiB", "--shape", "qwen3-8b", *keys)

    assert (code, told["processes"]) == (0, [])


@pytest.mark.parametrize(
    "text", ["8", "80GiB", "8x", "x80GiB", "8x80", "8x80KB", "-1x80GiB", "0x80GiB", "8x0GiB", "0x8x80GiB", "1" * 9 + "x80GiB"]
)
def test_an_inventory_that_is_none_is_refused(text, capsys):
    with pytest.raises(SystemExit):
        fit.main(["sized", f"--gpus={text}"])

    assert "is not of the form 8x80GiB" in capsys.readouterr().err


def test_a_shape_that_is_not_there_is_refused_with_the_nearest(capsys):
    with pytest.raises(SystemExit):
        fit.main(["sized", "--gpus", "8x80GiB", "--shape", "qwen3-9b"])

    assert "argument --shape: 'qwen3-9b' is none of " in (said := capsys.readouterr().err)
    assert "Did you mean qwen3-8b?" in said
