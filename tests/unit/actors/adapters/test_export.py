"""An adapter merged into its base model, and a checkpoint as a model of its own."""

import shutil

import pytest

from rubato.actors.adapters import shapes
from rubato.actors.adapters.export import main
from rubato.actors.adapters.training import LoraTrainEngine
from rubato.actors.checkpoints.model_check import check_model_folder
from rubato.actors.config import LoraSection, ModelSection, TrainSection
from rubato.actors.training.torch_train import TorchTrainEngine
from rubato.runtime.errors import LaunchError
from tests.models import logprobs, write_model

TOKENS = [4, 5, 6, 7, 8]


@pytest.fixture
def saved(base, tmp_path, adapter_image):
    """A checkpoint of a run that trains an adapter, with lively values."""
    engine = LoraTrainEngine(ModelSection(), TrainSection(lora=LoraSection(rank=4, alpha=8)), steps=1, seed=1)
    engine.load(base, None)
    folder = tmp_path / "run" / "checkpoints" / "step_1"
    engine.snapshot(term=1)(folder)
    (folder / shapes.WEIGHTS).write_bytes(adapter_image(1))
    (folder / "manifest.json").unlink()
    engine._lora = engine._lora.model_copy(update={"start": str(folder)})
    again = LoraTrainEngine(ModelSection(), TrainSection(lora=engine._lora), steps=1, seed=1)
    again.load(base, None)
    shutil.rmtree(folder)
    again.snapshot(term=1)(folder)
    return folder, again.logprobs([TOKENS])[0][1:]


@pytest.mark.parametrize("named", ["the checkpoint", "the run"])
def test_a_merged_model_gives_what_the_adapter_gave(saved, tmp_path, base, named, capsys):
    folder, expected = saved

    code = main([str(folder if named == "the checkpoint" else folder.parent.parent), "--merged", str(tmp_path / "out")])

    assert code == 0
    assert "14 matrices changed" in capsys.readouterr().out
    check_model_folder(tmp_path / "out")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {path.name for path in base.iterdir()}
    assert logprobs(tmp_path / "out", TOKENS) == pytest.approx(expected, abs=1e-4)
    assert logprobs(base, TOKENS) != pytest.approx(expected, abs=1e-2)


def test_a_base_model_that_was_moved_is_named_by_hand_and_another_is_refused(saved, tmp_path, base):
    folder, _ = saved
    config = folder / "adapter_config.json"
    config.write_text(config.read_text().replace(str(base), "/nowhere/model"))

    with pytest.raises(LaunchError, match="/nowhere/model, is not there: say with --base"):
        main([str(folder), "--merged", str(tmp_path / "out")])
    with pytest.raises(LaunchError, match="is an adapter of another base model"):
        main([str(folder), "--merged", str(tmp_path / "out"), "--base", str(write_model(tmp_path / "other", seed=1))])
    assert not (tmp_path / "out").exists()
    assert main([str(folder), "--merged", str(tmp_path / "out"), "--base", str(base)]) == 0


def test_a_checkpoint_of_a_whole_model_becomes_a_model_without_what_only_training_needs(base, tmp_path):
    engine = TorchTrainEngine(ModelSection(), TrainSection(), steps=1, seed=1)
    engine.load(base, None)
    engine.snapshot(term=1)(tmp_path / "step_1")

    main([str(tmp_path / "step_1"), "--merged", str(tmp_path / "out")])

    assert {path.name for path in (tmp_path / "out").iterdir()} == {path.name for path in base.iterdir()}
    assert logprobs(tmp_path / "out", TOKENS) == pytest.approx(logprobs(base, TOKENS), abs=1e-5)


def test_nothing_that_exists_is_overwritten(base, tmp_path):
    with pytest.raises(LaunchError, match="exists already"):
        main([str(base), "--merged", str(tmp_path)])


def test_a_place_that_can_not_be_written_is_told(base, tmp_path):
    (tmp_path / "file").touch()

    with pytest.raises(LaunchError, match=r"file/out can't be written: Not a directory\.$"):
        main([str(base), "--merged", str(tmp_path / "file" / "out")])


def test_ranks_that_the_tensors_do_not_have_are_not_merged(saved, tmp_path, base):
    config = saved[0] / "adapter_config.json"
    config.write_text(config.read_text().replace('"r": 4', '"r": 8'))

    with pytest.raises(LaunchError, match=r"adapter_config\.json says r=8"):
        main([str(saved[0]), "--merged", str(tmp_path / "out"), "--base", str(base)])
    assert not (tmp_path / "out").exists()
