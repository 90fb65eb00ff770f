"""An engine as it tells of itself, and the weights that engines hold and requests ask for: one record each, embedded wherever it is told."""

from collections.abc import Iterable

import msgspec


class WeightsId(msgspec.Struct, frozen=True, array_like=True, order=True):
    """Weights by number and name: the `version` of an `adapter`. The full model is the adapter ""."""

    version: int = 0
    adapter: str = ""


class WeightsNeed(msgspec.Struct, frozen=True, array_like=True):
    """Weights that a request is sampled under: `version` of `adapter` or a newer one, with `exact` that version alone, as evaluations ask for."""

    version: int = 0
    exact: bool = False
    adapter: str = ""

    def is_met_by(self, version: int) -> bool:
        """Whether an engine that stays on `version` serves it."""
        return version == self.version if self.exact else version >= self.version


class EngineProfile(msgspec.Struct, frozen=True, array_like=True, order=True):
    """The hardware that planners reckon with: names of configs/hardware and configs/models, and the GPUs that the engine was started with."""

    hardware: str
    model: str
    """Empty: the job's own model, whose folder says what shape it has."""
    degree: int
    scale: float = 1.0
    """Seconds that a second of that hardware lasts."""


class EngineInfo(msgspec.Struct, frozen=True, array_like=True):
    """What decides which requests an engine gets."""

    name: str
    num_slots: int
    """Requests it decodes at once; at least 1."""
    holds: tuple[WeightsId, ...] = (WeightsId(),)
    """Newest weights that it is known to hold, of each adapter."""
    suspended: bool = False
    pinned: bool = False
    """It stays on the weights that it holds, for an evaluation."""
    asleep: bool = False
    """What it is given waits until it wakes."""
    serves: str = "both"
    """Its `engine.serves`."""
    degree: int = 1
    """GPUs that share each layer."""
    profile: EngineProfile | None = None
    """None where its hardware is not known."""
    restart_s: float = 0.0
    """What a change of degree takes it where it is started anew for that, and its requests' KV is computed again; 0: it goes on."""

    @property
    def version(self) -> int:
        """Of the full model."""
        return self.version_of("")

    def version_of(self, adapter: str) -> int:
        """-1 where it holds none of that adapter."""
        for held in self.holds:
            if held.adapter == adapter:
                return held.version
        return -1

    def holding(self, weights: WeightsId) -> tuple[WeightsId, ...]:
        """`holds`, with these too where they are newer."""
        if weights.version <= self.version_of(weights.adapter):
            return self.holds
        return (*(held for held in self.holds if held.adapter != weights.adapter), weights)

    @property
    def is_last_resort(self) -> bool:
        """It gets requests only where no other engine is left to serve them."""
        return self.asleep

    @property
    def takes(self) -> bool:
        """New requests: it is neither suspended nor pinned for an evaluation."""
        return not (self.suspended or self.pinned)


def all_asleep(engines: Iterable[EngineInfo]) -> bool:
    """Whether there are some, and each is asleep."""
    asleep = [engine.asleep for engine in engines]
    return bool(asleep) and all(asleep)
