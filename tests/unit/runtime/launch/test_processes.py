"""An actor's process, as whoever started it sees it."""

import asyncio
import os
from pathlib import Path

from rubato.runtime.launch.processes import ActorChild

LIMIT_S = 30.0


async def test_what_an_actor_started_ends_with_it_however_it_ends(tmp_path: Path) -> None:
    said, out = os.pipe()
    process = await asyncio.create_subprocess_exec("sh", "-c", "sleep 60 & echo begun; wait", stdout=out, start_new_session=True)
    os.close(out)
    child = ActorChild(process, tmp_path / "stderr", tmp_path / "log")
    async with asyncio.timeout(LIMIT_S):
        assert await asyncio.to_thread(os.read, said, 100) == b"begun\n"

        child.kill()
        assert (await child.ended()).how == "signal 9"

        assert await asyncio.to_thread(os.read, said, 100) == b""  # the sleeper held the other end of the pipe
    os.close(said)
