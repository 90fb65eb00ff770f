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

LEAN = {"NODE_OPTIONS": "--disable-wasm-trap-handler"}  # else node, from 20.15 or 22.2 on, reserves more than env.memory_mb should allow


def pi(task: dict[str, Any], home: Path) -> list[str]:
    """By OpenAI's chat completions, as streams."""
    models = [{"id": task["model"], "contextWindow": 32_000, "maxTokens": 4_096}]
    provider = {"api": "openai-completions", "baseUrl": task["base_url"], "apiKey": task["api_key"], "models": models}
    (settings := home / ".pi" / "agent").mkdir(parents=True)
    (settings / "models.json").write_text(json.dumps({"providers": {"rubato": provider}}))
    return ["pi", "-p", "--provider", "rubato", "--model", task["model"], "--no-session", task["prompt"]]


def codex(task: dict[str, Any], home: Path) -> list[str]:
    """By OpenAI's responses, as streams. Its own sandbox is left out: `env.sandbox` is around all of it."""
    provider = f'{{name="rubato", base_url="{task["base_url"]}", wire_api="responses", env_key="OPENAI_API_KEY"}}'
    settings = ["-c", 'model_provider="rubato"', "-c", f"model_providers.rubato={provider}", "-m", task["model"]]
    return ["codex", "exec", "--skip-git-repo-check", "--ephemeral", "-s", "danger-full-access", *settings, task["prompt"]]


if __name__ == "__main__":
    task = json.loads(Path(os.environ["RUBATO_TASK_FILE"]).read_text())
    with tempfile.TemporaryDirectory() as home:
        words = {"pi": pi, "codex": codex}[sys.argv[1]](task, Path(home))
        sys.exit(subprocess.run(words, env={**os.environ, **LEAN, "HOME": home}, stdin=subprocess.DEVNULL, check=False).returncode)
