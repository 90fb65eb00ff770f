"""Forecast against fact: when a load was expected to be through, and how long it took."""

from runtime.observe.figures import Metrics


class Foresight:
    """Of one orchestrator. A load begins with its first request and is over once none is left."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._num, self._at_s, self._forecast_s = 0, 0.0, 0.0

    def expect(self, num_requests: int, forecast_s: float, now_s: float) -> None:
        """All `num_requests` are through in `forecast_s`. Of a load, the forecast counts that was made when most of it ran."""
        if num_requests > self._num:
            self._num, self._at_s, self._forecast_s = num_requests, now_s, forecast_s

    def over(self, now_s: float, scale: float) -> None:
        """Nothing runs any more; the fact is late by as much as this is. `scale`: seconds here for each of the hardware that is forecast."""
        if self._num:
            self._num = 0
            self._metrics.gauge("orchestrator/forecast_s", self._forecast_s)
            self._metrics.gauge("orchestrator/took_s", (now_s - self._at_s) / scale)
