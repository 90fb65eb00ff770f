"""What a trainer looks at before any process of the job is started."""

import pytest

from rubato.actors.training.preflight import preflight
from rubato.runtime.config.compose import from_mapping
from rubato.runtime.config.yaml_core import read_yaml
from rubato.runtime.errors import ConfigError
from tests.jobs import LEARNING
from tests.models import write_model


@pytest.mark.parametrize("mesh", [1, 2])
def test_a_run_that_trained_an_adapter_is_not_gone_on_with_as_a_whole_model(tmp_path, mesh):
    write_model(tmp_path / "model")
    saved = tmp_path / "checkpoints" / "step_1"
    saved.mkdir(parents=True)
    (saved / "adapter_config.json").write_text("{}")
    config = from_mapping(read_yaml(LEARNING), ["model.path=model", "model.device=cpu", f"train.mesh.shard={mesh}"])

    with pytest.raises(
        ConfigError, match=r"step_1 holds an adapter: set train\.lora as its run had it, or start another run with --force\.$"
    ):
        preflight(config.actor_config("trainer"), tmp_path)
