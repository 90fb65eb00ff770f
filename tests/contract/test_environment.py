"""Every environment, wherever it runs, behaves the same; every mistake in one gets its name."""

import asyncio
import re
from decimal import Decimal
from fractions import Fraction
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch

from rubato.actors.envs.hosting import EnvFailure, EnvHost, check_step, sentence
from rubato.actors.envs.section import EnvSection
from tests.sandboxes import needs_bwrap

USER = Path(__file__).with_name("user_env.py")

ENVIRONMENTS = {
    "frozen lake inline": {"class": "rubato.actors.envs.frozen_lake:FrozenLakeText"},
    "frozen lake in a worker": {"class": "rubato.actors.envs.frozen_lake:FrozenLakeText", "isolation": "process"},
    "gymnasium": {
        "class": "rubato.actors.envs.gymnasium:GymnasiumText",
        "kwargs": {
            "id": "CliffWalking-v1",
            "actions": {"up": 0, "right": 1, "down": 2, "left": 3},
            "template": "You stand on field {observation}.",
        },
    },
    "gymnasium rendered": {
        "class": "rubato.actors.envs.gymnasium:GymnasiumText",
        "kwargs": {"id": "FrozenLake-v1", "actions": {"left": 0}, "render": True, "kwargs": {"is_slippery": False}},
    },
    "plain class in a worker": {"class": f"{USER}:Plain"},
    "plain class inline": {"class": f"{USER}:Plain", "isolation": "inline"},
    "async class inline": {"class": f"{USER}:Async"},
    "async class in a worker": {"class": f"{USER}:Async", "isolation": "process"},
    "chat messages": {"class": f"{USER}:Messages"},
}
SANDBOXED = {"class": f"{USER}:Async", "sandbox": "bwrap", "sandbox_read": [str(USER.parent)]}
SETTINGS = [
    *(pytest.param(settings, id=name) for name, settings in ENVIRONMENTS.items()),
    pytest.param(SANDBOXED, id="async class in a sandbox", marks=needs_bwrap),
]


def section(**settings):
    limits = {"reset_timeout_s": 20, "step_timeout_s": 20, "workers": 1}
    return EnvSection.model_validate({**limits, **settings})


@pytest.fixture
async def host_of():
    hosts = []

    async def start(**settings):
        hosts.append(EnvHost(section(**settings)))
        await hosts[-1].start()
        return hosts[-1]

    yield start
    for host in hosts:
        await host.close()


@pytest.mark.parametrize("name", ["plain class in a worker", "async class in a worker", "async class inline"])
async def test_a_host_knows_whether_its_environments_run_in_workers(host_of, name):
    host = await host_of(**ENVIRONMENTS[name])

    assert host.pooled == name.endswith("worker")


@needs_bwrap
async def test_what_may_share_the_managers_process_does_not_where_it_has_a_sandbox(host_of):
    host = await host_of(**SANDBOXED)

    assert host.pooled


@pytest.mark.parametrize("settings", SETTINGS)
async def test_an_environment_plays_resets_to_the_same_task_and_closes(host_of, settings):
    host = await host_of(**settings)
    env = await host.borrow("train")

    first, info = await env.reset(11)
    observation, reward, terminated, truncated, step_info = await env.step("left")
    again, _ = await env.reset(11)
    await env.close()

    assert first == again
    assert isinstance(first, str | list)
    assert isinstance(observation, str | list)
    assert [type(value) for value in (reward, terminated, truncated)] == [float, bool, bool]
    assert isinstance(info, dict)
    assert isinstance(step_info, dict)


@pytest.mark.parametrize("settings", SETTINGS)
async def test_instances_do_not_share_their_episode(host_of, settings):
    host = await host_of(**settings)
    one, other = await host.borrow("train"), await host.borrow("train")
    await one.reset(11)
    start, _ = await other.reset(11)

    await one.step("left")

    assert (await other.reset(11))[0] == start


async def test_a_gymnasium_environment_takes_words_and_calls_others_invalid(host_of):
    host = await host_of(**ENVIRONMENTS["gymnasium"])
    env = await host.borrow("train")
    start, _ = await env.reset(1)

    invalid = await env.step("fly")
    moved = await env.step("go up")

    assert start == "You stand on field 36."
    assert (invalid[0], invalid[1], invalid[4]) == (start, 0.0, {"invalid": True})
    assert moved[0] == "You stand on field 24."


async def test_held_out_tasks_get_their_own_arguments(host_of):
    host = await host_of(**{"class": f"{USER}:Plain", "kwargs": {"goal": 3}, "eval_kwargs": {"goal": 1}})
    train, held_out = await host.borrow("train"), await host.borrow("eval")

    infos = [(await env.reset(1))[1] for env in (train, held_out)]

    assert infos == [{"goal": 3}, {"goal": 1}]


@pytest.mark.parametrize("isolation", ["auto", "inline", "process"])
async def test_a_class_declares_the_arguments_of_its_held_out_tasks(host_of, isolation):
    host = await host_of(**{"class": f"{USER}:WithSplit", "isolation": isolation})
    given = await host_of(**{"class": f"{USER}:WithSplit", "isolation": isolation, "eval_kwargs": {"goal": 2}})

    infos = [(await (await each.borrow("eval")).reset(1))[1] for each in (host, given)]

    assert infos == [{"goal": 1}, {"goal": 2}]
    assert host.has_split


@pytest.mark.parametrize(
    ("target", "has_split"),
    [
        (f"{USER}:Plain", False),
        (f"{USER}:Disjoint", True),
        ("rubato.actors.envs.frozen_lake:FrozenLakeText", True),
        ("rubato.actors.envs.gymnasium:GymnasiumText", False),
    ],
)
async def test_whether_there_is_a_held_out_split_is_known(host_of, target, has_split):
    assert (await host_of(**{"class": target})).has_split is has_split


async def test_a_split_that_is_no_dict_is_a_mistake():
    problem = await check_environment(section(**{"class": f"{USER}:WrongSplit"}), 1)

    assert "declares held_out as list instead of a dict of constructor arguments" in problem


STEP_MISTAKES = [
    ("RaisesInStep", "auto", "env_step_failed", "raised in step: KeyError('goal')"),
    ("RaisesInStep", "inline", "env_step_failed", "raised in step: KeyError('goal')"),
    ("HangsInStep", "auto", "env_timeout", "hung in step: no answer within 0.5 s"),
    ("HangsAsync", "auto", "env_timeout", "hung in step: no answer within 0.5 s"),
    ("Exits", "auto", "env_step_failed", "crashed in step: its process ended with exit code 7"),
    ("ExitsAsync", "auto", "env_step_failed", "raised in step: SystemExit(7)"),
    ("WrongShape", "auto", "env_bad_result", "returned a wrong result from step: 3 values"),
    ("WrongShape", "inline", "env_bad_result", "returned a wrong result from step: 3 values"),
    ("NaN", "auto", "env_bad_result", "a reward of nan, which is not finite"),
    ("Tensor", "auto", "env_bad_result", "an observation of type object"),
    ("Huge", "auto", "env_bad_result", "at most 10,485,760 are taken"),
]


@pytest.mark.parametrize(("name", "isolation", "outcome", "words"), STEP_MISTAKES)
async def test_every_mistake_in_a_step_has_its_name(host_of, name, isolation, outcome, words):
    host = await host_of(**{"class": f"{USER}:{name}", "isolation": isolation, "step_timeout_s": 0.5})
    env = await host.borrow("train")
    await env.reset(1)

    with pytest.raises(EnvFailure) as caught:
        await env.step("x")

    await env.close()
    assert caught.value.outcome == outcome
    assert words in caught.value.what


START_MISTAKES = [
    (f"{USER}:Missing", "can't be loaded: .*defines no Missing"),
    ("no_such_package:Env", "can't be loaded: .*no module no_such_package"),
    ("nowhere.py:Env", "can't be loaded: .*there is no file"),
    (f"{USER}:not_a_class", "can't be loaded: .*a class or function is needed"),
    (f"{USER}:RaisesInInit", r"raised in __init__ \(seed 4211\): KeyError\('goal'\). 3 of 3 tries failed. Log: a.jsonl"),
    (f"{USER}:RaisesInReset", r"raised in reset \(seed 4211\): KeyError\('goal'\). 8 of 8 seeds failed. Log: a.jsonl"),
    (f"{USER}:HangsInReset", r"hung in reset \(seed 4211\): no answer within 0.3 s. 3 of 3 seeds failed"),
]


async def check_environment(settings, seed, *, log=""):
    """What an environment manager does as it starts: "" or the sentence that ends the job."""
    host = EnvHost(settings)
    try:
        await host.start()
        await host.try_out(seed)
        return ""
    except EnvFailure as failure:
        return sentence(settings, failure, seed=seed, log=log)
    finally:
        await host.close()


@pytest.mark.parametrize(("target", "words"), START_MISTAKES, ids=[target.rpartition(":")[2] for target, _ in START_MISTAKES])
async def test_a_broken_environment_is_found_before_the_job_begins(target, words):
    settings = section(**{"class": target, "reset_timeout_s": 0.3})

    problem = await check_environment(settings, 4211, log="a.jsonl")

    assert problem.startswith(f"env {target} ")
    assert re.search(words, problem), problem


async def test_a_working_environment_passes_and_its_held_out_arguments_are_tried_too():
    good = await check_environment(section(**{"class": f"{USER}:Plain"}), 1)
    bad = await check_environment(section(**{"class": f"{USER}:Plain", "eval_kwargs": {"gaol": 1}}), 1)

    assert good == ""
    assert "unexpected keyword argument 'gaol'" in bad


async def test_bystanders_of_a_hung_environment_are_lost_through_no_fault_of_theirs(host_of):
    host = await host_of(**{"class": f"{USER}:HangsInStep", "step_timeout_s": 0.3})
    hanging, bystander = await host.borrow("train"), await host.borrow("train")
    await hanging.reset(1)
    await bystander.reset(1)

    with pytest.raises(EnvFailure, match="hung in step"):
        await hanging.step("x")
    with pytest.raises(EnvFailure) as caught:
        await bystander.reset(1)

    assert caught.value.outcome == "env_lost"


async def test_an_idle_environment_whose_worker_died_is_never_lent_again(host_of):
    host = await host_of(**{"class": f"{USER}:HangsInStep", "step_timeout_s": 0.3})
    hanging, idle = await host.borrow("train"), await host.borrow("train")
    await hanging.reset(1)
    host.give_back(idle, "train")
    with pytest.raises(EnvFailure):
        await hanging.step("x")

    fresh = await host.borrow("train")

    assert fresh is not idle
    assert (await fresh.reset(5))[0] == "at 0, task 5"


@pytest.mark.parametrize("isolation", ["inline", "process"])
async def test_a_grader_may_be_async_wherever_it_runs(host_of, tmp_path, isolation):
    (tmp_path / "own.py").write_text(
        "import asyncio\nasync def right(completion, answer):\n    await asyncio.sleep(0)\n    return completion == answer\n"
    )
    (tmp_path / "x.jsonl").write_text('{"prompt": "a", "answer": "b"}\n')
    kwargs = {"path": str(tmp_path / "x.jsonl"), "prompt": "prompt", "answer": "answer", "grader": f"{tmp_path}/own.py:right"}
    host = await host_of(**{"class": "rubato.actors.data.graded_env:DataSetEnv", "kwargs": kwargs, "isolation": isolation})
    env, _, _ = await host.begin("train", 1)

    assert (await env.step("b"))[:3] == ("", 1.0, True)


async def test_a_grader_that_fails_is_named_itself(host_of, tmp_path):
    (tmp_path / "own.py").write_text("def boom(completion, answer): return 1 / 0")
    (tmp_path / "x.jsonl").write_text('{"prompt": "a", "answer": "b"}\n')
    kwargs = {"path": str(tmp_path / "x.jsonl"), "prompt": "prompt", "answer": "answer", "grader": f"{tmp_path}/own.py:boom"}
    settings = {"class": "rubato.actors.data.graded_env:DataSetEnv", "kwargs": kwargs}
    host = await host_of(**settings)
    env, _, _ = await host.begin("train", 1)

    with pytest.raises(EnvFailure) as caught:
        await env.step("b")

    text = sentence(section(**settings), caught.value, task="task sums, row 0", seed=1, log="log")
    assert text.startswith(f"grader {tmp_path}/own.py:boom raised in step (task sums, row 0, seed 1): ZeroDivisionError")


async def test_seeds_that_fail_in_the_trial_are_told_and_one_that_works_is_enough(host_of):
    host = await host_of(**{"class": f"{USER}:FussyReset"})

    failures = await host.try_out(4211)

    assert [failure.what for failure in failures] == ["raised in reset: KeyError('goal')"] * 3


SCALARS = [
    ("True", "False"),
    ("np.bool_(True)", "np.bool_(False)"),
    ("np.float32(1)", "np.array(False)"),
    ("np.array(1)", "torch.tensor(False)"),
    ("torch.tensor(True)", "False"),
    ("Fraction(1, 1)", "False"),
    ("Decimal('1.0')", "False"),
    ("np.longdouble(1)", "False"),
]
NAMES = {"np": np, "torch": torch, "Fraction": Fraction, "Decimal": Decimal}


@pytest.mark.parametrize(("reward", "ended"), SCALARS)
def test_scalars_of_numpy_and_torch_are_numbers_and_booleans(reward, ended):
    assert check_step(eval(f"('', {reward}, {ended}, True, {{}})", NAMES)) == ("", 1.0, False, True, {})


CALL = {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {}}}]}
RESULT = {"role": "tool", "tool_call_id": "1", "name": "f", "content": "42"}
PARTS = {"role": "user", "content": [{"type": "text", "text": "4"}, {"type": "text", "text": "2"}]}


def test_openai_messages_are_taken_and_their_text_parts_become_one_text():
    observation, *_ = check_step(([CALL, RESULT, PARTS], 0.0, False, False, {}))

    assert observation == [CALL, RESULT, {"role": "user", "content": "42"}]


@pytest.mark.parametrize("ends", [(True, False), (False, True)])
@pytest.mark.parametrize("nothing", [None, []])
def test_where_an_episode_is_over_there_may_be_nothing_to_observe(nothing, ends):
    assert check_step((nothing, 1.0, *ends, {}))[0] == ""


def with_messages(*messages):
    return f"({[*messages]!r}, 0.0, False, False, {{}})"


IMAGE = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
MISTAKES = [
    ("(None, 0.0, False, False, {})", "nothing to observe (None), though the episode goes on"),
    ("([], 0.0, False, False, {})", "nothing to observe ([]), though the episode goes on"),
    (with_messages(IMAGE), "a part of type image_url: models here read text alone"),
    (with_messages({"role": "user", "content": [1]}), "a part that is not {'type': 'text', 'text': str}"),
    (with_messages({"role": "user", "content": 3}), "content is of type int instead of a string"),
    (with_messages({"role": "user", "content": None}), "content is of type NoneType instead of a string"),
    (with_messages({"role": 3, "content": ""}), "is not {'role': str, 'content': str}"),
    (with_messages("hi"), "is not {'role': str, 'content': str}"),
    (with_messages({"role": "tool", "content": "", "tool_call_id": 7}), "tool_call_id is of type int"),
    (with_messages({"role": "assistant", "content": "", "tool_calls": [{}]}), "tool_calls are no list of"),
    ("([{'role': 'user', 'content': '', 'x': object()}], 0.0, False, False, {})", "x holds what JSON can't"),
    ("('', float('nan'), False, False, {})", "a reward of nan, which is not finite"),
    ("('', np.float32('inf'), False, False, {})", "a reward of inf, which is not finite"),
    ("('', np.array([1.0]), False, False, {})", "a reward of type ndarray instead of a number: take its one element"),
    ("('', torch.ones(1), False, False, {})", "a reward of type Tensor instead of a number: take its one element"),
    ("('', '1.0', False, False, {})", "a reward of type str instead of a number"),
    ("('', 0.0, 1, False, {})", "terminated of type int instead of a bool"),
    ("('x' * 11_000_000, 0.0, False, False, {})", "at most 10,485,760"),
    ("([{'role': 'user', 'content': 'ä' * 6_000_000}], 0.0, False, False, {})", "at most 10,485,760"),
    ("('', 0.0, False, False, {'page': b'x' * 11_000_000})", "at most 10,485,760"),
    ("('', 0.0, False, False, {'pages': [['x' * 1000] * 1000] * 12})", "at most 10,485,760"),
]


@pytest.mark.parametrize(("result", "words"), MISTAKES)
def test_what_a_step_may_not_return_is_refused_by_name(result, words):
    with pytest.raises(EnvFailure) as caught:
        check_step(eval(result, NAMES))

    assert words in caught.value.what
    assert caught.value.outcome == "env_bad_result"


async def test_a_worker_takes_and_refuses_what_the_managers_process_does(host_of):
    host = await host_of(**{"class": f"{USER}:Told"})
    env = await host.borrow("train")
    await env.reset(1)

    taken = [(await env.step(f"('', {reward}, {ended}, True, {{}})"))[1:3] for reward, ended in SCALARS]
    observation, *_ = await env.step(with_messages(CALL, RESULT, PARTS))
    refused = []
    for result, _ in MISTAKES:
        with pytest.raises(EnvFailure) as caught:
            await env.step(result)
        refused.append(caught.value.what)

    assert taken == [(1.0, False)] * len(SCALARS)
    assert observation == [CALL, RESULT, {"role": "user", "content": "42"}]
    assert [what for what, (_, words) in zip(refused, MISTAKES, strict=True) if words not in what] == []


def test_lists_that_hold_each_other_are_measured_no_further_than_the_limit():
    deep = "x" * 1000
    for _ in range(60):
        deep = [deep, deep]

    with pytest.raises(EnvFailure, match="too large"):
        check_step(("", 0.0, False, False, {"deep": deep}))


def test_containers_that_hold_themselves_or_each_other_in_their_thousands_are_measured_in_short():
    itself, pair = {}, ["x"]
    itself["itself"] = itself
    for _ in range(60):
        pair = [pair, pair]

    for info in (itself, {"pair": pair}, {"many": [[{}] for _ in range(200_000)]}):
        with pytest.raises(EnvFailure, match="too large"):
            check_step(("", 0.0, False, False, info))


def test_a_container_of_the_users_own_class_is_not_asked_for_what_it_holds():
    class Own(dict):
        def __len__(self):
            raise RuntimeError("mine")

        __iter__ = values = items = __len__

    class Endless(list):
        def __iter__(self):
            while True:
                yield "x"

    *_, info = check_step(("", 0.0, False, False, {"own": Own(a=1), "endless": Endless([2])}))

    assert info == {"own": {"a": 1}, "endless": [2]}


@pytest.mark.parametrize("error", ["GeneratorExit", "KeyboardInterrupt", "BaseException"])
@pytest.mark.parametrize(("method", "awaits"), [("__init__", False), *product(("reset", "step", "close"), (False, True))])
async def test_what_is_no_exception_ends_a_rollout_by_name_too(host_of, method, error, awaits):
    kwargs = {"method": method, "error": error, "awaits": awaits}
    host = await host_of(**{"class": f"{USER}:Ends", "kwargs": kwargs, "isolation": "inline", "reset_tries": 1})

    said = []
    try:
        env, _, _ = await host.begin("train", 1)
        await env.step("x")
        await env.close()
    except EnvFailure as failure:
        said.append(failure.what)

    assert said == ([] if method == "close" else [f"raised in {method}: {error}()"])


@pytest.mark.filterwarnings("ignore:.*Deaf._hang")  # Python tells of it as it forgets what ignored GeneratorExit
@pytest.mark.parametrize("swallows", ["CancelledError", "BaseException"])
async def test_a_step_that_swallows_its_cancellation_ends_by_name_and_with_it_its_instance(host_of, swallows):
    host = await host_of(**{"class": f"{USER}:Deaf", "kwargs": {"swallows": swallows}, "step_timeout_s": 0.2})
    env = await host.borrow("train")
    await env.reset(1)

    with pytest.raises(EnvFailure, match=r"hung in step: no answer within 0.2 s") as caught:
        await env.step("x")
    await env.close()

    assert caught.value.outcome == "env_timeout"
    assert not env.usable


@pytest.mark.parametrize(("name", "kwargs"), [("Shielded", {}), ("Deaf", {"method": "reset"}), ("Deaf", {"method": "close"})])
async def test_other_deaf_calls_end_in_time_too(host_of, name, kwargs):
    limits = {"step_timeout_s": 0.2, "reset_timeout_s": 0.2, "reset_tries": 1}
    host = await host_of(**{"class": f"{USER}:{name}", "kwargs": kwargs, **limits})

    outcomes = []
    try:
        env, _, _ = await host.begin("train", 1)
        await env.step("x")
    except EnvFailure as failure:
        outcomes.append(failure.outcome)

    assert outcomes == ([] if kwargs.get("method") == "close" else ["env_timeout"])


async def test_a_rollout_that_is_cancelled_in_a_deaf_step_leaves_nothing_running(host_of):
    host = await host_of(**{"class": f"{USER}:Deaf"})
    env = await host.borrow("train")
    await env.reset(1)
    before = asyncio.all_tasks()

    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await env.step("x")
    await env.abandon()
    await asyncio.sleep(0)

    assert asyncio.all_tasks() == before
    assert not env.usable


async def test_a_cancellation_of_the_users_own_is_a_failed_step(host_of):
    host = await host_of(**{"class": f"{USER}:CancelsItself"})
    env = await host.borrow("train")
    await env.reset(1)

    with pytest.raises(EnvFailure, match=r"raised in step: CancelledError\(\)"):
        await env.step("x")


@pytest.mark.parametrize("method", ["reset", "step", "close"])
async def test_a_call_that_blocks_the_event_loop_is_told_of_once_with_its_line(method):
    said = []
    host = EnvHost(section(**{"class": f"{USER}:Blocks", "kwargs": {"method": method}}), on_notice=said.append)
    await host.start()

    for _ in range(2):
        env, _, _ = await host.begin("train", 1)
        await env.step("x")
        await env.close()

    await host.close()
    assert len(said) == 1
    assert re.match(rf"{method} of Blocks \({USER}:\d+\) blocked its environment manager for \d{{3}} ms", said[0])
