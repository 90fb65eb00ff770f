"""Held-out evaluations of the newest weights; they run beside training, and only the last one is waited for."""

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from actors.messages.samples import EvalResult, Evaluate
from actors.training.section import EvalSection
from bus.errors import AskFailed

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger

    from runtime.ref import Ref

FAILED_SHARE = 0.01
"""Above this share of tasks without a score the user is told: the reward says nothing about them."""

REPLY_S = 30.0
"""Beyond the time that the sample buffer may hold the ask back."""


class HeldOut:
    """Asks the sample buffer for evaluations and keeps the newest result until a row takes it."""

    def __init__(
        self,
        buffer: "Ref",
        section: EvalSection,
        log: "FilteringBoundLogger",
        notice: Callable[[str], None],
        epoch: Callable[[], int],
    ) -> None:
        self._buffer, self._section, self._log, self._epoch = buffer, section, log, epoch
        self._notice = notice
        self._result: dict[str, float] = {}

    def due(self, step: int, last: int) -> int:
        """Tasks to evaluate after `step`; 0 where none is due."""
        if step == last:
            return self._section.final_num_tasks
        return self._section.num_tasks if self._section.every and step % self._section.every == 0 else 0

    def take(self) -> dict[str, float]:
        """What was found since the last call, for the row that is written next."""
        result, self._result = self._result, {}
        return result

    async def evaluate_last(self, step: int, num: int, leaving: asyncio.Event) -> bool:
        """Like `evaluate`, but False at once when the actor is `leaving`: environments are drained by then, and the step is to be saved."""
        async with asyncio.TaskGroup() as tasks:
            waiting = (tasks.create_task(self.evaluate(step, num)), tasks.create_task(leaving.wait()))
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in waiting:
                task.cancel()
        return not leaving.is_set()

    async def evaluate(self, step: int, num: int) -> None:
        """Returns when there is a result, or none to be had in time; never raises for the latter."""
        deadline = asyncio.get_running_loop().time() + self._section.timeout_s
        request = Evaluate(f"{self._epoch()}.{step}", num)
        while asyncio.get_running_loop().time() < deadline:
            try:
                reply = await self._buffer.ask(request, timeout=request.wait_s + REPLY_S)
            except AskFailed as error:
                self._log.warning("evaluation_failed", step=step, error=str(error))
                return
            if isinstance(reply, EvalResult):
                self._keep(step, reply)
                self._log.info("evaluated", step=step, reward=reply.reward, num=reply.num, failed=reply.failed)
                return
        self._log.warning("evaluation_timed_out", step=step)

    def _keep(self, step: int, found: EvalResult) -> None:
        """For the next row. A failed task has no reward: it is counted beside, since 0 would mix broken with unsolved."""
        self._result = {"eval/num": found.num, "eval/failed": found.failed, "eval/version": found.version}
        if found.num:
            self._result["eval/reward"] = found.reward
        tasks = found.num + found.failed
        if found.failed > FAILED_SHARE * tasks:
            self._notice(
                f"evaluation after step {step}: {found.failed} of {tasks} tasks failed, and eval/reward leaves them out"
            )
