"""What is told of a forecast once its load is over."""

from rubato.actors.orchestrator.orchestrator import Foresight
from rubato.runtime.observe.figures import Metrics

SCALE = 0.5


def told(metrics):
    return {name: value for name, value in metrics.snapshot().items() if name.startswith("orchestrator/")}


async def test_the_forecast_of_the_fullest_moment_is_held_against_what_it_became_in_seconds_of_the_hardware():
    metrics = Metrics()
    foresight = Foresight(metrics)

    foresight.over(0.0, SCALE)
    assert told(metrics) == {}

    for num, forecast_s, now_s in ((2, 4.0, 0.0), (8, 10.0, 1.0), (8, 9.0, 2.0), (3, 3.0, 4.0)):
        foresight.expect(num, forecast_s, now_s)
    foresight.over(7.0, SCALE)
    foresight.over(8.0, SCALE)
    assert told(metrics) == {"orchestrator/forecast_s": 10.0, "orchestrator/took_s": 12.0}

    foresight.expect(1, 2.0, 9.0)
    foresight.over(10.0, SCALE)
    assert told(metrics) == {"orchestrator/forecast_s": 2.0, "orchestrator/took_s": 2.0}
