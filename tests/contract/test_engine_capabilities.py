"""One suite over every engine, capability by capability: what whoever asks for it may rely on."""

import asyncio
from contextlib import asynccontextmanager
from multiprocessing import active_children

import pytest
import pytest_asyncio

from rubato.actors.engines.engine import CAPABILITIES, EngineError, Work, capabilities, require
from rubato.actors.engines.engine import EXPORT as TO_EXPORT
from rubato.actors.messages.generation import Sampling, Tokens, VersionSpan
from tests.contract.engines import DRAW_BY_POSITION, VLLM, collect, every_engine, first_tokens, prompt_of, running
from tests.contract.test_engine import worst
from tests.models import write_model

pytestmark = pytest.mark.asyncio(loop_scope="module")

CAPABLE = DRAW_BY_POSITION
PACED = ["scripted paced", "torch paced"]
capable_engine = pytest.mark.parametrize("engine", CAPABLE, indirect=True)


@pytest_asyncio.fixture(loop_scope="module")
async def other(request, engine, model_folder):
    """A second engine of the same kind."""
    kind = request.node.callspec.params["engine"]
    async with running(kind, model_folder) as other:
        yield other


async def exported(engine, chunks, had: Tokens, request_id: str, **how) -> tuple[Work, Tokens]:
    """The Work, and all tokens that the engine's iterator gave; its last chunk has to say so."""

    async def rest() -> tuple[Tokens, str]:
        tokens, reason = had, ""
        async for chunk in chunks:
            tokens, reason = tokens + chunk.tokens, chunk.finish_reason
        return tokens, reason

    async with asyncio.TaskGroup() as tasks:
        reading = tasks.create_task(rest())
        work = await engine.export(request_id, **how)
    tokens, reason = reading.result()
    assert reason == "exported"
    return work, tokens


async def whole(tokens_before: Tokens, engine, work: Work) -> tuple[Tokens, str]:
    more, reason = await collect(engine, work)
    return tokens_before + more, reason


async def moved(source, target, sampling: Sampling, *, at: int, **how) -> tuple[Tokens, Work]:
    """A request's tokens that leaves `source` for `target` after at least `at` of them."""
    chunks = source.generate(Work("a", "s", prompt_of(4), sampling))
    had = await first_tokens(chunks, at)
    work, had = await exported(source, chunks, had, "a", **how)
    assert work.resumed == had
    tokens, reason = await whole(had, target, work)
    assert reason == "length"
    return tokens, work


# -- what is stated -----------------------------------------------------------------------------------------------------


@every_engine
async def test_a_capability_that_is_not_stated_is_refused_in_a_sentence_and_one_that_is_has_its_method(engine):
    for capability in CAPABILITIES:
        if capability in capabilities(engine):
            require(engine, capability)
        else:
            with pytest.raises(EngineError, match=f"has not the capability {capability} .*engine.kind"):
                require(engine, capability)
    for verb, capability in (("export", "export"), ("sleep", "sleep"), ("wake", "sleep"), ("reconfigure", "reconfigure")):
        assert hasattr(engine, verb) == (capability in capabilities(engine))


async def test_an_engine_of_ones_own_that_states_nothing_has_none():
    class Mine: ...

    with pytest.raises(EngineError, match="Mine has not the capability sleep"):
        require(Mine(), "sleep")


# -- export -------------------------------------------------------------------------------------------------------------


@every_engine
async def test_an_exported_request_has_what_was_sampled_and_the_engine_is_rid_of_it(engine):
    require(engine, TO_EXPORT)
    chunks = engine.generate(Work("a", "s", prompt_of(4), Sampling(200, seed=3)))
    had = await first_tokens(chunks, 3)

    work, tokens = await exported(engine, chunks, had, "a")

    assert work == Work("a", "s", prompt_of(4), Sampling(200, seed=3), tokens)
    assert len(tokens.ids) == len(tokens.logprobs) >= 12
    assert tokens.spans == (VersionSpan(0, 0, len(tokens.ids) // 4),)
    assert (engine.load().running, engine.load().waiting) == (0, 0)


@capable_engine
async def test_a_first_token_that_is_asked_for_at_once_is_a_chunk_of_its_own(engine):
    chunks = engine.generate(Work("first", "s", prompt_of(5), Sampling(9, temperature=0.0), first_at_once=True))

    first = await anext(chunks)
    await chunks.aclose()

    assert (len(first.tokens.ids) // 4, first.finish_reason) == (1, "")


@every_engine
async def test_an_exported_request_goes_on_and_ends_as_long_as_asked(engine):
    tokens, _ = await moved(engine, engine, Sampling(30, temperature=0.0), at=5)
    unmoved, _ = await collect(engine, Work("b", "s", prompt_of(4), Sampling(30, temperature=0.0)))

    assert tokens.ids == unmoved.ids


@capable_engine
@pytest.mark.parametrize("with_cache", [False, True])
async def test_a_request_that_moved_samples_token_for_token_what_it_would_have(engine, other, with_cache):
    unmoved, _ = await collect(engine, Work("a", "s", prompt_of(4), Sampling(40, seed=3)))
    for at in (1, 7, 20):
        tokens, work = await moved(engine, other, Sampling(40, seed=3), at=at, with_cache=with_cache)

        assert tokens.ids == unmoved.ids
        assert tokens.spans == unmoved.spans
        assert (work.cache is not None) == with_cache


@capable_engine
async def test_a_request_moves_again_and_again_and_back(engine, other):
    unmoved, _ = await collect(engine, Work("a", "s", prompt_of(4), Sampling(60, seed=5)))
    places, work, tokens = [engine, other] * 4, Work("a", "s", prompt_of(4), Sampling(60, seed=5)), Tokens()
    for i, place in enumerate(places):
        chunks = place.generate(work)
        had = tokens + await first_tokens(chunks, 2)
        work, tokens = await exported(place, chunks, had, "a", with_cache=i % 3 != 2)
        assert work.resumed == tokens

    tokens, _ = await whole(tokens, engine, work)

    assert tokens.ids == unmoved.ids


@capable_engine
async def test_a_request_without_a_slot_moves_too(engine, other):
    await engine.suspend()
    waiting = engine.generate(Work("a", "s", prompt_of(4), Sampling(9, seed=1)))
    async with asyncio.TaskGroup() as tasks:
        reading = tasks.create_task(anext(waiting))
        await asyncio.sleep(0)
        work = await engine.export("a", with_cache=True)
    await waiting.aclose()

    assert (reading.result().finish_reason, reading.result().tokens) == ("exported", Tokens())
    assert work == Work("a", "s", prompt_of(4), Sampling(9, seed=1))
    assert (await collect(other, work))[1] == "length"


@every_engine
async def test_what_does_not_run_is_not_exported(engine):
    await collect(engine, Work("a", "s", prompt_of(1), Sampling(2)))

    for request_id in ("a", "nobody"):
        with pytest.raises(EngineError, match=f"request {request_id} does not run here"):
            await engine.export(request_id)


@capable_engine
async def test_a_suspended_engine_exports(engine, other):
    chunks = engine.generate(Work("a", "s", prompt_of(4), Sampling(30, seed=2)))
    had = await first_tokens(chunks, 3)
    await engine.suspend()

    work, had = await exported(engine, chunks, had, "a", with_cache=True)
    tokens, _ = await whole(had, other, work)

    unmoved, _ = await collect(other, Work("a", "s", prompt_of(4), Sampling(30, seed=2)))
    assert tokens.ids == unmoved.ids


# -- cache --------------------------------------------------------------------------------------------------------------


@capable_engine
async def test_a_cache_says_what_it_holds(engine):
    chunks = engine.generate(Work("a", "s", prompt_of(4), Sampling(200, seed=3)))
    work, tokens = await exported(engine, chunks, await first_tokens(chunks, 3), "a", with_cache=True)

    cache = work.cache
    assert cache.version == 0
    assert 0 < cache.num_tokens < len(work.prompt) + len(tokens.ids) // 4
    size = {"int32": 4, "float32": 4, "bfloat16": 2}[cache.dtype]
    for dimension in cache.shape:
        size *= dimension
    assert len(cache.data) == size


@capable_engine
async def test_a_cache_of_other_weights_is_not_used_and_the_request_goes_on_under_the_new_ones(engine, other, other_image):
    _, work = await moved(engine, other, Sampling(30, seed=3), at=5, with_cache=True)
    await other.update(1, other_image)

    with_cache, _ = await collect(other, work)
    without, _ = await collect(other, work._replace(request_id="b", cache=None))

    assert with_cache.ids == without.ids
    assert {span.version for span in with_cache.spans} == {1}


@capable_engine
async def test_an_update_that_overtakes_a_waiting_request_makes_its_cache_useless(engine, other, other_image):
    _, work = await moved(engine, other, Sampling(30, seed=3), at=5, with_cache=True)
    await other.suspend()
    async with asyncio.TaskGroup() as tasks:
        asked = tasks.create_task(collect(other, work))
        await asyncio.sleep(0)
        await other.update(1, other_image)
        await other.resume()

    without, _ = await collect(other, work._replace(request_id="b", cache=None))
    assert asked.result()[0].ids == without.ids


@capable_engine
async def test_a_cache_that_is_not_of_this_request_or_model_is_refused(engine, other):
    _, work = await moved(engine, other, Sampling(30, seed=3), at=5, with_cache=True)
    half = memoryview(bytes(len(work.cache.data) // 2))

    with pytest.raises(EngineError, match="request a brought a cache"):
        await collect(other, work._replace(cache=work.cache._replace(data=half)))

    assert (await collect(other, work))[1] == "length"


@pytest.mark.parametrize("engine", ["scripted paced", "torch", "torch paced"], indirect=True)
async def test_an_engine_that_prefilled_says_how_fast(engine):
    before = engine.load().prefill_tokens_s
    await collect(engine, Work("a", "s", prompt_of(1, 100), Sampling(2)))

    assert before == 0.0
    assert engine.load().prefill_tokens_s > 0.0


# -- sleep --------------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def in_flight(engine, request_id: str, num: int, sampling: Sampling):
    """A request and its first tokens; whoever waits for more reads `rest`."""
    chunks: asyncio.Queue = asyncio.Queue()

    async def read() -> None:
        async for chunk in engine.generate(Work(request_id, "s", prompt_of(4), sampling)):
            chunks.put_nowait(chunk)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(read())
        tokens = Tokens()
        while len(tokens.ids) // 4 < num:
            tokens = tokens + (await chunks.get()).tokens
        yield chunks, tokens


async def read_on(chunks, tokens: Tokens) -> Tokens:
    reason = ""
    while not reason:
        chunk = await chunks.get()
        tokens, reason = tokens + chunk.tokens, chunk.finish_reason
    assert reason == "length"
    return tokens


@capable_engine
@pytest.mark.parametrize("level", [1, 2])
async def test_who_sleeps_computes_nothing_and_goes_on_where_it_was(engine, level):
    unmoved, _ = await collect(engine, Work("a", "s", prompt_of(4), Sampling(60, seed=3)))

    async with in_flight(engine, "a", 3, Sampling(60, seed=3)) as (chunks, tokens):
        assert await engine.sleep(level) >= 0.0
        asleep = engine.load().asleep
        while not chunks.empty():
            tokens = tokens + chunks.get_nowait().tokens
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await chunks.get()
        await engine.suspend()
        await engine.resume()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await chunks.get()
        assert await engine.wake() >= 0.0
        tokens = await read_on(chunks, tokens)

    assert asleep
    assert not engine.load().asleep
    assert tokens.ids == unmoved.ids


@capable_engine
async def test_new_weights_reach_who_sleeps_and_count_when_it_wakes(engine, other, other_image):
    await engine.sleep()
    await engine.update(1, other_image)
    await engine.wake()
    await other.update(1, other_image)

    slept, _ = await collect(engine, Work("a", "s", prompt_of(4), Sampling(20, seed=3)))
    awake, _ = await collect(other, Work("a", "s", prompt_of(4), Sampling(20, seed=3)))

    assert slept == awake
    assert slept.spans == (VersionSpan(1, 0, 20),)


@capable_engine
async def test_who_sleeps_can_be_told_all_else(engine, other):
    """Requests come, go and are aborted meanwhile."""
    async with in_flight(engine, "a", 3, Sampling(60, seed=3)) as (chunks, tokens):
        await engine.sleep()
        work = await engine.export("a", with_cache=True)
        while (chunk := await chunks.get()).finish_reason != "exported":
            tokens = tokens + chunk.tokens
        tokens = tokens + chunk.tokens
    async with asyncio.TaskGroup() as tasks:
        came = tasks.create_task(collect(engine, Work("b", "t", prompt_of(5), Sampling(4))))
        ended = tasks.create_task(collect(engine, Work("c", "u", prompt_of(5), Sampling(4))))
        await asyncio.sleep(0)
        await engine.abort("c")
        await ended
        await engine.wake()

    unmoved, _ = await collect(engine, Work("a", "s", prompt_of(4), Sampling(60, seed=3)))
    assert (await whole(tokens, other, work))[0].ids == unmoved.ids
    assert (came.result()[1], ended.result()[1]) == ("length", "aborted")


@capable_engine
async def test_sleeping_twice_and_waking_twice_are_nothing_and_a_level_that_is_not_is_refused(engine):
    with pytest.raises(EngineError, match="level=3 is no level of sleep"):
        await engine.sleep(3)
    assert not engine.load().asleep
    await engine.sleep()
    assert await engine.sleep(2) == 0.0
    await engine.wake()
    assert await engine.wake() == 0.0
    assert (await collect(engine, Work("a", "s", prompt_of(4), Sampling(3))))[1] == "length"


# -- reconfigure --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", PACED, indirect=True)
async def test_who_is_reconfigured_goes_on_where_it_was_with_other_gpus(engine):
    unmoved, _ = await collect(engine, Work("a", "s", prompt_of(4), Sampling(60, seed=3)))

    async with in_flight(engine, "a", 3, Sampling(60, seed=3)) as (chunks, tokens):
        assert await engine.reconfigure(4) > 0.0
        degree = engine.load().degree
        tokens = await read_on(chunks, tokens)

    assert degree == 4
    assert tokens.ids == unmoved.ids


@pytest.mark.slow
@pytest.mark.parametrize("engine", [VLLM], indirect=True)
async def test_vllm_goes_on_with_what_it_had_at_another_degree_and_back(engine, other_image, tmp_path):
    other = write_model(tmp_path, seed=1)
    await engine.update(3, other_image)
    before, _ = await collect(engine, Work("b", "b", prompt_of(4), Sampling(30, temperature=0.0)))

    for degree in (2, 1):
        async with in_flight(engine, "a", 3, Sampling(200, seed=3)) as (chunks, tokens), asyncio.TaskGroup() as tasks:
            changing = tasks.create_task(engine.reconfigure(degree))
            while not engine._resting:  # noqa: ASYNC110 - nothing tells
                await asyncio.sleep(0.001)
            aborted = tasks.create_task(collect(engine, Work("c", "c", prompt_of(4), Sampling(200))))
            came = tasks.create_task(collect(engine, Work("d", "d", prompt_of(4), Sampling(30, temperature=0.0))))
            await asyncio.sleep(0)
            await engine.abort("c")
            load = engine.load()
            await changing
            print(f"degree {degree}: {engine.switch_s}")
            tokens = await read_on(chunks, tokens)

        assert (load.running, engine.load().degree) == (3, degree)
        assert tokens.spans == (VersionSpan(3, 0, 200),)
        assert worst(other, [(Work("a", "s", prompt_of(4), Sampling(200, seed=3)), tokens)]) < 1e-4
        assert aborted.result() == (Tokens(), "aborted")
        assert came.result()[0].ids == before.ids
        assert list(engine.switch_s) == ["export", "stop", "start", "weights"]


@pytest.mark.parametrize("engine", [VLLM], indirect=True)
async def test_vllm_has_no_process_while_it_sleeps_and_wakes_with_the_newest_weights(engine, other_image, tmp_path):
    other = write_model(tmp_path, seed=1)
    late_work = Work("late", "late", prompt_of(5), Sampling(30, seed=4))

    async with in_flight(engine, "a", 3, Sampling(200, seed=3)) as (chunks, tokens), asyncio.TaskGroup() as tasks:
        leaves = tasks.create_task(collect(engine, Work("leaves", "l", prompt_of(6), Sampling(200, seed=5))))
        while engine.load().running < 2:  # noqa: ASYNC110 - nothing tells
            await asyncio.sleep(0.001)
        processes = len(active_children())
        assert await engine.sleep() > 0.0
        assert (len(active_children()), engine.load().asleep) == (processes - 1, True)
        late = tasks.create_task(collect(engine, late_work))
        work = await engine.export("leaves")
        assert ((await leaves)[0], (await leaves)[1]) == (work.resumed, "exported")
        await engine.update(1, other_image)
        assert len(active_children()) == processes - 1
        assert await engine.wake() > 0.0
        print(f"asleep and awake again: {engine.switch_s}")
        tokens = await read_on(chunks, tokens)
        rest = tasks.create_task(whole(work.resumed, engine, work))

    assert not engine.load().asleep
    assert [(span.version, span.end) for span in tokens.spans][1:] == [(1, 200)]
    assert (len(rest.result()[0].ids), rest.result()[1]) == (800, "length")
    assert late.result()[0].spans == (VersionSpan(1, 0, 30),)
    assert worst(other, [(late_work, late.result()[0])]) < 1e-4


@pytest.mark.parametrize("engine", [*CAPABLE, VLLM], indirect=True)
async def test_a_degree_that_can_not_be_is_refused_and_changes_nothing(engine):
    with pytest.raises(EngineError, match="degree=3 "):
        await engine.reconfigure(3)

    assert engine.load().degree == 1
    assert (await collect(engine, Work("a", "s", prompt_of(4), Sampling(3))))[1] == "length"
