"""Several adapters over one base model: each learns by itself, and what is past the budget lies in files."""

import pytest

from rubato.actors.adapters.bank import AdapterBank
from rubato.actors.adapters.training import LoraTrainEngine, tensors_in
from rubato.actors.config import ModelSection
from rubato.actors.training.train_engine import TrainError, image_of
from tests.unit.actors.adapters.conftest import BAD, GOOD, SECTIONS, bank_over, group_of, taught

AMPLE, NONE = 1 << 40, 0


@pytest.fixture
def bank(base, tmp_path):
    def make(budget_bytes, dtype="float32"):
        return bank_over(base, tmp_path / "spilled", budget_bytes=budget_bytes, dtype=dtype)

    return make


def trained(subject, trajectory, steps=3):
    """Each in turn, toward another token."""
    for _ in range(steps):
        for name in ("a", "b"):
            taught(subject, name, trajectory)
    return {name: image(subject, name) for name in ("a", "b")}


def image(subject, name):
    return bytes(image_of(subject.source(name)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_each_learns_what_it_would_have_learned_alone(bank, base, trajectory, dtype):
    images = trained(bank(AMPLE, dtype), trajectory)

    for name, good in (("a", GOOD), ("b", BAD)):
        alone = LoraTrainEngine(ModelSection(dtype=dtype), SECTIONS[name], steps=10, seed=1)
        alone.load(base, None)
        for step in range(1, 4):
            alone.train(step, group_of(alone.logprobs, trajectory, good))
        assert bytes(image_of(alone)) == images[name]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_past_the_budget_they_lie_in_files_and_come_back_as_they_were(bank, trajectory, dtype):
    ample, none = bank(AMPLE, dtype), bank(NONE, dtype)

    expected, images = trained(ample, trajectory), trained(none, trajectory)

    assert images == expected
    assert ample.spilled == ()
    assert none.spilled == ("a",)
    assert 0 < none.held_bytes < ample.held_bytes


def test_the_memory_that_is_reckoned_with_is_what_adapters_and_optimisers_take(bank, trajectory):
    subject = bank(AMPLE, "bfloat16")
    trained(subject, trajectory, steps=1)

    held = [tensor for engine in subject._held.values() for tensor in in_memory(engine)]

    assert sum(tensor.nbytes for tensor in held if tensor.dim()) == subject.held_bytes


def in_memory(engine):
    """Every tensor of an adapter, once."""
    states = [value for state in engine._optimizer.state.values() for value in state.values()]
    computed = tensors_in(engine.model, engine.name).values()
    found = [*engine._masters.values(), *computed, *(t.grad for t in (*engine._masters.values(), *computed) if t.grad is not None), *states]
    return {id(tensor): tensor for tensor in found}.values()


def test_one_that_is_dropped_leaves_the_others_as_they_are(bank, trajectory):
    subject = bank(AMPLE)
    images = trained(subject, trajectory)

    subject.add("c", SECTIONS["a"], steps=10, seed=1)
    before = image(subject, "c")

    subject.drop("a")

    assert subject.names == ("b", "c")
    assert image(subject, "b") == images["b"]
    subject.add("a", SECTIONS["a"], steps=10, seed=1)
    assert image(subject, "a") == before != images["a"]
    taught(subject, "c", trajectory)
    assert (image(subject, "c") != before, image(subject, "b")) == (True, images["b"])


def test_a_name_that_is_taken_or_that_there_is_not_is_told(bank):
    subject = bank(AMPLE)

    with pytest.raises(TrainError, match="there is an adapter a already"):
        subject.add("a", SECTIONS["a"], steps=1, seed=1)
    with pytest.raises(TrainError, match="there is no adapter c; there are a, b"):
        subject.train("c", [])


def test_one_goes_on_from_its_checkpoint_in_another_bank_as_it_would_have_in_its_own(bank, base, trajectory, tmp_path):
    subject = bank(AMPLE)
    images = trained(subject, trajectory)
    subject.snapshot("b", term=2)(tmp_path / "step_3")

    other = AdapterBank(ModelSection(), base, tmp_path / "other", budget_bytes=AMPLE)
    stands_at = other.add("mine", SECTIONS["b"], steps=10, seed=5, checkpoint=tmp_path / "step_3")
    before = image(other, "mine")
    group = group_of(lambda rows: other.logprobs("mine", rows), trajectory, BAD)
    for each, name in ((subject, "b"), (other, "mine")):
        each.train(name, group)

    assert (stands_at, other.version("mine")) == ((3, 2), 4)
    assert before == images["b"]
    assert image(other, "mine") == image(subject, "b") != before


def test_what_can_not_be_put_aside_stays_and_nothing_is_trained(bank, base, trajectory, tmp_path):
    (tmp_path / "spilled").write_text("a file where the folder would be")
    subject = AdapterBank(ModelSection(), base, tmp_path / "spilled", budget_bytes=NONE)
    subject.add("a", SECTIONS["a"], steps=10, seed=1)
    before = image(subject, "a")

    with pytest.raises(TrainError, match=r"the adapter a can't be put aside in .* to make room for b"):
        subject.add("b", SECTIONS["b"], steps=10, seed=1)

    assert (subject.names, subject.spilled, image(subject, "a")) == (("a",), (), before)
    taught(subject, "a", trajectory)
    assert subject.version("a") == 1


def test_an_adapter_that_can_not_begin_leaves_no_layer_in_the_model(bank, trajectory, tmp_path):
    subject = bank(AMPLE)
    lost = SECTIONS["b"].model_copy(update={"kl_coef": 0.1, "reference": str(tmp_path / "nowhere")})
    layers = {name for name, _ in subject._held["a"].model.named_parameters()}

    with pytest.raises(TrainError, match="nowhere can't be loaded"):
        subject.add("c", lost, steps=10, seed=1)

    assert {name for name, _ in subject._held["a"].model.named_parameters()} == layers
    taught(subject, "a", trajectory)
