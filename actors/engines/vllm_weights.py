"""Weights on their way into vLLM, which can't undo a swap: checked first, then handed to its processes by path, never in a pickle or on a wire.

What runs of ours inside those processes is here too: weights are swapped there, and they end with the engine's owner.
"""

import mmap
import os
import select
import signal
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from actors.checkpoints.hf_files import folder_images, read_header
from actors.engines.model import expected, finite, tensors_of

_MOST = 1 << 30
"""Bytes per write: Linux takes at most 2 GiB at once."""


def shapes_of(folder: Path) -> dict[str, tuple[int, ...]]:
    """Shape by name of a model folder's tensors. Raises EngineError when it holds no weights or damaged ones."""
    images = folder_images(folder)
    return {name: entry.shape for source, image in images for name, entry in read_header(image, source).items()}


def check_tensors(shapes: Mapping[str, tuple[int, ...]], image: memoryview, source: str) -> None:
    """Raises EngineError, naming `source`, when a tensor is missing, has another shape or isn't finite. Others are ignored."""
    tensors = tensors_of(image, source)
    for name, shape in shapes.items():
        finite(expected(tensors, name, shape, source), name, source)


@contextmanager
def handed_over(image: memoryview) -> Iterator[str]:
    """A path that holds a copy of `image` while the block runs. Processes of the same user can open it; what they mapped stays.

    Raises OSError when there is no room for the copy.
    """
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("rubato-weights", os.MFD_CLOEXEC)
        path, temporary = f"/proc/{os.getpid()}/fd/{fd}", False
    else:
        fd, path = tempfile.mkstemp(prefix="rubato-weights-", suffix=".safetensors")
        temporary = True
    try:
        _write(fd, image)
        yield path
    finally:
        os.close(fd)
        if temporary:
            os.unlink(path)


def _write(fd: int, image: memoryview) -> None:
    rest = image.cast("B") if image.nbytes else memoryview(b"")
    while rest:
        rest = rest[os.write(fd, rest[:_MOST]) :]


OWNER = "RUBATO_VLLM_OWNER"
"""Environment variable with the process id of the engine worker that started vLLM."""

EXTENSION = "actors.engines.vllm_weights.WorkerExtension"
"""For vLLM's `worker_extension_cls`."""


class WorkerExtension:
    """vLLM puts this class behind its own worker class; its methods are called by `collective_rpc`."""

    model_runner: Any

    def __new__(cls, *_: Any, **__: Any) -> Self:
        """The one place that runs in each of vLLM's workers before a model is loaded."""
        live_as_long_as_owner()
        return super().__new__(cls)

    def swap_weights(self, path: str, names: list[str]) -> None:
        """Load the safetensors image at `path`, of which `names` belong to the model, in place of the present weights."""
        with open(path, "rb") as file:
            image = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        tensors = tensors_of(image, path)
        self.model_runner.reload_weights(weights_iterator=((name, tensors[name]) for name in names))
        _repack(self.model_runner.get_model())


def _repack(model: Any) -> None:
    """On CPU an output layer multiplies by a packed copy of its weights, which a reload forgets where they are the embedding's (0.32)."""
    for module in model.modules():
        if hasattr(module, "cpu_linear") and module.weight.numel():
            module.quant_method.process_weights_after_loading(module)


def live_as_long_as_owner() -> None:
    """Kill this process, and the vLLM process between it and the owner, once the owner is gone: neither notices by itself."""
    if OWNER not in os.environ or not hasattr(os, "pidfd_open"):
        return
    owner, parent = int(os.environ[OWNER]), os.getppid()
    doomed = [os.getpid()] if parent == owner else [parent, os.getpid()]
    try:
        fd = os.pidfd_open(owner)
    except ProcessLookupError:
        _kill(doomed)
    else:
        threading.Thread(target=_wait_and_kill, args=(fd, doomed), name="owner", daemon=True).start()


def _wait_and_kill(fd: int, doomed: list[int]) -> None:
    select.select([fd], [], [])
    _kill(doomed)


def _kill(doomed: list[int]) -> None:
    parent, *_ = doomed
    for pid in doomed:
        if pid == os.getpid() or (pid == parent == os.getppid()):
            os.kill(pid, signal.SIGKILL)
