"""Every config that comes with Rubato, and what launching one asks of the host."""

from pathlib import Path

import pytest

from rubato.actors.checkpoints import devices
from rubato.actors.config import engine_specs
from rubato.actors.engines import kinds, worker
from rubato.runtime.config.compose import check_host, load
from rubato.runtime.errors import ConfigError

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.name)
def test_a_config_of_ours_loads_as_it_is_and_as_a_run_folder_keeps_it(path, tmp_path):
    config = load(path)
    kept = tmp_path / "config.yaml"
    kept.write_text(config.dump())

    assert load(kept).dump() == config.dump()


def test_the_quickstart_can_be_launched_here():
    check_host(load(CONFIGS / "quickstart.yaml"))


def test_vllm_that_is_not_installed_is_told_before_anything_starts(monkeypatch):
    monkeypatch.setattr(kinds.importlib.util, "find_spec", lambda name: None)
    config = load(CONFIGS / "quickstart_vllm.yaml").actor_config("engine")

    with pytest.raises(ConfigError, match=r"^engine.kind is vllm, but vllm is not installed. Install it with: pip"):
        worker.EngineWorker.check_host(config)


@pytest.mark.parametrize("role", ["engine", "trainer"])
def test_cuda_that_is_not_there_is_told_before_anything_starts(role, monkeypatch):
    monkeypatch.setattr(devices, "num_gpus", lambda: 0)
    config = load(CONFIGS / "quickstart.yaml", ["model.device=cuda"])

    with pytest.raises(ConfigError, match=r"^model.device is cuda, but torch sees no CUDA device"):
        config.actor_class(role).check_host(config.actor_config(role))


def test_a_gpu_by_its_number_is_not_vllm_s_to_take(monkeypatch):
    monkeypatch.setattr(kinds.importlib.util, "find_spec", lambda name: name)
    config = load(CONFIGS / "quickstart_vllm.yaml", ["model.device=cuda:1"]).actor_config("engine")

    with pytest.raises(ConfigError, match=r"^model.device is cuda:1, but engine.kind=vllm takes the first GPUs"):
        worker.EngineWorker.check_host(config)


@pytest.mark.parametrize("device", ["gpu", "cuda:", "cuda:-1", "cuda:01", "cuda:1 ", "cpu:0"])
def test_a_device_that_is_none_is_refused(device):
    with pytest.raises(ConfigError, match=r"model.device: .* is none of auto, cpu, cuda, and no cuda:N"):
        load(CONFIGS / "quickstart.yaml", [f"model.device='{device}'"])


ENGINES = "{class: 'rubato.actors.engines.worker:EngineWorker', pools: {far: {hardware: h20}}}"


def test_engines_may_run_under_a_second_role_whose_pools_count_like_the_first_ones():
    config = load(CONFIGS / "cluster_job.yaml", [f"actors.far_engine={ENGINES}", "affinity={default: h20}"])

    assert list(engine_specs(config)) == ["engine", "far_engine"]


def test_engines_under_two_roles_are_refused_on_pools_that_jobs_share():
    with pytest.raises(ConfigError, match=r"actors has engines under engine and far_engine; with cluster\.dir one role may"):
        load(CONFIGS / "cluster_job.yaml", [f"actors.far_engine={ENGINES}", "cluster.dir=/nowhere"])
