"""The section `tasks`: what a task takes from the other sections, and what is refused."""

from datetime import date

import pytest
from pydantic import TypeAdapter, ValidationError

from rubato.actors.config import RewardSection, RolloutSection
from rubato.actors.data.tasks import Tasks, rewards_of
from rubato.actors.envs.reasoning import ReasoningGymEnv, split_of
from rubato.actors.envs.section import EnvSection, resolved
from rubato.actors.envs.task_checks import check_tasks
from rubato.runtime.config.compose import from_mapping
from rubato.runtime.errors import ConfigError

BANDIT = "tests.simulation.test_env_manager:Bandit"


def tasks(**named):
    return TypeAdapter(Tasks).validate_python(named)


def refused(**named):
    with pytest.raises(ValidationError) as caught:
        tasks(**named)
    return str(caught.value)


def test_a_job_without_tasks_has_one_that_is_as_its_other_sections_say():
    env, rollout, reward = EnvSection(), RolloutSection(), RewardSection(functions=("m:f",))

    assert resolved({}, env, rollout, reward) == {"": ("env", env, rollout, reward)}
    assert rewards_of({}, reward) == {"": ("m:f",)}


def test_a_task_without_rewards_of_its_own_has_the_functions_and_the_url():
    url, judge = "http://127.0.0.1:8000/", "https://judge.example/v1"
    named = tasks(plain={"class": BANDIT}, own={"class": BANDIT, "rewards": [judge]})
    reward = RewardSection(functions=("m:f",), url=url)

    found = resolved(named, EnvSection(), RolloutSection(), reward)

    assert rewards_of(named, reward) == {"plain": ("m:f", url), "own": (judge,)}
    assert {name: task.reward.targets for name, task in found.items()} == {"plain": ("m:f", url), "own": (judge,)}
    assert found["plain"].reward.names == reward.names == ("f", "url")
    for url in ("http:///x", "http://host:99999/", "http://host:port/"):
        assert "no URL of a server" in refused(own={"class": BANDIT, "rewards": [url]})


def test_a_task_takes_what_it_does_not_say_itself_from_the_other_sections():
    named = tasks(
        walk={"class": BANDIT, "kwargs": {"arms": 3}, "max_turns": 2, "temperature": 0.5, "rewards": []},
        sums={"data": {"path": "sums.jsonl", "prompt": "q", "grader": "number", "eval_path": "held.jsonl"}},
    )

    found = resolved(named, EnvSection(step_timeout_s=9.0), RolloutSection(), RewardSection(functions=("m:f",)))

    walk, sums = found["walk"], found["sums"]
    assert (walk.env.target, walk.env.kwargs, walk.env.step_timeout_s) == (BANDIT, {"arms": 3}, 9.0)
    assert (walk.rollout.max_turns, walk.rollout.temperature) == (2, 0.5)
    assert (walk.reward.functions, sums.reward.functions) == ((), ("m:f",))
    assert sums.rollout == RolloutSection()
    assert sums.env.kwargs["path"].endswith("/sums.jsonl")
    assert sums.env.eval_kwargs["path"].endswith("/held.jsonl")


def test_the_key_that_graders_had_before_is_taken_and_one_sentence_says_so():
    def job(**data):
        role = {"class": "rubato.actors.rewards.service:RewardService"}
        return from_mapping({"actors": {"reward_service": role}, "tasks": {"sums": {"data": {"path": "x.jsonl", **data}}}})

    old, new = job(verifier="number"), job(grader="number")

    assert old.section("tasks") == new.section("tasks")
    assert "grader: number" in old.dump()
    assert "verifier:" not in old.dump()
    assert old.notes == ("the key verifier is called grader today; verifier: number was taken for it",)
    assert new.notes == ()
    with pytest.raises(ConfigError, match=r"tasks\.sums\.data: verifier is called grader today, and both are given"):
        job(verifier="number", grader="number")


@pytest.mark.parametrize(
    ("named", "words"),
    [
        ({"a": {"class": BANDIT, "weight": 0}, "b": {"class": BANDIT, "weight": 0}}, "the weights of a, b sum to 0"),
        (
            {"sums": {"class": BANDIT}, "sum": {"weight": 2}},
            "sum names none of class, data, reasoning_gym, textarena, verifiers, agent. Did you",
        ),
        ({"a": {"class": BANDIT, "reasoning_gym": "chain_sum"}}, "a names class and reasoning_gym: a task has one"),
        ({"a b": {"class": BANDIT}}, "'a b' can't be a task's name"),
        ({"a": {"data": {"path": "x.jsonl", "grader": "exakt"}}}, "Did you mean exact"),
        ({"a": {"class": BANDIT, "weight": -1}}, "greater than or equal to 0"),
        ({"a": {"data": {"path": "x.jsonl", "eval_path": "y.jsonl", "eval_rows": 9}}}, "eval_rows=9 has no effect beside"),
        ({"a": {"data": {"path": "x.jsonl", "eval_path": "./x.jsonl"}}}, "eval_path is path itself"),
        ({"a": {"data": {"path": "x.jsonl"}, "kwargs": {"arms": 3}}}, "a.kwargs has no effect beside data"),
        ({"a": {"data": {"path": "x.jsonl"}, "eval_kwargs": {"arms": 3}}}, "a.eval_kwargs has no effect beside data"),
    ],
)
def test_a_mixture_that_can_not_be_is_refused(named, words):
    assert words in refused(**named)


def test_what_a_task_names_and_is_not_there_is_refused_with_the_nearest_name(tmp_path):
    named = tasks(a={"reasoning_gym": "chain_sums"}, b={"data": {"path": str(tmp_path / "x.jsonl")}}, c={"class": "tests.no:X"})
    with pytest.raises(ConfigError) as caught:
        check_tasks(named)

    first, second, third = str(caught.value).splitlines()
    assert first.startswith("tasks.a.reasoning_gym: ")
    assert "x.jsonl does not exist" in second
    assert third.startswith("tasks.c.class: ")


@pytest.mark.parametrize(
    "wrong",
    [{"kwargs": {"max_term": 3}}, {"kwargs": {"name": "x"}}, {"kwargs": {"max_terms": date(2020, 1, 1)}}, {"eval_kwargs": {"max_term": 3}}],
)  # fmt: skip
def test_what_reasoning_gym_does_not_take_is_one_sentence(wrong):
    pytest.importorskip("reasoning_gym")

    with pytest.raises(ConfigError, match=r"^tasks\.a\.reasoning_gym: reasoning-gym's chain_sum does not take \{.*$"):
        check_tasks(tasks(a={"reasoning_gym": "chain_sum", **wrong}))


def test_questions_stay_held_out_where_evaluations_have_arguments_of_their_own():
    pytest.importorskip("reasoning_gym")
    named = tasks(a={"reasoning_gym": "chain_sum", "kwargs": {"max_terms": 2}, "eval_kwargs": {"max_terms": 3}})

    check_tasks(tasks(a={"reasoning_gym": "chain_sum", "eval_kwargs": {"split": "eval"}}))
    env = resolved(named, EnvSection(), RolloutSection(), RewardSection())["a"].env
    held_out = ReasoningGymEnv(**env.kwargs | env.eval_kwargs)

    assert {split_of(held_out.reset(seed=seed)[0]) for seed in range(40)} == {"eval"}


def test_a_package_of_the_extra_that_is_missing_is_named(monkeypatch, tmp_path):
    import rubato.actors.data.datasets
    import rubato.actors.envs.task_checks

    monkeypatch.setattr(rubato.actors.data.datasets, "find_spec", lambda _: None)
    monkeypatch.setattr(rubato.actors.envs.task_checks, "has_module", lambda _: False)
    (tmp_path / "x.jsonl").write_text('{"prompt": "1 + 1", "answer": "2"}\n')
    named = tasks(a={"reasoning_gym": "chain_sum"}, b={"data": {"path": str(tmp_path / "x.jsonl"), "grader": "math"}})
    with pytest.raises(ConfigError) as caught:
        check_tasks(named)

    for sentence, package in zip(str(caught.value).splitlines(), ("reasoning-gym", "math-verify"), strict=True):
        assert f"needs the package {package}, which is not installed: pip install -e '.[tasks]'" in sentence


def test_a_game_that_textarena_has_not_is_one_sentence():
    pytest.importorskip("textarena")

    with pytest.raises(
        ConfigError, match=r"^tasks\.a\.textarena: textarena has no game GuessTheNumer-v0\. Did you mean GuessTheNumber-v0\?$"
    ):
        check_tasks(tasks(a={"textarena": "GuessTheNumer-v0"}))


def test_a_game_without_textarena_names_what_to_install(monkeypatch):
    import rubato.actors.data.datasets

    monkeypatch.setattr(rubato.actors.data.datasets, "find_spec", lambda _: None)

    with pytest.raises(ConfigError) as refused:
        check_tasks(tasks(a={"textarena": "GuessTheNumber-v0"}))

    assert str(refused.value) == (
        "tasks.a.textarena: textarena=GuessTheNumber-v0 needs the package textarena, which is not installed: pip install -e '.[textarena]'"
    )


def test_a_game_of_textarena_is_an_environment_with_the_arguments_of_the_task():
    named = tasks(a={"textarena": "GuessTheNumber-v0", "kwargs": {"max_number": 8}, "eval_kwargs": {"max_number": 9}})

    env = resolved(named, EnvSection(), RolloutSection(), RewardSection())["a"].env

    assert env.target == "rubato.actors.envs.games:TextArenaEnv"
    assert (env.kwargs, env.eval_kwargs) == ({"max_number": 8, "id": "GuessTheNumber-v0"}, {"max_number": 9})
