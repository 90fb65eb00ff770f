"""Adapters beside the run's own, on their way out of the engines; they come in as all weights do."""

from typing import ClassVar

from rubato.bus.message import Ack, Request


class WithdrawWeights(Request[Ack], frozen=True):
    """Forget a named adapter, on the engine and its host: requests under it end as Aborted. Its name may be used again after that."""

    idempotent: ClassVar[bool] = True
    adapter: str
