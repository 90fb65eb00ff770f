"""pi and codex as agents that a job trains: env.agent="python /…/examples/coding_agents.py codex", and either of them in PATH.

    npm install @mariozechner/pi-coding-agent @openai/codex

Each works in the folder that it starts in. What it says at its end is scored by the task's environment; see docs/agents.md.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

LIMITS = {"contextWindow": 32_000, "maxTokens": 4_096}
"""Of the model, as pi is told."""


LEAN = {"NODE_OPTIONS": "--disable-wasm-trap-handler"}
"""Else node reserves more addresses than `env.memory_mb` should allow; for node 20.15, 22.2, or later."""


def pi(task: dict[str, Any], home: Path) -> list[str]:
    """By OpenAI's chat completions, as streams."""
    models = [{"id": task["model"], **LIMITS}]
    provider = {"api": "openai-completions", "baseUrl": task["base_url"], "apiKey": task["api_key"], "models": models}
    settings = home / ".pi" / "agent"
    settings.mkdir(parents=True)
    (settings / "models.json").write_text(json.dumps({"providers": {"rubato": provider}}))
    return ["pi", "-p", "--provider", "rubato", "--model", task["model"], "--no-session", task["prompt"]]


def codex(task: dict[str, Any], home: Path) -> list[str]:
    """By OpenAI's responses, as streams. Its own sandbox is left out: `env.sandbox` is around all of it."""
    provider = f'{{name="rubato", base_url="{task["base_url"]}", wire_api="responses", env_key="OPENAI_API_KEY"}}'
    settings = ["-c", 'model_provider="rubato"', "-c", f"model_providers.rubato={provider}", "-m", task["model"]]
    return ["codex", "exec", "--skip-git-repo-check", "--ephemeral", "-s", "danger-full-access", *settings, task["prompt"]]


def main(name: str) -> int:
    """Play the task of RUBATO_TASK_FILE; the agent's exit code."""
    task = json.loads(Path(os.environ["RUBATO_TASK_FILE"]).read_text())
    with tempfile.TemporaryDirectory() as home:
        words = {"pi": pi, "codex": codex}[name](task, Path(home))
        return subprocess.run(words, env={**os.environ, **LEAN, "HOME": home}, stdin=subprocess.DEVNULL, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
