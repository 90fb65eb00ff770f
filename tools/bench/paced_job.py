"""Live jobs on paced engines, for benches: started from a config in a folder of their own, up with all engines, and stopped at the end."""

import asyncio
import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from rubato.runtime.errors import LaunchError  # noqa: E402
from rubato.runtime.launch.card import running  # noqa: E402
from rubato.runtime.launch.children import die_with_parent  # noqa: E402
from rubato.runtime.registry import list_actors  # noqa: E402
from rubato.runtime.store.store import Store  # noqa: E402

START_S, END_S = 120.0, 30.0
BEAT_S = 2.0
"""Actors' figures are at most so old."""


async def is_up(folder: Path, launcher: "subprocess.Popen[bytes]", limit_s: float = START_S) -> None:
    """Raises TimeoutError where the run ended, or does not come."""
    async with asyncio.timeout(limit_s):
        while True:
            await asyncio.sleep(0.2)
            if launcher.poll() is not None:
                raise TimeoutError
            with contextlib.suppress(LaunchError):
                running(folder)
                return


async def all_here(store: Store, engines: int) -> None:
    """Wait for every engine."""
    async with asyncio.timeout(START_S):
        while True:
            if len([actor for actor in await list_actors(store) if actor.role == "engine"]) == engines:
                return
            await asyncio.sleep(0.2)


async def outlasted(store: Store) -> float:
    """Share of all engines' steps that took longer than their pace."""
    await asyncio.sleep(BEAT_S)
    engines = [actor.metrics for actor in await list_actors(store) if actor.role == "engine"]
    return sum(each["paced/steps"] * each["paced/outlasted_frac"] for each in engines) / sum(each["paced/steps"] for each in engines)


@asynccontextmanager
async def job(name: str, config: Mapping[str, Any], overrides: Sequence[str], limit_s: float = START_S) -> AsyncGenerator[Path]:
    """The run's folder while it is up. Raises SystemExit with what the launcher said where it does not come up."""
    with tempfile.TemporaryDirectory(prefix=f"rubato-{name}-") as scratch:
        place = Path(scratch)
        (place / "job.yaml").write_text(json.dumps(config))
        command = [ROOT / "tools/launch.py", place / "job.yaml", *overrides, "--run-dir", place / "run"]
        with (place / "said").open("w") as out:
            launcher = subprocess.Popen(  # noqa: ASYNC220 - it returns at once
                [sys.executable, *map(str, command)], cwd=place, stdout=out, stderr=out, preexec_fn=die_with_parent
            )
        try:
            try:
                await is_up(place / "run", launcher, limit_s)
            except TimeoutError:
                raise SystemExit(f"{name} did not get going: {(place / 'said').read_text()[-2000:]}") from None
            yield place / "run"
        finally:
            launcher.terminate()
            await asyncio.to_thread(launcher.wait, END_S)
