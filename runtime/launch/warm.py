"""The warm parent: `python -m rubato.runtime.launch.warm RUN_DIR MODULE…` imports what actors of the run need, once, and forks them.

It has no thread, event loop or ZeroMQ context of which a child would inherit half. What it forks becomes a child of the launcher, and
lives and ends as if the launcher had started it, whatever becomes of this process. Requests come on standard input and replies go to
standard output, a line of JSON each; runtime/launch/forks.py is the other side. Linux only.
"""

import ctypes
import gc
import os
import select
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

import msgspec

from rubato.runtime import node
from rubato.runtime.launch.children import die_with
from rubato.runtime.node import end_process

GO = b"!"


class ForkRequest(msgspec.Struct):
    """Fork the actor `name` of `pool`, once those of `needs` are imported that are to be."""

    name: str
    needs: tuple[str, ...]
    pool: str = ""


class ForkReply(msgspec.Struct):
    """The process of the actor `name`, or why there is none; without a name: everything is imported."""

    name: str = ""
    pid: int = 0
    error: str = ""


def main(argv: Sequence[str]) -> int:
    """Serve until the launcher closes the input; in a child, be the actor that was asked for."""
    folder, modules = Path(argv[0]), argv[1:]
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))  # uvloop leaves copies of the replies' end: children would keep it from closing
    gc.disable()  # imports leave little garbage, and a fifth of their time went into looking for it
    asked = WarmParent(folder, os.getppid()).serve(modules)
    if asked:
        end_process(_be(folder, asked))
    return 0


class WarmParent:
    """Imports and forks by turns; `launcher` is the process that its children become children of."""

    def __init__(self, folder: Path, launcher: int) -> None:
        self._folder, self._launcher = folder, launcher
        self._requests, self._replies = os.dup(0), os.dup(1)
        os.dup2(2, 1)  # what an import prints is no reply
        self._waiting: list[ForkRequest] = []
        self._rest = b""

    def serve(self, modules: Sequence[str]) -> ForkRequest | None:
        """Until the input ends, None then; in a child, the actor that it is to be."""
        left = list(modules)
        self._tell_imported(left)
        while self._hear(wait=not left):
            for request in [r for r in self._waiting if not set(left).intersection(r.needs)]:
                self._waiting.remove(request)
                if self._fork(request):
                    return request
            if left:
                _import(left.pop(0))
                self._tell_imported(left)
        return None

    def _tell_imported(self, left: Sequence[str]) -> None:
        if not left:
            self._reply(ForkReply())

    def _hear(self, *, wait: bool) -> bool:
        """Take in what was asked meanwhile, or `wait` for it. False where the input has ended."""
        if self._waiting and wait:
            return True
        if not wait and not select.select([self._requests], [], [], 0)[0]:
            return True
        data = os.read(self._requests, 1 << 16)
        *lines, self._rest = (self._rest + data).split(b"\n")
        self._waiting += [msgspec.json.decode(line, type=ForkRequest) for line in lines]
        return bool(data)

    def _reply(self, reply: ForkReply) -> None:
        os.write(self._replies, msgspec.json.encode(reply) + b"\n")

    def _fork(self, request: ForkRequest) -> bool:
        """Whether this is the child.

        There is a process between, which ends at once: its child falls to the launcher, which waits for that (PR_SET_CHILD_SUBREAPER).
        """
        name = request.name
        if (num := len(os.listdir("/proc/self/task"))) > 1:
            self._reply(ForkReply(name, error=f"an import has started {num - 1} threads, which a child would not have"))
            return False
        gc.freeze()  # no collection in a child writes to what it shares
        go, say = os.pipe()
        try:
            between = os.fork()
        except OSError as error:
            between = -1
            self._reply(ForkReply(name, error=str(error)))
        if between == 0:
            os.close(say)
            self._fork_again()
            self._become(request, go)
            return True
        os.close(go)
        if between > 0:
            self._hand_over(name, between, say)
        os.close(say)
        return False

    def _fork_again(self) -> None:
        """Returns in the child alone."""
        try:
            child = os.fork()
        except OSError:
            os._exit(1)
        if child:
            os._exit(0)

    def _hand_over(self, name: str, between: int, say: int) -> None:
        os.waitpid(between, 0)
        try:
            os.write(say, GO)
        except BrokenPipeError:
            self._reply(ForkReply(name, error="its process ended before it began"))

    def _become(self, request: ForkRequest, go: int) -> None:
        """In the child: once it is the launcher's, it ends with that, and tells it so itself, whatever becomes of the warm parent."""
        if os.read(go, 1) != GO:
            os._exit(1)
        os.close(go)
        die_with(self._launcher)
        os.setsid()
        retitle(_words(self._folder, request))
        self._reply(ForkReply(request.name, os.getpid()))
        os.close(self._requests)
        os.close(self._replies)


def _import(module: str) -> None:
    """Import `module`; where that fails, the actor that needs it will say so."""
    try:
        import_module(module)
    except Exception:  # noqa: BLE001 - whatever a module raises
        traceback.print_exc()


def _be(folder: Path, asked: ForkRequest) -> int:
    """As `python -m rubato.runtime.node RUN_DIR NAME [POOL]` would be."""
    with (folder / "logs" / f"{asked.name}.stderr").open("ab") as stderr:
        for fd in (1, 2):
            os.dup2(stderr.fileno(), fd)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    sys.argv = _words(folder, asked)[2:]
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()  # Python's own generator does so by itself
    gc.enable()
    return node.main(sys.argv[1:])


def _words(folder: Path, asked: ForkRequest) -> list[str]:
    return [sys.executable, "-m", "rubato.runtime.node", str(folder), asked.name, *filter(None, [asked.pool])]


def retitle(words: Sequence[str]) -> None:
    """Let the system show `words` as this process's command line, cut where the one that it was started with was shorter."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])  # arg_start and arg_end of proc(5)
    title = b"".join(word.encode() + b"\0" for word in words)[: max(0, end - start - 1)]
    if title:
        ctypes.memset(start, 0, end - start)
        ctypes.memmove(start, title, len(title))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
