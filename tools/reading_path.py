"""Names the files that one rollout runs through: what a reader opens to follow it from its ticket to the weights that it trained.

An embedded job (examples/embedded_job.py) trains one step. Every product file of which a function body runs, on any thread, from the first
request for tickets until an engine has swapped in the weights of that step, and its row stands in metrics.jsonl, counts: of these two either
comes first.

    python tools/reading_path.py [--most N]      exits 1 where there are more than N files
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

FIRST = ("actors/samples/buffer.py", "admit")
SWAP = ("actors/engines/torch_engine.py", "swap")
"""Of a `version` from 1 on: 0 is the base model."""

ROW = ("actors/training/publishing.py", "append_step")

OPTIMIZED = 0x1
"""Flag of a function's code: module and class bodies lack it."""


class Tracer:
    """A profile function. `files` has the number of functions that ran, by file; `ended` is set once SWAP and ROW returned."""

    def __init__(self) -> None:
        self.began = False
        self._last: set[tuple[str, str]] = {SWAP, ROW}
        self._seen: set[CodeType] = set()

    @property
    def ended(self) -> bool:
        return not self._last

    @property
    def files(self) -> Counter[str]:
        return Counter(found for code in self._seen if (found := _file(code)))

    def start(self) -> None:
        threading.setprofile(self)
        sys.setprofile(self)

    def stop(self) -> None:
        sys.setprofile(None)
        threading.setprofile(None)

    def __call__(self, frame: FrameType, event: str, _argument: Any) -> None:
        if self.ended or event not in ("call", "return"):
            return
        code = frame.f_code
        if event == "return":
            if self.began and (_is(code, ROW) or (_is(code, SWAP) and frame.f_locals["version"] >= 1)):
                self._last.discard(ROW if _is(code, ROW) else SWAP)
        else:
            self.began = self.began or _is(code, FIRST)
            if self.began and code.co_flags & OPTIMIZED:
                self._seen.add(code)


def _is(code: CodeType, place: tuple[str, str]) -> bool:
    return code.co_name == place[1] and _file(code) == place[0]


def _file(code: CodeType) -> str:
    try:
        path = Path(code.co_filename).relative_to(ROOT)
    except ValueError:
        return ""
    return str(path) if path.parts[0] in PRODUCT else ""


async def _train_one_step(folder: Path, tracer: Tracer) -> None:
    from runtime.config import from_mapping
    from runtime.embed import embed

    job = runpy.run_path(str(ROOT / "examples" / "embedded_job.py"))["JOB"]
    async with embed(from_mapping(job, ["run.steps=3", "run.name=reading-path"]), folder) as running:
        async for _ in running.rows():
            if tracer.ended:
                break
        await running.done()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--most", type=int, metavar="N", help="exit 1 where there are more files than this")
    most = parser.parse_args().most
    from actors.training.base_model import make

    tracer = Tracer()
    with tempfile.TemporaryDirectory() as scratch:
        make(Path(scratch) / "model", seed=1, progress=lambda what, share: None)
        tracer.start()
        try:
            asyncio.run(_train_one_step(Path(scratch), tracer))
        finally:
            tracer.stop()
    if not tracer.ended:
        print(
            "the rollout did not end: SWAP and ROW at the top of this tool no longer name what its last functions are"
        )
        return 2
    files = tracer.files
    for name, num in sorted(files.items()):
        print(f"{num:4}  {name}")
    folders = Counter(str(Path(name).parent) for name in files)
    print(f"{len(files)} files: " + ", ".join(f"{folder} {num}" for folder, num in sorted(folders.items())))
    return int(most is not None and len(files) > most)


if __name__ == "__main__":
    sys.exit(main())
