"""One batch of rollouts on modelled engines, trajectory by trajectory or in lock-step, until the last (or enough) are done."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

from rubato.sim.cluster import PoolSpec, affinity_of, engines_of, manager_of
from rubato.sim.manager_model import Played, RolloutFailed, Scores, TurnRequest
from rubato.sim.timeline import SimProcess, Timeline
from rubato.sim.workload import Episode


class BatchDone(NamedTuple):
    """`seconds` until the batch was complete; `played` of those that completed, by their number in the batch."""

    seconds: float
    played: dict[int, Played]
    busy_s: dict[str, float]
    """Seconds each engine computed, by its name."""


class BatchRun:
    """Runs once: `trajectories` or `lock_step`."""

    def __init__(self, pools: tuple[PoolSpec, ...], *, learned: bool = False) -> None:
        """Tasks go to the pools that name them, or as is `learned`: its caller says when to plan anew."""
        self.timeline = Timeline()
        self.engines = engines_of(self.timeline, pools)
        self.affinity = affinity_of(self.engines, pools, learned=learned)
        self.manager = manager_of(self.timeline, self.engines, self.affinity)

    def score_by(self, score: Scores) -> None:
        """Trajectories are scored by `score` and not as their task says."""
        self.manager = replace(self.manager, score=score)

    def trajectories(
        self,
        episodes: Sequence[Episode],
        enough: int | None = None,
        concurrency: int | None = None,
        over: Callable[[int], bool] = lambda number: False,
    ) -> BatchDone:
        """Each goes on by itself, `concurrency` at once (None: all). The batch ends when `enough` have, None means all, or when it is `over`,
        which is asked with the number of each that ends.

        One that gives up has ended too, and is not among the played.
        """
        wanted = len(episodes) if enough is None else enough
        played: dict[int, Played] = {}
        complete = self.timeline.event()
        left = iter(enumerate(episodes))
        ended = 0

        async def environment() -> None:
            nonlocal ended
            for number, episode in left:
                with suppress(RolloutFailed):
                    played[number] = await self.manager.play(f"t{number}", episode)
                ended += 1
                if over(number) or ended == wanted:
                    complete.set()

        for _ in range(concurrency or len(episodes)):
            self.timeline.start(environment())
        self.timeline.run(until=complete)
        return self._done(played)

    def lock_step(self, episodes: Sequence[Episode]) -> BatchDone:
        """All generate, then all environments step together; each turn waits for its slowest, as batched environments do.

        The scores come at the end, all at once, and are waited for.
        """
        played = {number: Played(version_first=0) for number in range(len(episodes))}
        self.timeline.run(until=self.timeline.start(self._turns(episodes, played)).ended)
        return self._done(played)

    async def _turns(self, episodes: Sequence[Episode], played: dict[int, Played]) -> None:
        timeline = self.timeline
        await timeline.sleep(max(sum(episode.resets_s) for episode in episodes))
        contexts = [0] * len(episodes)
        for turn in range(max(len(episode.turns) for episode in episodes)):
            active = [number for number, episode in enumerate(episodes) if len(episode.turns) > turn]
            began = timeline.now
            asked: list[SimProcess] = []
            for number in active:
                shown, sampled, _ = episodes[number].turns[turn]
                request = TurnRequest(f"t{number}")
                task = episodes[number].task
                asked.append(timeline.start(self.manager.proxy.generate(request, contexts[number] + shown, sampled, task)))
                contexts[number] += shown + sampled
            for process in asked:
                await process.ended
            step_s = max(episodes[number].turns[turn].step_s for number in active)
            for number in active:
                played[number].generate_s += timeline.now - began
                played[number].step_s += step_s
            await timeline.sleep(step_s)
        score_s = max(episode.reward_s for episode in episodes)
        for each in played.values():
            each.score_s = score_s
        await timeline.sleep(score_s)

    def _done(self, played: dict[int, Played]) -> BatchDone:
        busy = {engine.name: engine.usage.busy_s for engine in self.engines}
        return BatchDone(self.timeline.now, played, busy)
