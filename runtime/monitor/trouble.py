"""Says why a run that is up can't be looked at: which Store does not answer, since when, and what to do."""

import socket
import struct
from pathlib import Path
from urllib.parse import urlsplit

from runtime.clock import wall_s
from runtime.monitor.blocked import seconds

CONNECT_S = 0.2


def silent_store(url: str, folder: Path, launcher_pid: int, answered_s: float = 0.0) -> str:
    """The sentence about a Store that did not answer; `answered_s`: when it last did so here, in wall-clock seconds, 0 where never.

    An embedded Redis writes each heartbeat to its file in `folder`: the age of that file is the length of its silence.
    """
    state = folder / "state"
    written = [path.stat().st_mtime for path in state.rglob("appendonly*") if path.is_file()]
    since_s = max([answered_s, *written])
    since = f" for {seconds(max(0.0, wall_s() - since_s))}" if since_s else ""
    parts = urlsplit(url)
    address = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"  # without the password
    said = f"the Store at {address} does not answer{since}: whoever needs it waits"
    pid = _listener(parts.path) if parts.scheme == "unix" else 0
    if pid and _is_stopped(pid):
        return f"{said}. Its process {pid} is stopped; continue it with: kill -CONT {pid}"
    log = f"See {state / 'redis.log'}" if written else "See whether a server runs there and this host reaches it"
    stop = f"kill -INT {launcher_pid}, and once more if it shall not save first"
    return f"{said}. {log}. rubato stop needs the Store too; without it end the run by its launcher: {stop}"


def missing_card(folder: Path) -> str:
    """The sentence about a folder that a launcher holds although `run.json`, which leads to the run, is not in it."""
    return (
        f"{folder / 'run.json'} is missing, so nothing of the run can be reached, but its launcher runs. "
        "End the launcher, then start the run again with --resume."
    )


def _listener(path: str) -> int:
    """Process id of whoever listens on a Unix socket, also of one that is stopped; 0 where nobody does or the system can't tell."""
    if not hasattr(socket, "SO_PEERCRED"):
        return 0
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(CONNECT_S)
        try:
            connection.connect(path)
            return struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
        except OSError:
            return 0


def _is_stopped(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except OSError:
        return False
