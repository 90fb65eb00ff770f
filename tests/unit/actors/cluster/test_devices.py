"""GPUs of a place on a cluster, as the config of a job has them there."""

import yaml

from rubato.actors.cluster.needs import overrides, prepared
from rubato.actors.cluster.pools import ClusterPoolSection, SchedulerSection

JOB = {"actors": {"engine": {"class": "m:E", "count": 2}, "trainer": {"class": "m:T", "pools": {"mine": {"count": 1, "gpus": 1}}}}}


def section(devices):
    pool = {"nodes": 2, "gpus": 1, "memory_gb": 4}
    return SchedulerSection(
        rollout=ClusterPoolSection(**pool, devices=devices[:2]), training=ClusterPoolSection(**pool, devices=devices[2:])
    )


def test_each_role_has_a_pool_that_names_its_gpus():
    text = prepared(yaml.safe_dump(JOB), section(["0", "1", "2", "3"]))

    actors = yaml.safe_load(text)["actors"]
    assert actors["engine"] == {"class": "m:E", "pools": {"rollout": {"count": 2, "gpus": 0}}}
    assert actors["trainer"]["pools"] == {"mine": {"count": 1, "gpus": 0}}
    assert overrides(text, section(["0", "1", "2", "3"]), node=1, group=0) == [
        "actors.engine.pools.rollout.env.CUDA_VISIBLE_DEVICES='1'",
        "actors.trainer.pools.mine.env.CUDA_VISIBLE_DEVICES='2'",
    ]


def test_a_cluster_that_names_no_gpus_leaves_a_job_as_it_is():
    text = yaml.safe_dump(JOB, sort_keys=False)

    assert yaml.safe_load(prepared(text, section([]))) == JOB
    assert overrides(text, section([]), node=1, group=0) == []
