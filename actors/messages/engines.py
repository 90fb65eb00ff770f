"""What an engine is told to be: asleep or awake, and on how many GPUs. Its requests keep their place and tokens in all of it.

What an engine can't do (actors/engines/engine.py: `sleep`, `reconfigure`) fails the ask with a sentence and changes nothing.
"""

from typing import ClassVar

from rubato.bus.message import Message, Request
from rubato.planning.engine_info import EngineInfo


class Obeyed(Message, frozen=True):
    """It was carried out, in `seconds`, and the proxies know; 0 where the engine was that way already."""

    info: EngineInfo
    seconds: float


class SleepEngine(Request[Obeyed], frozen=True):
    """Weights and KV cache to host memory (`level` 1), or the weights alone (2); the device's is free, and nothing is computed until WakeEngine.

    The proxies give it no new request while another engine is awake.
    """

    idempotent: ClassVar[bool] = True
    level: int = 1
    term: int = 0
    """Incarnation of the orchestrator that sends it, as in Reconfigure; 0: the sender has none, and is never refused."""


class WakeEngine(Request[Obeyed], frozen=True):
    """Weights and KV cache back to the device; requests go on."""

    idempotent: ClassVar[bool] = True
    term: int = 0
    """As that of SleepEngine. Where the job shares its pool: of the permit under which it may compute, and refused for any but the one that
    holds now."""


class Reconfigure(Request[Obeyed], frozen=True):
    """Let `degree` GPUs share each layer. Refused where an order of a later `term` was carried out: its sender was replaced."""

    idempotent: ClassVar[bool] = True
    degree: int
    term: int
