"""The orchestrator's config: without it there is no process of it, and what can't work is one sentence."""

import pytest

from runtime.config import from_mapping
from runtime.errors import ConfigError

JOB = {
    "run": {"name": "small"},
    "actors": {
        "llm_proxy": {"class": "actors.proxy.proxy:LLMProxy"},
        "engine": {"class": "actors.engines.worker:EngineWorker", "count": 4},
        "orchestrator": {"class": "actors.scheduling.orchestrator:Orchestrator"},
    },
    "engine": {"kind": "scripted", "pace": {"hardware": "h800", "model": "qwen2.5-14b"}},
}


def test_no_orchestrator_is_started_unless_it_is_enabled():
    assert from_mapping(JOB).members("orchestrator") == ()
    assert from_mapping(JOB, ["orchestrator.enabled=true"]).members("orchestrator") == ("",)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (["orchestrator.degrees=[1, 3]"], "3, which does not divide the 40 attention heads of qwen2.5-14b"),
        (["orchestrator.degrees=[1, 8]"], "8, into which 4 GPUs, 1 in each engine, can't be divided"),
        (["actors.engine.count=1"], "with 1 engine there is nowhere to move a request to"),
        (["engine.kind=vllm", "engine.pace=null"], "engine.kind=vllm can be neither paced nor put to sleep"),
        (["engine.pace=null"], "engine.pace, which is not set"),
        (["orchestrator.planners=[rebalnce]"], "Did you mean rebalance?"),
    ],
)
def test_what_can_not_work_is_one_sentence(changes, sentence):
    with pytest.raises(ConfigError) as raised:
        from_mapping(JOB, ["orchestrator.enabled=true", *changes])

    assert sentence in str(raised.value)
    assert len(str(raised.value).splitlines()) == 1


def test_what_can_not_work_does_not_matter_while_it_is_off():
    from_mapping(JOB, ["actors.engine.count=1", "engine.pace=null"])
