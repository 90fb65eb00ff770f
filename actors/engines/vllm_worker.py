"""What runs of ours inside vLLM's own processes: weights are swapped here, and these processes end with the engine's owner."""

import mmap
import os
import select
import signal
import threading
from typing import Any, Self

from actors.engines.model import tensors_of

OWNER = "RUBATO_VLLM_OWNER"
"""Environment variable with the process id of the engine worker that started vLLM."""

EXTENSION = "actors.engines.vllm_worker.WorkerExtension"
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
