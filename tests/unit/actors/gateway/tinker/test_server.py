"""A Tinker server before scripted trainer and engines: what is taken in, in which order it is carried out, and what is told of it."""

import asyncio
import contextlib
import json
import math
import stat
from functools import partial

import httpx
import numpy as np
import pytest

from rubato.runtime.errors import ActorFailed, ConfigError
from tests.tinker_job import NEEDED, PUBLISHED, SAMPLED, VOCAB, Client, ScriptedTrainer, datum, output_of, request_of, sampled_of, serving

POLICY = {"logprobs": [-1.0] * 3, "advantages": [1.0] * 3}


@pytest.fixture
async def served(tmp_path):
    async with serving(tmp_path / "run") as (job, url, key), Client(url, key) as client:
        client.job, client.url, client.key, client.folder = job, url, key, tmp_path / "run"
        yield client


async def test_a_model_learns_step_by_step(served):
    model = await served.model()
    losses = [(await served.train(model))[0][1]["loss:sum"] for _ in range(3)]
    assert losses[0] == pytest.approx(3 * math.log(VOCAB), rel=1e-5)
    assert losses[0] > losses[1] > losses[2]


async def test_the_address_and_the_key_are_for_the_owner_alone(served):
    path = served.folder / "tinker.json"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert served.key.startswith("tml-")


@pytest.mark.parametrize("key", ["", "tml-another"])
async def test_a_foreign_key_is_refused_whatever_is_asked(served, key):
    async with Client(served.url, key) as other:
        assert (await other.post("create_session", {})).status_code == 401
        assert (await other.post("nonsense", {})).status_code == 401


async def test_what_comes_out_of_order_is_carried_out_in_order(served):
    model = await served.model()
    later = [await served.step(model, seq=4), await served.learn(model, seq=3), await served.step(model, seq=2)]
    first = await served.learn(model, seq=1)
    told = [await served.result(each.json()) for each in (first, *reversed(later))]
    losses = [output_of(told[at])[1]["loss:sum"] for at in (0, 2)]
    assert losses[1] < losses[0]


async def test_the_same_request_again_is_the_same_promise_and_is_carried_out_once(served):
    model = await served.model()
    promises = [(await served.learn(model, seq=1)).json() for _ in range(3)]
    promises += [each.json() for each in await asyncio.gather(*(served.learn(model, seq=1) for _ in range(3)))]
    assert len({each["request_id"] for each in promises}) == 1
    told = {await served.result(each) for each in promises}
    assert len(told) == 1
    assert (await served.learn(model, seq=1)).json() == promises[0]
    assert ScriptedTrainer.applied[model, 1] == 1


async def test_another_request_under_a_number_that_is_taken_is_refused(served):
    model = await served.model()
    assert (await served.learn(model, seq=1)).status_code == 200
    answer = await served.step(model, seq=1)
    assert answer.status_code == 400
    assert "seq_id 1 was another request before" in answer.json()["error"]


async def test_a_request_whose_predecessor_never_comes_is_told_so(tmp_path):
    async with serving(tmp_path / "run", "tinker.order_s=0.3") as (_, url, key), Client(url, key) as client:
        model = await client.model()
        told = await client.result((await client.step(model, seq=2)).json())
        assert told["category"] == "user"
        assert "seq_id 1 did not come in" in told["error"]
        assert "loss:sum" in output_of(await client.result((await client.learn(model, seq=1)).json()))[1]
        assert "error" not in await client.result((await client.step(model, seq=3)).json())


async def test_a_request_far_before_its_turn_is_refused(served):
    model = await served.model()
    assert (await served.step(model, seq=9000)).status_code == 400


async def test_an_error_of_the_client_has_its_turn_and_nothing_is_lost(served):
    model = await served.model()
    told = await served.result((await served.learn(model, loss="nonsense")).json())
    assert told == {"error": "there is no loss nonsense", "category": "user"}
    told = await served.result((await served.post("optim_step", {"model_id": model, "seq_id": served.numbered()})).json())
    assert told["category"] == "user"
    wide = datum()[0], {**datum()[1], "weights": datum()[1]["weights"][:2]}
    request = request_of(model, served.numbered(), [wide]).replace(b"\x22\x01\x02", b"\x22\x01\x09")  # of shape 9, with two elements
    told = await served.result((await served.post("forward_backward", request)).json())
    assert "shape [9] and 8 bytes" in told["error"]
    _, stepped = await served.train(model)
    assert stepped["metrics"]["optim/grad_norm"] == 1.0


async def test_what_is_no_message_is_refused_at_once(served):
    model = await served.model()
    for body in (b"", b"\xff\xff\xff", b'{"model_id": 1}'):
        assert (await served.post("forward_backward", body)).status_code == 400
    assert (await served.post("optim_step", b"\x00{")).status_code == 400
    assert (await served.post("optim_step", {"model_id": model, "seq_id": 0})).status_code == 400
    assert (await served.http.post("forward_backward", content=b"x", headers={"Content-Encoding": "zstd"})).status_code == 415


async def test_a_request_that_is_too_large_has_its_turn(tmp_path):
    async with serving(tmp_path / "run", "tinker.max_body_mb=1") as (_, url, key), Client(url, key) as client:
        model = await client.model()
        long = datum([1] * 300_000, [1] * 300_000)
        told = await client.result((await client.learn(model, long)).json())
        assert "tinker.max_body_mb=1" in told["error"]
        assert (await client.post("asample", b" " * 2_000_000)).status_code == 413
        assert "error" not in (await client.train(model))[1]


async def test_what_is_not_there_is_refused_by_its_name(served):
    for path in ("save_weights_external", "create_custom_loss", "training_runs/x/checkpoints/y/publish", "billing/usage/events"):
        answer = await served.post(path, {})
        assert answer.status_code == 404
        assert f"{path.split('/')[0]} is not there" in answer.json()["error"]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"base_model": "another"}, "'another' is not served here; toy is"),
        ({"lora_config": None}, "lora_config is missing"),
        ({"lora_config": {"rank": 0}}, "rank is 0"),
        ({"lora_config": {"rank": 513}}, "rank is 513; it is 1 to 512"),
        ({"lora_config": {"rank": 10**30}}, "it is 1 to 512"),
        ({"model_seq_id": -1}, "`int` >= 0"),
        ({"model_seq_id": 10**300}, "`int` <= 9223372036854775807"),
        ({"lora_config": {"rank": 4, "train_mlp": False, "train_attn": False}}, "neither train_mlp nor train_attn"),
        ({"optimizer_config": {"type": "dimuon"}}, "dimuon is not there"),
        ({"session_id": "sess-another"}, "there is no session"),
    ],
)
async def test_a_model_that_cant_be_made_is_refused(served, change, why):
    body = {"session_id": await served.session(), "model_seq_id": 0, "base_model": "toy", "lora_config": {"rank": 8}, **change}
    answer = await served.post("create_model", body)
    assert answer.status_code in (400, 404)
    assert why in answer.json()["error"]


async def test_many_operations_at_once_are_told_to_back_off(tmp_path):
    async with serving(tmp_path / "run", "tinker.max_pending=2") as (_, url, key), Client(url, key) as client:
        model = await client.model()
        ScriptedTrainer.hold = asyncio.Event()
        taken = [await client.learn(model, seq=seq) for seq in (1, 2)]
        assert (await client.learn(model, seq=3)).status_code == 429
        ScriptedTrainer.hold.set()
        for each in taken:
            output_of(await client.result(each.json()))
        assert (await client.learn(model, seq=3)).status_code == 200


async def test_whoever_asks_for_a_result_early_is_told_to_ask_again(tmp_path):
    async with serving(tmp_path / "run", "tinker.poll_s=0.1") as (_, url, key), Client(url, key) as client:
        model = await client.model()
        ScriptedTrainer.hold = asyncio.Event()
        promise = (await client.learn(model)).json()
        answer = await client.post("retrieve_future", promise)
        assert answer.status_code == 408
        assert answer.json()["type"] == "try_again"
        ScriptedTrainer.hold.set()
        output_of(await client.result(promise))
        for number in ("77", "9" * 5000, "-1", "x"):
            assert (await client.post("retrieve_future", {"request_id": f"{model}:{number}"})).status_code == 410


async def restarted(job, actor="tinker-1"):
    """It is killed, and another has taken its place; a server may not listen yet."""
    hosted = job._agent.host._hosted
    before = hosted[actor].instance
    before.kill()
    while hosted[actor].instance is before:  # noqa: ASYNC110 - it is started again
        await asyncio.sleep(0.05)


async def patiently(send):
    """As the SDK: a request that meets no server is sent again."""
    while True:
        with contextlib.suppress(httpx.TransportError):
            return await send()
        await asyncio.sleep(0.05)


async def test_a_server_that_is_killed_comes_back_at_its_address_with_all_that_it_acknowledged(served):
    session = await served.session()
    model = await served.model(session)
    sampler = await saved_sampler(served, model)
    told = await served.result(first := (await served.learn(model)).json())
    ScriptedTrainer.hold = asyncio.Event()
    waiting = (await served.step(model)).json()
    await restarted(served.job)
    ScriptedTrainer.hold.set()
    assert (await patiently(lambda: served.post("retrieve_future", first))).content == told
    assert (await served.result(waiting))["type"] == "optim_step"
    assert ScriptedTrainer.applied[model, 3] == 1
    await served.asked("session_heartbeat", {"session_id": session})
    sampled_of(await served.result((await served.sample(sampler)).json()))


async def test_what_is_refused_before_its_turn_leaves_their_turn_to_those_before_also_in_a_server_that_comes_after(served):
    model = await served.model()
    await served.result((await served.learn(model, seq=1)).json())
    wrong = {"model_id": model, "seq_id": 4, "adam_params": {"learning_rate": -1}}
    refused = (await served.post("optim_step", wrong)).json()
    later = (await served.step(model, seq=5)).json()
    await restarted(served.job)
    told = [await patiently(lambda: served.learn(model, seq=3)), await patiently(lambda: served.step(model, seq=2))]
    assert [each.status_code for each in told] == [200, 200], told[0].text
    for promise in (told[1].json(), told[0].json(), later):
        assert b"error" not in json.dumps(await served.result(promise), default=str).encode()
    assert (await served.result(refused))["category"] == "user"
    assert [seq for _, seq in ScriptedTrainer.applied] == [0, 1, 2, 3, 5]


async def test_what_no_file_of_the_trainer_covers_is_sent_again_though_its_result_is_kept_no_more(tmp_path):
    async with serving(tmp_path / "run", "tinker.results_kept=16") as (job, url, key), Client(url, key) as client:
        odds = []
        for disturbed in (False, True):
            client.seq, model = 0, await client.model()
            for number in range(20):
                output_of(await client.result((await client.learn(model, datum(targets=(number, 2, 3)))).json()))
            if disturbed:
                await restarted(job)
                await restarted(job, "trainer-1")
            await client.result((await patiently(partial(client.step, model, seq=21))).json())
            saved = await client.numbered_post("save_weights", model, seq=22, path="end")
            await client.result(saved.json())
            odds.append(np.load(tmp_path / "run/tinker/models" / model / "saves/22/odds.npy"))
        assert np.array_equal(*odds)


# -- what is saved ----------------------------------------------------------------------------------------------------


async def test_what_was_saved_is_loaded_and_begun_with(served):
    session = await served.session()
    model = await served.model(session)
    await served.train(model)
    path = (await served.result((await served.numbered_post("save_weights", model, path="one")).json()))["path"]
    assert path == f"tinker://{model}/weights/one"
    before = output_of(await served.result((await served.learn(model, only=True)).json()))
    await served.train(model)
    loaded = await served.result((await served.numbered_post("load_weights", model, path=path, optimizer=True)).json())
    assert loaded["path"] == path
    assert output_of(await served.result((await served.learn(model, only=True)).json())) == before
    body = {"session_id": session, "model_seq_id": 1, "path": path, "optimizer": True}
    second = (await served.result((await served.post("load_weights", body)).json()))["model_id"]
    assert output_of(await served.result((await served.learn(second, seq=1, only=True)).json())) == before
    assert (await served.asked("weights_info", {"tinker_path": path}))["lora_rank"] == 8
    assert (await served.asked("get_info", {"model_id": second}))["model_data"]["model_name"] == "toy"


async def test_a_name_is_taken_again_where_its_client_says_so(served):
    model = await served.model()
    await served.result((await served.numbered_post("save_weights", model, path="one")).json())
    told = await served.result((await served.numbered_post("save_weights", model, path="one")).json())
    assert "one is saved already" in told["error"]
    assert "path" in await served.result((await served.numbered_post("save_weights", model, path="one", overwrite=True)).json())


async def test_of_two_that_are_saved_under_a_name_at_once_the_second_is_refused(served):
    model = await served.model()
    ScriptedTrainer.hold = asyncio.Event()
    promises = [(await served.numbered_post("save_weights", model, path="one")).json() for _ in range(2)]
    ScriptedTrainer.hold.set()
    assert "path" in await served.result(promises[0])
    assert "one is saved already" in (await served.result(promises[1]))["error"]
    assert (await served.numbered_post("save_weights", model, seq=1, path="one")).json() == promises[0]


@pytest.mark.parametrize(
    "path", ["tinker://x/weights/one", "../../etc", "tinker://../weights/one", "tinker://a/b/c", "tinker://m/weights/../x"]
)
async def test_an_unknown_path_is_refused(served, path):
    model = await served.model()
    told = await served.result((await served.numbered_post("load_weights", model, path=path, optimizer=False)).json())
    assert "there is nothing at" in told["error"]
    answer = await served.post(
        "create_sampling_session", {"session_id": model.split(":")[0], "sampling_session_seq_id": 0, "model_path": path}
    )
    assert answer.status_code == 404


@pytest.mark.parametrize("name", ["../x", "a/b", ".hidden", "", "x" * 200])
async def test_a_name_that_is_none_is_refused(served, name):
    model = await served.model()
    told = await served.result((await served.numbered_post("save_weights", model, path=name)).json())
    assert "error" in told or name == ""


# -- sampling ---------------------------------------------------------------------------------------------------------


async def saved_sampler(client, model, kind="snapshot", number=0):
    body = {"sampling_session_seq_id": number, "kind": kind}
    told = await client.result((await client.numbered_post("save_weights_for_sampler", model, **body)).json())
    return told["sampling_session_id"]


async def test_a_snapshot_stays_as_it_was_and_a_follower_goes_on(served):
    model = await served.model()
    snapshot, follower = await saved_sampler(served, model), await saved_sampler(served, model, "inflight", 1)
    for _ in range(8):
        await served.train(model)
    still = sampled_of(await served.result((await served.sample(snapshot, max_tokens=32)).json()))[0][0]
    moved = sampled_of(await served.result((await served.sample(follower, max_tokens=32)).json()))[0][0]
    assert {round(each, 3) for each in still[1]} == {round(-math.log(VOCAB), 3)}
    assert sum(token in (2, 3, 4) for token in moved[0]) > 16
    assert (await served.http.get(f"samplers/{snapshot}")).json()["base_model"] == "toy"


async def test_sequences_have_names_and_a_repeated_request_is_the_same(served):
    model = await served.model()
    sampler = await saved_sampler(served, model)
    first, again = [(await served.sample(sampler, n=3)).json() for _ in range(2)]
    assert first == again
    assert len(set(first["sample_sequence_ids"])) == 3
    pairs, _ = sampled_of(await served.result(first))
    assert len({tuple(tokens) for tokens, _ in pairs}) > 1
    assert (await served.sample(sampler, n=2)).status_code == 400
    assert (await served.sample(sampler, 10**12)).status_code == 200  # so clients of a handle count


async def test_the_base_model_and_saved_weights_are_sampled_with_the_prompts_scores(served):
    session = await served.session()
    model = await served.model(session)
    await served.train(model)
    path = (await served.result((await served.numbered_post("save_weights_for_sampler", model, path="a")).json()))["path"]
    for number, what in enumerate(({"base_model": "toy"}, {"model_path": path})):
        body = {"session_id": session, "sampling_session_seq_id": number, **what}
        sampler = (await served.asked("create_sampling_session", body))["sampling_session_id"]
        asked = await served.sample(sampler, prompt=(1, 2, 3), prompt_logprobs=True, prompt_logprobs_last_n=1)
        pairs, scores = sampled_of(await served.result(asked.json()))
        assert len(pairs[0][0]) == 4
        assert [math.isnan(each) for each in scores] == [True, True, False]
    assert {adapter for adapter, _ in SAMPLED} == {"", f"{model}@3"}


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"topk_sample_logprobs": 2}, "topk_sample_logprobs"),
        ({"prompt_alt_tokens_k": 2}, "prompt_alt_tokens_k"),
        ({"params": {"top_k": 5}}, "top_k"),
        ({"params": {"temperature": -1}}, "temperature"),
        ({"params": {"stop": [""]}}, "stop"),
        ({"prompt": ()}, "prompt"),
        ({"prompt": (VOCAB,)}, f"the token {VOCAB}"),
        ({"prompt": (1,) * 600}, "600 tokens"),
        ({"n": 0}, "num_samples"),
    ],
)
async def test_what_cant_be_sampled_is_refused_by_its_name(served, more, why):
    model = await served.model()
    answer = await served.sample(await saved_sampler(served, model), **more)
    assert answer.status_code == 400
    assert why in answer.json()["error"]


async def test_saved_weights_that_engines_lost_are_published_again(served):
    model = await served.model()
    sampler = await saved_sampler(served, model)
    await served.result((await served.sample(sampler)).json())
    PUBLISHED.clear()
    sampled_of(await served.result((await served.sample(sampler, 1)).json()))


async def test_engines_hold_no_more_saved_weights_than_there_are_places(tmp_path):
    async with serving(tmp_path / "run", "tinker.samplers=2", "tinker.snapshots_kept=3") as (_, url, key), Client(url, key) as client:
        model = await client.model()
        samplers = [await saved_sampler(client, model, number=number) for number in range(5)]
        for sampler in samplers[2:]:
            sampled_of(await client.result((await client.sample(sampler)).json()))
        assert len(PUBLISHED) == 2
        assert (await client.sample(samplers[0])).status_code == 404
        assert len(list((tmp_path / "run/tinker/models" / model / "saves").iterdir())) == 3


async def test_a_prompt_is_scored_under_the_model_as_it_stands_also_by_a_trainer_that_began_anew(served):
    model = await served.model()
    sampler = await saved_sampler(served, model, "inflight")
    for _ in range(4):
        await served.train(model)
    scores = []
    for number in range(2):
        promise = (await served.sample(sampler, number, prompt=(1, 2, 3), prompt_logprobs=True)).json()
        scores.append(sampled_of(await served.result(promise))[1][1:])
        await restarted(served.job, "trainer-1")
    assert scores[0] == scores[1]


async def test_more_samples_than_there_may_ever_be_are_refused_for_good(tmp_path):
    async with serving(tmp_path / "run", "tinker.max_samples=4") as (_, url, key), Client(url, key) as client:
        body = {"session_id": await client.session(), "sampling_session_seq_id": 0, "base_model": "toy"}
        sampler = (await client.asked("create_sampling_session", body))["sampling_session_id"]
        answer = await client.sample(sampler, n=5)
        assert answer.status_code == 400
        assert "num_samples is 5; tinker.max_samples=4" in answer.json()["error"]
        assert len(sampled_of(await client.result((await client.sample(sampler, n=4)).json()))[0]) == 4


async def test_a_client_in_flight_whose_model_is_unloaded_is_told_so(served):
    model = await served.model()
    sampler = await saved_sampler(served, model, "inflight")
    await served.asked("unload_model", {"model_id": model})
    told = await served.result((await served.sample(sampler)).json())
    assert told == {"error": "the model that the sampling client follows is unloaded", "category": "user"}


async def test_a_sampling_session_whose_number_is_taken_by_another_is_refused(served):
    session = await served.session()
    model = await served.model(session)
    await saved_sampler(served, model)
    told = await served.result((await served.numbered_post("save_weights_for_sampler", model, sampling_session_seq_id=0)).json())
    assert "take another sampling_session_seq_id" in told["error"]
    path = (await served.result((await served.numbered_post("save_weights", model, path="one")).json()))["path"]
    body = {"session_id": session, "sampling_session_seq_id": 1, "base_model": "toy"}
    first = await served.asked("create_sampling_session", body)
    assert await served.asked("create_sampling_session", body) == first
    for number in (0, 1):
        answer = await served.post("create_sampling_session", {**body, "sampling_session_seq_id": number, "model_path": path})
        assert answer.status_code == 400
        assert "is taken" in answer.json()["error"]


# -- age --------------------------------------------------------------------------------------------------------------


async def of_samples(client, sampler, number=0):
    """A datum of policy gradients of what was sampled just now."""
    (tokens, logprobs), *_ = sampled_of(await client.result((await client.sample(sampler, number)).json()))[0]
    return datum([1, *tokens[:-1]], tokens, logprobs=logprobs, advantages=[1.0] * len(tokens))


async def test_what_was_sampled_too_long_ago_is_refused_with_its_age(tmp_path):
    async with serving(tmp_path / "run", "tinker.alpha=1") as (_, url, key), Client(url, key) as client:
        model = await client.model()
        data = await of_samples(client, await saved_sampler(client, model))
        (_, metrics), stepped = await client.train(model, data, loss="importance_sampling")
        assert {name: metrics[name] for name in metrics if name.startswith("rubato")} == {
            "rubato/unknown_frac:mean": 0.0,
            "rubato/version_min:min": 0.0,
            "rubato/version_max:max": 0.0,
        }
        assert stepped["metrics"]["rubato/version_max"] == 0.0
        await client.train(model, data, loss="importance_sampling")
        told = await client.result((await client.learn(model, data, loss="ppo")).json())
        assert told["category"] == "user"
        assert "its age is 2, and tinker.alpha=1" in told["error"]
        (_, metrics), _ = await client.train(model, datum(**POLICY), loss="importance_sampling")
        assert metrics["rubato/unknown_frac:mean"] == 1.0
        assert "rubato/version_min:min" not in metrics
        await client.train(model, data)  # a loss that asks for no samples


async def test_ages_outlive_a_server_that_is_killed(tmp_path):
    async with serving(tmp_path / "run", "tinker.alpha=1") as (job, url, key), Client(url, key) as client:
        model = await client.model()
        data = await of_samples(client, await saved_sampler(client, model))
        await client.train(model)
        await restarted(job)
        client.seq += 1
        learned = await patiently(lambda: client.learn(model, data, loss="ppo", seq=client.seq))
        assert output_of(await client.result(learned.json()))[1]["rubato/version_min:min"] == 0.0
        await client.step(model)
        told = await client.result((await client.learn(model, data, loss="ppo")).json())
        assert "its age is 2, and tinker.alpha=1" in told["error"]


async def test_what_waits_for_its_turn_is_judged_by_a_server_that_comes_after(tmp_path):
    async with serving(tmp_path / "run", "tinker.alpha=0") as (job, url, key), Client(url, key) as client:
        model = await client.model()
        sampler = await saved_sampler(client, model)
        promise = (await client.sample(sampler)).json()
        await client.result(promise)
        ScriptedTrainer.hold = asyncio.Event()
        moved = (await client.step(model)).json()
        longer = datum([1, 2, 3, 4], [2, 3, 4, 5], logprobs=[-1.0] * 4, advantages=[1.0] * 4)
        waiting = (await client.learn(model, longer, loss="ppo", made_of=promise["sample_sequence_ids"])).json()
        await restarted(job)
        ScriptedTrainer.hold.set()
        await patiently(lambda: client.result(moved))
        assert "its age is 1, and tinker.alpha=0" in (await client.result(waiting))["error"]


async def test_a_step_tells_of_all_that_went_into_it_also_where_the_server_was_killed_within(served):
    model = await served.model()
    data = await of_samples(served, await saved_sampler(served, model))
    await served.train(model, datum(**POLICY), loss="ppo")
    told = []
    for disturbed in (False, True):
        for sent, more in ((data, {}), (datum(**POLICY), {}), (datum(**POLICY), {"only": True}), (datum(), {"loss": "cross_entropy"})):
            learned = await served.learn(model, sent, **{"loss": "ppo", **more})
            output_of(await served.result(learned.json()))
        await saved_sampler(served, model, "inflight", 1 + disturbed)
        if disturbed:
            await restarted(served.job)
        stepped = await patiently(lambda seq=served.seq + 1: served.step(model, seq=seq))
        served.seq += 1
        told.append((await served.result(stepped.json()))["metrics"])
    assert told[0] == told[1]
    assert told[0]["rubato/unknown_frac"] == 0.5
    assert told[0]["rubato/version_min"] == 0.0


async def test_what_gathered_before_a_load_is_no_part_of_the_next_step(served):
    model = await served.model()
    path = (await served.result((await served.numbered_post("save_weights", model, path="one")).json()))["path"]
    await served.learn(model, datum(**POLICY), loss="ppo")
    await served.numbered_post("load_weights", model, path=path, optimizer=False)
    stepped = await served.result((await served.step(model)).json())
    assert "rubato/unknown_frac" not in stepped["metrics"]


@pytest.mark.parametrize(("alpha", "needed"), [("0", 4), ("1", 3), ("9", 1), ("null", 1)])
async def test_a_client_in_flight_asks_engines_for_nothing_older_than_the_bound(tmp_path, alpha, needed):
    async with serving(tmp_path / "run", f"tinker.alpha={alpha}") as (_, url, key), Client(url, key) as client:
        model = await client.model()
        await client.train(model)
        sampler = await saved_sampler(client, model, "inflight")
        for _ in range(3):
            await client.train(model)
        sampled_of(await client.result((await client.sample(sampler)).json()))
        assert NEEDED == [needed]  # noqa: SIM300 - the needed one is the parameter


async def test_without_a_bound_versions_are_told_and_nothing_is_refused(served):
    model = await served.model()
    data = await of_samples(served, await saved_sampler(served, model))
    for _ in range(3):
        await served.train(model)
    (_, metrics), _ = await served.train(model, data, loss="cispo")
    assert metrics["rubato/version_min:min"] == 0.0


# -- tenants ----------------------------------------------------------------------------------------------------------


async def test_a_tenant_has_no_way_to_anothers_models_paths_samplers_and_results(tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("a tml-aaaaaaaaaaaaaaaaaaaa\n# them\nb tml-bbbbbbbbbbbbbbbbbbbb\n")
    async with serving(tmp_path / "run", f"tinker.keys={keys}") as (_, url, key):
        assert key == ""
        async with Client(url, "tml-aaaaaaaaaaaaaaaaaaaa") as own, Client(url, "tml-bbbbbbbbbbbbbbbbbbbb") as other:
            session = await own.session()
            model = await own.model(session)
            promise = (await own.learn(model)).json()
            path = (await own.result((await own.numbered_post("save_weights", model, path="one")).json()))["path"]
            sampler = await saved_sampler(own, model)
            asked = (await own.sample(sampler)).json()
            assert (await other.learn(model, seq=9)).status_code == 404
            assert (await other.post("retrieve_future", promise)).status_code == 410
            assert (await other.post("retrieve_future", asked)).status_code == 410
            assert (await other.sample(sampler, 1)).status_code == 404
            assert (await other.http.get(f"samplers/{sampler}")).status_code == 404
            assert (await other.post("session_heartbeat", {"session_id": session})).status_code == 404
            assert (await other.post("weights_info", {"tinker_path": path})).status_code == 404
            mine = await other.model()
            assert (
                "nothing at"
                in (await other.result((await other.numbered_post("load_weights", mine, path=path, optimizer=False)).json()))["error"]
            )
            assert (await other.post("sample", {})).status_code == 404
            output_of(await own.result(promise))


@pytest.mark.parametrize(
    "text", ["", "a key", "a tml-short", "a tml-aaaaaaaaaaaaaaaaaaaa more", "a tml-aaaaaaaaaaaaaaaaaaaa\nb tml-aaaaaaaaaaaaaaaaaaaa"]
)
async def test_a_file_of_keys_that_is_none_ends_the_launch_with_its_line(tmp_path, text):
    keys = tmp_path / "keys"
    keys.write_text(text)
    with pytest.raises((ConfigError, ActorFailed), match=r"tinker\.keys="):
        async with serving(tmp_path / "run", f"tinker.keys={keys}"):
            pass


# -- sessions ---------------------------------------------------------------------------------------------------------


async def test_a_session_that_is_finished_takes_its_models_and_leaves_what_has_a_name(served):
    session = await served.session()
    model = await served.model(session)
    path = (await served.result((await served.numbered_post("save_weights", model, path="one")).json()))["path"]
    await saved_sampler(served, model)
    assert (await served.post(f"sessions/{session}/finish", {"reason": "success"})).status_code == 200
    assert (await served.learn(model)).status_code == 404
    assert (await served.post("session_heartbeat", {"session_id": session})).status_code == 410
    folder = served.folder / "tinker/models" / model
    assert [each.name for each in (folder / "saves").iterdir()] == ["1"]
    body = {"session_id": await served.session(), "model_seq_id": 0, "path": path, "optimizer": True}
    assert "model_id" in await served.result((await served.post("load_weights", body)).json())
    assert json.loads((folder / "model.json").read_text())["unloaded"]


async def test_a_model_is_unloaded_and_makes_room(tmp_path):
    async with serving(tmp_path / "run", "tinker.max_models=1") as (_, url, key), Client(url, key) as client:
        session = await client.session()
        model = await client.model(session)
        body = {"session_id": session, "model_seq_id": 1, "base_model": "toy", "lora_config": {"rank": 8}}
        assert (await client.post("create_model", body)).status_code == 429
        promise = await client.asked("unload_model", {"model_id": model})
        assert (await client.result(promise))["model_id"] == model
        await client.model(session, 1)


async def test_a_session_whose_end_a_kill_cut_short_ends_after_it(tmp_path):
    async with serving(tmp_path / "run", "tinker.max_models=1") as (job, url, key), Client(url, key) as client:
        session = await client.session()
        model = await client.model(session)
        with (tmp_path / "run/tinker/sessions.jsonl").open("a") as book:
            book.write(json.dumps({"id": session, "tenant": "own", "over": True}) + "\n")
        await restarted(job)
        while (await patiently(lambda: client.post("get_info", {"model_id": model}))).status_code != 404:  # noqa: ASYNC110 - of the server
            await asyncio.sleep(0.05)
        await client.model()


async def test_a_model_that_is_asked_for_while_its_session_ends_is_not_left_behind(tmp_path):
    async with serving(tmp_path / "run", "tinker.max_models=1") as (_, url, key), Client(url, key) as client:
        for _ in range(5):
            session = await client.session()
            body = {"session_id": session, "model_seq_id": 0, "base_model": "toy", "lora_config": {"rank": 8}}
            await asyncio.gather(client.post("create_model", body), client.post(f"sessions/{session}/finish", {}))
        await client.model()


async def test_what_a_model_saved_is_not_written_over_by_one_that_takes_its_number(served):
    session = await served.session()
    model = await served.model(session)
    await served.result((await served.numbered_post("save_weights", model, path="one")).json())
    await served.asked("unload_model", {"model_id": model})
    body = {"session_id": session, "model_seq_id": 0, "base_model": "toy", "lora_config": {"rank": 8}}
    answer = await served.post("create_model", body)
    assert answer.status_code == 400
    assert "take another model_seq_id" in answer.json()["error"]
    assert (await served.post("unload_model", {"model_id": model})).status_code == 404
