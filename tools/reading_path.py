"""Names the files that one rollout runs through: what a reader opens to follow it from its ticket to the weights that it trained.

An embedded job (examples/embedded_job.py) trains some steps. Every product file of which a function body runs, on any thread, counts from
the first Claim that is answered once a step stands in metrics.jsonl (loading is no rollout, and a trainer may load while others roll out)
until a ticket issued after it is trained, and the version that this gave was swapped in and stands in metrics.jsonl.

    python tools/reading_path.py [--most N]      exits 1 where there are more than N files, three times over
"""

import argparse
import asyncio
import runpy
import sys
import tempfile
import threading
from collections import Counter
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

PRODUCT = ("bus", "runtime", "planning", "actors")

CLAIM, BATCH = ("actors/samples/buffer.py", "claim"), "Batch"
"""A function, and the type of what it returns once it is answered."""
ADMIT, TICKETS = ("actors/samples/buffer.py", "admit"), "Tickets"
TRAIN = ("actors/training/torch_train.py", "parts")
"""Of a `step` over `groups` of trajectories."""
SWAP = ("actors/engines/torch_engine.py", "swap")
"""Of a `version`: that of a step is its number."""
ROW = ("actors/training/rows.py", "append_step")
"""Of a `step`."""

TRIES = 3
"""On a busy machine an actor may be lost and start again meanwhile, which is no part of a rollout; what is comes up every time."""

OPTIMIZED = 0x1
"""Flag of a function's code: module and class bodies lack it."""


class Tracer:
    """A profile function, `ready` after a first step. `files` has the number of functions that ran, by file; `ended` is set once SWAP and ROW of the step returned."""

    def __init__(self) -> None:
        self.ready = self.began = self.ended = False
        self._issued: set[str] = set()
        """Trajectories of tickets that were issued since it began."""
        self._step = 0
        """The first that trained one of these."""
        self._last = {SWAP: "version", ROW: "step"}
        self._seen: set[CodeType] = set()

    @property
    def files(self) -> Counter[str]:
        return Counter(found for code in self._seen if (found := _file(code)))

    def start(self) -> None:
        threading.setprofile(self)
        sys.setprofile(self)

    def stop(self) -> None:
        sys.setprofile(None)
        threading.setprofile(None)

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        if self.ended or event not in ("call", "return"):
            return
        code = frame.f_code
        if event == "return":
            self._returned(code, frame, argument)
        elif self.began and code.co_flags & OPTIMIZED:
            self._seen.add(code)
            if not self._step and _is(code, TRAIN):
                groups = frame.f_locals["groups"]
                trained = any(one.ticket.trajectory_id in self._issued for group in groups for one in group)
                self._step = frame.f_locals["step"] if trained else 0

    def _returned(self, code: CodeType, frame: FrameType, value: Any) -> None:
        """A coroutine returns at each wait too: what it hands up then is no answer."""
        what = type(value).__name__
        if not self.began:
            self.ready = self.ready or _is(code, ROW)
            self.began = self.ready and what == BATCH and _is(code, CLAIM)
        elif what == TICKETS and _is(code, ADMIT):
            self._issued |= {ticket.trajectory_id for ticket in value.tickets}
        elif self._step:
            for place in [place for place in self._last if _is(code, place)]:
                if frame.f_locals[self._last[place]] >= self._step:
                    del self._last[place]
            self.ended = not self._last


def _is(code: CodeType, place: tuple[str, str]) -> bool:
    return code.co_name == place[1] and _file(code) == place[0]


def _file(code: CodeType) -> str:
    try:
        path = Path(code.co_filename).relative_to(ROOT)
    except ValueError:
        return ""
    return str(path) if path.parts[0] in PRODUCT else ""


async def _train_one_step(folder: Path, tracer: Tracer) -> None:
    from rubato.runtime.config.compose import from_mapping
    from rubato.runtime.embed import embed

    job = runpy.run_path(str(ROOT / "examples" / "embedded_job.py"))["JOB"]
    async with embed(from_mapping(job, ["run.steps=16", "run.name=reading-path"]), folder) as running:
        async for _ in running.rows():
            if tracer.ended:
                break
        await running.done()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--most", type=int, metavar="N", help="exit 1 where there are more files than this")
    most = parser.parse_args().most
    from rubato.actors.training.base_model import make

    for _ in range(TRIES):
        tracer = Tracer()
        with tempfile.TemporaryDirectory() as scratch:
            make(Path(scratch) / "model", seed=1, progress=lambda what, share: None)
            tracer.start()
            try:
                asyncio.run(_train_one_step(Path(scratch), tracer))
            finally:
                tracer.stop()
        if not tracer.ended:
            print("the rollout did not end: the places at the top of this tool no longer name where it begins, is trained and ends")
            return 2
        files = tracer.files
        for name, num in sorted(files.items()):
            print(f"{num:4}  {name}")
        folders = Counter(str(Path(name).parent) for name in files)
        print(f"{len(files)} files: " + ", ".join(f"{folder} {num}" for folder, num in sorted(folders.items())))
        if most is None or len(files) <= most:
            return 0
    return 1


if __name__ == "__main__":
    sys.exit(main())
