"""A whole job in virtual time: environments roll out, the buffer admits and hands over, the trainer trains and publishes.

What each of these takes is pluggable: sim/cluster.py has the costs of a cluster, sim/onehost/processes.py those of processes on one host.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from rubato.actors.messages.samples import Ticket
from rubato.sim.buffer_model import ModelledBuffer
from rubato.sim.manager_model import ModelledManager, Played, RolloutFailed
from rubato.sim.timeline import Cancelled, SimProcess, Timeline
from rubato.sim.workload import Episode


@dataclass(frozen=True, slots=True)
class Environments:
    """Rollouts that run at once at one environment manager."""

    manager: ModelledManager
    count: int


class JobCosts(Protocol):
    """The times of a job's parts: each method returns, in virtual time, when its part is through."""

    timeline: Timeline

    @property
    def environments(self) -> Sequence[Environments]: ...
    def episode(self, ticket: Ticket) -> Episode:
        """What happens in this attempt at a rollout."""
        ...

    async def store(self) -> None:
        """A trajectory goes from its manager into the sample buffer."""
        ...

    async def train(self, step: int, tokens: int, sequences: int) -> None: ...
    async def publish(self, step: int) -> None:
        """The trainer's share of handing out weights of version `step`; engines take them on their own."""
        ...

    async def finish(self, step: int) -> None:
        """What a step takes once its weights are out."""
        ...

    async def checkpoint(self, step: int) -> None:
        """What is written between `step` and the next one."""
        ...

    def used(self) -> Mapping[str, tuple[float, float]]:
        """CPU and busy seconds so far by part; empty where they are not modelled."""
        ...


@dataclass(frozen=True, slots=True)
class JobStep:
    """One training step, in virtual seconds, from the end of the one before."""

    step: int
    began_s: float
    asked_s: float
    """The checkpoint of the step before, if any, is behind it."""
    claimed_s: float
    trained_s: float
    published_s: float
    ended_s: float
    tokens: int
    used: Mapping[str, tuple[float, float]]

    @property
    def waited_s(self) -> float:
        """For its batch."""
        return self.claimed_s - self.asked_s

    @property
    def train_s(self) -> float:
        return self.trained_s - self.claimed_s


class Begun(NamedTuple):
    """A rollout that was begun: its task, and the tokens that it samples where it is let."""

    task: str
    sampled: int


@dataclass(eq=False, slots=True)
class _Place:
    """For one rollout at a time."""

    process: SimProcess | None = None


class Job:
    """`run` simulates; `rows` then says what happened."""

    def __init__(self, buffer: ModelledBuffer, steps: int, costs: JobCosts) -> None:
        self.rows: list[JobStep] = []
        self.played: list[Played] = []
        """Every rollout that was scored, in the order in which they ended."""
        self.begun: dict[str, Begun] = {}
        """By trajectory."""
        self.buffer = buffer
        self._steps = steps
        self._costs = costs
        self._timeline = costs.timeline
        self._tokens: dict[str, int] = {}
        """Of the trajectories in the buffer."""
        self._playing: dict[tuple[str, int], _Place] = {}
        """By trajectory and attempt."""
        buffer.on_cancel = self._cancel

    def run(self, steps: int | None = None) -> list[JobStep]:
        """Simulate up to the end of step `steps`; None means the job's last. A job that goes on admits as in its middle."""
        for each in self._costs.environments:
            for _ in range(each.count):
                place = _Place()
                place.process = self._timeline.start(self._environment(each.manager, place))
        self._timeline.run(until=self._timeline.start(self._trainer(steps or self._steps)).ended)
        return self.rows

    def _cancel(self, trajectory: str, attempt: int) -> None:
        place = self._playing.get((trajectory, attempt))
        if place is not None and place.process is not None:
            place.process.cancel()

    async def _environment(self, manager: ModelledManager, place: _Place) -> None:
        while True:
            await manager.up()
            freed = self.buffer.freed
            ticket = self.buffer.issue()
            if ticket is None:
                with self.buffer.waiting(1):
                    await freed
                continue
            rollout = ticket.trajectory_id, ticket.attempt
            self._playing[rollout] = place
            try:
                await self._roll_out(manager, ticket)
            except Cancelled:
                self.buffer.cancelled(ticket)
            finally:
                del self._playing[rollout]

    async def _roll_out(self, manager: ModelledManager, ticket: Ticket) -> None:
        name = ticket.trajectory_id
        drawn = self._costs.episode(ticket)
        self.begun[name] = Begun(drawn.task, drawn.sampled)
        session = f"{name}.{ticket.attempt}"
        try:
            played = await manager.play(session, drawn, ticket.version, self.buffer.still_useful)
        except RolloutFailed as failed:
            self.buffer.give_up(ticket, failed.reason, retry=failed.retry)
            return
        self.played.append(played)
        await self._costs.store()
        self._tokens[name] = drawn.tokens
        # Alternating rewards give every group a spread: what is learned is no part of the model.
        self.buffer.put(ticket, played.version_first, float(int(name.rpartition(".")[2]) % 2))

    async def _trainer(self, steps: int) -> None:
        timeline, costs = self._timeline, self._costs
        for step in range(1, steps + 1):
            asked = timeline.now
            while (batch := self.buffer.claim(step)) is None:
                await self.buffer.changed
            claimed = timeline.now
            tokens = sum(self._tokens.pop(name) for name in batch)
            await costs.train(step, tokens, len(batch))
            trained = timeline.now
            await costs.publish(step)
            self.buffer.trained(step)
            published = timeline.now
            await costs.finish(step)
            began = self.rows[-1].ended_s if self.rows else 0.0
            self.rows.append(JobStep(step, began, asked, claimed, trained, published, timeline.now, tokens, costs.used()))
            await costs.checkpoint(step)
