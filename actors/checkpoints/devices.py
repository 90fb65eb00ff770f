"""What devices a process under `model.device` will have, asked by the process that starts it."""

import os
import subprocess
import sys
from functools import cache

from rubato.actors.checkpoints.model_folder import pick_device


def check_device(device: str) -> None:
    """Raises ConfigError where `model.device` is a GPU that torch does not see."""
    if device.startswith("cuda"):
        pick_device(device, num_gpus())


@cache
def num_gpus() -> int:
    """Asks torch in a process of its own: it is too heavy for a launcher."""
    look = "import torch; print(torch.cuda.device_count() if torch.cuda.is_available() else 0)"
    told = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=False).stdout.split()
    return int(told[-1]) if told else 0


GPUS = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")
"""NVIDIA's, AMD's, and either under WSL."""


def may_use_cuda(device: str) -> bool:
    """Whether a process under `model.device` may: with auto it does where torch can, which takes seconds to ask."""
    return device.startswith("cuda") or (device == "auto" and any(map(os.path.exists, GPUS)))
