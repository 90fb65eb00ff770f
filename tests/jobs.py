"""Whole runs for tests, as a user starts them: the installed `rubato` command in a folder of its own, and nothing left behind."""

import os
import resource
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import NamedTuple

COMMAND_S = 150.0
"""Longest one command may take: several times what it needs on two busy cores."""

SMALL = """
run: {name: small, steps: 2}
actors:
  sample_buffer: {class: "rubato.actors.samples.buffer:SampleBuffer"}
  llm_proxy: {class: "rubato.actors.proxy.proxy:LLMProxy"}
  engine: {class: "rubato.actors.engines.worker:EngineWorker"}
  env_manager: {class: "rubato.actors.envs.manager:EnvManager"}
  trainer: {class: "rubato.actors.training.trainer:Trainer"}
env: {isolation: inline, concurrency: 8}
engine: {kind: scripted, scripted: {token_s: 0.0}}
rollout: {max_turns: 3, max_new_tokens: 2}
train: {kind: scripted, batch_groups: 2, group_size: 2}
check: {enabled: false}
eval: {every: 0, final_num_tasks: 0}
checkpoint: {every: 1, keep: 3}
report: {finish: ""}
"""
"""Real actors and processes; the scripted engine answers at once, and nothing is learned, so that no process loads torch."""

LEARNING = SMALL.replace("train: {kind: scripted, ", "train: {")
"""The same with a trainer that learns."""

ACTING = "\n".join(line for line in SMALL.splitlines() if not line.startswith(("  trainer:", "check:", "eval:", "checkpoint:")))
"""SMALL without a trainer: what happens before the first batch is full."""


class Ended(NamedTuple):
    """How a command ended."""

    code: int
    out: str
    err: str


def rubato(*arguments: object, cwd: Path, largest_file: int = -1) -> Ended:
    """Run `rubato ARGUMENTS…` as installed for this interpreter, in the folder `cwd`."""
    return python("-m", "rubato.runtime.cli", *arguments, cwd=cwd, largest_file=largest_file)


def python(*arguments: object, cwd: Path, largest_file: int = -1) -> Ended:
    """Run `python ARGUMENTS…` to its end, without the checkout on its import path; no file may grow beyond `largest_file` bytes."""
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=cwd,
        env=clean_environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=COMMAND_S,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, largest_file)),
        check=False,
    )
    return Ended(done.returncode, done.stdout, done.stderr)


def clean_environment() -> dict[str, str]:
    """This process's, so that imports find what is installed and never what lies in the working folder."""
    return {**os.environ, "PYTHONSAFEPATH": "1", "PYTHONPATH": import_path()}


@cache
def import_path() -> str:
    """Empty where the package is installed, else the checkout: tests also run without an installation."""
    seen = subprocess.run(
        [sys.executable, "-P", "-c", "import rubato.runtime"],
        cwd="/",
        env={**os.environ, "PYTHONPATH": ""},
        capture_output=True,
        check=False,
    )
    return "" if seen.returncode == 0 else str(Path(__file__).parent.parent)


def left_behind(folder: Path) -> list[str]:
    """Command lines of processes that mention `folder`."""
    found: list[str] = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = entry.read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        except OSError:
            continue
        if str(folder) in line and int(entry.parent.name) != os.getpid():
            found.append(line)
    return found


def write_model(folder: Path) -> Path:
    """The quickstart's base model before it learned anything: for runs where only its form matters."""
    from rubato.actors.training.base_model import make

    make(folder, 1, lambda what, share: None, steps=0)
    return folder
