from collections.abc import Callable

import pytest
from msgspec.structs import replace

from rubato.runtime.monitor.snapshot import snapshot
from rubato.runtime.monitor.views import Snapshot
from rubato.runtime.observe.figures import StageView, WaitView
from rubato.runtime.registry import ActorRecord

CONFIG = {"run": {"name": "quickstart", "steps": 60}, "staleness": {"alpha": 1}}


def record(
    name: str, *, waits: tuple[WaitView, ...] = (), stages: tuple[StageView, ...] = (), state: str = "ready", **metrics: float
) -> ActorRecord:
    role = name.rsplit("-", 1)[0]
    named = {key.replace("__", "/"): value for key, value in metrics.items()}
    return ActorRecord(
        name,
        role,
        f"mem://{name}",
        3,
        4242,
        "here",
        state,
        mailbox=2,
        rate_s=5900.0,
        idle=0.09,
        metrics=named,
        waits=[replace(wait, stage=wait.stage or wait.what) for wait in waits],
        stages=list(stages),
    )


@pytest.fixture
def make_record() -> Callable[..., ActorRecord]:
    return record


@pytest.fixture
def waiting_records() -> list[ActorRecord]:
    """A trainer that waits for a batch that one slow environment holds up."""
    return [
        record("engine-1", weights__version=23.0),
        record("engine-2", weights__version=22.0),
        record(
            "env_manager-1",
            waits=(
                WaitView("tickets", "room for 3 rollouts", "sample_buffer", 90.0),
                WaitView("g1306.1", "", "llm_proxy", 13.0, "rollout.generate_timeout_s=60", "generate"),
                WaitView("g1307.2", "", "", 11.9, "env.step_timeout_s=60", "env.step", 11.9),
            ),
            stages=(StageView("env.step", "", 1, 1.0, 0.4), StageView("tickets", "sample_buffer", 1, 1.0, -1.0, True)),
            **{"env/step_s_p99": 0.4, "rollout__in_flight": 61.0},
        ),
        record(
            "sample_buffer-1",
            waits=(WaitView("batch 42", "29 of 32 groups; oldest group g1307 has 7 of 8 members", "env_manager-1", 12.3),),
            stages=(StageView("batch 42", "env_manager-1", 1, 1.0, -1.0, True),),
            queue__ready__depth=88.0,
        ),
        record(
            "trainer-1",
            waits=(WaitView("batch 42", "29 of 32 groups", "sample_buffer", 12.4, "samples.claim_s=60"),),
            stages=(StageView("batch 42", "sample_buffer", 1, 1.0, -1.0, True),),
        ),
    ]


@pytest.fixture
def waiting_run(waiting_records: list[ActorRecord]) -> Snapshot:
    return snapshot("quickstart-0421", waiting_records, ROWS, CONFIG, elapsed_s=52.0)


ROWS = [
    {"step": 40, "reward/mean": 0.79, "eval/reward": 0.8, "staleness/max": 0, "staleness/dropped": 2, "queue/held/depth": 7},
    {"step": 41, "reward/mean": 0.83, "staleness/max": 1, "staleness/dropped": 1, "weights/version": 21},
]


@pytest.fixture
def rows() -> list[dict[str, float]]:
    return ROWS


@pytest.fixture
def config() -> dict[str, object]:
    return CONFIG
