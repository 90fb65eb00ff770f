"""Agents of others, as they are installed by `.ci/agents install`, play a job's rollouts: what was sampled is what is trained."""

import json
import os
import shutil
import sys
from pathlib import Path

import msgspec
import pytest
from tokenizers import Tokenizer

from rubato.actors.messages.samples import Trajectory
from rubato.bus.message import unpack_i32
from rubato.runtime.bubblewrap import Sandbox, flaw_of
from rubato.runtime.errors import ExitCode
from tests.chat_models import chat_model
from tests.jobs import SMALL, left_behind, rubato

pytestmark = pytest.mark.slow

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[2]
PLACE = ROOT / ".venv-agents"
BIN = PLACE / "node_modules" / ".bin"

TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}{% for call in m.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>{% endfor %}<|im_end|>\n'
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

ENV = """
class Finds:
    held_out = {}

    def reset(self, *, seed):
        return "What does the place hold?", {}

    def step(self, action):
        return "", float("holds the widget" in action), True, False, {}

    def close(self): ...
"""

ENDS = ["It holds the widget.", "It holds no widget."]


def call(name, **arguments):
    """As a model writes it, and no client writes it again: by its numbers and its white space. The tokenizer has `widget` whole."""
    told = json.dumps(arguments, separators=(" ,", " : "))
    return f'<think>\nwhere is the widget?\n</think>\n\n<tool_call>\n{{"name" : "{name}" ,"arguments" : {told}}}\n</tool_call>'


def played(tmp_path, monkeypatch, agent, *calls, sandboxed=False):
    """How a job of one step went whose model makes `calls`, then says one of ENDS: each trajectory, and what the engine was asked and wrote."""
    monkeypatch.setenv("PATH", f"{BIN}:{os.environ['PATH']}")
    model = chat_model(tmp_path / "model", template=TEMPLATE)
    (model / "says.json").write_text(json.dumps([*calls, ENDS]))
    (tmp_path / "finds.py").write_text(ENV)
    engine = f'kind: "{HERE / "writing_engine.py"}:WritingEngine", max_len: 262144, scripted: {{token_s: 0.0, vocab_size: 512}}'
    config = SMALL.replace("kind: scripted, scripted: {token_s: 0.0}", engine).replace("isolation: inline, ", "")
    (tmp_path / "small.yaml").write_text(config)
    node = Path(shutil.which("node") or "/usr/bin/node").resolve().parent
    shown = [str(PLACE), str(ROOT / "examples"), str(node)]
    more = ["env.sandbox=bwrap", f"env.sandbox_read={json.dumps(shown)}", "env.memory_mb=4096"] if sandboxed else []

    ended = rubato(
        "launch", "small.yaml", "--run-dir", "run", f"model.path={model}", "run.steps=1", "train.batch_groups=1", "env.class=finds.py:Finds",
        f"env.agent={agent}", "env.agent_timeout_s=40", "rollout.max_new_tokens=512", "rollout.max_len=262144", "samples.max_barren_groups=2",
        *more, cwd=tmp_path,
    )  # fmt: skip

    assert ended.code == ExitCode.DONE, ended.out + ended.err
    assert left_behind(tmp_path) == []
    kept = [msgspec.msgpack.decode(path.read_bytes(), type=Trajectory) for path in (tmp_path / "run" / "trajectories").iterdir()]
    wrote = [json.loads(line) for line in (model / "wrote.jsonl").read_text().splitlines()]
    ledger = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    assert sorted(line["reward"] for line in ledger if line["fate"] == "trained") == [0.0, 1.0]
    return kept, wrote, Tokenizer.from_file(str(model / "tokenizer.json"))


def check_exact(kept, wrote, tokenizer, turns):
    """Each trajectory is one context, sampled where the engine wrote, token for token, and its reward is that of its own last words."""
    assert len(kept) >= 2
    for trajectory in kept:
        (segment,) = trajectory.segments
        tokens, mask = [*unpack_i32(segment.tokens)], [*segment.mask]
        own = [(prompt, text) for prompt, text in wrote if tokens[: len(prompt) + len(text)] == prompt + text]
        own = [each for at, each in enumerate(own) if each not in own[:at]]  # another session may have begun with the same
        assert len(own) == trajectory.turns == turns
        sampled = [0] * len(tokens)
        for prompt, text in own:
            sampled[len(prompt) : len(prompt) + len(text)] = [1] * len(text)
        assert mask == sampled
        said = [tokenizer.decode(text, skip_special_tokens=False) for _, text in own]
        assert [tokenizer.encode(each).ids != text for each, (_, text) in zip(said, own, strict=True)] == [True] * turns
        assert (
            "widget-42"
            in tokenizer.decode(own[-1][0], skip_special_tokens=False).rpartition("<|im_start|>")[0].rpartition("</tool_call>")[2]
        )
        assert trajectory.reward == float(ENDS[0] in said[-1])


@pytest.mark.parametrize(
    ("name", "calls"),
    [
        ("pi", [call("write", path="note.txt", content="widget-42"), call("bash", command="cat note.txt", timeout=9.0)]),
        ("codex", [call("exec_command", cmd="echo widget-$((6 * 7)) > note.txt; cat note.txt", yield_time_ms=9000)]),
    ],
)
def test_a_coding_agent_uses_its_tools_in_a_sandbox_and_is_trained_token_for_token(tmp_path, monkeypatch, name, calls):
    if not (BIN / name).exists():
        pytest.skip(f"{name} is not installed: .ci/agents install")
    if flaw := flaw_of(Sandbox()):
        pytest.skip(f"no sandbox can be had here: {flaw}")
    plays = f"{sys.executable} {ROOT}/examples/coding_agents.py {name}"

    agent = f"""sh -c '{plays} && test "$(cat note.txt)" = widget-42'"""  # a file that is not there is an agent that failed

    found = played(tmp_path, monkeypatch, agent, *calls, sandboxed=True)

    check_exact(*found, turns=len(calls) + 1)


@pytest.mark.parametrize("kind", ["by_chat", "by_responses", "by_messages"])
def test_an_agent_of_a_framework_uses_its_tool_and_is_trained_token_for_token(tmp_path, monkeypatch, kind):
    python = PLACE / "bin" / "python"
    if not python.exists():
        pytest.skip("openai-agents and anthropic are not installed: .ci/agents install")

    found = played(tmp_path, monkeypatch, f"{python} {HERE}/framework_agents.py {kind}", call("found_in", place="box"))

    check_exact(*found, turns=2)
