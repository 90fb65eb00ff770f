"""A cluster whose rollout nodes lie on hosts that join it, as its config and the configs of its jobs have it."""

import pytest
import yaml

from rubato.actors.cluster.needs import check_hosts, on_host
from rubato.runtime.config.compose import from_mapping, load
from rubato.runtime.errors import ConfigError
from rubato.runtime.launch.placer import specs_of
from tests.unit.actors.cluster.test_needs import CONFIGS

SCHEDULER = "rubato.actors.cluster.scheduler:ClusterScheduler"
POOL = {"memory_gb": 8}


def cluster(hosts, **more):
    section = {"rollout": POOL | {"hosts": hosts}, "training": POOL}
    return from_mapping({"actors": {"scheduler": {"class": SCHEDULER}}, "scheduler": section, **more})


def test_a_cluster_with_hosts_has_the_role_that_joins_and_none_of_it_at_launch():
    assert cluster(["far"], bus={"host": "10.0.0.1"}).actors["cluster_host"].count == 0
    assert list(cluster([]).actors) == ["scheduler"]


def test_hosts_that_could_not_come_to_it_are_told():
    with pytest.raises(ConfigError, match=r"rollout\.hosts names hosts that join the cluster: set bus\.host"):
        cluster(["far"])


def launched(labels, *overrides):
    """The job in its last life, on the hosts of these labels one after another."""
    config = load(CONFIGS / "cluster_job.yaml", overrides).dump()
    return load(CONFIGS / "cluster_job.yaml", [*overrides, *(word for label in labels for word in on_host(config, label, "10.0.0.1"))])


def test_a_job_s_engines_and_environments_are_brought_by_the_host_of_its_node():
    job = launched(["far"], "actors.engine.count=2")

    assert (job.actors["engine"].count, job.actors["env_manager"].count, job.actors["trainer"].count) == (0, 0, 1)
    spec = specs_of(job)["rollout"]
    assert (spec.count, dict(spec.roles), spec.labels) == (1, {"engine": 2, "env_manager": 1}, ("far",))
    assert job.bus.host == "10.0.0.1"


def test_a_job_s_own_labels_and_those_of_the_cluster_s_host_are_of_its_first_host():
    config = load(CONFIGS / "cluster_job.yaml", ["host.labels=[mine]"]).dump()

    assert load(CONFIGS / "cluster_job.yaml", on_host(config, "far", "10.0.0.1", {"pod:a"})).host.labels == ("mine", "pod:a")


def test_pools_of_engines_go_there_each_with_its_labels():
    pools = "actors.engine={class: 'rubato.actors.engines.worker:EngineWorker', pools: {a: {count: 2, labels: [h20]}, b: {count: 0}}}"
    job = launched(["far"], pools)

    spec = specs_of(job)["rollout"]
    assert (dict(spec.pools), dict(spec.roles), spec.labels) == ({"a": 2}, {"env_manager": 1}, ("far", "h20"))
    assert [pool.count for pool in job.actors["engine"].pools.values()] == [0, 0]


def test_on_the_cluster_s_own_host_it_is_launched_as_it_was_submitted_also_after_a_move():
    job = launched(["far", ""], "actors.engine.count=2")

    assert (job.actors["engine"].count, job.actors["env_manager"].count, job.launch.hosts, job.launch.backend) == (2, 1, {}, "here")


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (
            {"bus": {"host": "10.0.0.9"}},
            "job a has bus.host=10.0.0.9, and nodes of this cluster lie on several hosts: it says which. Leave it out.",
        ),
        ({"launch": {"hosts": {"x": {"pools": {"engine": 1}}}}}, "job a has launch.hosts="),
    ],
)
def test_a_job_that_says_itself_where_it_runs_is_refused(given, sentence):
    assert check_hosts("a", yaml.safe_dump(given)).startswith(sentence)
    assert check_hosts("a", yaml.safe_dump({"bus": {"host": ""}, "launch": {"hosts": {}}})) == ""
