"""A program of one's own takes turns with other jobs of a cluster: python phases.py CLUSTER JOB"""

import sys

from rubato.actors.cluster.permits import Phases

pools = {"rollout": "rollout-0", "training": "training-0"}
with Phases(sys.argv[1], job=sys.argv[2], pools=pools) as phase:

    @phase("training")
    def train(samples: list[int]) -> float:
        return sum(samples) / len(samples)

    for step in range(3):
        with phase("rollout") as permit:
            samples = [step, step + 1]
            print(f"step {step}: rolled out under permit {permit.term}")
        print(f"step {step}: loss {train(samples)}")
