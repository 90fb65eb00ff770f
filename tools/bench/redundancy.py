"""More rollouts than a batch needs: surplus groups that keep their slots, beside first-N discarding. Simulated, with the live planners.

python tools/bench/redundancy.py                 both bounds, a table: a minute
python tools/bench/redundancy.py --json FILE     the figures as JSON

Three arms meet the same trajectories: `none` has as many environments as a batch has rollouts; `surplus` has a quarter more and loses
none, `first_n` as many and kills those that are not among the first. docs/benchmarks.md says what is modelled.
"""

import argparse
import json
import sys
from collections import Counter, deque
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple, Protocol

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import yaml  # noqa: E402

from actors.messages.samples import Ticket  # noqa: E402
from actors.samples.group import GroupLimits  # noqa: E402
from actors.samples.groups import Groups  # noqa: E402
from actors.samples.sample import group_id, split_id, trajectory_id  # noqa: E402
from sim.buffer_model import NEVER_LAPSES_S, ModelledBuffer  # noqa: E402
from sim.timeline import SimEvent, Timeline  # noqa: E402
from sim.workload import TaskSpec, episode  # noqa: E402

WORKLOAD = ROOT / "configs/workloads/gem_math.yaml"
BATCH_GROUPS, GROUP_SIZE = 16, 8
REDUNDANCY = 1.25
"""RollPacker's; RollArt states none."""
RESET_S, SLOW_SHARE, SLOW = 5.0, 0.02, 100.0
"""What most resets take, which share takes longer, and how many times as long."""
TOKEN_S, TRAIN_S = 0.02, 10.0
"""50 tokens a second for each rollout, however many there are; a training step."""
ARMS = ("none", "surplus", "first_n")
ALPHAS, WARM, STEPS, SEED = (1, 2), 5, 100, 1
"""Batches before those that are timed, and those."""


class Buffer(Protocol):
    """What rollouts and the trainer ask of either arm's buffer."""

    changed: SimEvent

    @property
    def version(self) -> int: ...
    def issue(self) -> Ticket | None: ...
    def put(self, ticket: Ticket, version_first: int, reward: float) -> None: ...
    def claim(self, step: int) -> list[str] | None: ...
    def trained(self, step: int) -> None: ...


class FirstN:
    """A model of the rule: each batch starts a quarter more groups than it trains, takes those that are through first, and kills the others.

    Rollouts of the batch of step n begin once version n - 1 - α is out, so none of them can be too old.
    """

    def __init__(self, timeline: Timeline, alpha: int) -> None:
        self._timeline, self._alpha = timeline, alpha
        self.version = 0
        self.changed = timeline.event()
        self.running: dict[str, list[SimEvent]] = {}
        """Group that is not killed → the ends of its rollouts."""
        self._tickets: deque[Ticket] = deque()
        self._opened = 0
        self._scored: Counter[str] = Counter()
        self._through: dict[int, list[str]] = {}
        """Step → its groups that are through, in their order; no more than it trains."""

    def issue(self) -> Ticket | None:
        while not self._tickets:
            if self._opened > self.version + self._alpha:
                return None
            self._open()
        ticket = self._tickets.popleft()
        return ticket if ticket.group_id in self.running else self.issue()

    def put(self, ticket: Ticket, version_first: int, reward: float) -> None:
        if ticket.group_id not in self.running:
            return
        self._scored[ticket.group_id] += 1
        if self._scored[ticket.group_id] < GROUP_SIZE:
            return
        through = self._through[ticket.row]
        through.append(ticket.group_id)
        if len(through) == BATCH_GROUPS:
            for group in self._groups(ticket.row):
                ends = self.running.pop(group)
                for end in ends if group not in through else ():
                    end.set()
        self._moved()

    def claim(self, step: int) -> list[str] | None:
        through = self._through.get(step, [])
        if len(through) < BATCH_GROUPS:
            return None
        return [trajectory_id(group, member) for group in through for member in range(GROUP_SIZE)]

    def trained(self, step: int) -> None:
        self.version = step
        self._moved()

    def _groups(self, step: int) -> list[str]:
        num = round(BATCH_GROUPS * REDUNDANCY)
        return [group_id((step - 1) * num + at) for at in range(num)]

    def _open(self) -> None:
        self._opened += 1
        step = self._opened
        self._through[step] = []
        for group in self._groups(step):
            self.running[group] = []
            members = range(GROUP_SIZE)
            self._tickets.extend(Ticket(trajectory_id(group, m), group, 1, step, 0, self.version) for m in members)

    def _moved(self) -> None:
        happened, self.changed = self.changed, self._timeline.event()
        happened.set()


class Drawn(NamedTuple):
    """One trajectory."""

    reset_s: float
    play_s: float
    tokens: int


class Arm:
    """A job in virtual time: `environments` rollouts at once, and a trainer."""

    def __init__(self, task: TaskSpec, timeline: Timeline, buffer: Buffer, environments: int) -> None:
        self._task, self._timeline, self._buffer = task, timeline, buffer
        self._environments = environments
        self.drawn: dict[str, Drawn] = {}
        """Of all that began."""
        self.batches: list[tuple[float, list[str]]] = []
        """When each was trained, and what."""

    def run(self) -> None:
        for _ in range(self._environments):
            self._timeline.start(self._environment())
        self._timeline.run(until=self._timeline.start(self._trainer()).ended)

    async def _environment(self) -> None:
        while True:
            changed = self._buffer.changed
            ticket = self._buffer.issue()
            if ticket is None:
                await changed
                continue
            drawn = self.drawn[ticket.trajectory_id] = self._draw(ticket.trajectory_id)
            first: list[int] = []
            self._timeline.at(
                self._timeline.now + drawn.reset_s, lambda first=first: first.append(self._buffer.version)
            )
            over = self._timeline.event()
            self._timeline.at(self._timeline.now + drawn.reset_s + drawn.play_s, over.set)
            if isinstance(self._buffer, FirstN):
                self._buffer.running[ticket.group_id].append(over)
            await over
            if first:
                self._buffer.put(ticket, first[0], float(split_id(ticket.trajectory_id)[1] % 2))

    def _draw(self, trajectory: str) -> Drawn:
        played = episode(self._task, SEED, trajectory)
        return Drawn(
            played.resets_s[-1], sum(turn.sampled * TOKEN_S + turn.step_s for turn in played.turns), played.sampled
        )

    async def _trainer(self) -> None:
        for step in range(1, WARM + STEPS + 1):
            while (batch := self._buffer.claim(step)) is None:
                await self._buffer.changed
            await self._timeline.sleep(TRAIN_S)
            self._buffer.trained(step)
            self.batches.append((self._timeline.now, batch))


def workload() -> TaskSpec:
    """GEM-math, with the tail of resets."""
    quick = 1 - SLOW_SHARE
    points = [[0, RESET_S], [quick, RESET_S], [quick + 1e-9, SLOW * RESET_S], [1, SLOW * RESET_S]]
    reset_s = {"law": "quantiles", "points": points}
    return TaskSpec.model_validate(yaml.safe_load(WORKLOAD.read_text()) | {"reset_s": reset_s})


def arm_of(name: str, alpha: int) -> Arm:
    """One of ARMS."""
    timeline, rollouts = Timeline(), BATCH_GROUPS * GROUP_SIZE
    if name == "first_n":
        return Arm(workload(), timeline, FirstN(timeline, alpha), round(rollouts * REDUNDANCY))
    limits = GroupLimits(
        group_size=GROUP_SIZE,
        batch_groups=BATCH_GROUPS,
        steps=WARM + STEPS + alpha + 2,  # beyond what is simulated: nothing ends before
        run_seed=SEED,
        max_attempts=1,
        unbounded_batches=1,
        ticket_ttl_s=NEVER_LAPSES_S,
    )
    environments = rollouts if name == "none" else round(rollouts * REDUNDANCY)
    return Arm(workload(), timeline, ModelledBuffer(timeline, Groups(limits, alpha)), environments)


def figures(arm: Arm) -> dict[str, float]:
    """Seconds per batch; mean length of what was trained over that of all that began; shares whose reset was slow, and not trained."""
    arm.run()
    trained = [arm.drawn[name] for _, batch in arm.batches for name in batch]
    everyone = list(arm.drawn.values())
    return {
        "batch_s": (arm.batches[-1][0] - arm.batches[WARM - 1][0]) / STEPS,
        "length_bias": fmean(each.tokens for each in trained) / fmean(each.tokens for each in everyone),
        "slow_trained_frac": fmean(each.reset_s > RESET_S for each in trained),
        "slow_begun_frac": fmean(each.reset_s > RESET_S for each in everyone),
        "untrained_frac": 1 - len(trained) / len(everyone),
    }


def compare(alpha: int) -> dict[str, Any]:
    """One bound: every arm, and what those with redundancy gain over the one without."""
    found: dict[str, Any] = {"alpha": alpha} | {name: figures(arm_of(name, alpha)) for name in ARMS}
    for name in ARMS[1:]:
        found[name]["gain"] = found["none"]["batch_s"] / found[name]["batch_s"]
    return found


def main(argv: Sequence[str]) -> int:
    """Simulate, print the table, write the figures where asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE")
    asked = parser.parse_args(argv)
    try:
        if asked.json:
            asked.json.open("ab").close()
    except OSError as error:
        parser.error(str(error))
    points = [compare(alpha) for alpha in ALPHAS]
    print("simulated                s per batch   gain   length bias   slow resets trained, begun   not trained")
    for point in points:
        for name in ARMS:
            f = point[name]
            print(
                f"alpha {point['alpha']}  {name:10} {f['batch_s']:17.1f} {f.get('gain', 1.0):6.2f} {f['length_bias']:13.3f}"
                f" {f['slow_trained_frac']:16.1%}, {f['slow_begun_frac']:6.1%} {f['untrained_frac']:15.1%}"
            )
    if asked.json:
        asked.json.write_text(json.dumps({"points": points, "simulated": True}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
