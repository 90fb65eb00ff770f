"""Trainer and engines compared again and again: what an engine that keeps its old weights, or gives other log-probs, comes to."""

import asyncio
import json
from contextlib import asynccontextmanager, nullcontext
from types import SimpleNamespace

import pytest

from rubato.actors.cluster.lease import GivenUp
from rubato.actors.config import CheckSection, ModelSection, RolloutSection, TrainSection
from rubato.actors.messages.generation import Aborted, Completion, Tokens, VersionSpan
from rubato.actors.training import trainer as training
from rubato.actors.training.checks import FULL_ROWS, PROMPT_TOKENS, LogprobCheck
from rubato.actors.training.train_engine import TrainError
from rubato.bus.errors import NotSent
from rubato.bus.message import pack_f32, pack_i32, unpack_i32
from rubato.runtime.actor import Actor

SECTION = CheckSection(num_prompts=6, num_tokens=4)


class Trainer(Actor):
    role = "trainer"


def logprob(version, token, temperature):
    return -(1.0 + version / 100 + token % 5) / temperature


class Training:
    """Stands for a TrainEngine at weight version `version`."""

    def __init__(self, version=0):
        self.version = version

    def logprobs(self, sequences, temperature=1.0):
        return [[logprob(self.version, token, temperature) for token in tokens] for tokens in sequences]


class Engines:
    """Stands for proxy and engines: request by request the next of `names` answers, under the version that was asked for."""

    def __init__(self, names=("engine-1",), *, deaf=(), temperature=None, newer_after=99):
        self.names, self.deaf, self.temperature, self.newer_after = names, deaf, temperature, newer_after
        self.requests = []

    async def __call__(self, request):
        name = self.names[len(self.requests) % len(self.names)]
        self.requests.append(request)
        ids = list(range(request.sampling.max_new_tokens))
        version = 0 if name in self.deaf else request.weights.version
        temperature = self.temperature or request.sampling.temperature
        after = min(self.newer_after, len(ids))
        logprobs = [logprob(version if at < after else 77, token, temperature) for at, token in enumerate(ids)]
        spans = (VersionSpan(request.weights.version, 0, after), VersionSpan(77, after, len(ids)))
        spans = tuple(span for span in spans if span.end > span.start)
        tokens = Tokens(pack_i32(ids), pack_f32(logprobs), spans)
        return Completion(request.request_id, tokens, "length", name)


class Lease:
    """Stands for the trainer's lease of a pool that is shared."""

    def __init__(self, *, leaves=False):
        self.leaves, self.is_held = leaves, False

    def waiting(self):
        return nullcontext()

    async def compute(self, call, *args):
        return call(*args)

    @asynccontextmanager
    async def __call__(self, phase):
        if self.leaves:
            raise GivenUp("it is being saved")
        self.is_held = True
        yield self
        self.is_held = False


@pytest.fixture
def compared(on_stage, tmp_path):
    """`compared(engines, [(step, version that the trainer holds), …])`: whether each comparison took place, and the notices."""
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 50}))

    def run(engines, steps, lease=None, **rollout):
        found, failed, lease = [], [], lease or Lease()

        async def ask(request):
            assert not lease.is_held, "the pool is kept from others while the engines wait for their turn"
            return await engines(request)

        async def main(context):
            context.actors["llm_proxy"] = ask
            config = SimpleNamespace(
                check=SECTION, model=ModelSection(path=str(tmp_path)), train=TrainSection(), rollout=RolloutSection(max_len=100, **rollout)
            )
            trainer = Trainer(config, context)
            trainer.lease, trainer.leaving = lease, asyncio.Event()
            check = LogprobCheck(trainer)
            try:
                for step, version in steps:
                    trainer.engine = Training(version)
                    found.append(await check.check(step))
            except TrainError as error:
                failed.append(error)
            found.extend(context.notices)

        on_stage(main, name="trainer-1")
        if failed:
            raise failed[0]
        return found

    return run


def test_an_engine_that_has_every_version_agrees_and_the_user_is_told_once(compared):
    first, second, *notices = compared(Engines(), [(0, 0), (1, 1)])

    assert (first, second) == (True, True)
    assert notices == ["trainer and engine agree: mean |Δlogp| 0.0e+00 over 24 tokens"]


def test_weights_that_never_arrive_at_one_of_eight_engines_are_found_and_named(compared):
    engines = Engines(tuple(f"engine-{i}" for i in range(6)), deaf=("engine-4",))

    with pytest.raises(TrainError, match=r"They agreed before this update, so its weights most likely never reached engine-4"):
        compared(engines, [(0, 0), (1, 1)])


def test_another_model_from_the_start_is_told_as_that(compared):
    with pytest.raises(TrainError, match="same model folder"):
        compared(Engines(), [(0, 5)])


def test_log_probs_are_compared_at_the_temperature_of_rollouts(compared):
    assert compared(Engines(), [(0, 0)], temperature=0.5)[0] is True
    assert compared(Engines(), [(0, 0)], temperature=0.0 + 2.0)[0] is True
    with pytest.raises(TrainError, match=r"engine-1 gives log-probs of temperature 1: .* rollout.temperature=0.5"):
        compared(Engines(temperature=1.0), [(0, 0)], temperature=0.5)


def test_some_rows_are_as_long_as_trajectories_may_get_and_no_request_comes_twice(compared):
    engines = Engines()

    compared(engines, [(0, 0), (1, 1)])

    lengths = [len(unpack_i32(request.prompt)) for request in engines.requests[:6]]
    assert lengths == [96] * FULL_ROWS + [PROMPT_TOKENS] * 4
    assert len({request.request_id for request in engines.requests}) == 12
    assert {request.weights.version for request in engines.requests[6:]} == {1}


def test_only_tokens_of_the_very_version_are_compared(compared):
    _, told = compared(Engines(newer_after=3), [(0, 0)])

    assert told.endswith("over 18 tokens")


def test_an_engine_that_names_another_version_than_was_asked_for_agrees_with_nobody(compared):
    found, told = compared(Engines(newer_after=0), [(3, 3)])

    assert found is False
    assert told == "trainer and engines were not compared after step 3: engine-1 sampled no token under version 3"


@pytest.mark.parametrize("trouble", ["aborted", "away"])
def test_engines_that_are_busy_or_away_are_told_of_and_training_goes_on(compared, trouble):
    async def busy(request):
        if trouble == "away":
            raise NotSent("llm_proxy has no room")
        return Aborted(request.request_id, Tokens(), "llm_proxy has no room")

    assert compared(busy, [(7, 7)]) == [False, "trainer and engines were not compared after step 7: llm_proxy has no room"]


def test_a_trainer_that_leaves_before_its_turn_is_told_and_goes_on_to_the_row_of_its_step(compared):
    assert compared(Engines(), [(7, 7)], Lease(leaves=True)) == [
        False,
        "trainer and engines were not compared after step 7: it is being saved",
    ]


def test_comparisons_are_due_at_the_start_after_the_first_update_every_so_often_and_after_the_last_step():
    section = CheckSection(every=10)

    due = [step for published, step in enumerate(range(6, 35), 1) if section.due(published, step, 34)]

    assert due == [6, 7, 10, 20, 30, 34]
    assert not CheckSection(enabled=False).due(1, 0, 0)
    assert not CheckSection(every=0).due(3, 10, 11)
    assert CheckSection(every=0).due(3, 11, 11)


@pytest.mark.parametrize(("check", "words"), [(False, "check.enabled=true finds out which"), (True, "On fresh prompts they agree")])
def test_a_mismatch_that_stays_is_told_of_once_with_its_likely_cause_after_a_comparison(on_stage, tmp_path, check, words):
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 50}))
    told = []

    async def main(context):
        context.actors["llm_proxy"] = Engines()
        section = CheckSection(enabled=check, every=0, num_prompts=2, num_tokens=2)
        trainer = training.Trainer(training.Trainer.Config(model=ModelSection(path=str(tmp_path)), check=section), context)
        trainer.out.num_published = 2
        hook = LogprobCheck(trainer)
        for step, kl in enumerate([1e-6, None, 2e-3, 1e-6, *[2e-3] * 8], 3):
            trainer.engine, trainer.out.version = Training(step), step
            took = await hook.after_publish(step, {} if kl is None else {"policy/mismatch_kl": kl})
            told.extend((step, "time/check" in took, text) for text in context.notices if "mismatch_kl" in text)
            context.notices.clear()

    on_stage(main, name="trainer-1")

    ((step, compared, text),) = told
    assert (step, compared) == (11, check)
    assert words in text
    assert text.startswith("policy/mismatch_kl has been above 0.001 for 5 steps, 2.0e-03 now")
