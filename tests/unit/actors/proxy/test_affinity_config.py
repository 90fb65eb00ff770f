"""What `affinity` may say, against the job's tasks and pools."""

import pytest

from rubato.runtime.config.compose import from_mapping
from rubato.runtime.errors import ConfigError

POOLS = {"near": {"count": 1, "hardware": "h800"}, "far": {"count": 3, "hardware": "h20"}}


def job(affinity, pools=POOLS, **changes):
    return from_mapping({
        "actors": {
            "sample_buffer": {"class": "rubato.actors.samples.buffer:SampleBuffer"},
            "llm_proxy": {"class": "rubato.actors.proxy.proxy:LLMProxy"},
            "engine": {"class": "rubato.actors.engines.worker:EngineWorker"} | ({"pools": pools} if pools else {}),
            "env_manager": {"class": "rubato.actors.envs.manager:EnvManager"},
            "trainer": {"class": "rubato.actors.training.trainer:Trainer"},
        },
        "tasks": {"math": {"reasoning_gym": "chain_sum"}, "game": {"class": "rubato.actors.envs.frozen_lake:FrozenLakeText"}},
        "affinity": affinity,
        **changes,
    })  # fmt: skip


@pytest.mark.parametrize("affinity", [{}, "learned", {"math": "h20"}, {"math": "h20", "default": "h800"}])
def test_a_map_of_tasks_to_classes_that_are_there_is_taken(affinity):
    assert job(affinity).section("affinity") == affinity


@pytest.mark.parametrize(
    ("affinity", "words"),
    [
        ({"maths": "h20"}, "affinity is a map of tasks: 'maths' is none of math, game, default. Did you mean math?"),
        ({"math": "h2"}, "affinity.math must be the hardware class of a pool: 'h2' is none of h20, h800. Did you mean h20?"),
        ({"math": "far"}, "affinity.math must be the hardware class of a pool: 'far' is a pool; its hardware class is h20."),
        ("lerned", "affinity: 'lerned' is none of learned, and no map of tasks to hardware classes. Did you mean learned?"),
        ({"math": 20}, "affinity: {'math': 20} is neither learned nor a map of tasks to hardware classes"),
    ],
)  # fmt: skip
def test_a_map_that_names_what_is_not_there_is_refused_with_the_nearest_name(affinity, words):
    with pytest.raises(ConfigError) as refused:
        job(affinity)

    assert words in str(refused.value)
    assert len(str(refused.value).splitlines()) == 1


def test_a_map_needs_pools_that_say_their_class():
    with pytest.raises(ConfigError, match=r"affinity\.math is h20, but no pool says its hardware class: set actors\."):
        job({"math": "h20"}, pools=None)


def test_an_engine_that_does_not_observe_its_steps_can_not_be_learned_from():
    with pytest.raises(ConfigError, match=r"affinity is learned, but engine\.kind=vllm does not observe its steps"):
        job("learned", engine={"kind": "vllm"})
