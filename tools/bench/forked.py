"""Processes forked of this one, in which torch is loaded already: ranks of one host, without a job."""

import os
import select
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

LIMIT_S = 500.0


def forked(num: int, folder: Path, work: Callable[[int], Any]) -> list[Any]:
    """What `work(rank)` gives in each of `num` processes; they end with this call. Raises RuntimeError where one of them fails."""
    children = [_fork(rank, folder / f"result.{rank}", work) for rank in range(num)]
    try:
        codes = [_ended(pid) for pid in children]
    finally:
        for pid in children:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    if any(codes):
        said = [path.read_text() for rank in range(num) if (path := folder / f"result.{rank}.error").exists()]
        raise RuntimeError("\n".join([f"exit codes {codes}", *said]))
    return [msgspec.msgpack.decode((folder / f"result.{rank}").read_bytes()) for rank in range(num)]


def _fork(rank: int, path: Path, work: Callable[[int], Any]) -> int:
    if pid := os.fork():
        return pid
    code = 1
    try:
        path.write_bytes(msgspec.msgpack.encode(work(rank)))
        code = 0
    except Exception:  # noqa: BLE001 - told by the parent
        path.with_suffix(f"{path.suffix}.error").write_text(traceback.format_exc())
    finally:
        sys.stdout.flush()
        os._exit(code)


def _ended(pid: int) -> int:
    handle = os.pidfd_open(pid)
    try:
        if not select.select([handle], [], [], LIMIT_S)[0]:
            os.kill(pid, signal.SIGKILL)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    finally:
        os.close(handle)
