"""The orchestrator's config: without it there is no process of it, and what can't work is one sentence."""

import pytest

from rubato.runtime.config.compose import from_mapping
from rubato.runtime.errors import ConfigError

JOB = {
    "run": {"name": "small"},
    "actors": {
        "llm_proxy": {"class": "rubato.actors.proxy.proxy:LLMProxy"},
        "engine": {"class": "rubato.actors.engines.worker:EngineWorker", "count": 4},
        "orchestrator": {"class": "rubato.actors.orchestrator.orchestrator:Orchestrator"},
    },
    "engine": {"kind": "scripted", "pace": {"hardware": "h800", "model": "qwen2.5-14b"}},
}


VLLM = ["engine.kind=vllm", "engine.pace=null", "engine.hardware=xeon-8480"]


def test_no_orchestrator_is_started_unless_it_is_enabled():
    assert from_mapping(JOB).members("orchestrator") == ()
    assert from_mapping(JOB, ["orchestrator.enabled=true"]).members("orchestrator") == ("",)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (["orchestrator.degrees=[1, 3]"], "3, which does not divide the 40 attention heads of qwen2.5-14b"),
        (["orchestrator.degrees=[1, 8]"], "8, into which 4 GPUs, 1 in each engine, can't be divided"),
        (["actors.engine.count=1"], "with 1 engine there is nowhere to move a request to"),
        (["engine.kind=vllm", "engine.pace=null"], "on what engine.kind=vllm runs"),
        (["engine.kind=vllm", "engine.pace=null", "engine.hardware=h101"], "'h101' is none of"),
        (["engine.hardware=h100"], "engine.pace models one: leave one of the two out"),
        ([*VLLM, "actors.engine.count=3", "orchestrator.degrees=[1, 2]"], "2, into which 3 GPUs, 1 in each engine, can't be divided"),
        ([*VLLM, "engine.vllm.tensor_parallel_size=2", "orchestrator.degrees=[1]"], "1, into which 8 GPUs, 2 in each"),
        ([*VLLM, "orchestrator.degrees=[0]"], "an engine has one GPU at least"),
        (
            [*VLLM, "engine.hardware=h100"],
            "the 4 engines of kind vllm have no pool, so all would take the host's first h100: give each its own",
        ),
        (
            [*VLLM, "engine.hardware=h100", "orchestrator.planners=[rebalance]"],
            "so all would take the host's first h100: give each its own by a pool with gpus: 1",
        ),
        (
            [*VLLM, "actors.engine={class: 'rubato.actors.engines.worker:EngineWorker', pools: {near: {count: 2, gpus: 1}}}"],
            "each engine of pool near sees 1 GPUs",
        ),
        (["engine.pace=null"], "engine.pace, which is not set"),
        (["orchestrator.planners=[rebalnce]"], "Did you mean rebalance?"),
        (["orchestrator.planners=[]"], "orchestrator.planners is empty, so it would do nothing"),
        (["orchestrator.degrees=[1, 10]", "actors.engine.count=10"], "10, and a server has 8 H800"),
    ],
)
def test_what_can_not_work_is_one_sentence(changes, sentence):
    with pytest.raises(ConfigError) as raised:
        from_mapping(JOB, ["orchestrator.enabled=true", *changes])

    assert sentence in str(raised.value)
    assert len(str(raised.value).splitlines()) == 1


def test_requests_move_between_engines_of_two_roles_with_one_engine_each():
    far = "actors.far_engine={class: 'rubato.actors.engines.worker:EngineWorker'}"

    job = from_mapping(JOB, ["orchestrator.enabled=true", "actors.engine.count=1", far])

    assert job.members("orchestrator") == ("",)


def test_vllm_is_taken_where_the_job_says_on_what_it_runs():
    job = from_mapping(JOB, ["orchestrator.enabled=true", *VLLM, "orchestrator.degrees=[1, 2]"])

    assert job.members("orchestrator") == ("",)


def test_vllm_on_gpus_is_taken_where_each_engine_has_its_own_and_none_changes_its_degree():
    own = "actors.engine={class: 'rubato.actors.engines.worker:EngineWorker', pools: {near: {count: 2, gpus: 1}}}"

    job = from_mapping(JOB, ["orchestrator.enabled=true", *VLLM, "engine.hardware=h100", own, "orchestrator.planners=[rebalance]"])

    assert job.members("orchestrator") == ("",)


def test_what_can_not_work_does_not_matter_while_it_is_off():
    from_mapping(JOB, ["actors.engine.count=1", "engine.pace=null"])


def in_pools(pools, *changes):
    engine = {"class": "rubato.actors.engines.worker:EngineWorker", "pools": pools}
    job = JOB | {"actors": JOB["actors"] | {"engine": engine}}
    return from_mapping(job, ["orchestrator.enabled=true", *changes])


@pytest.mark.parametrize(
    ("counts", "degrees", "sentence"),
    [
        ((3, 3), "[1, 2]", "2, into which no pool can be divided, and engines merge within one pool: 3 GPUs, 1 in each"),
        ((4, 4), "[1, 8]", "4 GPUs, 1 in each engine of pool left; 4 GPUs, 1 in each engine of pool right"),
        ((1, 1), "[1, 2]", "no pool that decodes (left, right) has two engines, and requests move within one pool"),
        ((1, 1), "[]", "no pool that decodes (left, right) has two engines, and requests move within one pool"),
    ],
)
def test_a_degree_that_no_pool_can_be_divided_into_is_refused_whatever_all_pools_have_together(counts, degrees, sentence):
    pools = {name: {"count": count} for name, count in zip(("left", "right"), counts, strict=True)}

    with pytest.raises(ConfigError) as raised:
        in_pools(pools, f"orchestrator.degrees={degrees}")

    assert sentence in str(raised.value)
    assert len(str(raised.value).splitlines()) == 1


def test_a_degree_that_one_of_several_pools_can_use_is_taken():
    in_pools({"left": {"count": 4}, "right": {"count": 3}}, "orchestrator.degrees=[1, 2, 4]")
    larger = {"count": 2, "set": {"engine.pace.degree": 2}}
    in_pools({"left": {"count": 4}, "right": larger}, "orchestrator.degrees=[1, 2, 4]")


def test_engines_that_only_prefill_are_none_that_requests_move_between():
    first = {"count": 4, "set": {"engine.serves": "prefill"}}
    then = {"count": 1, "set": {"engine.serves": "decode"}}
    with pytest.raises(ConfigError, match=r"no pool that decodes \(then\) has two engines"):
        in_pools({"first": first, "then": then})
    in_pools({"first": first, "then": then | {"count": 2}})


def test_stages_that_change_under_the_orchestrator_are_refused():
    first, then = ({"count": 2, "set": {"engine.serves": stage}} for stage in ("prefill", "decode"))
    with pytest.raises(ConfigError, match=r"proxy\.balance=auto engines of one pool prefill or decode by turns"):
        in_pools({"first": first, "then": then}, "proxy.balance=auto")


def test_degrees_that_other_hosts_may_bring_engines_for_are_taken():
    from_mapping(JOB, ["orchestrator.enabled=true", "orchestrator.degrees=[1, 8]", "bus.host=10.0.0.1"])
