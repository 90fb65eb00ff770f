"""What both modes share of rewards and moves, and what the second mode's environment tells its engine."""

import asyncio
from array import array

import pytest

from rubato.actors.config import RolloutSection
from rubato.actors.engines.engine import CACHE, EXPORT, EngineError, Work, capabilities
from rubato.actors.messages.generation import Sampling
from rubato.bus.message import unpack_i32
from rubato.sim.cluster import engines_of
from rubato.sim.live.environment import ModelledEnv, asked
from rubato.sim.live.roofline_engine import STOP, RooflineEngine, RooflineSection
from rubato.sim.manager_model import TurnRequest
from rubato.sim.moves_model import next_move
from rubato.sim.proxy_model import ModelledProxy
from rubato.sim.reward_model import RewardPool
from rubato.sim.simtest.toys import renderer, write_tokenizer
from rubato.sim.timeline import Timeline
from rubato.sim.virtual import run_virtual
from rubato.sim.workload import Episode, TaskSpec, episode
from tests.sim.test_both_modes import READ
from tests.sim.test_job import engine, pools


def test_a_reward_worker_takes_all_that_waits_as_one_batch_and_answers_it_together():
    timeline = Timeline()
    rewards, ended = RewardPool(timeline, workers=1), {}

    async def score(name: str, reward_s: float) -> None:
        await rewards.score(name, Episode("task", (), (), reward_s))
        ended[name] = timeline.now

    for name, at_s, reward_s in (("a", 0.0, 1.0), ("b", 0.3, 2.0), ("c", 0.6, 3.0), ("d", 7.0, 4.0)):
        timeline.at(at_s, lambda name=name, reward_s=reward_s: timeline.start(score(name, reward_s)))
    timeline.run()

    assert ended == {"a": 1.0, "b": 6.0, "c": 6.0, "d": 11.0}


def test_the_newest_request_of_the_fullest_engine_moves_to_the_emptiest():
    assert next_move({"x": ["a"], "y": ["b", "c", "d"], "z": []}) == ("d", "z")
    assert next_move({"x": ["a"], "y": ["b"]}) is None


@pytest.mark.parametrize("nic_bytes_s", [5e11, 1e7])
def test_a_turn_that_moves_goes_on_where_it_was_with_its_cache_or_without(nic_bytes_s):
    timeline = Timeline()
    gpu = {**engine()["gpu"], "nic_busbw_bytes_s": nic_bytes_s}
    engines = engines_of(timeline, pools(2, gpu=gpu))
    proxy = ModelledProxy(timeline, engines)
    turn = timeline.start(proxy.generate(TurnRequest("t0"), 1000, 100))
    source, target = sorted(engines, key=lambda each: "t0" not in proxy.requests()[each.name])
    # Both engines have observed a move: from then on the plan knows its rates.
    proxy._carry.travelled(source.name, source.name, 1000, source.model.kv_move_s(1000))
    timeline.at(0.5, lambda: proxy.move("t0", target.name))

    timeline.run(until=turn.ended)

    sampled = [each.usage.tokens for each in engines]
    assert sum(sampled) == 100
    assert min(sampled) > 0
    assert proxy.moved == 1
    carried = nic_bytes_s > 1e9
    assert target.usage.prefilled == (0 if carried else 1000 + source.usage.tokens)
    assert proxy.requests() == {source.name: (), target.name: ()}


def test_a_turn_that_is_over_before_it_can_leave_stays():
    timeline = Timeline()
    engines = engines_of(timeline, pools(2))
    proxy = ModelledProxy(timeline, engines)
    turn = timeline.start(proxy.generate(TurnRequest("t0"), 100, 1))
    source, target = sorted(engines, key=lambda each: "t0" not in proxy.requests()[each.name])
    timeline.at(source.model.prefill_s(100) + 0.001, lambda: proxy.move("t0", target.name))

    timeline.run(until=turn.ended)

    assert (proxy.moved, source.usage.tokens, target.usage.tokens) == (0, 1, 0)


async def test_an_observation_has_its_tokens_and_says_how_many_are_sampled_next(tmp_path):
    folder, env = write_tokenizer(tmp_path / "model"), ModelledEnv(READ, seed=1)
    turns = episode(TaskSpec.model_validate(READ), 1, "g00000001.0").turns

    async with asyncio.TaskGroup() as tasks:
        playing = tasks.create_task(env.reset(seed=0), name="env_manager-1.g00000001.0")
    shown, _ = playing.result()
    prompt = array("i", renderer(RolloutSection(), folder).opening(shown)).tolist()

    assert len(prompt) == turns[0].shown
    assert asked(prompt) == turns[0].sampled


def started(folder, run) -> None:
    """`run(engine, work)` in virtual time, of a turn that samples 40 tokens."""
    digits = [2 + 40 // 6**place % 6 for place in reversed(range(8))]
    work = Work("r", "s", (2, 2, *digits, STOP), Sampling(max_new_tokens=64, stop_token_ids=(STOP,)))
    spec = pools(1)[0].engine
    section = RooflineSection(kind="rubato.sim.live.roofline_engine:RooflineEngine", spec=spec, max_len=1024)

    async def main() -> None:
        modelled = RooflineEngine(folder, None, section)
        await modelled.start()
        await run(modelled, work)

    run_virtual(main)


async def tokens_of(modelled: RooflineEngine, work: Work) -> tuple[list[int], str]:
    found: list[int] = []
    reason = ""
    async for chunk in modelled.generate(work):
        found += unpack_i32(chunk.tokens.ids)
        reason = chunk.finish_reason
    return found, reason


def test_the_modelled_engine_gives_a_request_away_and_goes_on_with_it(tmp_path):
    async def run(modelled: RooflineEngine, work: Work) -> None:
        assert capabilities(modelled) == {EXPORT, CACHE}
        async with asyncio.TaskGroup() as tasks:
            going = tasks.create_task(tokens_of(modelled, work))
            await asyncio.sleep(0.1)
            moved = await modelled.export("r", with_cache=True)
        first, reason = going.result()
        rest, last = await tokens_of(modelled, moved)

        assert (reason, last) == ("exported", "stop")
        assert 0 < len(first) < 40
        assert moved.cache is not None
        assert moved.cache.num_tokens == len(work.prompt) + len(first) - 1
        assert len(first) + len(rest) == 40
        assert rest[-1] == STOP
        with pytest.raises(EngineError, match="does not run here"):
            await modelled.export("r")

    started(tmp_path, run)


def test_the_modelled_engine_hands_a_request_over_after_its_first_token(tmp_path):
    async def run(modelled: RooflineEngine, work: Work) -> None:
        chunks = modelled.generate(work._replace(first_at_once=True))
        first = await anext(chunks)
        async with asyncio.TaskGroup() as tasks:
            exporting = tasks.create_task(modelled.export("r", with_cache=True))
            last = await anext(chunks)

        assert (len(first.tokens.ids), first.finish_reason) == (4, "")
        assert (last.tokens.ids, last.finish_reason) == (b"", "exported")
        assert exporting.result().resumed.ids == first.tokens.ids

    started(tmp_path, run)


def test_an_aborted_request_ends_with_the_tokens_that_it_has(tmp_path):
    async def run(modelled: RooflineEngine, work: Work) -> None:
        async with asyncio.TaskGroup() as tasks:
            going = tasks.create_task(tokens_of(modelled, work))
            await asyncio.sleep(0.1)
            await modelled.abort("r")
        found, reason = going.result()

        assert reason == "aborted"
        assert 0 < len(found) < 40
        assert modelled.load().running == 0

    started(tmp_path, run)
