"""One suite over every engine: what a worker may rely on, whichever engine it hosts."""

import asyncio
from pathlib import Path

import pytest

from rubato.actors.engines.engine import EngineError, Work
from rubato.actors.engines.section import PaceSection
from rubato.actors.messages.generation import Sampling, Tokens, VersionSpan
from rubato.bus.message import pack_i32, unpack_f32, unpack_i32
from rubato.planning.step_sums import StepSums
from tests.contract.engines import (
    KINDS,
    MODELLED,
    collect,
    draws_by_position,
    every_engine,
    first_tokens,
    modelled_engine,
    prompt_of,
    running,
    whole_of,
)
from tests.models import VOCAB, greedy, logprobs, weights_image, write_model

pytestmark = pytest.mark.asyncio(loop_scope="module")


@every_engine
async def test_a_request_ends_by_length_with_one_span_and_one_logprob_per_token(engine):
    work = Work("a", "s", prompt_of(1), Sampling(10))

    tokens, reason = await collect(engine, work)

    assert reason == "length"
    assert len(unpack_i32(tokens.ids)) == len(unpack_f32(tokens.logprobs)) == 10
    assert tokens.spans == (VersionSpan(0, 0, 10),)
    assert all(value <= 0 for value in unpack_f32(tokens.logprobs))


@every_engine
async def test_a_stop_token_ends_the_request_and_is_kept(engine):
    sampled, _ = await collect(engine, Work("a", "s", prompt_of(1), Sampling(10, seed=5)))
    ids = unpack_i32(sampled.ids)
    stop = next(token for token in ids if ids.index(token) >= 3)

    tokens, reason = await collect(engine, Work("b", "s", prompt_of(1), Sampling(10, seed=5, stop_token_ids=(stop,))))

    assert reason == "stop"
    assert unpack_i32(tokens.ids)[-1] == stop
    assert len(tokens.ids) // 4 <= 10


@every_engine
async def test_the_same_seed_and_session_give_the_same_tokens_and_another_seed_others(engine):
    first, _ = await collect(engine, Work("a", "s", prompt_of(2), Sampling(24, seed=1)))
    again, _ = await collect(engine, Work("b", "s", prompt_of(2), Sampling(24, seed=1)))
    other, _ = await collect(engine, Work("c", "s", prompt_of(2), Sampling(24, seed=2)))

    assert again.ids == first.ids
    assert other.ids != first.ids


@every_engine
async def test_members_of_a_group_share_prompt_and_seed_but_sample_differently(engine):
    one, _ = await collect(engine, Work("a", "g.0", prompt_of(2), Sampling(24, seed=1)))
    two, _ = await collect(engine, Work("b", "g.1", prompt_of(2), Sampling(24, seed=1)))

    assert one.ids != two.ids


@every_engine
async def test_two_hundred_requests_over_eight_slots_all_finish(engine):
    works = [Work(f"r{i}", f"s{i}", prompt_of(i, 1 + i % 30), Sampling(1 + i % 7)) for i in range(200)]

    results = await asyncio.gather(*(collect(engine, work) for work in works))

    assert [len(tokens.ids) // 4 for tokens, _ in results] == [work.sampling.max_new_tokens for work in works]
    assert {reason for _, reason in results} == {"length"}
    assert engine.load().running == engine.load().waiting == 0


@every_engine
async def test_an_abort_keeps_the_tokens_so_far_and_ends_the_iterator(engine):
    chunks = engine.generate(Work("a", "s", prompt_of(1), Sampling(200)))
    tokens, reason = await first_tokens(chunks, 3), ""

    await engine.abort("a")
    async for chunk in chunks:
        tokens, reason = tokens + chunk.tokens, chunk.finish_reason

    assert reason == "aborted"
    assert 3 <= len(tokens.ids) // 4 < 200
    assert engine.load().running == 0


@every_engine
async def test_aborting_an_unknown_request_is_ignored(engine):
    await engine.abort("nobody")

    assert (await collect(engine, Work("a", "s", prompt_of(1), Sampling(2))))[1] == "length"


@every_engine
async def test_closing_the_iterator_frees_the_slot(engine):
    for i in range(20):
        chunks = engine.generate(Work(f"r{i}", f"s{i}", prompt_of(i), Sampling(240)))
        await anext(chunks)
        await chunks.aclose()

    async with asyncio.timeout(30):
        _, reason = await collect(engine, Work("last", "s", prompt_of(1), Sampling(3)))

    assert reason == "length"
    assert engine.load().waiting == 0


@every_engine
async def test_nothing_is_sampled_while_suspended_and_requests_go_on_after(engine):
    chunks = engine.generate(Work("a", "s", prompt_of(1), Sampling(200)))
    await first_tokens(chunks, 2)

    await engine.suspend()
    while True:
        try:
            async with asyncio.timeout(0.1):
                await anext(chunks)
        except TimeoutError:
            break
    suspended = engine.load().suspended
    await engine.resume()
    await chunks.aclose()
    _, reason = await collect(engine, Work("b", "s", prompt_of(1), Sampling(4)))

    assert suspended
    assert reason == "length"


@every_engine
async def test_requests_in_flight_live_through_an_update_and_their_spans_say_where(engine, other_image):
    works = [Work(f"r{i}", f"s{i}", prompt_of(i), Sampling(60)) for i in range(8)]
    streams = [engine.generate(work) for work in works]
    tokens = [await first_tokens(chunks, 3) for chunks in streams]

    await engine.suspend()
    await engine.update(1, other_image)
    await engine.resume()
    for i, chunks in enumerate(streams):
        async for chunk in chunks:
            tokens[i] = tokens[i] + chunk.tokens

    assert engine.load().version == 1
    for found in tokens:
        assert [span.version for span in found.spans] == [0, 1]
        assert found.spans[0].start == 0
        assert found.spans[0].end == found.spans[1].start
        assert found.spans[1].end == len(found.ids) // 4 == 60


@modelled_engine
async def test_what_an_engine_tells_that_it_computes_with_is_what_was_published(engine, other_image):
    whole = whole_of(other_image)

    before = await engine.digest(whole.slices)
    await engine.update(1, other_image)
    after = await engine.digest(whole.slices)

    assert whole.differing(after) == []
    assert whole.differing(before) == [cut.name for cut in whole.slices]


@pytest.mark.parametrize("engine", ["scripted"], indirect=True)
async def test_an_engine_without_tensors_says_that_it_can_not_tell(engine, other_image):
    assert await engine.digest(whole_of(other_image).slices) is None


@every_engine
async def test_weights_that_do_not_fit_are_refused_and_the_old_ones_stay(engine, model_folder):
    before, _ = await collect(engine, Work("a", "s", prompt_of(3), Sampling(12, temperature=0.0)))

    for bad in (b"", b"not a safetensors image at all", bytes(weights_image(model_folder)[:2000])):
        with pytest.raises(EngineError):
            await engine.update(1, memoryview(bad))
    after, _ = await collect(engine, Work("b", "t", prompt_of(3), Sampling(12, temperature=0.0)))

    assert after.ids == before.ids
    assert after.spans == (VersionSpan(0, 0, 12),)


@every_engine
async def test_resumed_tokens_count_and_are_not_sampled_again(engine):
    await goes_on(engine, Sampling(10, temperature=0.0))


@draws_by_position
async def test_a_seeded_request_that_goes_on_elsewhere_samples_what_it_would_have_sampled_here(engine):

    await goes_on(engine, Sampling(10, seed=3))


@every_engine
async def test_a_request_whose_resumed_tokens_are_all_it_asked_for_ends_at_once(engine):
    resumed = Tokens(pack_i32([5, 6]), bytes(8), (VersionSpan(0, 0, 2),))

    by_length = await collect(engine, Work("a", "s", prompt_of(4), Sampling(2), resumed))
    by_stop = await collect(engine, Work("b", "s", prompt_of(4), Sampling(9, stop_token_ids=(6,)), resumed))

    assert by_length == (Tokens(), "length")
    assert by_stop == (Tokens(), "stop")


@every_engine
async def test_a_request_that_can_never_run_is_refused_with_a_sentence(engine):
    for prompt in ((), (VOCAB + 5,), prompt_of(1, 300)):
        with pytest.raises(EngineError, match="request a"):
            await collect(engine, Work("a", "s", prompt, Sampling(4)))


@every_engine
async def test_stopping_ends_every_request_as_aborted(engine):
    some = asyncio.Event()
    results: list[str] = []

    async def run(i: int) -> None:
        async for chunk in engine.generate(Work(f"r{i}", "", prompt_of(i), Sampling(240))):
            some.set()
            results.append(chunk.finish_reason) if chunk.finish_reason else None

    async with asyncio.TaskGroup() as tasks:
        for i in range(12):
            tasks.create_task(run(i))
        await some.wait()
        await engine.stop()

    assert results == ["aborted"] * 12


@pytest.mark.parametrize("kind", ["scripted", "torch"])
async def test_a_paced_engine_gives_the_tokens_of_an_unpaced_one(kind, model_folder, other_image):
    works = [Work(f"r{i}", f"s{i}", prompt_of(i, 3 + 40 * i), Sampling(20, seed=i)) for i in range(6)]
    found = []
    for name in (kind, f"{kind} paced"):
        async with running(name, model_folder, max_batch_tokens=64) as engine:
            first = await asyncio.gather(*(collect(engine, work) for work in works))
            await engine.update(1, other_image)
            found.append((first, await asyncio.gather(*(collect(engine, work) for work in works))))

    unpaced, paced = [[(t.ids, t.spans, why) for t, why in (*before, *after)] for before, after in found]
    assert paced == unpaced


@pytest.mark.parametrize("kind", ["scripted", "torch"])
async def test_only_a_paced_engine_counts_its_steps_and_swaps(kind, model_folder, other_image):
    counted = []
    for name in (kind, f"{kind} paced"):
        async with running(name, model_folder) as engine:
            await collect(engine, Work("a", "s", prompt_of(1), Sampling(10)))
            await engine.update(1, other_image)
            counted.append(engine.load().gauges.get("paced/steps", 0))

    assert counted == [0, 11]


@pytest.mark.parametrize("kind", ["scripted paced", "torch", "torch paced"])
async def test_an_engine_observes_what_its_steps_cost(kind, model_folder):
    async with running(kind, model_folder) as engine:
        await collect(engine, Work("a", "s", prompt_of(2, 40), Sampling(10)))
        sums = StepSums()
        engine.observe(sums.add)
        await collect(engine, Work("b", "t", prompt_of(1, 40), Sampling(10)))

    assert (sums.with_prompts, sums.decoding) == (1, 9)


@pytest.mark.parametrize("kind", ["scripted", "torch"])
async def test_steps_that_no_host_could_take_so_fast_are_all_counted_as_outlasted(kind, model_folder):
    pace = PaceSection(hardware="h20", model="qwen3-8b", scale=1e-9)
    async with running(kind, model_folder, pace=pace) as engine:
        _, reason = await collect(engine, Work("a", "s", prompt_of(1), Sampling(10)))
        load = engine.load()

    assert reason == "length"
    # the first step of the scripted engine is over as it begins: it computes nothing
    assert load.gauges["paced/steps"] == 10
    assert load.gauges["paced/outlasted_frac"] >= 0.9


@pytest.mark.parametrize("kind", ["scripted", "torch"])
async def test_an_engine_that_is_stopped_ends_a_step_that_would_last_for_hours(kind, model_folder):
    pace = PaceSection(hardware="h20", model="qwen3-8b", scale=1e7)
    async with running(kind, model_folder, pace=pace) as engine, asyncio.TaskGroup() as tasks:
        await engine.suspend()
        asked = tasks.create_task(collect(engine, Work("a", "s", prompt_of(1), Sampling(100))))
        await asyncio.sleep(0)
        await engine.resume()
        await engine.stop()

        _, reason = await asked

    assert reason == "aborted"


@modelled_engine
@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.7, 1.0), (2.0, 1.0), (0.0, 1.0), (1.3, 0.9)])
async def test_logprobs_are_of_the_distribution_sampled_from_as_transformers_has_it(engine, model_folder, temperature, top_p):
    """Greedy tokens have theirs at temperature 1."""
    sampling = Sampling(20, temperature, top_p)
    works = [Work(f"r{i}", f"s{i}", prompt_of(i, 3 + 5 * i), sampling) for i in range(9)]

    results = await asyncio.gather(*(collect(engine, work) for work in works))

    assert worst(model_folder, [(w, t) for w, (t, _) in zip(works, results, strict=True)]) < 1e-4


@modelled_engine
async def test_rows_of_several_temperatures_in_one_batch_keep_their_own(engine, model_folder):
    temperatures = (0.0, 0.5, 1.0, 2.0)
    works = [Work(f"r{i}", f"s{i}", prompt_of(i, 9), Sampling(20, t)) for i, t in enumerate(temperatures)]

    results = await asyncio.gather(*(collect(engine, work) for work in works))

    assert worst(model_folder, [(w, t) for w, (t, _) in zip(works, results, strict=True)]) < 1e-4


@pytest.mark.parametrize("engine", KINDS[:2], indirect=True)
async def test_an_engine_that_can_not_do_top_p_says_so(engine):
    with pytest.raises(EngineError, match=r"top_p 0\.9.*top_p=1"):
        await collect(engine, Work("a", "s", prompt_of(1), Sampling(4, top_p=0.9)))


@modelled_engine
async def test_greedy_is_what_transformers_samples(engine, model_folder):
    works = [Work(f"r{i}", f"s{i}", prompt_of(50 + i, 5 + 3 * i), Sampling(16, temperature=0.0)) for i in range(8)]

    results = await asyncio.gather(*(collect(engine, work) for work in works))

    for work, (tokens, _) in zip(works, results, strict=True):
        assert list(unpack_i32(tokens.ids)) == greedy(model_folder, list(work.prompt), 16)


@modelled_engine
async def test_a_sessions_later_turns_have_the_logprobs_of_a_whole_prefill(engine, model_folder):
    history: list[int] = list(prompt_of(7))
    found = []

    for turn in range(6):
        work = Work(f"t{turn}", "session", tuple(history), Sampling(3))
        tokens, _ = await collect(engine, work)
        found.append((work, tokens))
        history += [*unpack_i32(tokens.ids), *prompt_of(100 + turn, 9)]

    assert worst(model_folder, found) < 1e-4


@modelled_engine
async def test_a_session_that_went_another_way_is_not_answered_from_its_old_history(engine, model_folder):
    first = Work("a", "session", prompt_of(7, 30), Sampling(5))
    other = Work("b", "session", prompt_of(7, 10) + prompt_of(8, 20), Sampling(5))
    shorter = Work("c", "session", prompt_of(7, 10), Sampling(5))

    found = [(work, (await collect(engine, work))[0]) for work in (first, other, shorter)]

    assert worst(model_folder, found) < 1e-4


@modelled_engine
async def test_after_an_update_the_new_weights_answer_also_for_a_cached_session(engine, other_image, tmp_path):
    other = write_model(tmp_path, seed=1)
    await collect(engine, Work("a", "session", prompt_of(9, 20), Sampling(4)))

    await engine.update(3, other_image)
    work = Work("b", "session", (*prompt_of(9, 20), 5, 6, 7), Sampling(8))
    tokens, _ = await collect(engine, work)

    assert tokens.spans == (VersionSpan(3, 0, 8),)
    assert worst(other, [(work, tokens)]) < 1e-4


@pytest.mark.parametrize("kind", MODELLED)
async def test_kept_caches_never_reach_a_session_that_begins_after_the_update(kind, request, model_folder, other_image, tmp_path):
    other = write_model(tmp_path, seed=1)
    if kind == "vllm":
        pytest.importorskip("vllm")
    options = {"url": request.getfixturevalue("server_of")(model_folder)} if kind == "vllm_server" else {}
    async with running(kind, model_folder, kv_on_update="keep", **options) as engine:
        prompt = prompt_of(9, 100)
        await collect(engine, Work("a", "before", prompt, Sampling(4)))

        await engine.update(1, other_image)
        work = Work("b", "after", prompt, Sampling(8))
        tokens, _ = await collect(engine, work)

    assert tokens.spans == (VersionSpan(1, 0, 8),)
    assert worst(other, [(work, tokens)]) < 1e-4


async def goes_on(engine, sampling: Sampling) -> None:
    """The last four of ten tokens are the same when the first six come with the request."""
    whole, _ = await collect(engine, Work("a", "s", prompt_of(4), sampling))
    ids = unpack_i32(whole.ids)
    resumed = Tokens(pack_i32(ids[:6]), whole.logprobs[: 4 * 6], (VersionSpan(0, 0, 6),))

    rest, reason = await collect(engine, Work("b", "s", prompt_of(4), sampling, resumed))

    assert unpack_i32(rest.ids) == ids[6:]
    assert rest.spans == (VersionSpan(0, 0, 4),)
    assert reason == "length"


def worst(folder: Path, found: list[tuple[Work, Tokens]]) -> float:
    """Largest mean absolute difference from transformers' log-probs over the given completions."""
    means = []
    for work, tokens in found:
        ids, ours = unpack_i32(tokens.ids), unpack_f32(tokens.logprobs)
        sampling = work.sampling
        theirs = logprobs(folder, [*work.prompt, *ids], sampling.temperature, sampling.top_p)[-len(ids) :]
        means.append(sum(abs(a - b) for a, b in zip(ours, theirs, strict=True)) / len(ids))
    return max(means)
