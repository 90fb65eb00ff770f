"""What `train.mesh` makes of a config."""

import pytest

from rubato.actors import plugins
from rubato.actors.plugins import load as load_plugin
from rubato.actors.ranks.rank import TrainRank
from rubato.runtime.config.compose import from_mapping, load
from rubato.runtime.config.yaml_core import read_yaml
from rubato.runtime.errors import ConfigError
from tests.jobs import SMALL


@pytest.fixture
def config(tmp_path):
    """SMALL, with overrides."""
    (tmp_path / "small.yaml").write_text(SMALL)
    return lambda *overrides: load(tmp_path / "small.yaml", overrides)


@pytest.mark.parametrize(
    ("overrides", "count"), [(["train.mesh.shard=2"], 2), (["train.mesh={replicate: 2, shard: 2}"], 4), (["train.mesh.replicate=3"], 3)]
)
def test_a_mesh_brings_its_ranks(config, overrides, count):
    job = config("model.device=cpu", *overrides)

    assert job.actors["trainer_rank"].count == count
    assert job.members("trainer_rank") == ("",) * count


def test_without_a_mesh_there_is_no_rank_and_nothing_of_them_is_imported(config, tmp_path, monkeypatch):
    """Nor where all defaults are written, as in what a host that joins gets."""
    monkeypatch.setattr(plugins, "load", lambda path: pytest.fail(f"{path} was imported") if "ranks" in path else load_plugin(path))
    (tmp_path / "whole.yaml").write_text(config().dump())

    assert "trainer_rank" not in config().actors
    assert "trainer_rank" not in config("train.mesh={replicate: 1, shard: 1}").actors
    assert "trainer_rank" not in load(tmp_path / "whole.yaml").actors


def test_a_rank_may_be_lost_as_often_as_the_whole_unit_may(config):
    job = config("model.device=cpu", "train.mesh.shard=2", "actors.trainer.restarts=4")

    assert job.actors["trainer_rank"].restarts == 12


@pytest.mark.parametrize(("device", "pool"), [("cpu", ""), ("cuda", "ranks")])
def test_a_run_goes_on_with_another_number_of_ranks(config, tmp_path, device, pool):
    (tmp_path / "config.yaml").write_text(config(f"model.device={device}", "train.mesh.shard=2").dump())

    more = load(tmp_path / "config.yaml", ["train.mesh.shard=4"], resumed=True)
    one = load(tmp_path / "config.yaml", ["train.mesh.shard=1"], resumed=True)

    assert more.members("trainer_rank") == (pool,) * 4
    assert "trainer_rank" not in one.actors  # whose pool would have GPUs


@pytest.mark.parametrize(("device", "other", "pool"), [("cpu", "cuda", "ranks"), ("cuda", "cpu", "")])
def test_a_run_goes_on_with_its_ranks_on_another_device(config, tmp_path, device, other, pool):
    (tmp_path / "config.yaml").write_text(config(f"model.device={device}", "train.mesh.shard=2").dump())

    job = load(tmp_path / "config.yaml", [f"model.device={other}", "train.mesh.shard=3"], resumed=True)

    assert job.members("trainer_rank") == (pool,) * 3


def test_what_was_said_of_ranks_that_came_with_the_mesh_stays_with_another_number_of_them(config, tmp_path):
    (tmp_path / "config.yaml").write_text(config("model.device=cuda", "train.mesh.shard=2").dump())
    first = load(tmp_path / "config.yaml", ["actors.trainer_rank.pools.ranks.cores=3"], resumed=True)
    (tmp_path / "config.yaml").write_text(first.dump())

    job = load(tmp_path / "config.yaml", ["train.mesh.shard=4"], resumed=True)

    assert (job.actors["trainer_rank"].pools["ranks"].count, job.actors["trainer_rank"].pools["ranks"].cores) == (4, 3)


def test_a_role_of_ranks_that_is_written_stays_as_it_is(config):
    ranks = "actors.trainer_rank={class: 'rubato.actors.ranks.rank:TrainRank', pools: {near: {count: 2, cores: 1}}}"

    job = config("train.mesh.shard=2", ranks)

    assert job.members("trainer_rank") == ("near", "near")
    assert job.actors["trainer_rank"].restarts == 5


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            ["train.mesh.shard=3", "actors.trainer_rank={class: 'rubato.actors.ranks.rank:TrainRank', count: 2}"],
            "train.mesh has 1 x 3 = 3 ranks, and actors.trainer_rank has 2 processes",
        ),
        (
            ["train.mesh.shard=2", "cluster.dir=/tmp/c", "staleness.alpha=0"],
            "train.mesh has 2 ranks, and cluster.dir has one trainer's process take turns",
        ),
        (
            ["train.mesh.shard=2", "train.kind=torch", "train.lora.rank=8"],
            "train.mesh has 2 ranks, and train.lora trains an adapter in one process",
        ),
        (["train.mesh.shard=0"], "train.mesh.shard"),
        (["train.mesh=2"], "train.mesh"),
        (["train.mesh={replicate: 33, shard: 32}"], "train.mesh has 33 x 32 = 1056 ranks, of which there may be 1024"),
    ],
)
def test_a_mesh_that_can_not_be_is_refused_in_a_sentence(config, overrides, said):
    with pytest.raises(ConfigError, match=said.replace("(", r"\(")):
        config("model.device=cpu", *overrides)


def test_ranks_on_gpus_have_one_each_and_a_host_with_fewer_says_so(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setattr("rubato.actors.ranks.rank.check_device", lambda device: None)  # which asks torch
    job = from_mapping(read_yaml(SMALL), ["model.device=cuda", "train.mesh.shard=4"])

    assert job.actors["trainer_rank"].pools["ranks"].gpus == 1
    with pytest.raises(ConfigError, match=r"train\.mesh has 1 x 4 = 4 ranks, and this host has 2 GPUs, one for each"):
        TrainRank.check_host(job.actor_config("trainer_rank"))
