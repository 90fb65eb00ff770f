"""Pools of a role: what each of their processes gets, and what a mistake in one is answered with."""

import re

import pytest
import yaml

from rubato.runtime.config.compose import check_host, from_mapping, load, pool_named
from rubato.runtime.config.config import load_role
from rubato.runtime.errors import ConfigError

JOB = """
actors:
  sample_buffer: {class: "rubato.actors.samples.buffer:SampleBuffer"}
  llm_proxy: {class: "rubato.actors.proxy.proxy:LLMProxy"}
  engine:
    class: "rubato.actors.engines.worker:EngineWorker"
    pools:
      decode:
        count: 2
        hardware: h20
        env: {OMP_NUM_THREADS: 4}
        set: {engine.num_slots: 64}
      prefill: {count: 1, cores: 1}
  env_manager: {class: "rubato.actors.envs.manager:EnvManager"}
env: {isolation: inline}
engine: {kind: scripted, num_slots: 8}
"""


@pytest.fixture
def job(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text(JOB)
    return path


def refusal(path, *overrides):
    with pytest.raises(ConfigError) as caught:
        load(path, overrides)
    return re.sub(r"^(job.yaml|command line): | \(line \d+\)$", "", str(caught.value).replace(str(path), "job.yaml"))


def test_each_pool_has_the_job_s_config_with_what_it_sets(job):
    config = load(job)

    assert [config.actor_config("engine", pool).engine.num_slots for pool in ("", "decode", "prefill")] == [8, 64, 8]
    assert config.actors["engine"].pools["decode"].env == {"OMP_NUM_THREADS": "4"}


def test_the_pools_counts_are_the_role_s(job):
    engine, manager = (load(job).actors[role] for role in ("engine", "env_manager"))

    assert (engine.count, engine.members) == (3, ("decode", "decode", "prefill"))
    assert (manager.count, manager.members) == (1, ("",))


def test_a_run_keeps_its_pools_and_they_can_be_changed_from_the_command_line(job, tmp_path):
    config, kept = load(job), tmp_path / "config.yaml"
    kept.write_text(config.dump())
    decode = "actors.engine.pools.decode"
    again = load(kept, [f"{decode}.count=3", f"{decode}.set.engine.num_slots=32"], resumed=True)

    assert load(kept).dump() == config.dump()
    assert again.actors["engine"].count == 4
    assert again.actor_config("engine", "decode").engine.num_slots == 32


def test_what_is_known_of_this_host_is_not_told_to_others(job):
    config = load(job, ["host.labels=[h800]"])

    assert config.host.labels == ("h800",)
    assert yaml.safe_load(config.dump(shared=True))["host"] == {}


ENGINE = "actors.engine"
DECODE = "actors.engine.pools.decode"


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        (f"{DECODE}.hardwar=h20", f"{DECODE}.hardwar is not a key. Did you mean actors.engine.pools.decode.hardware?"),
        (f"{DECODE}.count=many", f"{DECODE}.count is 'many'; it must be a whole number at least 0 and at most 1024."),
        (f"{DECODE}.set.engine.num_slot=4", f"{DECODE}.set: engine.num_slot is not a key. Did you mean engine.num_slots?"),
        (f"{DECODE}.set.engine.num_slots=0", f"{DECODE}.set: engine.num_slots is 0; it must be a whole number at least 1."),
        (f"{DECODE}.set.engine.kind.x=1", f"{DECODE}.set: engine.kind.x can't be set: engine.kind is the value 'scripted'."),
        (
            f"{DECODE}.set.rollout.max_turns=4",
            f"{DECODE}.set: rollout.max_turns has no effect there: engine reads model, engine, weights, cluster, train.",
        ),
        (f"{ENGINE}.count=2", f"{ENGINE}: count=2 and pools both say how many. Leave count out, and set that of each pool."),
        (f"{ENGINE}.pools.a b.count=1", f"{ENGINE}: a b can't be a pool's name: use letters, digits, - and _."),
        (
            f"{ENGINE}.pools.decod.count=1",
            f"{ENGINE}.pools.decod is not there. Did you mean decode? A new pool is given whole: {ENGINE}.pools.decod='{{count: 1}}'.",
        ),
        (
            f"{DECODE}.env={{a=b: 1}}",
            f"{DECODE}: 'a=b' in env can't be set: name a variable by letters, digits and _, its value without NUL.",
        ),
        (
            "actors.env_manager.pools.decode.count=1",
            "actors.engine and actors.env_manager both have a pool decode. Call one of them otherwise.",
        ),
    ],
)  # fmt: skip
def test_a_mistake_in_a_pool_is_one_sentence(job, override, sentence):
    assert refusal(job, override) == sentence


def test_a_role_without_a_process_in_any_pool_is_told_of_the_pools(job):
    said = refusal(job, f"{DECODE}.count=0", "actors.engine.pools.prefill.count=0")

    assert said == (
        "the pools of engine have 0 processes together; a job needs at least 1 engine. "
        "Change the count of one of them, or bus.host if other hosts are to bring them."
    )


def test_devices_are_given_in_one_way(job):
    said = refusal(job, f"{DECODE}.gpus=1", f"{DECODE}.env.CUDA_VISIBLE_DEVICES='0'")

    assert said == f"{DECODE}: gpus=1 and env.CUDA_VISIBLE_DEVICES=0 both say which GPUs. Keep one of them."


def test_a_mistake_in_what_a_pool_sets_is_told_with_its_line(job):
    job.write_text(JOB.replace("engine.num_slots: 64", "engine.num_slot: 64"))

    with pytest.raises(ConfigError, match=r"job.yaml: .*decode.set: engine.num_slot is not a key.* \(line 12\)$"):
        load(job)


def test_sections_that_do_not_fit_in_a_pool_are_refused_as_in_the_job(job):
    said = refusal(job, f"{DECODE}.set.engine.max_len=64", "rollout.max_len=128")

    assert said.startswith(f"{DECODE}.set: rollout.max_len"), said


def test_what_a_pool_needs_of_the_host_is_looked_for_like_what_the_job_needs(job):
    check_host(load(job, [f"{DECODE}.set.engine.kind=nowhere.engine:Engine", f"{DECODE}.count=0"]))

    with pytest.raises(ConfigError, match=r"nowhere"):
        check_host(load(job, [f"{DECODE}.set.engine.kind=nowhere.engine:Engine"]))


def test_a_pool_may_be_new_on_the_command_line(job):
    changed = load(job, [f"{ENGINE}.pools.decod={{count: 1}}", f"{ENGINE}.pools.spare.count=2"])

    assert changed.actors["engine"].members == ("decode", "decode", "prefill", "decod", "spare", "spare")


@pytest.mark.parametrize(
    ("role", "named", "meant"),
    [
        ("engine", "decode", "decode"),
        ("env_manager", "", ""),
        ("engine", "decod", "decod is not a pool of engine. Did you mean decode?"),
        ("engine", "x", "x is not a pool of engine. Its pools are decode, prefill."),
        ("engine", "", "engine has the pools decode, prefill. Say which with --pool."),
        ("env_manager", "decode", "env_manager has no pools, so there is no decode. Leave --pool out."),
    ],
)
def test_a_pool_is_found_by_name(job, role, named, meant):
    config = load(job)
    try:
        found = pool_named(config, role, named)
    except ConfigError as error:
        found = str(error)

    assert found == meant


def test_the_only_pool_need_not_be_named():
    tree = yaml.safe_load(JOB)
    del tree["actors"]["engine"]["pools"]["prefill"]

    assert pool_named(from_mapping(tree), "engine", "") == "decode"


@pytest.mark.parametrize("role", ["engine", "env_manager", "llm_proxy", "sample_buffer"])
def test_a_process_of_one_role_has_the_config_of_that_role_as_the_whole_job_has_it(role, job, tmp_path, monkeypatch):
    monkeypatch.setenv("PLACE", "secret")
    config, kept = load(job, ["env.kwargs={key: '${PLACE}'}"]), tmp_path / "config.yaml"
    kept.write_text(config.dump())

    alone = load_role(kept, role)

    for pool in ("", *config.actors[role].pools):
        assert alone.actor_config(role, pool) == config.actor_config(role, pool)
    assert (alone.run, alone.bus, alone.actors) == (config.run, config.bus, config.actors)
    assert alone.hidden("the secret") == config.hidden("the secret") != "the secret"


def test_a_process_of_one_role_imports_no_other_role_s_class(job, tmp_path):
    kept = tmp_path / "config.yaml"
    kept.write_text(load(job).dump().replace("rubato.actors.envs.manager:EnvManager", "rubato.actors.envs.nowhere:EnvManager"))

    assert load_role(kept, "engine").actor_config("engine", "decode").engine.num_slots == 64
    with pytest.raises(ConfigError, match=r"actors\.envs\.nowhere"):
        load_role(kept, "env_manager")
