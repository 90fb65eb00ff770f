"""Three loads on which fixed values of α differ most: the engine is what there is too little of, a few long rollouts are, or the trainer is."""

from functools import cache
from pathlib import Path

import yaml

from rubato.planning.roofline import Deployment
from rubato.sim.admission.job import LengthWorkload, distributions
from rubato.sim.distribution import Quantiles

CONFIGS = Path(__file__).resolve().parents[2] / "configs"

EVEN = Quantiles(law="quantiles", points=((0.0, 900.0), (1.0, 1100.0)))

TAIL = "math"
"""Of configs/lengths: a tenth of the responses is longer than four medians."""

ALPHAS = (0, 1, 2, 3, 4, 6, 8, "auto")


def workloads() -> dict[str, LengthWorkload]:
    """By name."""
    return {
        "rollout-bound": LengthWorkload(EVEN, step_s=2.0),
        "heavy tail": LengthWorkload(distributions()[TAIL], step_s=4.0),
        "trainer-bound": LengthWorkload(EVEN, step_s=25.0),
    }


@cache
def hardware() -> Deployment:
    """One H800 with Qwen3-8B."""
    files = {"gpu": "hardware/h800.yaml", "model": "models/qwen3-8b.yaml"}
    return Deployment.model_validate({key: yaml.safe_load((CONFIGS / file).read_text()) for key, file in files.items()})
