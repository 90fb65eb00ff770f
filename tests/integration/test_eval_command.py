"""`rubato eval` as a user types it."""

import json

import pytest
from peft import LoraConfig, get_peft_model
from safetensors import numpy as tensor_files
from transformers import AutoModelForCausalLM

from rubato.actors.checkpoints import checkpoint as checkpoints
from rubato.runtime.config.compose import load
from rubato.runtime.errors import ExitCode
from tests.jobs import LEARNING, rubato, write_model
from tests.models import write_model as write_tiny

pytestmark = pytest.mark.slow

SMALLEST = LEARNING.replace("kind: scripted, scripted: {token_s: 0.0}", "kind: torch, num_slots: 16").replace(
    "final_num_tasks: 0", "final_num_tasks: 4"
)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A run with two checkpoints, one of other weights, and the model that it began with."""
    folder = tmp_path_factory.mktemp("eval")
    (folder / "small.yaml").write_text(SMALLEST)
    model = write_model(folder / "model")
    for step in (2, 4):
        files = {path.name: path.read_bytes() for path in model.iterdir() if path.is_file()}
        files["optimizer.state"] = b"no tensors of a model"
        checkpoints.write(folder / "run" / "checkpoints" / f"step_{step}", files, step=step, term=1)
    return folder


def test_every_checkpoint_of_a_run_is_evaluated_as_the_version_that_it_is(place):
    ended = rubato("eval", "run", "small.yaml", "--all", "--json", "--out", "all.jsonl", "eval.samples=2", cwd=place)

    assert ended.code == ExitCode.DONE, ended.err
    rows = [json.loads(line) for line in ended.out.splitlines()]
    assert [(row["version"], row["num"], row["failed"]) for row in rows] == [(2, 8, 0), (4, 8, 0)]
    own = {"task/env/avg@2", "task/env/pass@2"}
    assert {"reward", "avg@2", "pass@1", "pass@2", "samples", "temperature", "top_p", *own} <= rows[0].keys()
    assert [json.loads(line) for line in (place / "all.jsonl").read_text().splitlines()] == rows
    for row in rows:
        assert row["samples_file"] in ended.err
        samples = [json.loads(line) for line in (place / row["samples_file"]).read_text().splitlines()]
        assert [(each["row"], each["sample"]) for each in samples] == [(n, k) for n in range(4) for k in range(2)]
        assert sum(each["reward"] for each in samples) == pytest.approx(8 * row["reward"])
        assert all(each["text"] and each["turns"] and each["finish"] in ("stop", "length") for each in samples)


@pytest.mark.parametrize("of", ["run", "run/checkpoints/step_2"])
def test_a_run_and_each_of_its_checkpoints_need_no_config(place, of):
    (place / "run" / "config.yaml").write_text(load(place / "small.yaml").dump())

    ended = rubato("eval", of, "--json", "eval.final_num_tasks=2", cwd=place)

    (place / "run" / "config.yaml").unlink()
    assert ended.code == ExitCode.DONE, ended.err
    (row,) = map(json.loads, ended.out.splitlines())
    assert (row["version"], row["num"]) == (2 if of.endswith("2") else 4, 2)


def test_a_checkpoint_in_several_files_is_evaluated_as_one_in_one_file(place):
    files = {path.name: path.read_bytes() for path in (place / "model").iterdir() if path.is_file()}
    tensors = tensor_files.load(files.pop("model.safetensors"))
    parts = {"model-1.safetensors": [*tensors][::2], "model-2.safetensors": [*tensors][1::2]}
    files |= {file: tensor_files.save({name: tensors[name] for name in names}) for file, names in parts.items()}
    index = {"weight_map": {name: file for file, names in parts.items() for name in names}}
    files["model.safetensors.index.json"] = json.dumps(index).encode()
    checkpoints.write(place / "sharded" / "checkpoints" / "step_2", files, step=2, term=1)

    whole, sharded = (rubato("eval", run, "small.yaml", "--json", cwd=place) for run in ("run/checkpoints/step_2", "sharded"))

    assert (whole.code, sharded.code) == (ExitCode.DONE, ExitCode.DONE), sharded.err
    assert json.loads(sharded.out)["reward"] == json.loads(whole.out)["reward"]
    assert json.loads(sharded.out)["version"] == 2


def test_a_model_folder_and_the_newest_checkpoint_of_a_run_make_a_table(place):
    for name, version in (("model", 0), ("run", 4)):
        ended = rubato("eval", name, "small.yaml", cwd=place)

        assert ended.code == ExitCode.DONE, ended.err
        head, row = ended.out.splitlines()
        assert head.split() == ["version", "reward", "num", "failed", "model"]
        assert [int(float(cell)) for cell in (row.split()[0], *row.split()[2:4])] == [version, 4, 0]
        assert row.split()[-1].startswith(str(place / name))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("gone", "small.yaml"), "gone is no folder. Name a model folder, a checkpoint, or the folder of a run."),
        (("model",), "model is of no run with a config.yaml, so eval needs a config: rubato eval model configs/quickstart.yaml"),
        (("run", "eval.samples=2"), "run is of no run with a config.yaml, so eval needs a config"),
        (("model", "gone.yaml"), "gone.yaml does not exist."),
        (("model", "small.yaml", "eval.sample=2"), "eval.sample is not a key. Did you mean eval.samples?"),
        (("model", "small.yaml", "eval.samples=0"), "eval.samples"),
        (("model", "small.yaml", "--all"), "model has no checkpoints: --all goes with the folder of a run."),
        ((".", "small.yaml"), "has no config.json"),
    ],
)
def test_a_mistake_is_one_sentence(arguments, words, place):
    ended = rubato("eval", *arguments, cwd=place)

    assert ended.code != ExitCode.DONE
    assert words in ended.err
    assert len(ended.err.strip().splitlines()) == 1
    assert ended.out == ""


def test_an_adapter_that_others_made_is_evaluated_over_its_base_model(place):
    config = LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8, target_modules=["q_proj"], init_lora_weights=False)
    get_peft_model(AutoModelForCausalLM.from_pretrained(place / "model"), config).save_pretrained(place / "adapter")

    ended = rubato("eval", "adapter", "small.yaml", "--json", cwd=place)
    refused = rubato("eval", "adapter", "small.yaml", f"model.path={write_tiny(place / 'other')}", cwd=place)

    assert ended.code == ExitCode.DONE, ended.err
    row = json.loads(ended.out)
    assert (row["version"], row["num"], row["failed"], row["model"]) == (1, 4, 0, str(place / "adapter"))
    assert refused.code == ExitCode.REFUSED
    assert "it is an adapter of another base model, or of another rank" in refused.err
