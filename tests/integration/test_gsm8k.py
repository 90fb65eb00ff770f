"""configs/gsm8k_qwen3_0.6b.yaml with a small model that lies as the Hugging Face hub keeps one: snapshots of links to blobs."""

import hashlib
import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.jobs import rubato, write_model

CONFIG = Path(__file__).parents[2] / "configs" / "gsm8k_qwen3_0.6b.yaml"
TEMPLATE = (
    "{% for message in messages %}{{ message.content }}{% if message.role == 'assistant' %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% if not enable_thinking %}-{% endif %}{% endif %}"
)

SMALL = (
    "engine.kind=torch", "engine.vllm={}", "model.device=cpu", "engine.max_len=256", "rollout.max_len=256", "tasks.gsm8k.max_new_tokens=8",
    "train.batch_groups=2", "train.group_size=2", "env.concurrency=8", "run.steps=2", "checkpoint.every=1", "eval.num_tasks=2",
    "eval.final_num_tasks=2",
)  # fmt: skip


def hub_copy(model: Path, cache: Path) -> Path:
    """What `hf download` prints the path of."""
    snapshot = cache / "models--Qwen--Qwen3-0.6B" / "snapshots" / "c1899de289a04d12100db370d81485cdf75e47ca"
    blobs = snapshot.parents[1] / "blobs"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for file in model.iterdir():
        blob = blobs / hashlib.sha256(file.read_bytes()).hexdigest()
        blob.write_bytes(file.read_bytes())
        (snapshot / file.name).symlink_to(Path("../../blobs") / blob.name)
    return snapshot


@pytest.mark.slow
def test_a_model_of_the_hub_s_cache_trains_and_its_checkpoints_stand_alone(tmp_path):
    model = write_model(tmp_path / "model")
    (model / "chat_template.jinja").write_text(TEMPLATE)
    snapshot = hub_copy(model, tmp_path / "hub")
    data = tmp_path / "data" / "gsm8k" / "main"
    data.mkdir(parents=True)
    rows = {"question": [f"What is {n} and 1?" for n in range(8)], "answer": [f"{n}+1={n + 1}\n#### {n + 1}" for n in range(8)]}
    for split in ("train", "test"):
        pyarrow.parquet.write_table(pyarrow.table(rows), data / f"{split}-00000-of-00001.parquet")

    ended = rubato("launch", str(CONFIG), f"model.path={snapshot}", *SMALL, "--run-dir", "run", cwd=tmp_path)

    assert ended.code == 0, ended.err
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    (tmp_path / "hub").rename(tmp_path / "gone")
    folder = tmp_path / "run" / "checkpoints" / "step_2"
    assert not any(path.is_symlink() for path in folder.iterdir())
    assert AutoTokenizer.from_pretrained(folder).chat_template == TEMPLATE
    assert AutoModelForCausalLM.from_pretrained(folder).num_parameters() > 0
