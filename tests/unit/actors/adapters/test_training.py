"""Training of an adapter: what moves, what is published and saved, and what the reference is."""

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from rubato.actors.adapters import shapes
from rubato.actors.adapters.training import LoraTrainEngine
from rubato.actors.checkpoints.model_folder import read_header
from rubato.actors.config import LoraSection, ModelSection, TrainSection
from rubato.actors.training.torch_train import TorchTrainEngine
from rubato.actors.training.train_engine import TrainError, image_of
from tests.models import logprobs as reference_logprobs
from tests.models import write_model

PROMPT, GOOD, BAD = [4, 5, 6], 7, 8
LORA = LoraSection(rank=4, alpha=8)


@pytest.fixture
def engine(base):
    def make(checkpoint=None, *, dtype="float32", folder=base, kind=LoraTrainEngine, **options):
        train = TrainSection(**{"lr": 2e-2, "minibatches": 1, "lora": LORA, **options})
        found = kind(ModelSection(path=str(folder), dtype=dtype), train, steps=10, seed=1)
        found.load(folder, checkpoint)
        return found

    return make


def group_of(engine, trajectory, version=0):
    found = []
    for token in (GOOD, BAD, GOOD, BAD):
        logprobs = engine.logprobs([[*PROMPT, token]])[0]
        found.append(trajectory([*PROMPT, token], [0, 0, 0, 1], [0.0, 0.0, 0.0, logprobs[3]], float(token == GOOD), version))
    return found


def whole_state(engine):
    return {name: tensor.clone() for name, tensor in engine._model.state_dict().items() if "lora_" not in name}


def test_a_new_adapter_adds_nothing(engine, base):
    subject = engine()

    assert subject.logprobs([[*PROMPT, GOOD]])[0][1:] == pytest.approx(reference_logprobs(base, [*PROMPT, GOOD]), abs=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_adapter_that_is_not_finite_is_not_exported(engine, dtype):
    subject = engine(dtype=dtype)
    name, tensor = list(subject._state().items())[1]
    tensor[0, 0] = float("nan")

    with pytest.raises(TrainError, match=f"^{name} is not finite, so this version of the weights is not published"):
        image_of(subject)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_training_moves_the_adapter_alone(engine, trajectory, dtype):
    subject = engine(dtype=dtype)
    before, base_before = subject.logprobs([[*PROMPT, GOOD]])[0][3], whole_state(subject)

    for step in range(1, 6):
        subject.train(step, [group_of(subject, trajectory, step - 1)])

    after = whole_state(subject)
    assert subject.logprobs([[*PROMPT, GOOD]])[0][3] > before + 0.1
    assert all(torch.equal(base_before[name], after[name]) for name in after)
    assert subject.base_logprobs([[*PROMPT, GOOD]])[0][3] == pytest.approx(before, abs=1e-6)


def test_what_is_published_is_the_adapter_and_says_whose_it_is(engine, base):
    image = image_of(engine(dtype="bfloat16"))
    whole = shapes.image_bytes(shapes.shapes_in(base), "BF16")

    places, told = read_header(image, "it"), shapes.told_of(image)
    assert {place.dtype for place in places.values()} == {"BF16"}
    assert len(places) == 2 * 7 * 2
    assert told[shapes.BASE] == shapes.base_of(base)
    assert shapes.scaled_by(image, "it") == (4, 8.0)
    assert shapes.image_bytes({n: p.shape for n, p in places.items()}, "BF16") < whole / 4  # of a model whose layers are 64 wide


def test_a_checkpoint_is_a_folder_that_peft_reads(engine, base, trajectory, tmp_path):
    subject = engine()
    subject.train(1, [group_of(subject, trajectory)])
    subject.snapshot(term=1)(tmp_path / "step_1")

    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), tmp_path / "step_1").eval()

    with torch.no_grad():
        logits = loaded(torch.tensor([[*PROMPT, GOOD]])).logits[0].log_softmax(-1)
    assert not (tmp_path / "step_1" / "model.safetensors").exists()
    assert (tmp_path / "step_1" / "tokenizer.json").exists()
    assert subject.logprobs([[*PROMPT, GOOD]])[0][3] == pytest.approx(logits[2, GOOD].item(), abs=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_training_goes_on_from_a_checkpoint_as_if_never_interrupted(engine, trajectory, tmp_path, dtype):
    subject = engine(dtype=dtype)
    batches = [[group_of(subject, trajectory)] for _ in range(2)]
    subject.train(1, batches[0])
    subject.snapshot(term=3)(tmp_path / "step_1")
    subject.train(2, batches[1])

    resumed = engine(tmp_path / "step_1", dtype=dtype)
    resumed.train(2, batches[1])

    assert bytes(image_of(resumed)) == bytes(image_of(subject))


def test_the_reference_is_the_base_with_the_adapter_off(engine, trajectory):
    subject, none = engine(kl_coef=0.1), engine()
    first = subject.train(1, [group_of(subject, trajectory)]).metrics

    subject.train(2, [group_of(subject, trajectory, 1)])
    later = subject.train(3, [group_of(subject, trajectory, 2)]).metrics

    assert subject._reference is None
    assert first["policy/kl_ref"] == pytest.approx(0.0, abs=1e-6)
    assert later["policy/kl_ref"] > 1e-3
    assert none._reference is None


def test_dropout_is_for_updates_alone(engine, trajectory):
    subject = engine(lora=LORA.model_copy(update={"dropout": 0.5}))
    subject.train(1, [group_of(subject, trajectory)])

    assert subject.logprobs([[*PROMPT, GOOD]]) == subject.logprobs([[*PROMPT, GOOD]])


def test_activations_computed_again_give_the_same_update(engine, trajectory):
    plain, again = engine(), engine(gradient_checkpointing=True)
    batch = [group_of(plain, trajectory)]

    plain.train(1, batch)
    again.train(1, batch)

    theirs, ours = (torch.frombuffer(bytearray(image_of(each))[-4096:], dtype=torch.float32) for each in (again, plain))
    assert torch.allclose(theirs, ours, atol=1e-6)


def test_an_adapter_is_begun_with_where_one_is_named(engine, trajectory, tmp_path):
    subject = engine()
    subject.train(1, [group_of(subject, trajectory)])
    subject.snapshot(term=1)(tmp_path / "step_1")

    begun = engine(lora=LORA.model_copy(update={"start": str(tmp_path / "step_1")}))

    assert bytes(image_of(begun)) == bytes(image_of(subject))


def test_a_checkpoint_of_an_adapter_is_no_model_and_a_whole_one_no_adapter(engine, tmp_path):
    engine().snapshot(term=1)(tmp_path / "step_1")
    engine(kind=TorchTrainEngine, lora=None).snapshot(term=1)(tmp_path / "step_2")

    with pytest.raises(TrainError, match="holds an adapter: set train"):
        engine(tmp_path / "step_1", kind=TorchTrainEngine, lora=None)
    with pytest.raises(TrainError, match="holds no adapter in peft's format"):
        engine(tmp_path / "step_2")


def test_a_checkpoint_over_another_base_is_refused(engine, tmp_path):
    engine().snapshot(term=1)(tmp_path / "step_1")

    with pytest.raises(TrainError, match="is an adapter of another base model"):
        engine(tmp_path / "step_1", folder=write_model(tmp_path / "other", seed=1))
