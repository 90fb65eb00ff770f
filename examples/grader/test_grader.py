"""The grader in a test: the real actor, embedded in the test's own event loop. Run it with: pytest test_grader.py"""

import asyncio
from pathlib import Path

from messages import Grade

from rubato.runtime.config.compose import from_mapping
from rubato.runtime.embed import embed

JOB = {
    "actors": {"grader": {"class": f"{Path(__file__).parent}/grader.py:Grader"}},
    "grader": {"strictness": 2.0},
    "report": {"finish": ""},
}


def test_half_right_is_worth_less_than_half(tmp_path: Path) -> None:
    async def scores() -> list[float]:
        async with embed(from_mapping(JOB), tmp_path / "run") as job:
            asks = [job.ref("grader").ask(Grade(answer, "left"), timeout=5) for answer in ("left", "LE", "down")]
            return [graded.score for graded in await asyncio.gather(*asks)]

    right, half, wrong = asyncio.run(scores())

    assert right == 1.0
    assert wrong < half < 0.5
