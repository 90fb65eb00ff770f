"""Whether this host has the device that the config asks for."""

import subprocess
import sys
from functools import cache

from runtime.errors import ConfigError


def check_device(device: str) -> None:
    """Raises ConfigError where `model.device` is cuda and torch sees none."""
    if device == "cuda" and not sees_cuda():
        raise ConfigError(
            "model.device is cuda, but torch sees no CUDA device: set model.device=cpu, or install a CUDA build."
        )


@cache
def sees_cuda() -> bool:
    """Asks torch in a process of its own: it is too heavy for a launcher."""
    look = "import sys, torch; sys.exit(0 if torch.cuda.is_available() else 3)"
    return subprocess.run([sys.executable, "-c", look], capture_output=True, check=False).returncode == 0
