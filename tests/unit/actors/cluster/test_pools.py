"""The pools of a cluster, as its config has them."""

import pytest
from pydantic import ValidationError

from rubato.actors.cluster.pools import ClusterPoolSection, SchedulerSection


def test_a_node_costs_what_its_class_costs_for_its_gpus_or_what_is_said():
    assert ClusterPoolSection(hardware="h20", gpus=8, memory_gb=1).node.usd_hour == pytest.approx(8 * 1.85)
    assert ClusterPoolSection(hardware="h20", memory_gb=1).node.usd_hour == pytest.approx(1.85)
    assert ClusterPoolSection(hardware="h20", gpus=8, usd_hour=3, memory_gb=1).node.usd_hour == 3


def test_nodes_have_the_devices_one_after_another():
    pool = ClusterPoolSection(nodes=2, gpus=2, devices=[4, 5, 6, 7], memory_gb=1)

    assert [pool.devices_of(node) for node in range(2)] == ["4,5", "6,7"]


def test_nodes_lie_on_one_host_or_each_on_its_own_or_here():
    def hosts(*names):
        return [ClusterPoolSection(nodes=2, memory_gb=1, hosts=names).host_of(node) for node in range(2)]

    assert hosts() == ["", ""]
    assert hosts("far") == ["far", "far"]
    assert hosts("", "pod:b") == ["", "pod:b"]


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"nodes": 2, "gpus": 2, "devices": [0, 1, 2]}, "devices names 3, and 2 nodes of 2 GPUs have 4"),
        ({"hardware": "h2"}, "'h2' is none of .* Did you mean h20"),
        ({"memory_gb": 0}, "greater than 0"),
        ({"nodes": 3, "hosts": ["a", "b"]}, "hosts names 2, and there are 3 nodes: name one for all, or one for each"),
        ({"hosts": ["far away"]}, "'far away' is no label of a host: use letters, digits"),
    ],
)
def test_a_pool_that_can_t_be_is_told(wrong, sentence):
    with pytest.raises(ValidationError, match=sentence):
        ClusterPoolSection(**{"memory_gb": 1, **wrong})


def test_a_cluster_s_bound_is_at_least_one():
    pool = ClusterPoolSection(memory_gb=1)

    with pytest.raises(ValidationError, match="slo"):
        SchedulerSection(rollout=pool, training=pool, slo=0.9)


@pytest.mark.parametrize(
    ("where", "wrong", "sentence"),
    [
        ("rollout", {"switch_s": -1}, r"rollout\.switch_s\n.*greater than or equal to 0"),
        ("rollout", {"cores": -1}, r"rollout\.cores\n.*greater than or equal to 0"),
        ("training", {"cores": 8}, r"training\.cores has no effect: environments run beside rollouts\. Set rollout\.cores"),
        ("training", {"hosts": ["far"]}, r"training\.hosts has no effect: jobs train on the cluster's own host.* Set rollout\.hosts"),
        ("cold_s", -1, r"cold_s\n.*greater than or equal to 0"),
    ],
)
def test_a_cost_of_switching_or_cores_that_can_t_be_are_told(where, wrong, sentence):
    given = {"rollout": {"memory_gb": 1}, "training": {"memory_gb": 1}}
    given[where] = given[where] | wrong if where in given else wrong

    with pytest.raises(ValidationError, match=sentence):
        SchedulerSection.model_validate(given)
