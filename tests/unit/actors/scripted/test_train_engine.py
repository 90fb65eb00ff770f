"""The scripted trainer: weights that an engine accepts, new with each step, and a checkpoint that is taken up."""

import pytest

from rubato.actors.checkpoints import checkpoint as checkpoints
from rubato.actors.checkpoints.hf_files import read_header
from rubato.actors.config import ModelSection, ScriptedTrainSection, TrainSection
from rubato.actors.scripted.train_engine import STATE, ScriptedTrainEngine
from rubato.actors.training.train_engine import TrainError, image_of

SECTION = TrainSection(kind="scripted", scripted=ScriptedTrainSection(step_s=0.0, weights_mib=0.25))


def made() -> ScriptedTrainEngine:
    return ScriptedTrainEngine(ModelSection(), SECTION, steps=10, seed=1)


def test_its_weights_have_the_size_that_was_asked_for_and_every_byte_of_them_changes_with_a_step(tmp_path):
    engine = made()
    images = []
    for step in (1, 2):
        engine.train(step, [])
        images.append(image_of(engine))

    entry = read_header(images[0], "it")["scripted"]
    assert entry.end - entry.begin == 2**18
    before, after = (bytes(image[-(2**18) :]) for image in images)
    assert all(a != b for a, b in zip(before, after, strict=True)), "no delta is smaller than the whole"


def test_a_checkpoint_is_taken_up_where_it_ended_and_a_damaged_one_is_named(tmp_path):
    engine = made()
    engine.train(3, [])
    engine.snapshot(term=2)(tmp_path / "step_3")
    newest, _ = checkpoints.newest(tmp_path)

    assert made().load(tmp_path, newest) == (3, 2)
    (newest / STATE).write_text("{")
    with pytest.raises(TrainError, match=STATE):
        made().load(tmp_path, newest)
