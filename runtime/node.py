"""The process of one actor: `python -m rubato.runtime.node RUN_DIR ACTOR_NAME [POOL]`, started and supervised by the node agent."""

import asyncio
import atexit
import gc
import os
import resource
import signal
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from rubato.runtime.importer import import_structlog, runs_user_code

import_structlog()

from rubato.runtime.config import Config  # noqa: E402
from rubato.runtime.errors import ExitCode, first_cause, said_by  # noqa: E402
from rubato.runtime.kernel import Kernel, is_permanent  # noqa: E402
from rubato.runtime.launch.connection import connect  # noqa: E402
from rubato.runtime.observe.log import configure, logger  # noqa: E402

MANY_FILES = 16 * 1024


def main(argv: list[str]) -> int:
    folder, name, pool = Path(argv[0]), argv[1], "".join(argv[2:3])
    allow_many_files()
    jobs: list[Config] = []

    def hide(text: str) -> str:
        return jobs[0].hidden(text) if jobs else text

    configure(folder / "logs" / f"{name}.jsonl", actor=name, hide=hide)
    sys.setswitchinterval(0.0005)  # a thread that computes gives the event loop its turn ten times sooner
    kernels: list[Kernel] = []
    try:
        asyncio.Runner(loop_factory=_loop_factory()).run(_serve(folder, name, pool, jobs, kernels))
    except Exception as group:  # noqa: BLE001 - the boundary of the process: named, logged, and the supervisor's
        error = first_cause(group)
        said = hide(" ".join(said_by(error).split()))
        logger("node").error("actor_failed", error=said, exc_info=group)
        print(f"{name}: {said}", file=sys.stderr)  # noqa: T201 - the launcher quotes it
        return ExitCode.REFUSED if is_permanent(error, kernels[0] if kernels else None) else ExitCode.FAILED
    return ExitCode.DONE


async def _serve(folder: Path, name: str, pool: str, jobs: list[Config], kernels: list[Kernel]) -> None:
    """`jobs` gets the job's config, once it is read, and `kernels` the actor's."""
    role = name.rsplit("-", 1)[0]
    async with connect(folder, role=role) as connection:
        job = connection.config
        jobs.append(job)
        kernel = await connection.kernel(job.actor_class(role), job.actor_config(role, pool), name, pool)
        kernels.append(kernel)
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, kernel.stop)
        async with asyncio.TaskGroup() as tasks:
            freezing = tasks.create_task(_freeze(kernel))
            await kernel.serve()
            freezing.cancel()


async def _freeze(kernel: Kernel) -> None:
    """What the process has loaded by the time it is ready stays: no collection looks at it again.

    Otherwise each full one holds the event loop up for as long as it takes to visit every object of torch, a tenth of a second. For
    the same reason none is made first: a little garbage stays too.
    """
    await kernel.ready.wait()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)  # an actor that remembers thousands of samples spent a fifth of its time on them


def _loop_factory():  # noqa: ANN202 - uvloop's loop type is not exported
    import uvloop

    return uvloop.new_event_loop


def end_process(code: int) -> NoReturn:
    """End this process as Python does, but where no code of the user's runs leave its memory to the system: taking torch apart costs a
    third of a second of CPU, and only a file left open would need it.
    """
    if runs_user_code():
        sys.exit(code)
    # As multiprocessing ends its own: what threads have in hand, and what was registered for the end, is done.
    threading._shutdown()  # pyright: ignore - nothing public waits for the threads of pools
    atexit._run_exitfuncs()  # pyright: ignore[reportPrivateUsage]
    for stream in filter(None, (sys.stdout, sys.stderr)):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def allow_many_files() -> None:
    """Raise this process's own limit of open files: each peer costs a few, and 1024 is what many systems start from."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MANY_FILES if hard == resource.RLIM_INFINITY else min(MANY_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


if __name__ == "__main__":
    end_process(main(sys.argv[1:]))
