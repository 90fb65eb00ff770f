"""The client of a vLLM that others started, against a scripted server: what it refuses, and what it makes of what it is told."""

import asyncio
from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest

from rubato.actors import plugins
from rubato.actors.config import ModelSection
from rubato.actors.engines.engine import EngineDead, EngineError, Work
from rubato.actors.engines.section import EngineConfig, EngineSection
from rubato.actors.engines.vllm_http import flaw_of_url, key_in
from rubato.actors.engines.vllm_server import VllmServerEngine
from rubato.actors.messages.generation import Sampling, Tokens, VersionSpan
from rubato.bus.message import unpack_f32, unpack_i32
from rubato.runtime.config.compose import from_mapping
from rubato.runtime.errors import ConfigError
from tests.contract.engines import collect, first_tokens
from tests.unit.actors.engines.test_vllm_setup import image_of
from tests.vllm_serve import TOLD, serving

KEY = "RUBATO_TEST_VLLM_KEY"
IMAGE = image_of(a=[0.5, 1.5], b=[2.5])


def engine_of(folder, url, **options):
    (folder / "model.safetensors").write_bytes(image_of(a=[0.0, 0.0], b=[0.0]))
    section = EngineSection(kind="vllm_server", url=url, num_slots=8, max_len=64, **options)
    return VllmServerEngine(folder, ModelSection(), section)


@asynccontextmanager
async def started(folder, *, given=None, **options):
    async with serving(**(given or {})) as serve:
        engine = engine_of(folder, serve.url, **options)
        await engine.start()
        serve.asked.clear()
        try:
            yield engine, serve
        finally:
            await engine.stop()


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"missing": {"/v1/models"}}, "has no /v1/models"),
        ({"missing": {"/weight_info"}}, "lacks the routes for new weights: it runs without VLLM_SERVER_DEV_MODE=1.*rubato vllm-command"),
        ({"told": None}, r"lacks our worker extension \(.*no attribute.*rubato vllm-command"),
        ({"told": TOLD | {"protocol": 99}}, "lacks a worker extension of this version of Rubato"),
        ({"told": {"protocol": 1}}, "lacks a worker extension of this version of Rubato"),
        ({"told": TOLD | {"logprobs_mode": "raw_logprobs"}}, r"lacks --logprobs-mode processed_logprobs \(it has raw_logprobs\)"),
        ({"told": TOLD | {"weight_transfer": "nccl"}}, r"lacks --weight-transfer-config with the backend rubato \(it has nccl\)"),
        ({"told": TOLD | {"weight_transfer": ""}}, r"with the backend rubato \(it has none\)"),
        ({"told": TOLD | {"max_len": 32}}, "lacks room for engine.max_len=64: its --max-model-len is 32"),
        ({"told": TOLD | {"dtype": "bfloat16"}}, "lacks --dtype float32, which model.dtype says: it computes in bfloat16"),
        ({"unread": "Permission denied"}, r"can't read .*model.safetensors \(Permission denied\).*on the engine's host"),
        ({"missing": {"/inference/v1/generate"}}, r"lacks tokens in, tokens out \(/inference/v1/generate\)"),
        ({"key": "another"}, "refused /v1/models: status 401, so it wants a key"),
    ],
)
async def test_what_a_server_lacks_is_named_as_the_engine_starts(tmp_path, given, sentence):
    async with serving(**given) as serve:
        engine = engine_of(tmp_path, serve.url)
        with pytest.raises(EngineError, match=sentence) as refused:
            await engine.start()
        await engine.stop()

    assert not isinstance(refused.value, EngineDead)


async def test_a_server_that_is_not_there_is_tried_again(tmp_path):
    async with serving() as serve:
        url = serve.url

    engine = engine_of(tmp_path, url)
    with pytest.raises(EngineDead, match="is not reached"):
        await engine.start()
    await engine.stop()


async def test_a_server_is_brought_the_base_model_before_anything_is_sampled(tmp_path):
    async with started(tmp_path, given={"version": "7", "told": TOLD | {"updating": True}}) as (engine, serve):
        commands = [path for path, _ in serve.posted]
        brought = dict(serve.posted)["/update_weights"]["update_info"]
        load = engine.load()

    assert brought == {"paths": [str(tmp_path / "model.safetensors")], "sizes": [0], "names": ["a", "b"]}
    assert commands.index("/finish_weight_update") < commands.index("/start_weight_update")  # of the one that went before
    assert (serve.version, load.version, load.num_slots, load.suspended) == ("0", 0, 4, False)


async def test_the_key_comes_from_the_environment_and_goes_with_every_request(tmp_path, monkeypatch):
    monkeypatch.setenv(KEY, "secret")
    async with started(tmp_path, given={"key": "secret"}, api_key_env=KEY) as (engine, _):
        tokens, reason = await collect(engine, Work("a", "s", (5,), Sampling(3)))

    assert (unpack_i32(tokens.ids), unpack_f32(tokens.logprobs), reason) == ([6, 7, 8], [-0.5] * 3, "length")


async def test_a_key_that_is_not_set_is_named(monkeypatch):
    monkeypatch.delenv(KEY, raising=False)

    with pytest.raises(EngineError, match=f"engine.api_key_env names {KEY}, which is not set"):
        key_in(KEY)


async def test_each_request_over_http_is_under_one_version_and_goes_on_with_all_tokens_so_far(tmp_path):
    async with started(tmp_path) as (engine, serve):
        chunks = engine.generate(Work("a", "s", (5,), Sampling(20)))
        tokens = await first_tokens(chunks, 4)
        await engine.update(1, IMAGE)
        async for chunk in chunks:
            tokens = tokens + chunk.tokens

    at = tokens.spans[0].end
    assert unpack_i32(tokens.ids) == list(range(6, 26))
    assert tokens.spans == (VersionSpan(0, 0, at), VersionSpan(1, at, 20))
    assert [asked.token_ids for asked in serve.asked] == [[5], list(range(5, 6 + at))]
    assert [asked.sampling_params.max_tokens for asked in serve.asked] == [20, 20 - at]
    assert len({asked.request_id for asked in serve.asked}) == 2


async def test_only_requests_that_began_under_the_same_weights_share_caches_that_are_kept(tmp_path):
    async with started(tmp_path, kv_on_update="keep") as (engine, serve):
        chunks = engine.generate(Work("a", "s", (5,), Sampling(20)))
        tokens = await first_tokens(chunks, 4)
        await engine.update(1, IMAGE)
        async for chunk in chunks:
            tokens = tokens + chunk.tokens
        await collect(engine, Work("b", "s", (5,), Sampling(2)))

    assert [asked.cache_salt for asked in serve.asked] == ["0", "0", "1"]


async def test_a_server_that_something_else_updates_is_left(tmp_path):
    async with started(tmp_path) as (engine, serve):
        serve.version = "77"
        with pytest.raises(EngineDead, match="says that it has the weights 77, but was brought version 0"):
            await engine.update(1, IMAGE)
        with pytest.raises(EngineDead):
            engine.load()


async def test_tokens_of_weights_that_were_not_brought_are_never_taken_for_a_version(tmp_path):
    async with started(tmp_path) as (engine, serve):
        serve.says = "77"
        with pytest.raises(EngineDead, match="sampled under the weights 77, but was brought version 0"):
            await collect(engine, Work("a", "s", (5,), Sampling(3)))


async def test_weights_that_do_not_fit_never_reach_the_server(tmp_path):
    async with started(tmp_path) as (engine, serve):
        num = len(serve.posted)
        with pytest.raises(EngineError, match="weights version 1 lacks b"):
            await engine.update(1, image_of(a=[1.0, 2.0]))

    assert len(serve.posted) == num


async def test_an_answer_that_breaks_off_is_an_error_of_that_request_alone(tmp_path):
    async with started(tmp_path) as (engine, serve):
        serve.breaks_after = 3
        with pytest.raises(EngineError, match=r"request a was refused by the server at .*: its answer broke off") as refused:
            await collect(engine, Work("a", "s", (5,), Sampling(9)))
        serve.breaks_after = -1
        tokens, _ = await collect(engine, Work("b", "s", (5,), Sampling(2)))

    assert not isinstance(refused.value, EngineDead)
    assert unpack_i32(tokens.ids) == [6, 7]


async def test_a_server_whose_engine_died_is_dead(tmp_path):
    async with started(tmp_path) as (engine, serve):
        serve.breaks_after, serve.dead = 3, True
        with pytest.raises(EngineDead, match=r"request a: the server at .* refused /health"):
            await collect(engine, Work("a", "s", (5,), Sampling(9)))


async def test_a_server_that_answers_no_more_ends_its_engine_as_a_dead_one(tmp_path, monkeypatch):
    monkeypatch.setattr("rubato.actors.engines.vllm_server.BEAT_S", 0.01)
    monkeypatch.setattr("rubato.actors.engines.vllm_http.ANSWER_S", 0.2)
    config = EngineConfig(engine=EngineSection(kind="vllm_server", url="http://127.0.0.1:8000"))
    [hook] = [plugins.load(path) for path in plugins.chosen(plugins.ENGINE_HOOKS, config)]

    async def served(engine, serve):
        async with asyncio.TaskGroup() as tasks:
            await hook(SimpleNamespace(name="engine-0", spawn=tasks.create_task)).begin(engine)
            tasks.create_task(collect(engine, Work("a", "s", (5,), Sampling(9))))
            serve.answers.clear()

    async with started(tmp_path) as (engine, serve):
        with pytest.raises(ExceptionGroup) as ended:
            await served(engine, serve)
        with pytest.raises(EngineDead, match="is not reached"):
            engine.load()

    assert ended.group_contains(EngineDead, match=r"is not reached \(ReadTimeout")


async def test_a_server_that_answers_is_looked_at_until_its_engine_stops(tmp_path, monkeypatch):
    monkeypatch.setattr("rubato.actors.engines.vllm_server.BEAT_S", 0.001)
    async with started(tmp_path) as (engine, serve), asyncio.TaskGroup() as tasks:
        looks = tasks.create_task(engine.watch())
        await collect(engine, Work("a", "s", (5,), Sampling(9)))
        assert not looks.done()
        await engine.stop()

    assert ("/health", None) in serve.posted


async def test_a_request_that_the_server_keeps_ending_is_given_up(tmp_path):
    async with started(tmp_path) as (engine, serve):
        serve.ends_at_once = True
        with pytest.raises(EngineError, match="ended the request 3 times without a token"):
            await collect(engine, Work("a", "s", (5,), Sampling(9)))

    assert len(serve.asked) == 3


async def test_who_waits_at_a_server_that_is_suspended_is_aborted_at_once(tmp_path):
    async with started(tmp_path) as (engine, _):
        await engine.suspend()
        async with asyncio.TaskGroup() as tasks:
            waits = tasks.create_task(collect(engine, Work("a", "s", (5,), Sampling(9))))
            await asyncio.sleep(0)
            await engine.abort("a")
            found = await waits

    assert found == (Tokens(), "aborted")


@pytest.mark.parametrize(
    ("url", "flaw"),
    [
        ("http://127.0.0.1:8000", ""),
        ("http://localhost:8000/", ""),
        ("http://[::1]:8000", ""),
        ("https://gpu.example.com/vllm", ""),
        ("http://10.0.0.5:8000", "goes to 10.0.0.5 in the clear.*https, or a tunnel"),
        ("http://gpu.example.com", "in the clear"),
        ("tcp://127.0.0.1:8000", "is no URL such as"),
        ("127.0.0.1:8000", "is no URL such as"),
        ("http://127.0.0.1:99999", "is no URL"),
        ("http://me:secret@127.0.0.1:8000", "has a password in it.*engine.api_key_env"),
        ("http://127.0.0.1:8000?a=1", "ends in a query"),
    ],
)
def test_a_url_beyond_loopback_is_https(url, flaw):
    found = flaw_of_url(url)

    if flaw:
        with pytest.raises(ValueError, match=flaw):
            EngineSection(kind="vllm_server", url=url)
    assert bool(found) == bool(flaw)


def job(engine):
    return from_mapping({
        "actors": {
            "sample_buffer": {"class": "rubato.actors.samples.buffer:SampleBuffer"},
            "llm_proxy": {"class": "rubato.actors.proxy.proxy:LLMProxy"},
            "engine": {"class": "rubato.actors.engines.worker:EngineWorker", **engine},
            "env_manager": {"class": "rubato.actors.envs.manager:EnvManager"},
            "trainer": {"class": "rubato.actors.training.trainer:Trainer"},
        },
        "env": {"class": "rubato.actors.envs.frozen_lake:FrozenLakeText"},
        "engine": {"kind": "vllm_server", "url": "http://127.0.0.1:8000"},
    })  # fmt: skip


def test_two_engines_never_have_one_server():
    own = {"a": {"count": 1}, "b": {"count": 1, "set": {"engine.url": "http://127.0.0.1:8001"}}}

    assert job({"pools": own}).actors["engine"].members == ("a", "b")
    for engine in ({"count": 2}, {"pools": {"a": {"count": 1}, "b": {"count": 1}}}):
        with pytest.raises(ConfigError, match=r"2 engines have the server http://127.0.0.1:8000.*pools.NAME.set.engine.url"):
            job(engine)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"kind": "vllm_server"}, "engine.kind=vllm_server needs engine.url"),
        ({"kind": "torch", "url": "http://127.0.0.1:1"}, "engine.url has no effect on engine.kind=torch"),
        ({"kind": "vllm", "api_key_env": "A"}, "engine.api_key_env has no effect on engine.kind=vllm"),
    ],
)
def test_keys_of_a_server_and_the_kind_go_together(given, sentence):
    with pytest.raises(ValueError, match=sentence):
        EngineSection(**given)
