"""What engines on other hosts than the weights pull of a version, by the last ones that travelled."""

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from rubato.actors.messages.weights import WeightsPublished
from rubato.planning.demand import Demand
from rubato.runtime.blobs.patches import FULL_EVERY

if TYPE_CHECKING:
    from rubato.actors.ranks.head import RankedEngine
    from rubato.actors.training.trainer import Trainer


class SizesApart:
    """Of one trainer."""

    def __init__(self, trainer: "Trainer") -> None:
        self._trainer = trainer
        self._travelled: deque[tuple[int, int]] = deque(maxlen=2)
        """(version, bytes) of the last that did not have to travel whole. Two: nothing changes in a step without gradients, and much in the next."""

    def of(self, version: int, published: WeightsPublished, engines: Sequence[str]) -> tuple[Demand, ...]:
        """Of `version`, where `published` is the last: what changed for engines of other hosts, where it travels so, and all for the others."""
        whole = published.size_bytes
        if published.version % FULL_EVERY and published.version not in dict(self._travelled):
            self._travelled.append((published.version, published.delta_bytes or whole))
        travels = max((size for _, size in self._travelled), default=whole) if version % FULL_EVERY else whole
        return tuple(
            (source, engine, round(share * (whole if self._node(engine) == node else travels)))
            for source, node, share in self._sources()
            for engine in engines
        )

    def _sources(self) -> list[tuple[str, str, float]]:
        """Who has the weights, on which host, and which share of them: the trainer, or the first of its ranks on each host."""
        trainer = self._trainer
        shares = cast("RankedEngine", trainer.engine).shares if trainer.peers("trainer_rank") else ()
        num_bytes = sum(share.num_bytes for share in shares)
        apart = any(share.node != trainer.node for share in shares)
        return [(each.first, each.node, each.num_bytes / num_bytes) for each in shares] if apart else [(trainer.name, trainer.node, 1.0)]

    def _node(self, actor: str) -> str:
        record = self._trainer.directory.find(actor)
        return record.node if record is not None else ""
