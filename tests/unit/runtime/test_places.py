"""What of a host each actor has, and what is told where it has no more."""

import os

import pytest

from rubato.planning.devices import HostResources
from rubato.runtime.config import ActorSpec
from rubato.runtime.errors import ConfigError
from rubato.runtime.places import HostPlaces, this_host

HOST = HostResources(frozenset({"h20"}), tuple("01234567"), tuple(range(16)))


def places(host=HOST, trainer=None, **decode):
    pools = {"decode": {"count": 2, "gpus": 1, "cores": 2, **decode}}
    specs = {"engine": {"class": "e", "pools": pools}, "trainer": {"class": "t", "pools": trainer or {}}}
    return HostPlaces({role: ActorSpec.model_validate(spec) for role, spec in specs.items()}, host)


def test_an_actor_keeps_its_place_until_it_leaves():
    made = places(env={"NCCL_DEBUG": "INFO"})
    for name in ("engine-1", "engine-2"):
        made.take(name, "engine", "decode")
    first, second = made.of("engine-1"), made.of("engine-2")
    made.leave("engine-1")
    made.take("engine-3", "engine", "decode")

    assert first.environment == {"NCCL_DEBUG": "INFO", "CUDA_VISIBLE_DEVICES": "0"}
    assert (second.environment["CUDA_VISIBLE_DEVICES"], second.cores) == ("1", (2, 3))
    assert (made.of("engine-3"), made.of("engine-1").pool) == (first, "")


def test_an_actor_of_no_pool_has_nothing_of_its_own():
    made = places()
    made.take("trainer-1", "trainer", "")
    made.take("guest-1", "guest", "")

    assert made.of("trainer-1") == made.of("guest-1") == made.of("nobody")
    assert not made.of("trainer-1").own_process


def test_gpus_that_a_pool_names_are_nobody_else_s():
    made = places(trainer={"train": {"env": {"CUDA_VISIBLE_DEVICES": "0, 2"}}})
    for number in (1, 2):
        made.take(f"engine-{number}", "engine", "decode")

    assert [made.of(f"engine-{n}").environment["CUDA_VISIBLE_DEVICES"] for n in (1, 2)] == ["1", "3"]


def test_more_than_the_host_has_is_refused_with_what_there_is():
    made = places()

    assert made.why_not("engine", "decode", 8) == ""
    assert made.why_not("engine", "decode", 9) == (
        "can't add 9 engine to the pool decode, only 8: this host has 0 of 8 GPUs free, and each process takes 1."
    )
    assert made.why_not("trainer", "", 9) == ""
    with pytest.raises(ConfigError, match=r"engine-1 of the pool decode has no place: this host has 0 of 0 GPUs free"):
        places(HostResources(frozenset(), (), ())).take("engine-1", "engine", "decode")


LAUNCHES = [
    ({"count": 8}, None),
    ({"count": 9}, "has 0 of 8 GPUs free, and each process takes 1. Set it to 8, "),
    ({"count": 2, "cores": 9}, "has 7 of 16 cores free, and each process takes 9. Set it to 1, "),
    ({"count": 2, "labels": ["h20", "nvlink"]}, "does not have the label nvlink. Set it to 0, "),
]


@pytest.mark.parametrize(("decode", "why"), LAUNCHES)
def test_counts_beyond_what_the_launching_host_has_are_refused(decode, why):
    said = places(**decode).problems()

    assert (
        said == []
        if why is None
        else said
        == [
            f"actors.engine.pools.decode.count is {decode['count']}, but this host {why}"
            "and let other hosts bring the rest: rubato add engine --pool decode --join TOKEN"
        ]
    )


def test_pools_share_one_host_at_launch():
    (said,) = places(count=8, trainer={"train": {"gpus": 1}}).problems()

    assert said.startswith("actors.trainer.pools.train.count is 1, but this host has 0 of 8 GPUs free")


@pytest.mark.parametrize(
    ("visible", "devices"), [("0,1", ("0", "1")), ("GPU-a, GPU-b", ("GPU-a", "GPU-b")), ("", ()), ("-1", ()), ("2,-1,3", ("2",))]
)
def test_the_gpus_of_a_host_are_those_that_the_launcher_sees(visible, devices, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    found = this_host(["a"])

    assert found == (frozenset({"a"}), devices, tuple(sorted(os.sched_getaffinity(0))))


def test_without_the_variable_all_gpus_of_the_host_count(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(os, "listdir", lambda folder: ["nvidia0", "nvidia11", "nvidiactl", "null"])

    assert this_host([]).devices == ("0", "1")
