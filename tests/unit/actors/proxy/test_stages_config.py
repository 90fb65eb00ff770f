"""What pools serve is compared with each other, and with the engine's kind."""

import pytest
import yaml

from rubato.runtime.config.compose import load
from rubato.runtime.errors import ConfigError

ACTORS = {"llm_proxy": {"class": "rubato.actors.proxy.proxy:LLMProxy"}, "engine": {"class": "rubato.actors.engines.worker:EngineWorker"}}


def write(folder, pools, **sections):
    engine = ACTORS["engine"] | {"pools": {name: {"set": {"engine.serves": name}} for name in pools}}
    job = {"actors": ACTORS | {"engine": engine if pools else ACTORS["engine"]}, "engine": {"kind": "scripted"}}
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(job | sections))
    return path


def test_prefill_and_decode_in_pools_of_their_own(tmp_path):
    job = load(write(tmp_path, ["prefill", "decode"], proxy={"balance": "auto"}))

    assert {pool.name: config.engine.serves for pool, config in job.pooled.items()} == {"prefill": "prefill", "decode": "decode"}


@pytest.mark.parametrize(
    ("pools", "sections", "said"),
    [
        (["prefill"], {}, "engine.serves is prefill for every engine, so none is there to decode: add a pool"),
        (["decode"], {}, "engine.serves is decode for every engine, so none is there to prefill: add a pool"),
        ([], {"proxy": {"balance": "auto"}}, "proxy.balance is auto, but every engine both prefills and decodes"),
        ([], {"proxy": {"balance": "both"}}, "proxy.balance"),
        (["prefill", "decode"], {"engine": {"kind": "vllm"}}, "engine.kind=vllm takes no KV cache from another"),
        (["prefill", "decoding"], {}, "engine.serves"),
    ],
)
def test_what_can_not_work_is_one_sentence(tmp_path, pools, sections, said):
    with pytest.raises(ConfigError, match=said) as told:
        load(write(tmp_path, pools, **sections))

    assert "\n" not in str(told.value)


def test_engines_of_two_roles_serve_the_stages_together(tmp_path):
    path = write(tmp_path, ["prefill"])
    job = yaml.safe_load(path.read_text())
    job["actors"]["far_engine"] = ACTORS["engine"] | {"pools": {"far": {"set": {"engine.serves": "decode"}}}}
    path.write_text(yaml.safe_dump(job))

    assert sorted(config.engine.serves for config in load(path).pooled.values()) == ["decode", "prefill"]


@pytest.mark.parametrize(("empty", "others"), [("prefill", ["decode"]), ("decode", ["prefill"])])
def test_a_stage_whose_engines_are_none_is_one_sentence(tmp_path, empty, others):
    path = write(tmp_path, [empty, *others])
    job = yaml.safe_load(path.read_text())
    job["actors"]["engine"]["pools"][empty]["count"] = 0
    path.write_text(yaml.safe_dump(job))
    advice = "raise its count, or set bus.host if other hosts are to bring them"
    with pytest.raises(ConfigError, match=f"pool {empty} has count 0, so no engine is there to {empty}: {advice}"):
        load(path)

    job["actors"]["engine"]["pools"]["all"] = {"set": {"engine.serves": "both"}}
    path.write_text(yaml.safe_dump(job))
    load(path)


@pytest.mark.parametrize(("empty", "others"), [("prefill", ["decode"]), ("decode", ["prefill"])])
def test_other_hosts_may_bring_all_engines_of_a_stage(tmp_path, empty, others):
    path = write(tmp_path, [empty, *others], bus={"host": "10.0.0.1"})
    job = yaml.safe_load(path.read_text())
    job["actors"]["engine"]["pools"][empty]["count"] = 0
    path.write_text(yaml.safe_dump(job))

    assert load(path).members("engine") == (*others,)


def test_pools_that_say_nothing_serve_what_the_section_says(tmp_path):
    path = write(tmp_path, ["prefill"], engine={"kind": "scripted", "serves": "prefill"})
    job = yaml.safe_load(path.read_text())
    job["actors"]["engine"]["pools"] = {"fast": {}, "slow": {}}
    path.write_text(yaml.safe_dump(job))

    with pytest.raises(ConfigError, match=r"engine\.serves is prefill for every engine"):
        load(path)
