"""One trajectory against fakes of the proxy and the reward service."""

import asyncio
import math
from array import array
from contextlib import contextmanager

import msgspec
import pytest
from msgspec.structs import replace

from rubato.actors.config import EvalSection, RewardSection, RolloutSection
from rubato.actors.data.tasks import OWN_COLUMNS
from rubato.actors.envs.chat import ChatRenderer
from rubato.actors.envs.hosting import EnvHost
from rubato.actors.envs.recorder import GaveUp, Recorder, RecorderContext
from rubato.actors.envs.rollout import Rollout, RolloutContext, RolloutHook
from rubato.actors.envs.section import EnvSection
from rubato.actors.messages.generation import Aborted, Completion, Tokens, VersionSpan
from rubato.actors.messages.samples import NotScored, PolicyState, Scores, Ticket, shortened
from rubato.actors.report.breakdown import numbers_of
from rubato.bus.errors import Failed, Unknown
from rubato.sim.virtual import run_virtual

END = 257
HERE = __name__


class Corridor:
    """Goal after three times "go"; "fail" raises, "nan" pays it, "cut" truncates."""

    inline = True
    resets = []

    def reset(self, *, seed):
        Corridor.resets.append(seed)
        self.position = 0
        return f"at 0 of {seed}", {"answer": 42, "odd": object(), "task": "not ours"}

    def step(self, action):
        if action == "fail":
            raise KeyError("goal")
        self.position += action == "go"
        reward = float("nan") if action == "nan" else 0.25
        return (f"at {self.position}", reward, self.position == 3, action == "cut", {"invalid": action not in ("go", "cut")})

    def close(self):
        pass


class Moody:
    """Raises in its first `bad` resets."""

    inline = True
    tries = 0

    def __init__(self, bad):
        self.bad = bad

    def reset(self, *, seed):
        Moody.tries += 1
        if Moody.tries <= self.bad:
            raise RuntimeError("not today")
        return "hello", {}

    def step(self, action):
        return "", 1.0, True, False, {}

    def close(self):
        pass


class FakeProxy:
    """Answers with the given words, or raises or returns what is not a word."""

    def __init__(self, renderer, words, versions=(5,)):
        self.renderer, self.words, self.versions = renderer, list(words), list(versions)
        self.requests = []

    async def ask(self, request, *, timeout):
        self.requests.append(request)
        word = self.words.pop(0)
        if isinstance(word, Exception):
            raise word
        if not isinstance(word, str):
            return word
        version = self.versions.pop(0) if len(self.versions) > 1 else self.versions[0]
        stop = [] if word.endswith("…") else [END]
        ids = array("i", [*self.renderer._tokenizer.raw.encode(word.rstrip("…")).ids, *stop])
        tokens = Tokens(ids.tobytes(), array("f", [-1.0] * len(ids)).tobytes(), (VersionSpan(version, 0, len(ids)),))
        return Completion(request.request_id, tokens, "stop" if stop else "length", "engine-1")


class FakeReward:
    def __init__(self, reply):
        self.reply, self.requests = reply, []

    async def ask(self, request, *, timeout):
        self.requests.append(request)
        return self.reply


class Silent:
    def observe(self, name, value):
        pass

    @contextmanager
    def busy(self):
        yield

    @contextmanager
    def on(self, what, **_):
        yield


@pytest.fixture
def renderer(model_folder):
    return ChatRenderer(model_folder)


async def play(renderer, words, **settings):
    rollout, proxy = prepare(renderer, words, **settings)
    return await rollout.play(), proxy


def prepare(
    renderer,
    words,
    *,
    env="Corridor",
    reward=None,
    ticket=None,
    policy=(5, 1),
    kwargs=None,
    proxy=None,
    evaluation=None,
    score_names=(),
    hooks=(),
    **limits,
):
    section = EnvSection.model_validate({"class": f"{HERE}:{env}", "isolation": "inline", "kwargs": kwargs or {}})
    host = EnvHost(section)
    host._class = {"Corridor": Corridor, "Moody": Moody, "Slow": Slow}[env]
    proxy = proxy or FakeProxy(renderer, words)
    rollout = RolloutSection(**{"max_new_tokens": 8, "max_len": 4096, **limits})
    silent = Silent()
    stage = RolloutContext(
        env=section,
        rollout=rollout,
        host=host,
        renderer=renderer,
        proxy=proxy,
        reward=reward,
        policy=lambda: PolicyState(*policy),
        metrics=silent,
        waits=silent,
        eval=evaluation or EvalSection(),
        score_names=score_names,
        hooks=hooks,
    )
    ticket = ticket or Ticket("t1", "g1", 1, 17, 4211, 5)
    return stage.rollout_of(ticket), proxy


async def test_a_trajectory_ends_at_the_goal_with_the_sum_of_step_rewards(renderer):
    trajectory, proxy = await play(renderer, ["go", "what", "go", "go"])

    assert (trajectory.reward, trajectory.turns, trajectory.truncated) == (1.0, 4, False)
    assert [request.request_id for request in proxy.requests] == ["t1.1v5.0", "t1.1v5.1", "t1.1v5.2", "t1.1v5.3"]
    assert {request.session for request in proxy.requests} == {"t1"}
    assert proxy.requests[0].sampling.stop_token_ids == (END,)


async def test_every_prompt_continues_the_one_before_by_the_very_tokens_that_were_sampled(renderer):
    trajectory, proxy = await play(renderer, ["go", "go", "go"])
    (segment,) = trajectory.segments

    for before, after in zip(proxy.requests, proxy.requests[1:], strict=False):
        assert after.prompt.startswith(before.prompt)
    assert segment.tokens.startswith(proxy.requests[-1].prompt)
    assert len(segment.tokens) == len(segment.logprobs) == 4 * len(segment.mask)
    sampled = [i for i, bit in enumerate(segment.mask) if bit]
    assert sampled == [i for span in segment.spans for i in range(span.start, span.end)]
    assert array("i", segment.tokens).tolist()[sampled[-1]] == END


async def test_tokens_are_drawn_by_the_tickets_noise_at_the_temperature_that_the_trajectory_tells(renderer):
    ticket = Ticket("t1", "g1", 1, 17, 4211, 5, noise=77)

    trained, proxy = await play(renderer, ["go", "go", "go"], ticket=ticket, temperature=0.7)
    held_out, greedy = await play(renderer, ["go", "go", "go"], ticket=replace(ticket, purpose="eval"), temperature=0.7)

    assert {(r.sampling.seed, r.sampling.temperature) for r in proxy.requests} == {(77, 0.7)}
    assert {(r.sampling.seed, r.sampling.temperature) for r in greedy.requests} == {(77, 0.0)}
    assert (trained.temperature, held_out.temperature) == (0.7, 0.0)


async def test_a_trajectory_is_cut_at_max_turns_max_len_and_by_the_environment(renderer):
    by_turns, _ = await play(renderer, ["no"] * 9, max_turns=4)
    by_length, _ = await play(renderer, ["no"] * 99, max_len=200, max_turns=99)
    by_itself, _ = await play(renderer, ["cut"])

    assert [(t.truncated, t.turns) for t in (by_turns, by_itself)] == [(True, 4), (True, 1)]
    assert by_length.truncated
    assert len(by_length.segments[0].mask) <= 200


async def test_a_trajectory_older_than_alpha_is_given_up_before_its_next_turn(renderer):
    with pytest.raises(GaveUp) as caught:
        await play(renderer, ["go", "go", "go"], policy=(7, 1))

    assert (caught.value.reason, caught.value.retry) == ("stale", True)


async def test_age_counts_from_the_first_sampled_token_and_alpha_below_zero_is_no_bound(renderer):
    fresh, _ = await play(renderer, ["go", "go", "go"], policy=(6, 1))
    unbounded, _ = await play(renderer, ["go", "go", "go"], policy=(60, -1))

    assert fresh.version_first == unbounded.version_first == 5


async def test_no_turn_is_sampled_under_older_weights_than_the_first(renderer):
    proxy = FakeProxy(renderer, ["go", "go", "go"], versions=[6, 7, 7])

    trajectory, _ = await play(renderer, [], proxy=proxy, policy=(6, 1))

    assert [request.weights.version for request in proxy.requests] == [5, 6, 6]
    assert [span.version for span in trajectory.segments[0].spans] == [6, 7, 7]


async def test_a_turn_of_older_weights_than_the_first_counts_where_its_ticket_allows_them(renderer):
    proxy = FakeProxy(renderer, ["go", "go", "go"], versions=[6, 5, 6])

    trajectory, _ = await play(renderer, [], proxy=proxy, policy=(6, 1))

    assert [request.weights.version for request in proxy.requests] == [5, 6, 5]
    assert (trajectory.turns, trajectory.version_first) == (3, 5)


async def test_an_aborted_turn_goes_on_with_its_tokens_under_a_new_id(renderer):
    part = Tokens(array("i", [1]).tobytes(), array("f", [-1.0]).tobytes(), (VersionSpan(5, 0, 1),))

    trajectory, proxy = await play(renderer, [Aborted("t1.1.0", part, "asked"), "go", "go", "go"])

    assert [request.request_id for request in proxy.requests[:3]] == ["t1.1v5.0", "t1.1v5.0r1", "t1.1v5.1"]
    assert proxy.requests[1].resumed == part
    assert trajectory.turns == 3


def sampled(*versions):
    """As many tokens, each under its version."""
    spans = tuple(VersionSpan(version, at, at + 1) for at, version in enumerate(versions))
    return Tokens(array("i", [1] * len(versions)).tobytes(), array("f", [-1.0] * len(versions)).tobytes(), spans)


@pytest.mark.parametrize(
    "answer",
    [
        Completion("", sampled(5, 4), "length", "engine-1"),
        Completion("", sampled(4), "stop", "engine-1"),
        Aborted("", sampled(5, 4), "asked"),
    ],
)
async def test_what_an_engine_sampled_after_it_went_back_to_older_weights_is_sampled_anew(renderer, answer):
    trajectory, proxy = await play(renderer, [answer, "go", "go", "go"])

    assert [request.request_id for request in proxy.requests[:3]] == ["t1.1v5.0", "t1.1v5.0r1", "t1.1v5.1"]
    assert proxy.requests[1].resumed == Tokens()
    assert (trajectory.turns, trajectory.version_first) == (3, 5)


async def test_an_engine_that_stays_behind_ends_the_attempt_and_what_it_sampled_counts(renderer):
    rollout, _ = prepare(renderer, [Completion("", sampled(4), "length", "engine-1")] * 3)

    with pytest.raises(GaveUp, match="older than was asked for") as caught:
        await rollout.play()

    assert caught.value.retry
    assert rollout.recorder.given_up("generation_failed", retry=True).tokens == 3


@pytest.mark.parametrize(
    ("answers", "retry"),
    [([Aborted("", Tokens(), "asked")] * 3, True), ([Unknown("lost")], True), ([Failed("bug")], False)],
    ids=["aborted", "lost", "failed"],
)
async def test_a_turn_that_can_not_be_generated_has_a_named_end(renderer, answers, retry):
    with pytest.raises(GaveUp) as caught:
        await play(renderer, answers)

    assert (caught.value.reason, caught.value.retry) == ("generation_failed", retry)


@pytest.mark.parametrize(
    ("value", "flaw"), [(math.nan, "not finite (nan)"), (0.5, "0.5, above 0"), (-1e4, "-10000, below"), (-math.inf, "-inf")]
)
async def test_log_probabilities_that_are_none_end_a_rollout_by_the_name_of_the_engine(renderer, value, flaw):
    tokens = Tokens(array("i", [1, 2]).tobytes(), array("f", [-1.0, value]).tobytes(), (VersionSpan(5, 0, 2),))

    with pytest.raises(GaveUp) as caught:
        await play(renderer, [Completion("", tokens, "length", "engine-3")])

    assert (caught.value.reason, caught.value.retry) == ("bad_logprobs", False)
    assert caught.value.detail.startswith("engine-3 sent a completion in which a log-probability is ")
    assert flaw in caught.value.detail


@pytest.mark.parametrize("logprobs", [b"", bytes(4), bytes(7), bytes(12)])
async def test_log_probabilities_of_another_number_end_a_rollout_by_the_name_of_the_engine(renderer, logprobs):
    tokens = Tokens(array("i", [1, 2]).tobytes(), logprobs, (VersionSpan(5, 0, 2),))

    with pytest.raises(GaveUp) as caught:
        await play(renderer, [Completion("", tokens, "length", "engine-3")])

    assert (caught.value.reason, caught.value.retry) == ("bad_logprobs", False)
    assert f"engine-3 sent a completion in which the log-probabilities have {len(logprobs)} bytes" in caught.value.detail


@pytest.mark.parametrize(("word", "outcome"), [("fail", "env_step_failed"), ("nan", "env_bad_result")])
async def test_a_failing_step_is_a_named_outcome_and_not_tried_again(renderer, word, outcome):
    with pytest.raises(GaveUp) as caught:
        await play(renderer, ["go", word])

    assert (caught.value.reason, caught.value.retry) == (outcome, False)


@pytest.mark.parametrize(("bad", "works"), [(2, True), (3, False)])
async def test_a_reset_gets_three_tries(renderer, bad, works):
    Moody.tries = 0

    if works:
        assert (await play(renderer, ["x"], env="Moody", kwargs={"bad": bad}))[0].reward == 1.0
    else:
        with pytest.raises(GaveUp, match="raised in reset: RuntimeError") as caught:
            await play(renderer, ["x"], env="Moody", kwargs={"bad": bad})
        assert caught.value.reason == "env_reset_failed"


async def test_held_out_tasks_are_played_greedily(renderer):
    ticket = Ticket("e1", "g1", 1, 0, 1, 5, "eval")

    _, proxy = await play(renderer, ["go", "go", "go"], ticket=ticket, policy=(99, 1))

    assert proxy.requests[0].sampling.temperature == 0.0
    assert [(r.weights.exact, r.weights.version) for r in proxy.requests] == [(True, 5)] * 3


async def test_several_samples_of_a_held_out_task_have_the_evaluations_own_sampling(renderer):
    section = EvalSection(samples=2, temperature=0.6, top_p=0.95)

    for purpose, expected in (("eval", (0.6, 0.95)), ("train", (1.0, 1.0))):
        ticket = Ticket("e1", "g1", 1, 0, 1, 5, purpose)
        _, proxy = await play(renderer, ["go", "go", "go"], ticket=ticket, evaluation=section)

        assert (proxy.requests[0].sampling.temperature, proxy.requests[0].sampling.top_p) == expected


async def test_scores_are_added_and_the_functions_see_turns_and_info(renderer):
    reward = FakeReward(Scores((0.5, -0.25)))

    trajectory, _ = await play(renderer, ["go", "huh", "go", "go"], reward=reward)

    assert trajectory.reward == 1.25
    assert reward.requests[0].completions == ("go", "huh", "go", "go")
    columns = msgspec.msgpack.decode(reward.requests[0].columns)
    assert columns.items() >= {"turns": 4, "invalid_turns": 1, "env_reward": 1.0, "answer": 42}.items()
    told = {"task": "", "row": 17, "purpose": "train", "trajectory": "t1", "version": 5}
    assert columns.items() >= told.items()
    assert "odd" not in columns
    assert set(columns) - {"answer", "invalid"} <= set(OWN_COLUMNS)


async def test_a_trajectory_says_what_its_reward_is_the_sum_of_and_what_the_environment_told_in_numbers(renderer):
    names = RewardSection(functions=("a.py:exact", "b:mean")).names

    trajectory, _ = await play(renderer, ["go"] * 3, reward=FakeReward(Scores((0.5, -0.25))), score_names=names)
    plain, _ = await play(renderer, ["go"] * 3)

    assert trajectory.scores == {"env": 0.75, "exact": 0.5, "mean_2": -0.25}
    assert sum(trajectory.scores.values()) == trajectory.reward
    assert trajectory.info == {"answer": 42.0, "invalid": 0.0}
    assert plain.scores == {"env": 0.75}


async def test_a_reward_service_that_says_more_than_there_are_functions_loses_nothing(renderer):
    trajectory, _ = await play(renderer, ["go"] * 3, reward=FakeReward(Scores((0.5, 1.0))), score_names=("exact",))

    assert trajectory.scores == {"env": 0.75, "exact": 0.5, "score_1": 1.0}
    assert trajectory.reward == 2.25


async def test_a_trajectory_that_is_not_scored_is_given_up_and_never_worth_zero(renderer):
    with pytest.raises(GaveUp, match=r"timeout: my\.py:f no answer"):
        await play(renderer, ["go"] * 3, reward=FakeReward(NotScored("timeout", "my.py:f no answer")))


async def test_a_first_prompt_that_does_not_fit_is_refused_with_its_length(renderer):
    with pytest.raises(GaveUp, match=r"the first prompt has \d+ tokens; rollout.max_len is 10"):
        await play(renderer, ["go"], max_len=10)


async def test_each_turn_says_how_it_ended_and_a_turn_at_its_limit_makes_the_trajectory_cut(renderer):
    reward = FakeReward(Scores((0.0,)))

    cut, _ = await play(renderer, ["go", "so be it…", "go", "go"], reward=reward)
    whole, _ = await play(renderer, ["go", "go", "go"])

    assert (cut.finish_reasons, cut.cut) == (("stop", "length", "stop", "stop"), True)
    assert (whole.finish_reasons, whole.cut) == (("stop",) * 3, False)
    columns = msgspec.msgpack.decode(reward.requests[0].columns)
    assert columns["finish_reasons"] == ["stop", "length", "stop", "stop"]


async def test_where_a_turn_is_one_token_its_limit_cuts_nothing(renderer):
    trajectory, _ = await play(renderer, ["x…"] * 2, env="Corridor", max_new_tokens=1, max_turns=2)

    assert (trajectory.finish_reasons, trajectory.cut) == (("length", "length"), False)


async def test_what_is_given_up_says_how_many_tokens_it_sampled_and_resumed_ones_count_once(renderer):
    def tokens(num):
        return Tokens(bytes(4 * num), bytes(4 * num), (VersionSpan(5, 0, num),))

    answers = ["go", Aborted("", tokens(3), "asked"), Aborted("", tokens(5), "asked"), Aborted("", tokens(5), "asked")]
    rollout, _ = prepare(renderer, answers)
    with pytest.raises(GaveUp) as caught:
        await rollout.play()

    told = rollout.recorder.given_up(caught.value.reason, retry=caught.value.retry)
    assert (told.reason, told.retry, told.turns, told.tokens) == ("generation_failed", True, 1, len([*b"go", END]) + 5)


class Slow(Corridor):
    async def step(self, action):
        await asyncio.sleep(0.25)
        return Corridor.step(self, action)


def test_a_trajectory_says_how_much_of_its_time_went_into_its_environment(model_folder):
    class SlowProxy(FakeProxy):
        async def ask(self, request, *, timeout):
            await asyncio.sleep(1.0)
            return await super().ask(request, timeout=timeout)

    async def main():
        renderer = ChatRenderer(model_folder)
        trajectory, _ = await play(renderer, [], env="Slow", proxy=SlowProxy(renderer, ["go"] * 3))
        return trajectory

    trajectory = run_virtual(main)

    assert (trajectory.wall_s, trajectory.env_s) == (3.75, 0.75)


@pytest.mark.parametrize("purpose", ["train", "eval"])
async def test_a_rollout_that_failed_tells_what_it_had_played(renderer, purpose):
    rollout, _ = prepare(renderer, ["go", "fail"], ticket=Ticket("t1", "g1", 1, 0, 1, 5, purpose))
    with pytest.raises(GaveUp) as caught:
        await rollout.play()

    told = rollout.recorder.failed(caught.value)

    assert told.reason == "env_step_failed"
    assert told.played.reason.startswith("env_step_failed: raised in step: KeyError")
    assert (told.turns, told.played.turns, told.played.finish_reasons) == (2, 2, ("stop", "stop"))
    assert told.played.text == ("go\nfail" if purpose == "eval" else "")
    (segment,) = told.played.segments
    assert segment.logprobs == b""
    assert "fail" in renderer.decode(segment.tokens)


async def test_a_rollout_that_failed_before_anything_was_sampled_has_nothing_to_be_read(renderer):
    rollout, _ = prepare(renderer, ["go"], max_len=10)
    with pytest.raises(GaveUp) as caught:
        await rollout.play()

    assert rollout.recorder.failed(caught.value).played is None


async def test_a_held_out_trajectory_carries_its_text_and_one_to_train_on_does_not(renderer):
    texts = {}
    for purpose in ("train", "eval"):
        trajectory, _ = await play(renderer, ["go"] * 3, ticket=Ticket("t1", "g1", 1, 0, 1, 5, purpose))
        texts[purpose] = trajectory.text

    assert texts == {"train": "", "eval": "go\ngo\ngo"}
    assert shortened("a" * 30 + "b" * 30, 20) == "a" * 10 + "\n… 40 characters left out …\n" + "b" * 10


def test_what_is_no_unicode_in_an_info_becomes_columns_and_figures(renderer):
    rollout, _ = prepare(renderer, [])
    rollout.recorder.info = {"k\ud83d": ["v\ud83d", 1.0], "n\ud83d": 2.0}

    columns = msgspec.msgpack.decode(rollout.recorder._columns())

    assert columns["k\ufffd"] == ["v\ufffd", 1.0]
    assert numbers_of(rollout.recorder.info) == {"n\ufffd": 2.0}


async def test_stops_of_the_renderer_go_with_each_request(model_folder):
    renderer = ChatRenderer(model_folder, stop=["</answer>", "<|endoftext|>"])

    _, proxy = await play(renderer, ["go"] * 3)

    sampling = proxy.requests[0].sampling
    assert (sampling.stop, sampling.stop_token_ids) == (("</answer>",), (END, END + 1))


class Counting(RolloutHook):
    def __init__(self):
        self.seen = []

    @contextmanager
    def turns(self):
        self.seen.append("begin")
        try:
            yield
        finally:
            self.seen.append("end")


@pytest.mark.parametrize(("words", "ends"), [(["go"] * 3, True), (["fail"], False)])
async def test_a_hook_goes_around_the_turns_of_each_rollout_however_they_end(renderer, words, ends):
    hook, order = Counting(), []

    class Watched(FakeProxy):
        async def ask(self, request, *, timeout):
            order.extend(hook.seen)
            return await super().ask(request, timeout=timeout)

    rollout, proxy = prepare(renderer, [], proxy=Watched(renderer, words), hooks=[hook])
    played = await asyncio.gather(rollout.play(), return_exceptions=True)

    assert isinstance(played[0], GaveUp) is not ends
    assert order == ["begin"] * len(proxy.requests)
    assert hook.seen == ["begin", "end"]


async def test_a_driver_of_another_kind_may_open_several_contexts_and_speak_in_them_at_once(renderer):
    class Forking:
        async def drive(self, recorder):
            contexts = [recorder.open(renderer.opening(text)) for text in ("one", "two")]
            await asyncio.gather(*map(recorder.generate, contexts))
            contexts[0].show(renderer.follow_up("more", END))
            await recorder.generate(contexts[0])
            recorder.reward = 0.5

    proxy = FakeProxy(renderer, ["a", "b", "c"], versions=[6, 7, 7])
    context = RecorderContext(
        rollout=RolloutSection(max_new_tokens=8, max_len=4096),
        eval=EvalSection(),
        renderer=renderer,
        proxy=proxy,
        policy=lambda: PolicyState(7, 1),
        waits=Silent(),
    )

    trajectory = await Rollout(Recorder(context, Ticket("t1", "g1", 1, 0, 1, 5)), Forking()).play()

    assert [[span.version for span in segment.spans] for segment in trajectory.segments] == [[6, 7], [7]]
    assert len({request.request_id for request in proxy.requests}) == 3
    assert proxy.requests[2].weights.version == 6
    assert (trajectory.turns, trajectory.reward, trajectory.version_first) == (3, 0.5, 6)
