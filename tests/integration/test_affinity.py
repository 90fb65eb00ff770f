"""Hardware affinity in a run as a user starts it: what is learned is shown and logged, and what can't be is refused."""

import json

import pytest

from rubato.actors.training.base_model import make_tokenizer, write_tokenizer
from rubato.runtime.errors import ExitCode
from tests.jobs import SMALL, rubato

pytestmark = pytest.mark.slow

TEXT = """
class Shown:
    def __init__(self, *, tokens):
        self._text = "a" * tokens

    def reset(self, *, seed):
        return self._text, {}

    def step(self, action):
        return "", float(len(action) % 2), True, False, {}
"""

ENGINE = (
    "engine: {kind: scripted, num_slots: 8, max_len: 4096, max_batch_tokens: 4096, scripted: {stop_share: 0.0, vocab_size: %d}, "
    "pace: {hardware: h800, model: qwen3-8b, scale: 0.1}}"
)
POOLS = (
    '  engine: {class: "rubato.actors.engines.worker:EngineWorker", pools: {near: {count: 1, hardware: h800}, '
    "far: {count: 2, hardware: h20, set: {engine.pace.hardware: h20}}}}"
)
TASKS = """
tasks:
  read: {class: "shown.py:Shown", kwargs: {tokens: 2400}, max_turns: 1, max_new_tokens: 4}
  write: {class: "shown.py:Shown", kwargs: {tokens: 20}, max_turns: 1, max_new_tokens: 128}
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("affinity")
    write_tokenizer(folder / "model")
    lines = [line for line in SMALL.splitlines() if not line.startswith(("  engine:", "engine:", "rollout:", "train:"))]
    at = lines.index("actors:") + 1
    config = "\n".join([*lines[:at], POOLS, *lines[at:]]).replace("concurrency: 8", "concurrency: 32")
    config += "\n" + ENGINE % make_tokenizer().get_vocab_size() + TASKS
    config += f"model: {{path: {folder / 'model'}}}\nrollout: {{max_len: 4096}}\nstaleness: {{alpha: 2}}\n"
    config += "train: {kind: scripted, batch_groups: 8, group_size: 2}\n"
    (folder / "two.yaml").write_text(config)
    (folder / "shown.py").write_text(TEXT)
    return folder


def test_a_plan_is_learned_and_told_with_its_reason(place):
    ended = rubato("launch", "two.yaml", "--run-dir", "run", "affinity=learned", "run.steps=6", cwd=place)

    assert ended.code == ExitCode.DONE, ended.err
    lines = [json.loads(line) for line in (place / "run" / "logs" / "llm_proxy-1.jsonl").read_text().splitlines()]
    plans = [line for line in lines if line["event"] == "affinity_planned"]
    assert plans[-1]["shares"]["write"] == {"h20": 1.0}
    assert plans[-1]["shares"]["read"]["h800"] > 0.5
    assert plans[-1]["why"].startswith("task read → h800: ")
    assert "affinity: task read → h800: " in ended.out + ended.err


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("affinity.raed=h20", "Did you mean read?"),
        ("affinity.read=h200", "affinity.read must be the hardware class of a pool: 'h200' is none of h20, h800"),
        ("affinity=learnd", "Did you mean learned?"),
    ],
)
def test_a_map_that_names_what_is_not_there_is_one_sentence_before_anything_starts(place, change, words):
    ended = rubato("launch", "two.yaml", "--dry-run", change, cwd=place)

    assert ended.code == ExitCode.REFUSED, ended.out
    assert words in ended.err
    assert "Traceback" not in ended.err
    assert len(ended.err.strip().splitlines()) == 1
