"""A session against a fake of the proxy: what a turn that fails leaves behind, and what is too old."""

import asyncio
from array import array

import pytest
from starlette.requests import Request

from rubato.actors.config import EvalSection, RolloutSection
from rubato.actors.envs.chat import ChatRenderer
from rubato.actors.envs.recorder import GaveUp, Recorder, RecorderContext
from rubato.actors.gateway.server import SessionServer
from rubato.actors.gateway.session import Ask, Ending, Refused, Session, SessionOver
from rubato.actors.messages.generation import Completion, Tokens, VersionSpan
from rubato.actors.messages.samples import PolicyState, Ticket
from rubato.bus.errors import Failed
from rubato.runtime.observe.figures import Waits
from tests.scripted_sessions import scripted_session

END = 257
USER = {"role": "user", "content": "where?"}


class Proxy:
    """Says `word`; raises what is an error, and never answers None."""

    def __init__(self, renderer):
        self.renderer, self.word = renderer, "here"
        self.requests = []

    async def ask(self, request, *, timeout):
        self.requests.append(request.request_id)
        if self.word is None:
            await asyncio.Event().wait()
        if isinstance(self.word, Exception):
            raise self.word
        ids = array("i", [*self.renderer._tokenizer.raw.encode(self.word).ids, END])
        tokens = Tokens(ids.tobytes(), array("f", [-1.0] * len(ids)).tobytes(), (VersionSpan(0, 0, len(ids)),))
        return Completion(request.request_id, tokens, "stop", "engine-1")


class Played:
    """A session that is open; `version` is the newest of the weights, and α is 1."""

    def __init__(self, folder, *, idle_s=60.0, **more):
        renderer = self.renderer = ChatRenderer(folder)
        self.proxy, self.version = Proxy(renderer), 0
        context = RecorderContext(
            rollout=RolloutSection(),
            eval=EvalSection(),
            renderer=renderer,
            proxy=self.proxy,
            policy=lambda: PolicyState(version=self.version, alpha=1),
            waits=Waits(),
        )

        async def the_renderer(tools):
            return renderer

        async def offload(call):
            return call()

        ticket = Ticket("g1.0", "g1", attempt=1, row=3, seed=77, noise=0, version=0)
        self.recorder = Recorder(context, ticket)
        self.session = Session(the_renderer, offload=offload, idle_s=idle_s, max_len=1000, **more)
        self.session.begin(self.recorder)

    async def turn(self, *messages):
        return (await self.session.turns(Ask(messages)))[0].said.message


@pytest.fixture
async def played(model_folder):
    return Played(model_folder)


@pytest.mark.parametrize("how", ["fails", "is left"])
async def test_a_turn_that_is_asked_for_again_goes_on_in_the_same_context(played, how):
    first = await played.turn(USER)
    before = played.recorder.transcripts[0].prompt
    played.proxy.word = Failed("no engine") if how == "fails" else None

    with pytest.raises(Refused if how == "fails" else TimeoutError):
        async with asyncio.timeout(0.01):
            await played.turn(USER, first, USER)
    between = [each.prompt for each in played.recorder.transcripts]
    played.proxy.word = "there"
    await played.turn(USER, first, USER)

    (segment,) = (each.segment() for each in played.recorder.transcripts)
    assert between == [before]
    assert segment.tokens.startswith(before)
    assert len(segment.tokens) == 4 * len(segment.mask) == len(segment.logprobs)
    assert len(segment.spans) == 2


async def test_a_first_turn_that_fails_leaves_no_context(played):
    played.proxy.word = Failed("no engine")
    with pytest.raises(Refused) as refused:
        await played.turn(USER)
    left = [*played.recorder.transcripts]
    played.proxy.word = "here"
    await played.turn(USER)

    assert (refused.value.status, refused.value.code) == (400, "generation_failed")
    assert left == []
    assert len(played.recorder.transcripts) == 1


async def test_a_session_whose_first_token_is_too_old_to_train_is_over_as_stale(played):
    first = await played.turn(USER)
    driving = asyncio.ensure_future(played.session.drive(played.recorder))  # noqa: TID251 - it ends before the test does
    await asyncio.sleep(0)
    played.version = 2

    for _ in range(2):
        with pytest.raises(SessionOver) as over:
            await played.turn(USER, first, USER)
        assert over.value.code == "stale"
    with pytest.raises(GaveUp) as end:
        await driving
    assert (end.value.reason, end.value.retry) == ("stale", True)


@pytest.mark.parametrize(("trains_all", "num"), [(False, 1), (True, 2)])
async def test_a_side_request_is_trained_where_all_are(model_folder, trains_all, num):
    played = Played(model_folder, trains_all=trains_all)
    played.proxy.word = "a-title"
    await played.turn({"role": "user", "content": "a title"})
    played.proxy.word = "five"
    await played.turn(USER)
    played.session.complete(Ending(reward=1.0))

    await played.session.drive(played.recorder)

    assert len(played.recorder.transcripts) == num
    assert played.recorder.texts == ["a-title", "five"][2 - num :]
    assert played.recorder.info == ({} if trains_all else {"unused_contexts": 1})
    assert played.session.told == {"session_id": played.session.id, "segments": num, "unused": 2 - num}


BAD = [
    Ending(reward=float("nan")),
    Ending(reward=1.0, rewards={"style": 1.0}),
    Ending(rewards={"style": float("inf")}),
    Ending(rewards={"style": 1e30, "form": 1e30}),
    Ending(rewards={"": 1.0}),
    Ending(rewards={"\x1b[31mred": 1.0}),
    Ending(rewards={"two\nlines": 1.0}),
    Ending(rewards={"x" * 65: 1.0}),
    Ending(rewards={f"{at}": 1.0 for at in range(33)}),
    Ending(rewards={"exact": 1.0}),
    Ending(rewards={"std": 1.0}),
]


async def test_of_a_session_that_is_over_its_answer_is_not_kept(played):
    server, ending = SessionServer("run"), Ending(rewards={"a": 1.0, "b": 2.0}, answer="x" * 1_000_000)
    server.add(played.session)
    await played.turn(USER)

    played.session.complete(ending)
    server.remove(played.session)

    assert len(repr(server._over)) < 1000
    played.session.complete(Ending(rewards={"b": 2.0, "a": 1.0}, answer="x" * 1_000_000))
    with pytest.raises(Refused, match="completed with another body before"):
        played.session.complete(Ending(rewards={"a": 1.0, "b": 2.0}, answer="x"))


@pytest.mark.parametrize("bad", BAD)
async def test_an_ending_that_is_none_is_refused_and_the_session_goes_on(model_folder, bad):
    played = Played(model_folder, score_names=["exact"])
    await played.turn(USER)

    with pytest.raises(Refused) as refused:
        played.session.complete(bad)
    played.session.complete(Ending(reward=1.0))

    assert (refused.value.status, refused.value.code) == (400, "invalid_reward")
    assert played.session.over == "complete"


async def test_rewards_are_summed_and_are_the_trajectorys_scores_by_their_names(played):
    await played.turn(USER)
    played.session.complete(Ending(rewards={"style": 0.5, "facts": 1.0}))
    await played.session.drive(played.recorder)

    trajectory = await played.recorder.finish(0.0)

    assert trajectory.reward == 1.5
    assert trajectory.scores == {"env": 0.0, "style": 0.5, "facts": 1.0}
    assert played.session.rewarded


@pytest.mark.parametrize("ending", [Ending(reward=1.0), Ending(rewards={"style": 0.5}), Ending(answer="5"), Ending(error="lost")])
async def test_a_session_is_completed_once_the_same_body_changes_nothing_and_another_is_refused(played, ending):
    await played.turn(USER)
    played.session.complete(ending)
    before = (played.session.over, played.recorder.reward, played.session.answer)

    played.session.complete(ending)
    with pytest.raises(Refused) as refused:
        played.session.complete(Ending(reward=0.25))

    assert (refused.value.status, refused.value.code) == (409, "ended_otherwise")
    assert (played.session.over, played.recorder.reward, played.session.answer) == before


async def test_a_turn_that_is_under_way_as_its_session_ends_is_cut_off_and_is_no_part_of_it(played):
    first = await played.turn(USER)
    before = played.recorder.transcripts[0].prompt
    played.proxy.word = None
    late = asyncio.ensure_future(played.turn(USER, first, USER))  # noqa: TID251 - it ends before the test does
    await asyncio.sleep(0)
    assert played.recorder.transcripts[0].prompt != before
    played.session.complete(Ending(reward=1.0))

    await played.session.drive(played.recorder)

    (transcript,) = played.recorder.transcripts
    assert transcript.prompt == before
    with pytest.raises(SessionOver) as over:
        await late
    assert over.value.code == "complete"


async def test_a_session_does_not_expire_while_a_request_is_under_way(model_folder):
    played = Played(model_folder, idle_s=0.01)
    played.proxy.word = None
    driving = asyncio.ensure_future(played.session.drive(played.recorder))  # noqa: TID251 - it ends before the test does
    await asyncio.sleep(0)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.03):
            await played.turn(USER)
    assert played.session.over is None

    with pytest.raises(GaveUp) as end:
        await driving
    assert end.value.reason == "agent_left"


async def test_a_session_that_is_asked_for_anything_does_not_expire(model_folder):
    played = Played(model_folder, idle_s=0.2)
    driving = asyncio.ensure_future(played.session.drive(played.recorder))  # noqa: TID251 - it ends before the test does
    server = SessionServer("run")
    server.add(played.session)
    for _ in range(4):
        await asyncio.sleep(0.1)
        await server._models(Request({"type": "http", "headers": [(b"x-api-key", played.session.key.encode())], "path_params": {}}))

    assert not driving.done()
    with pytest.raises(GaveUp):
        await driving


async def test_what_another_session_of_the_same_attempt_asked_is_not_its_answer(model_folder):
    """A Store that lost its last seconds gives an attempt out again, and engines keep answers by the names of requests."""
    one, other = Played(model_folder), Played(model_folder)
    await one.turn(USER)
    await other.turn({"role": "user", "content": "another"})

    assert one.recorder.ticket == other.recorder.ticket
    assert one.proxy.requests != other.proxy.requests


async def test_an_engine_is_not_shown_what_lets_a_session_be_ended(played):
    await played.turn(USER)

    (request_id,) = played.proxy.requests
    assert played.session.id not in request_id
    assert played.session.key not in request_id


async def driven(session):
    """It is complete, and its driver through."""
    session.complete(Ending(reward=1.0))
    await session.drive(session.recorder)
    return await session.recorder.finish(0.0)


async def test_of_requests_under_way_at_once_the_one_that_came_last_leads_to_the_end():
    session = scripted_session("a title", "the way")
    proxy = session.proxy
    proxy.goes_on.clear()
    title = asyncio.ensure_future(session.turns(Ask([{"role": "user", "content": "title?"}])))  # noqa: TID251 - it ends before the test does
    while not proxy.asked:  # noqa: ASYNC110 - nothing else tells
        await asyncio.sleep(0)
    held, proxy.goes_on = proxy.goes_on, asyncio.Event()
    proxy.goes_on.set()
    await session.turns(Ask([USER]))
    held.set()
    await title
    trajectory = await driven(session)

    assert (session.answer, session.recorder.texts, len(trajectory.segments)) == ("the way", ["the way"], 1)


async def test_a_side_request_that_ended_at_its_own_limit_does_not_make_its_sample_one_that_was_cut():
    session = scripted_session("a title", "the way")
    await session.turns(Ask([{"role": "user", "content": "title?"}], max_tokens=2))
    await session.turns(Ask([USER]))
    trajectory = await driven(session)

    assert (trajectory.turns, trajectory.finish_reasons, trajectory.cut) == (1, ("stop",), False)


FORGETS = (
    "{% for m in messages %}{{ m.role }}:{{ m.content.split('</think>')[-1] if m.role == 'assistant' else m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


@pytest.mark.parametrize(("rerenders", "word", "num"), [(False, "hm</think>five", 1), (True, "hm</think>five", 3), (True, "five", 1)])
async def test_where_a_template_drops_what_was_reasoned_a_turn_may_follow_what_it_shows(write_model, tmp_path, rerenders, word, num):
    played = Played(write_model(tmp_path / "forgets", template=FORGETS), rerenders=rerenders)
    played.proxy.word = word
    history = [USER]
    for _ in range(3):
        history += [await played.turn(*history), USER]
    played.session.complete(Ending(reward=1.0))
    await played.session.drive(played.recorder)

    contexts = [array("i", each.prompt).tolist() for each in played.recorder.transcripts]
    texts = [played.renderer._tokenizer.raw.decode(ids, skip_special_tokens=False) for ids in contexts]
    assert len(texts) == num
    assert texts[-1].count("hm</think>") == (0 if word == "five" else 1 if rerenders else 3)
    assert sum(sum(each.segment().mask) for each in played.recorder.transcripts) == played.recorder.sampled


async def test_what_is_shown_anew_leaves_nothing_where_its_turn_fails(write_model, tmp_path):
    played = Played(write_model(tmp_path / "forgets", template=FORGETS), rerenders=True)
    played.proxy.word = "hm</think>five"
    first = await played.turn(USER)
    before = [each.prompt for each in played.recorder.transcripts]
    played.proxy.word = Failed("no engine")

    with pytest.raises(Refused):
        await played.turn(USER, first, USER)

    assert [each.prompt for each in played.recorder.transcripts] == before


async def test_an_agents_words_on_why_it_failed_can_be_printed(played):
    played.session.complete(Ending(error="\x1b[2Jno \x00 luck"))

    with pytest.raises(GaveUp) as end:
        await played.session.drive(played.recorder)
    assert (end.value.reason, end.value.detail) == ("agent_failed", "\\x1b[2Jno \\x00 luck")
