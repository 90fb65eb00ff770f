"""Time that is modelled: how long an engine's steps last on the hardware of `engine.pace`, and how many outlasted that."""

from collections.abc import Iterable

from pydantic import ValidationError

from rubato.actors.catalog import deployed
from rubato.actors.engines.engine import EngineError
from rubato.actors.engines.scheduler import RealTime, Row
from rubato.actors.engines.section import PaceSection
from rubato.planning.roofline import Deployment, Roofline

MOST_OUTLASTED = 0.02
"""Share of an engine's steps above which its times no longer are the hardware's: figures from it count for nothing."""


def deployment_of(section: PaceSection) -> Deployment:
    """The engine that such a section has others last like."""
    return deployed(section.hardware, section.model, section.degree)


class EnginePace(RealTime):
    """One device that does one thing after another. It computes durations and never waits: that is the engine's to do."""

    def __init__(self, section: PaceSection) -> None:
        self._section = section
        self._roofline = Roofline(deployment_of(section))
        self._scale = section.scale
        self._free_at: float | None = None
        self.num = 0
        """Steps and swaps so far."""
        self.outlasted = 0
        """Those that took longer than their pace."""
        self.busy_s = 0.0
        """What they lasted by their pace."""

    def step_s(self, rows: Iterable[Row]) -> float:
        """Seconds of one step: its prefills one after another, then its decodes as one batch, which is how RLSim counts them."""
        prefill_s, batch, context = 0.0, 0, 0
        for _, start, end in rows:
            if end - start == 1:
                batch += 1
                context += start
            else:
                prefill_s += self._roofline.prefill_s(end - start, start)
        return self._scale * (prefill_s + (self._roofline.step_s(batch, context) if batch else 0.0))

    def swap_s(self) -> float:
        return self._scale * self._roofline.swap_s()

    def kv_move_s(self, tokens: int) -> float:
        return self._scale * self._roofline.kv_move_s(tokens)

    def sleep_s(self, tokens: int) -> float:
        return self._scale * self._roofline.sleep_s(tokens)

    def prefill_s(self, tokens: int) -> float:
        """Seconds of the prefill of `tokens`."""
        return self._scale * self._roofline.prefill_s(tokens)

    @property
    def degree(self) -> int:
        return self._section.degree

    @property
    def gauges(self) -> dict[str, float]:
        """How far the times are the hardware's."""
        late = self.outlasted / max(1, self.num)
        return {"paced/engines": 1, "paced/steps": self.num, "paced/busy_s": self.busy_s, "paced/outlasted_frac": late}

    def reconfigure(self, degree: int, tokens: int) -> float:
        try:
            section = PaceSection.model_validate({**self._section.model_dump(), "degree": degree})
        except ValidationError as error:
            raise EngineError(str(error.errors()[0]["msg"]).removeprefix("Value error, ")) from None
        roofline = Roofline(deployment_of(section))
        duration_s = self._scale * self._roofline.reconfigure_s(tokens, roofline)
        self._section, self._roofline = section, roofline
        return duration_s

    def due(self, duration_s: float, began: float, now: float) -> float:
        """The time at which a step of `duration_s` ends; it is counted. Without a pause before it, it is timed from the end of the one
        before and not from `began`, so late wake-ups do not add up. A step that has taken longer already ends `now`.
        """
        due = (began if self._free_at is None else self._free_at) + duration_s
        self.num += 1
        self.busy_s += duration_s
        self.outlasted += now > due
        self._free_at = max(due, now)
        return self._free_at

    def idle(self) -> None:
        self._free_at = None
