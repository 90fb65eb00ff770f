"""How a training step reads on the launcher's terminal."""

from collections.abc import Mapping

BAR = 12
EIGHTHS = " ▏▎▍▌▋▊▉█"


class StepTable:
    """One line per step: reward with a bar, held-out reward, age, who waited, tokens per second, seconds, time left."""

    def __init__(self) -> None:
        self._seconds: list[float] = []

    def header(self) -> str:
        return " step  reward               eval   age  wait trainer/engines   gen tok/s   step s    eta"

    def line(self, step: int, steps: int, row: Mapping[str, float]) -> str:
        seconds = row.get("time/step", 0.0)
        self._seconds = [*self._seconds[-9:], seconds]
        left = int(sum(self._seconds) / len(self._seconds) * (steps - step))
        reward = row.get("reward/mean", 0.0)
        held_out = f"{row['eval/reward']:.2f}" if "eval/reward" in row else "    "
        engines = [v for k, v in row.items() if k.startswith("idle/engine")]
        idle = sum(engines) / len(engines) * seconds if engines else 0.0
        return (
            f"{step:5d}  {reward:5.2f} {_bar(reward)}  {held_out}  {row.get('staleness/max', 0.0):3.0f}"
            f"  {row.get('time/wait_for_batch', 0.0):9.1f} / {idle:<6.1f}  {row.get('perf/gen_tokens_s', 0.0):10,.0f}"
            f"  {seconds:6.2f}  {left // 60:3d}:{left % 60:02d}"
        )


def _bar(share: float) -> str:
    eighths = round(max(0.0, min(1.0, share)) * BAR * 8)
    full, rest = divmod(eighths, 8)
    return ("█" * full + (EIGHTHS[rest] if rest else "")).ljust(BAR)
