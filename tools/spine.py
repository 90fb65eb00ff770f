"""Measures what a job without options loads, and what its spine says of mechanisms that it does not use.

    python tools/spine.py [--json FILE] [--hold] [--static]

The quickstart is played for three steps, and each of five roles tells the project's modules that it has loaded by its end. Its actors are
started by themselves: forked from the warm parent they would have what all roles of their host need. `files` and `lines` are those of all
five together; empty files don't count. `mentions` are words of WORDS in the twelve files of the spine, docstrings and comments included.

--hold exits 1 where a figure is above the last of its BOUNDS; --static counts mentions alone.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

ROLES = ("sample_buffer", "llm_proxy", "engine", "env_manager", "trainer")

SPINE = (
    "actors/envs/manager.py",
    "actors/envs/rollout.py",
    "actors/envs/chat.py",
    "actors/proxy/proxy.py",
    "actors/proxy/placement.py",
    "planning/routing.py",
    "actors/engines/worker.py",
    "actors/engines/torch_engine.py",
    "actors/samples/buffer.py",
    "actors/samples/group.py",
    "actors/training/trainer.py",
    "actors/training/publishing.py",
)

WORDS = {
    "affinity": "affinity affinities",
    "stages": "prefill prefills prefilled prefilling stages",
    "moves": "move moves moved moving parked exported exports handover",
    "orchestrator": "orchestrator orchestrators orchestration orchestrated reconfigure reconfigured asleep",
    "cluster": "permit permits permitted cluster clusters phase phases regrouping",
    "tail batching": "tail tails",
    "adaptive alpha": "adaptive adapt adapts",
    "dynamic sampling": "dynamic surplus",
    "reward deadlines": "deadline deadlines",
    "fabric": "fabric fabrics circuit circuits optical",
    "pace": "pace paces paced pacing",
    "scripted": "scripted script scripts",
    "adapters": "adapters adapted lora peft",
}
"""Mechanism → its words, singly and as parts of names: `_affinity`, `PrefillStage`, `with_permit`."""

BOUNDS: dict[str, tuple[int, ...]] = {
    "files": (155, 134, 122, 102, 100, 95, 94),
    "lines": (31500, 29010, 27000, 25300, 25200, 25020, 25018),
    "mentions": (453, 20, 11),
}
"""Figure → the bounds that it has had. The last holds; a new one is lower than that, and is appended. A bound of 25,150 lines
was given up: a Store that fails over, mirrors of checkpoints and hosts placed by others have keys and seams that every actor loads.
"""

STEPS = ("run.steps=3", "eval.num_tasks=8", "eval.final_num_tasks=8")
LIMIT_S = 600.0

HOOK = """
import atexit, json, os, sys

def tell():
    if sys.argv[0].endswith("node.py") or "rubato.runtime.node" in sys.orig_argv:
        loaded = sorted(name for name in list(sys.modules) if name.partition(".")[0] == "rubato")
        with open(os.path.join(os.environ["RUBATO_SPINE"], sys.argv[-1]), "w") as file:
            json.dump(loaded, file)

atexit.register(tell)
"""
"""A `sitecustomize`: each process of an actor writes what it has loaded, under its name."""


def modules() -> dict[str, list[str]]:
    """Role → the project's modules that its process had loaded when it ended."""
    with tempfile.TemporaryDirectory(prefix="rubato-spine-") as scratch:
        folder = Path(scratch)
        (folder / "hook").mkdir()
        (folder / "told").mkdir()
        (folder / "hook" / "sitecustomize.py").write_text(HOOK)
        apart = [f"actors.{role}.threads=2" for role in ROLES]  # what has more than one thread is never forked
        command = [sys.executable, "tools/launch.py", "configs/quickstart.yaml", *STEPS, *apart]
        path = os.pathsep.join(filter(None, [str(folder / "hook"), os.environ.get("PYTHONPATH")]))
        played = subprocess.run(
            [*command, "--run-dir", str(folder / "run")],
            cwd=ROOT, env={**os.environ, "PYTHONPATH": path, "RUBATO_SPINE": str(folder / "told")},
            capture_output=True, text=True, timeout=LIMIT_S, check=False,
        )  # fmt: skip
        if played.returncode:
            raise SystemExit(f"the quickstart ended with {played.returncode}: {played.stderr.strip()[-500:]}")
        told = {path.name: json.loads(path.read_text()) for path in (folder / "told").iterdir()}
    found = {role: sorted({m for name, ms in told.items() if name.startswith(f"{role}-") for m in ms}) for role in ROLES}
    if missing := [role for role, names in found.items() if not names]:
        raise SystemExit(f"no word from {', '.join(missing)}: actors no longer run as rubato.runtime.node, or end without their atexit")
    return found


def file_of(module: str) -> Path | None:
    """The file of `module`, where it is one of the project's and not empty."""
    place = ROOT.joinpath(*module.removeprefix("rubato.").split("."))
    found = next((p for p in (place.with_suffix(".py"), place / "__init__.py") if p.is_file()), None)
    return found if found is not None and found.stat().st_size else None


def words_of(text: str) -> Iterable[str]:
    """The words of `text` in small letters, names taken apart at `_` and at capitals."""
    return (word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", text))


def mentions() -> dict[str, int]:
    """Spine file → words in it that belong to a mechanism."""
    listed = frozenset(" ".join(WORDS.values()).split())
    return {name: sum(word in listed for word in words_of((ROOT / name).read_text())) for name in SPINE}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    parser.add_argument("--hold", action="store_true", help="exit 1 where one is above its bound")
    parser.add_argument("--static", action="store_true", help="mentions alone: no job is played")
    given = parser.parse_args()
    loaded = {} if given.static else modules()
    files = {file for names in loaded.values() for name in names if (file := file_of(name)) is not None}
    said = mentions()
    figures = {"files": len(files), "lines": sum(len(file.read_text().splitlines()) for file in files), "mentions": sum(said.values())}
    if given.json:
        given.json.write_text(json.dumps({"modules": loaded, **figures, "mentions": said}, indent=1))
    for name, num in said.items():
        print(f"{num:4}  {name}")
    for role, names in loaded.items():
        print(f"{len(names):4}  modules of {role}")
    print(", ".join(f"{figures[name]} {name} (<= {BOUNDS[name][-1]})" for name in figures))
    return int(given.hold and any(figures[name] > BOUNDS[name][-1] for name in figures))


if __name__ == "__main__":
    sys.exit(main())
