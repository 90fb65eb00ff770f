"""What a kind of host needs in Ray's terms, and the sentence where no node has it: no Ray is needed for either."""

import pytest

from rubato.runtime.config.compose import from_mapping
from rubato.runtime.launch.placer import HostSpec, placer_problems
from rubato.runtime.launch.ray.cluster import RayNode, bundle_of, selector_of, why_none

NODES = [
    RayNode("10.0.0.5", {"CPU": 8.0, "memory": 1e9}, {"ray.io/node-id": "a1", "rack": "a"}),
    RayNode("10.0.0.6", {"CPU": 4.0, "GPU": 2.0}, {"ray.io/node-id": "b2", "rack": "b", "h20": "true"}),
    RayNode("10.0.0.7", {}, {"ray.io/node-id": "c3"}),
]


def test_a_host_asks_ray_for_its_cores_its_gpus_and_its_labels():
    spec = HostSpec("far", 1, {"far": 2}, gpus=2, cpus=3, labels=("h20", "rack=b"))

    assert bundle_of(spec) == {"CPU": 3, "GPU": 2.0}
    assert selector_of(spec) == {"h20": "true", "rack": "b"}
    assert why_none(spec, NODES) == ""


def test_a_host_that_needs_nothing_goes_to_any_node_with_a_cpu():
    assert why_none(HostSpec("far", 1), NODES) == ""
    assert why_none(HostSpec("far", 1), NODES[2:]).startswith("no node of the Ray cluster has a CPU: ")


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        (HostSpec("far", 1, gpus=8), "no node of the Ray cluster has 8 GPUs"),
        (HostSpec("far", 1, gpus=8), "the most that one has is 8 CPUs, 2 GPUs"),
        (HostSpec("far", 1, gpus=2, cpus=8), "has 8 CPUs and 2 GPUs together: the most that one has is 8 CPUs, 2 GPUs"),
        (HostSpec("far", 1, gpus=1, labels=("rack=a",)), "the most that one of those labelled rack=a has is 8 CPUs, 0 GPUs"),
        (HostSpec("far", 1, labels=("h100",)), "has the label h100 (its labels are h20=true, rack=a, rack=b)"),
        (HostSpec("far", 1, labels=("h100",)), "A node has it by: ray start --labels=h100=true"),
        (HostSpec("far", 1, labels=("h20", "rack=a")), "has the labels h20, rack=a together"),
    ],
)
def test_the_sentence_says_what_no_node_has(spec, said):
    why = why_none(spec, NODES)

    assert said in why
    assert "launch.hosts.far" in why
    assert "\n" not in why


def test_a_back_end_whose_package_is_not_installed_is_refused_with_what_installs_it(monkeypatch):
    monkeypatch.setattr("rubato.runtime.launch.ray.placer.find_spec", lambda _: None)
    job = {"bus": {"host": "127.0.0.1"}, "actors": {"engine": {"class": "rubato.runtime.actor:Actor"}}}
    hosts = {"hosts": {"far": {"pools": {"engine": 1}}}}

    assert placer_problems(from_mapping({**job, "launch": {"backend": "ray", **hosts}})) == [
        "launch.backend is ray, but ray is not installed. Install it with: pip install -e '.[ray]'"
    ]
    assert placer_problems(from_mapping({**job, "launch": {"backend": "here", **hosts}})) == []
    assert placer_problems(from_mapping({**job, "launch": {"backend": "ray"}})) == []
