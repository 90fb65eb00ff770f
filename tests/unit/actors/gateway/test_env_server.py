"""The wire to an EnvServer of verifiers: its protocol against a ROUTER of libzmq, and what is believed of what comes."""

import asyncio
import tempfile
from array import array
from contextlib import suppress

import msgspec
import pytest
import zmq

from rubato.actors.envs.recorder import GaveUp
from rubato.actors.gateway.env_server import Dealer, ServerLost
from rubato.actors.gateway.session import AskTokens
from rubato.actors.gateway.traces import MOST_NODES, Episode
from rubato.bus.message import unpack_f32, unpack_i32
from tests.scripted_sessions import scripted_session

pack = msgspec.msgpack.encode


class Router(zmq.Socket):
    """Of libzmq, at `place`."""

    place: str = ""


@pytest.fixture
def router():
    with tempfile.TemporaryDirectory(prefix="rubato-") as folder, zmq.Context() as context:
        socket = Router(context, zmq.ROUTER)
        socket.bind(f"ipc://{folder}/s")
        vars(socket)["place"] = f"{folder}/s"
        yield socket
        socket.close(0)


async def dealt(router):
    _, dealer = await asyncio.get_running_loop().create_unix_connection(Dealer, router.place)
    return dealer


async def heard(router):
    return await asyncio.to_thread(router.recv_multipart)


async def failure_of(asking):
    try:
        return await asking
    except (GaveUp, ServerLost) as failure:
        return failure


async def test_deltas_come_before_the_reply_and_each_to_its_own_request(router):
    dealer = await dealt(router)
    one, other = [], []
    async with asyncio.timeout(10), asyncio.TaskGroup() as tasks:
        first = tasks.create_task(dealer.ask("run", {"n": 1}, lambda data: one.append(bytes(data))))
        second = tasks.create_task(dealer.ask("run", {"n": 2}, lambda data: other.append(bytes(data))))
        for _ in range(2):
            who, name, method, payload = await heard(router)
            number = msgspec.msgpack.decode(payload)["n"]
            assert method == b"run"
            router.send_multipart([who, b"unknown", b"delta", b"lost"])
            router.send_multipart([who, name, b"delta", b"d%d" % number])
            router.send_multipart([who, name, b"reply", b"x" * 300_000 * number])

    assert (one, other) == ([b"d1"], [b"d2"])
    assert (len(first.result()), len(second.result())) == (300_000, 600_000)
    dealer.close()


async def test_what_is_not_wanted_any_more_is_cancelled_by_its_name(router):
    dealer = await dealt(router)
    async with asyncio.timeout(10), asyncio.TaskGroup() as tasks:
        asking = tasks.create_task(dealer.ask("run", {}, print))
        _, name, _, _ = await heard(router)
        asking.cancel()
        _, _, method, payload = await heard(router)

    assert (method, msgspec.msgpack.decode(payload)) == (b"cancel", {"request_id": name.decode()})
    dealer.close()


async def test_a_server_that_goes_away_or_speaks_another_protocol_ends_what_waits(router):
    dealer = await dealt(router)
    async with asyncio.timeout(10), asyncio.TaskGroup() as tasks:
        wrong = tasks.create_task(failure_of(dealer.ask("run", {}, print)))
        who, name, _, _ = await heard(router)
        router.send_multipart([who, name, b"what", b"is", b"this"])
        assert "a message of 4 parts" in (await wrong).detail
        waiting = tasks.create_task(failure_of(dealer.ask("run", {}, print)))
        while (await heard(router))[2] != b"run":
            pass
        router.close(0)
        assert isinstance(await waiting, ServerLost)
    with pytest.raises(ServerLost):
        await dealer.ask("run", {}, print)


async def test_what_is_no_zmtp_ends_the_connection(router):
    place, over = f"{router.place}2", asyncio.Event()

    async def babble(reader, writer):
        writer.write(b"HTTP/1.1 400 Bad Request\r\n" * 10)
        with suppress(ConnectionError):
            await reader.read()
        writer.close()
        over.set()

    async with asyncio.timeout(10), await asyncio.start_unix_server(babble, place):
        _, dealer = await asyncio.get_running_loop().create_unix_connection(Dealer, place)
        with pytest.raises(ServerLost, match="not ZMTP"):
            await dealer.ask("run", {}, print)
        await over.wait()


PROMPT = array("i", map(ord, "2 + 3?")).tobytes()


async def played():
    """A session of two turns, and the nodes that a true trace of it has."""
    session = scripted_session("five", "sure")
    (one,) = await session.turns(AskTokens(PROMPT))
    more = array("i", map(ord, "sure?")).tobytes()
    (two,) = await session.turns(AskTokens(PROMPT + one.completion.tokens.ids + more))
    nodes, parent = [], None
    for shown, answer in ((PROMPT, one), (more, two)):
        tokens = answer.completion.tokens
        ids, begun = unpack_i32(tokens.ids), unpack_i32(shown)
        mask = [False] * len(begun) + [True] * len(ids)
        nodes.append({"parent": parent, "sampled": True, "token_ids": begun + ids, "mask": mask, "logprobs": unpack_f32(tokens.logprobs)})
        parent = len(nodes) - 1
    return session, nodes


def ended(nodes, **state):
    episode = Episode()
    for node in nodes:
        episode.grow(pack({"trace": "t", "nodes": [node], "pending": [{"role": "user"}], "links": {0: []}}))
    episode.grow(pack({"trace": "t", "set": {"ok": True, "rewards": {"right": {"score": 1, "weight": 0.5}, "none": None}, **state}}))
    return episode.end(pack({"success": True, "head": {"ok": True}, "traces": [{"id": "t", "nodes": len(nodes), "calls": 2}]}))


async def test_a_true_trace_names_what_was_kept_of_it():
    session, nodes = await played()

    trace = ended(nodes, metrics={"length": 4.0}, stop_condition="max_turns")

    assert trace.kept_in(session.forest) == [session.forest.turns[0].transcript]
    assert (trace.reward, trace.truncated) == (0.5, True)
    assert trace.info == {"right": 1.0, "length": 4.0}


async def test_of_a_session_what_the_trace_does_not_have_is_not_trained():
    session, nodes = await played()
    await session.turns(AskTokens(array("i", map(ord, "a title")).tobytes()))

    assert len(session.forest.turns) == 3
    assert len(ended(nodes).kept_in(session.forest)) == 1


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"token_ids": [1, 2, 3]}, "tokens that this job did not sample"),
        ({"token_ids": [2**40]}, "token ids that are none"),
        ({"mask": []}, "a mask"),
        ({"logprobs": []}, "log-probabilities"),
        ({"logprobs": [float("nan")] * 5}, "log-probabilities"),
        ({"parent": 1}, "follows the message 1"),
        ({"parent": None}, "tokens that this job did not sample"),
    ],
)
async def test_a_trace_that_has_other_tokens_than_were_kept_is_refused(change, said):
    session, nodes = await played()
    nodes[1] |= change

    with pytest.raises(GaveUp, match=said) as refused:
        ended(nodes).kept_in(session.forest)

    assert (refused.value.reason, refused.value.retry) == ("env_bad_result", False)


@pytest.mark.parametrize("score", [float("nan"), float("inf"), 1e308])
def test_a_reward_that_is_no_number_is_a_failed_rollout(score):
    trace = ended([], rewards={"right": {"score": score, "weight": 100.0}})

    with pytest.raises(GaveUp, match="sent a reward right of"):
        _ = trace.reward


def test_rewards_whose_sum_is_none_are_a_failed_rollout():
    trace = ended([], rewards={name: {"score": 1e30} for name in ("right", "brief")})

    with pytest.raises(GaveUp, match="sent rewards whose sum"):
        _ = trace.reward


@pytest.mark.parametrize(
    ("errors", "reason", "retry"),
    [
        ([], "env_step_failed", False),
        ([{"type": "TaskError", "message": "a bug"}], "env_step_failed", False),
        ([{"type": "TaskError", "message": "\x1b[2J"}], "env_step_failed", False),
        ([{"type": "ProviderError", "message": "busy", "status_code": 503}], "generation_failed", True),
        ([{"type": "ProviderError", "message": "too long", "status_code": 400}], "env_step_failed", False),
    ],
)
def test_an_episode_that_failed_is_tried_again_where_that_may_help(errors, reason, retry):
    episode = Episode()
    episode.grow(pack({"trace": "t", "errors": errors, "set": {"ok": False}}))

    with pytest.raises(GaveUp) as end:
        episode.end(pack({"head": {"ok": False}, "traces": [{"id": "t", "nodes": 0, "calls": 0}]}))

    assert (end.value.reason, end.value.retry) == (reason, retry)
    assert end.value.detail.isprintable()


def test_an_episode_of_several_agents_is_refused_and_a_judge_s_trace_is_passed_over():
    head, traces = {"ok": True}, [{"id": name, "nodes": 0} for name in ("a", "b")]
    two, judged = Episode(), Episode()
    for name in ("a", "b"):
        two.grow(pack({"trace": name, "set": {"ok": True}}))
        judged.grow(pack({"trace": name, "set": {"ok": True, "agent": {"name": name, "trainable": name == "a"}}}))

    assert judged.end(pack({"head": head, "traces": traces})).state.agent.trainable
    with pytest.raises(GaveUp, match="an episode of 2 agents' traces"):
        two.end(pack({"head": head, "traces": traces}))


@pytest.mark.parametrize("message", [b"", b"\x81\xa5KEY\xa1\xff", b"\x81\xa1x" + b"\x91" * 5000 + b"\xc0"])
@pytest.mark.parametrize("take", [Episode.grow, Episode.end])
def test_a_message_that_can_not_be_read_is_refused(take, message):
    with pytest.raises(GaveUp, match="EnvServer sent a") as refused:
        take(Episode(), message.replace(b"KEY", b"trace" if take is Episode.grow else b"error"))

    assert refused.value.reason == "env_bad_result"


def test_a_trace_that_was_given_up_counts_for_nothing_and_too_long_a_one_is_refused():
    episode = Episode()
    episode.grow(pack({"trace": "first", "nodes": [{}]}))
    episode.grow(pack({"trace": "first", "discard": True}))

    with pytest.raises(GaveUp, match="0 of the 1 messages"):
        episode.end(pack({"head": {"ok": True}, "traces": [{"id": "first", "nodes": 1}]}))
    with pytest.raises(GaveUp, match="a trace of more than"):
        episode.grow(pack({"trace": "t", "nodes": [{}] * (MOST_NODES + 1)}))
