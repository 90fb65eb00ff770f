"""The modelled engine against closed forms of its own cost model."""

from pathlib import Path

import pytest
import yaml

from rubato.planning.roofline import Deployment, Roofline
from rubato.runtime.errors import ConfigError
from rubato.sim.engine_model import ModelledEngine
from rubato.sim.timeline import Timeline

CONFIGS = Path(__file__).parents[2] / "configs"


def spec(**changes) -> Deployment:
    gpu = yaml.safe_load((CONFIGS / "hardware/h800.yaml").read_text())
    model = yaml.safe_load((CONFIGS / "models/qwen3-8b.yaml").read_text())
    return Deployment.model_validate({"gpu": gpu, "model": model, **changes})


def engine(**changes) -> tuple[Timeline, ModelledEngine]:
    timeline = Timeline()
    return timeline, ModelledEngine(timeline, "engine-0", Roofline(spec(**changes)))


def test_one_request_takes_its_prefill_and_the_sum_of_its_steps():
    timeline, served = engine()

    job = timeline.start(served.generate("a", 1000, 400))
    timeline.run(until=job.ended)

    steps = sum(served.model.step_s(1, 1000 + done) for done in range(400))
    assert timeline.now == pytest.approx(served.model.prefill_s(1000) + steps, rel=1e-9)
    assert served.usage.tokens == 400


def test_a_request_that_joins_waits_for_the_boundary_of_the_running_step():
    timeline, served = engine()
    first = timeline.start(served.generate("a", 1000, 400))

    async def joins() -> float:
        await timeline.sleep(served.model.prefill_s(1000) + 1.5 * served.model.step_s(1, 1000))
        await served.generate("b", 100, 1)
        return timeline.now

    second = timeline.start(joins())
    timeline.run()

    alone = [served.model.step_s(1, 1000 + done) for done in range(2)]
    begun = served.model.prefill_s(1000) + sum(alone) + served.model.prefill_s(100)
    assert second.ended.value == pytest.approx(begun + served.model.step_s(2, 1102), rel=1e-9)
    assert first.ended.happened
    assert served.usage.tokens == 401


def test_the_next_turn_of_a_session_prefills_only_what_is_new():
    timeline, served = engine()

    async def turns() -> None:
        await served.generate("a", 1000, 10)
        await served.generate("a", 1010 + 50, 10)

    timeline.start(turns())
    timeline.run()

    assert served.usage.prefilled == 1000 + 50


def test_new_weights_make_every_kv_stale():
    timeline, served = engine()
    running = timeline.start(served.generate("a", 1000, 1000))

    async def swaps() -> None:
        await timeline.sleep(1.0)
        served.suspend()
        await timeline.sleep(5.0)
        served.resume(version=1)

    timeline.start(swaps())
    timeline.run()

    assert running.ended.happened
    assert served.version == 1
    assert served.usage.prefilled > 2000
    assert timeline.now == pytest.approx(5.0 + served.usage.busy_s, rel=0.01)


def test_a_request_waits_for_the_version_that_it_asks_for_and_blocks_nobody():
    timeline, served = engine()
    early = timeline.start(served.generate("a", 10, 10, min_version=1))
    other = timeline.start(served.generate("b", 10, 10))

    timeline.run()
    assert other.ended.happened
    assert not early.ended.happened

    served.resume(version=1)
    timeline.run()
    assert early.ended.happened


def test_a_full_kv_room_preempts_and_loses_no_token():
    timeline, served = engine(memory_use=0.28)
    room = served.model.kv_tokens
    jobs = [timeline.start(served.generate(name, room // 4, room // 3)) for name in "abc"]

    timeline.run()

    assert all(job.ended.happened for job in jobs)
    assert served.usage.preempted > 0
    assert served.usage.tokens == 3 * (room // 3)


def test_what_can_never_fit_is_refused():
    timeline, served = engine()

    with pytest.raises(ConfigError, match="Give the engine more GPUs"):
        timeline.start(served.generate("a", served.model.kv_tokens, 1))


def test_an_aborted_request_leaves_at_the_next_boundary_and_says_what_was_to_come():
    timeline, served = engine()
    job = timeline.start(served.generate("a", 1000, 400))
    began_s = served.model.prefill_s(1000)

    async def aborts() -> int:
        await timeline.sleep(began_s + 1.5 * served.model.step_s(1, 1000))
        return await served.abort("a")

    abort = timeline.start(aborts())
    timeline.run(until=job.ended)

    assert abort.ended.value == 398
    assert job.ended.happened
    assert timeline.now == pytest.approx(began_s + served.model.step_s(1, 1000) + served.model.step_s(1, 1001))
    assert (served.in_flight, served.held("a")) == (0, 0)


def test_an_abort_after_the_end_frees_the_kv_and_one_of_many_leaves_the_others():
    timeline, served = engine()
    timeline.start(served.generate("a", 1000, 2))
    timeline.run()
    assert served.held("a") == 1002

    abort = timeline.start(served.abort("a"))
    others = [timeline.start(served.generate(name, 100, 50)) for name in "bc"]
    timeline.start(served.abort("b"))
    timeline.run()

    assert (abort.ended.value, served.held("a"), served.held("c")) == (0, 0, 150)
    assert all(job.ended.happened for job in others)
