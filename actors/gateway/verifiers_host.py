"""Serves a taskset by verifiers' own EnvServer: a script for the interpreter that has verifiers. It imports nothing of Rubato.

    python verifiers_host.py FOLDER       settings come as JSON on stdin, where no other user sees them; see `main`

The last line of its stdout is `{"verifiers": VERSION, "tasks": N}` once it listens, or `{"error": …}`; what others print goes to stderr.
"""

import asyncio
import json
import os
import signal
import sys
from contextlib import suppress
from importlib import import_module
from importlib.metadata import version
from itertools import islice
from typing import Any


def main(folder: str, told: dict[str, Any]) -> int:
    """In `folder` are the socket, `s`, and `tasks.jsonl`, the data of each task.

    `told`: taskset, harness, limit (of tasks), most_bytes (of that file), max_turns, max_total_tokens, guard (a script).
    """
    said = os.dup(1)
    os.dup2(2, 1)
    try:
        _guard(told["guard"])
        server = _server(f"ipc://{folder}/s", told)
        answer = {"verifiers": version("verifiers"), "tasks": _write_tasks(f"{folder}/tasks.jsonl", server.env.taskset, told)}
    except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever the taskset's module raises
        os.write(said, _line({"error": f"{type(error).__name__}: {error}"[:2000]}))
        return 1
    signal.signal(signal.SIGTERM, _interrupted)
    os.write(said, _line(answer))
    with suppress(KeyboardInterrupt):
        asyncio.run(server.run())
    return 0


def _line(answer: dict[str, Any]) -> bytes:
    return json.dumps(answer).encode() + b"\n"


def _interrupted(*_: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise KeyboardInterrupt


def _guard(script: str) -> None:
    """What this process starts ends with it, however that is killed (runtime/pool/guard.py)."""
    mark = os.environ["RUBATO_STARTED_BY"] = f"{os.getpid()}-{os.urandom(8).hex()}"  # the guard's too: another's would end it
    null = [(os.POSIX_SPAWN_OPEN, fd, os.devnull, os.O_RDWR, 0) for fd in (0, 1, 2)]
    os.posix_spawn(sys.executable, [sys.executable, "-I", "-S", script, str(os.getpid()), mark], os.environ, file_actions=null, setsid=True)


def _server(address: str, told: dict[str, Any]) -> Any:
    """An EnvServer that is bound to `address`. Of an environment's one role the harness is as told, and runs as a process of this host."""
    loaders, agents = import_module("verifiers.v1.utils.loaders"), import_module("verifiers.v1.configs.agent")
    taskset, harness = _plugin(told["taskset"]), _plugin(told["harness"])
    own = loaders.default_harness_id(taskset["id"])
    harness["id"] = harness.get("id") or (own if own != "bash" else "null")
    kind = loaders.env_config_type(taskset["id"])
    roles = [name for name, field in kind.model_fields.items() if isinstance(field.default, agents.AgentConfig)]
    if len(roles) != 1:
        raise ValueError(f"the environment of {taskset['id']} has {len(roles)} agents ({', '.join(roles)}): one alone can be trained")
    limits = {name: told[name] for name in ("max_turns", "max_total_tokens")}
    config = kind.model_validate({"taskset": taskset, roles[0]: {"harness": harness, "runtime": {"type": "subprocess"}, **limits}})
    return import_module("verifiers.v1.serve.server").EnvServer(config, address)


def _plugin(told: dict[str, Any]) -> dict[str, Any]:
    """Its config; that of a file is found by the file's name."""
    given = told.get("id", "")
    if not given.endswith(".py"):
        return dict(told)
    if not os.path.isfile(given):
        raise ValueError(f"there is no file {given}")
    folder, name = os.path.split(given)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    return {**told, "id": name.removesuffix(".py")}


def _write_tasks(path: str, taskset: Any, told: dict[str, Any]) -> int:
    """One line of JSON each; how many."""
    num = size = 0
    with open(path, "wb") as file:
        for task in islice(taskset, told["limit"]):
            line = task.data.model_dump_json().encode() + b"\n"
            size += len(line)
            if size > told["most_bytes"]:
                raise ValueError(f"its first {num + 1} tasks have more than {told['most_bytes']:,} bytes: lower limit")
            file.write(line)
            num += 1
    if not num:
        raise ValueError("it has no task")
    return num


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], json.load(sys.stdin)))
