"""Training on packed sequences: what a batch becomes, and what an update does to the model."""

import json
import math
import shutil

import msgspec
import pytest
import torch

from rubato.actors.cluster.lease import advance
from rubato.actors.config import ModelSection, TrainSection
from rubato.actors.messages.samples import MOST_REWARD
from rubato.actors.training import forward
from rubato.actors.training.forward import WeightsImage
from rubato.actors.training.torch_train import TorchTrainEngine, micro_batch, pack, sequences_of
from rubato.actors.training.train_engine import TrainError, image_of
from tests.jobs import write_model

PROMPT, GOOD, BAD = [4, 5, 6], 7, 8


@pytest.fixture
def engine(model_folder):
    def make(checkpoint=None, *, steps=10, model_dtype="float32", **options):
        train = TrainSection(**{"lr": 5e-3, "minibatches": 1, **options})
        found = TorchTrainEngine(ModelSection(path=str(model_folder), dtype=model_dtype), train, steps=steps, seed=1)
        found.load(model_folder, checkpoint)
        return found

    return make


def group_of(engine, trajectory, version=0):
    """Four rollouts of one prompt: the good token is rewarded."""
    found = []
    for token in (GOOD, BAD, GOOD, BAD):
        logprobs = engine.logprobs([[*PROMPT, token]])[0]
        kept = [0.0, 0.0, 0.0, logprobs[3]]
        found.append(trajectory([*PROMPT, token], [0, 0, 0, 1], kept, float(token == GOOD), version))
    return found


def test_training_raises_the_probability_of_what_was_rewarded(engine, trajectory):
    subject = engine()
    before = subject.logprobs([[*PROMPT, GOOD]])[0][3]

    for step in range(1, 6):
        subject.train(step, [group_of(subject, trajectory, step - 1)])

    assert subject.logprobs([[*PROMPT, GOOD]])[0][3] > before + 0.5


def test_on_policy_the_ratio_is_one_and_kl_zero(engine, trajectory):
    subject = engine()

    result = subject.train(1, [group_of(subject, trajectory)])

    assert result.metrics["policy/ratio_mean"] == pytest.approx(1.0, abs=1e-5)
    assert result.metrics["policy/kl"] == pytest.approx(0.0, abs=1e-6)
    assert result.metrics["policy/mismatch_kl"] == pytest.approx(0.0, abs=1e-5)
    assert result.metrics["reward/mean"] == 0.5
    assert result.num_tokens == 16


def test_a_batch_without_spread_changes_nothing_but_the_step(engine, trajectory):
    subject = engine()
    before = bytes(image_of(subject))

    result = subject.train(1, [[trajectory([*PROMPT, GOOD], [0, 0, 0, 1], reward=1.0)] * 2])

    assert bytes(image_of(subject)) == before
    assert result.num_tokens == 0
    assert result.metrics["reward/zero_std_frac"] == 1.0
    assert result.metrics["policy/taught_frac"] == result.metrics["optim/minibatches"] == 0.0


@pytest.mark.parametrize(
    ("options", "rewards", "taught_frac", "minibatches"),
    [
        ({"overlong": "mask"}, (1.0, 0.0), 1.0, 0),  # nothing is left to train on
        ({"overlong": "penalty"}, (1.0, 0.0), 1.0, 1),
        ({"overlong": "penalty"}, (1.0, 1.0), 0.0, 0),
    ],
)
def test_a_step_says_whether_it_had_something_to_teach_and_what_came_of_it(options, rewards, taught_frac, minibatches, engine, trajectory):
    subject = engine(**options)
    cut = [msgspec.structs.replace(trajectory([*PROMPT, GOOD], [0, 0, 0, 1], reward=r), cut=True) for r in rewards]

    metrics = subject.train(1, [cut]).metrics

    assert (metrics["policy/taught_frac"], metrics["optim/minibatches"]) == (taught_frac, minibatches)
    assert metrics["optim/updates"] == minibatches


@pytest.mark.parametrize(("number", "skipped"), [("nan", 1), ("inf", 1), ("0.0", 0)])
def test_a_loss_of_ones_own_without_a_usable_gradient_makes_no_update(number, skipped, engine, trajectory, tmp_path):
    (tmp_path / "my_loss.py").write_text(f"def fn(now_N, *rest, **clips):\n    return now_N * float('{number}')\n")
    subject = engine(loss=f"{tmp_path}/my_loss.py:fn")
    before = bytes(image_of(subject))

    metrics = subject.train(1, [group_of(subject, trajectory)]).metrics

    assert (metrics["optim/minibatches"], metrics["optim/updates"], metrics["optim/skipped"]) == (1, 0, skipped)
    assert bytes(image_of(subject)) == before


def test_a_gradient_that_is_not_finite_is_left_out_and_told(engine, trajectory):
    subject = engine()
    before = bytes(image_of(subject))
    good, bad = group_of(subject, trajectory)[:2]
    broken = trajectory([*PROMPT, BAD], [0, 0, 0, 1], [0.0, 0.0, 0.0, float("nan")], 0.0, 0)

    result = subject.train(1, [[good, broken]])

    assert (result.metrics["optim/skipped"], result.metrics["optim/updates"]) == (1.0, 0.0)
    assert bytes(image_of(subject)) == before
    assert subject.train(2, [[good, bad]]).metrics["optim/skipped"] == 0.0
    assert bytes(image_of(subject)) != before


def test_the_largest_reward_leaves_finite_weights(engine, trajectory):
    subject = engine()
    group = [msgspec.structs.replace(t, reward=t.reward * MOST_REWARD) for t in group_of(subject, trajectory)]

    result = subject.train(1, [group])

    assert result.metrics["optim/skipped"] == 0.0
    assert all(math.isfinite(value) for value in result.metrics.values())


@pytest.mark.parametrize("model_dtype", ["float32", "bfloat16"])
def test_training_goes_on_from_a_checkpoint_as_if_never_interrupted(engine, trajectory, tmp_path, model_dtype):
    subject = engine(model_dtype=model_dtype)
    batches = [[group_of(subject, trajectory)] for _ in range(2)]
    subject.train(1, batches[0])
    subject.snapshot(term=3)(tmp_path / "step_1")
    subject.train(2, batches[1])

    resumed = engine(model_dtype=model_dtype)
    stands_at = resumed.load(tmp_path, tmp_path / "step_1")
    resumed.train(2, batches[1])

    assert stands_at == (1, 3)
    for engine_, folder in ((subject, "a"), (resumed, "b")):
        engine_.snapshot(term=4)(tmp_path / folder)
    for name in ("model.safetensors", "optimizer.state"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    assert bytes(image_of(resumed)) == bytes(image_of(subject))


NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NEEDS_GPU])]


@pytest.mark.parametrize("device", DEVICES)
def test_an_engine_that_slept_between_two_steps_trains_as_if_it_had_not(model_folder, trajectory, tmp_path, device):
    subjects = []
    for _ in range(2):
        section = ModelSection(path=str(model_folder), device=device, dtype="bfloat16")
        subjects.append(TorchTrainEngine(section, TrainSection(lr=5e-3, minibatches=1), steps=10, seed=1))
        subjects[-1].load(model_folder, None)
    awake, sleeper = subjects
    for step in (1, 2):
        batch = [group_of(awake, trajectory, step - 1)]
        awake.train(step, batch)

        sleeper.wake()
        sleeper.train(step, batch)
        sleeper.sleep()
        sleeper.sleep()

    assert all(not tensor.is_cuda for tensor in sleeper._state().values())
    assert all(not value.is_cuda for state in sleeper._optimizer.state.values() for value in state.values())
    assert bytes(image_of(sleeper)) == bytes(image_of(awake))
    for subject, folder in ((awake, "a"), (sleeper, "b")):
        subject.snapshot(term=1)(tmp_path / folder)
    assert (tmp_path / "a" / "optimizer.state").read_bytes() == (tmp_path / "b" / "optimizer.state").read_bytes()


@pytest.mark.parametrize("device", DEVICES)
def test_a_step_in_parts_between_which_the_engine_sleeps_is_the_step_without_a_stop(model_folder, trajectory, tmp_path, device):
    subjects = []
    options = {"minibatches": 2, "proximal": "recomputed", "micro_batch_tokens": 8}
    for _ in range(2):
        section = ModelSection(path=str(model_folder), device=device, dtype="bfloat16")
        subjects.append(TorchTrainEngine(section, TrainSection(lr=5e-3, **options), steps=10, seed=1))
        subjects[-1].load(model_folder, None)
    whole, stopped = subjects
    groups = [group_of(whole, trajectory) for _ in range(2)]
    expected = whole.train(1, groups)

    parts, num_parts = stopped.parts(1, groups), 0
    while (result := advance(parts)) is None:
        stopped.sleep()
        assert all(m.grad is None or not m.grad.is_cuda for m in stopped._masters.values())
        stopped.wake()
        num_parts += 1

    assert num_parts == 6, "four micro-batches, and what the two of the second minibatch began with"
    assert result == expected
    assert bytes(image_of(stopped)) == bytes(image_of(whole))
    for subject, folder in ((whole, "a"), (stopped, "b")):
        subject.snapshot(term=1)(tmp_path / folder)
    assert (tmp_path / "a" / "optimizer.state").read_bytes() == (tmp_path / "b" / "optimizer.state").read_bytes()


def saved_weights(subject, folder):
    """All weights of a checkpoint by name."""
    from safetensors.torch import load_file

    subject.snapshot(term=1)(folder)
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize(("master_dtype", "kept"), [("float32", True), ("bfloat16", False)])
def test_in_bfloat16_a_step_of_1e_6_is_not_lost(engine, trajectory, tmp_path, master_dtype, kept):
    subject = engine(lr=1e-6, model_dtype="bfloat16", master_dtype=master_dtype)
    before = saved_weights(subject, tmp_path / "step_0")["model.norm.weight"]

    for step in range(1, 4):
        subject.train(step, [group_of(subject, trajectory, step - 1)])

    moved = saved_weights(subject, tmp_path / "step_3")["model.norm.weight"] - before
    if kept:
        assert moved.abs().float().mean().item() == pytest.approx(3e-6, rel=0.2)
    else:
        assert not moved.any()


def test_weights_go_to_engines_in_their_dtype_and_to_disk_in_the_masters(engine, trajectory, tmp_path):
    from safetensors.torch import load

    for model_dtype, dtype in (("bfloat16", "model"), ("bfloat16", "float32"), ("float32", "bfloat16")):
        subject = engine(model_dtype=model_dtype, dtype=dtype)
        subject.train(1, [group_of(subject, trajectory)])

        exported = load(bytes(image_of(subject)))

        assert {t.dtype for t in exported.values()} == {getattr(torch, model_dtype)}
        folder = tmp_path / f"{model_dtype}_{dtype}"
        saved = saved_weights(subject, folder)
        assert {t.dtype for t in saved.values()} == {torch.float32}
        assert set(saved) == set(exported)
        for name, weight in saved.items():
            assert torch.equal(weight.to(torch.bfloat16), exported[name].to(torch.bfloat16)), name


def test_a_gradient_in_bfloat16_points_where_float32s_does(engine, trajectory):
    groups = varied(trajectory)
    exact = direction(engine(), groups)

    found = direction(engine(micro_batch_tokens=100, model_dtype="bfloat16"), groups)

    assert torch.nn.functional.cosine_similarity(found, exact, dim=0) > 0.9999


def direction(subject, groups):
    """[P] float32: the gradient of one update, before clipping takes its length."""
    subject._optimizer.step = lambda: None
    subject.train(1, groups)
    return torch.cat([master.grad.flatten() for _, master in sorted(subject._masters.items())])


def test_a_checkpoint_is_a_model_folder_that_hf_tools_load(engine, tmp_path):
    from transformers import AutoModelForCausalLM

    engine().snapshot(term=1)(tmp_path / "step_0")

    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "step_0", local_files_only=True)

    assert loaded.config.model_type == "qwen3"


def test_exported_weights_carry_hf_names_and_no_tied_head(engine):
    from safetensors.torch import load

    names = set(load(bytes(image_of(engine()))))

    assert "model.embed_tokens.weight" in names
    assert "model.layers.1.self_attn.q_norm.weight" in names
    assert "lm_head.weight" not in names


def test_weights_that_are_not_finite_are_not_exported(engine):
    subject = engine()
    with torch.no_grad():
        subject._model.model.layers[0].mlp.up_proj.weight[1, 2] = math.nan

    with pytest.raises(TrainError, match=r"^model\.layers\.0\.mlp\.up_proj\.weight is not finite"):
        image_of(subject)


def test_what_is_exported_stays_as_it_was_while_training_goes_on(engine, trajectory):
    subject = engine()
    before = bytes(image_of(subject))
    memory = memoryview(bytearray(subject.image_bytes()))

    whole = subject.export(memory)
    subject.train(1, [group_of(subject, trajectory)])
    whole()

    assert bytes(memory) == before
    assert bytes(image_of(subject)) != before


def test_a_snapshot_is_written_as_it_was_taken_while_training_goes_on(engine, trajectory, tmp_path):
    subject = engine()
    subject.snapshot(term=1)(tmp_path / "before" / "step_0")

    write = subject.snapshot(term=1)
    subject.train(1, [group_of(subject, trajectory)])
    write(tmp_path / "beside" / "step_0")

    before, beside = ({path.name: path.read_bytes() for path in (tmp_path / name / "step_0").iterdir()} for name in ("before", "beside"))
    assert beside == before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_image_reads_as_safetensors_with_every_value_rounded_to_its_type(dtype):
    from safetensors.torch import load

    tensors = {"b": torch.randn(5, 3).t(), "a": torch.randn(7), "one": torch.tensor(2.0)}
    image = WeightsImage(tensors, dtype)
    memory = bytearray(image.size_bytes)

    image.write(tensors, memoryview(memory))()

    found = load(bytes(memory))
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensor.to(dtype)) for name, tensor in tensors.items())


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("at", [0, 5, 11])
def test_an_image_names_the_tensor_that_is_not_finite(dtype, number, at, monkeypatch):
    monkeypatch.setattr(forward, "PIECE", 4)
    tensors = {"b": torch.ones(5, 3).t(), "a": torch.ones(3, 4), "c": torch.ones(2)}
    tensors["a"].view(-1)[at] = number
    image = WeightsImage(tensors, dtype)

    with pytest.raises(TrainError, match=r"^a is not finite, so this version of the weights is not published: "):
        image.write(tensors, memoryview(bytearray(image.size_bytes)))()


def test_numbers_whose_sum_overflows_are_finite_and_one_that_its_type_can_not_hold_is_not():
    tensors = {"a": torch.full((100,), 3e38), "b": torch.tensor([3e38, 3e38, -3e38])}
    wide, narrow = WeightsImage(tensors, torch.float32), WeightsImage(tensors, torch.bfloat16)
    memory = bytearray(wide.size_bytes)

    wide.write(tensors, memoryview(memory))()

    assert bool(torch.frombuffer(memory, dtype=torch.float32, offset=wide.size_bytes - 412).isfinite().all())
    narrow.write(tensors, memoryview(bytearray(narrow.size_bytes)))()
    tensors["b"][1] = torch.finfo(torch.float32).max
    with pytest.raises(TrainError, match=r"^b is not finite"):
        narrow.write(tensors, memoryview(bytearray(narrow.size_bytes)))()


@pytest.mark.gpu
@NEEDS_GPU
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_image_from_a_gpu_names_the_tensor_that_is_not_finite_once_it_has_landed(dtype):
    tensors = {"a": torch.ones(1 << 20, device="cuda"), "b": torch.full((3, 5), 3e38, device="cuda")}
    image = WeightsImage(tensors, dtype)
    memory = memoryview(bytearray(image.size_bytes))
    image.write(tensors, memory)()
    tensors["a"][-1] = math.nan

    whole = image.write(tensors, memory)

    for asked in (whole, image.check, whole):
        with pytest.raises(TrainError, match=r"^a is not finite"):
            asked()
    tensors["a"][-1] = 1.0
    image.write(tensors, memory)()
    image.check()


@pytest.mark.gpu
@NEEDS_GPU
def test_an_image_from_a_gpu_has_the_values_from_before_they_were_changed():
    tensors = {"a": torch.randn(1 << 22, device="cuda"), "b": torch.randn(3, 5, device="cuda")}
    before = [tensor.bfloat16().cpu() for tensor in tensors.values()]
    image = WeightsImage(tensors, torch.bfloat16)
    for _ in range(2):
        memory = bytearray(image.size_bytes)

        whole = image.write(tensors, memoryview(memory))
        for tensor in tensors.values():
            tensor.zero_()
        whole()

        body = torch.frombuffer(memory, dtype=torch.bfloat16, offset=image.size_bytes - 2 * ((1 << 22) + 15))
        assert torch.equal(body, torch.cat([value.flatten() for value in before]))
        before = [torch.zeros_like(value) for value in before]


def test_a_folder_without_weights_is_refused_in_one_sentence(tmp_path):
    subject = TorchTrainEngine(ModelSection(), TrainSection(), steps=1, seed=1)

    with pytest.raises(TrainError, match=r"has no \*\.safetensors"):
        subject.load(tmp_path, None)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_truncated_file_is_refused_in_one_sentence(model_folder, tmp_path, name):
    folder = tmp_path / "model"
    shutil.copytree(model_folder, folder)
    (folder / name).write_bytes((model_folder / name).read_bytes()[:100])
    subject = TorchTrainEngine(ModelSection(), TrainSection(), steps=1, seed=1)

    with pytest.raises(TrainError, match="can't be loaded") as refused:
        subject.load(folder, None)

    assert "\n" not in str(refused.value)


def test_the_learning_rate_warms_up_and_falls_linearly(engine, trajectory):
    subject = engine(lr=1e-3, lr_final=0.1, warmup_steps=2)
    group = group_of(subject, trajectory)

    rates = [subject.train(step, [group]).metrics["optim/lr"] for step in (1, 2, 10)]

    assert rates == pytest.approx([0.5e-3, 0.9e-3, 0.1e-3])


def test_a_resumed_run_of_other_length_keeps_its_learning_rates(engine, trajectory, tmp_path):
    group = group_of(engine(), trajectory)
    subject = engine(steps=10, lr_final=0.1)
    rates = [subject.train(step, [group]).metrics["optim/lr"] for step in (1, 2, 3)]
    subject.snapshot(term=1)(tmp_path / "step_3")
    rates += [subject.train(step, [group]).metrics["optim/lr"] for step in (4, 5)]

    resumed = engine(tmp_path / "step_3", steps=1000, lr_final=0.1)

    assert [resumed.train(step, [group]).metrics["optim/lr"] for step in (4, 5)] == rates[3:]
    assert resumed.train(11, [group]).metrics["optim/lr"] == pytest.approx(0.1 * 5e-3)
    stretched = engine(tmp_path / "step_3", steps=1000, lr_final=0.1, lr_steps=19)
    assert stretched.train(10, [group]).metrics["optim/lr"] == pytest.approx(0.55 * 5e-3)


def test_a_checkpoint_is_the_whole_model_folder_and_the_base_of_the_next_run(tmp_path):
    from transformers import AutoTokenizer

    from rubato.actors.engines.runner import ModelRunner
    from rubato.actors.engines.section import EngineSection
    from rubato.actors.envs.chat import ChatRenderer

    base = write_model(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.chat_template = "{% for message in messages %}w1 {{ message.content }} w2 {% endfor %}"
    tokenizer.save_pretrained(base)
    assert (base / "chat_template.jinja").exists()
    for name in ("modeling_own.py", "LICENSE", "merges.txt", "tokenizer.model", "preprocessor_config.json"):
        (base / name).write_text(f"{name} of the model")
    for name in ("model.safetensors.index.json", "pytorch_model.bin", ".gitattributes"):
        (base / name).write_text("no part of a checkpoint")
    first = TorchTrainEngine(ModelSection(), TrainSection(), steps=1, seed=1)
    first.load(base, None)

    checkpoint = tmp_path / "checkpoints" / "step_0"
    first.snapshot(term=1)(checkpoint)

    messages = [{"role": "user", "content": "w3"}]
    loaded = AutoTokenizer.from_pretrained(checkpoint)
    assert loaded.apply_chat_template(messages, tokenize=False) == "w1 w3 w2 "
    assert (checkpoint / "modeling_own.py").read_text() == "modeling_own.py of the model"
    missing = {path.name for path in base.iterdir()} - {path.name for path in checkpoint.iterdir()}
    assert missing == {"model.safetensors.index.json", "pytorch_model.bin", ".gitattributes"}

    second = TorchTrainEngine(ModelSection(), TrainSection(), steps=1, seed=2)
    assert second.load(checkpoint, None) == (0, 0)
    assert image_of(second) == image_of(first)
    second.snapshot(term=1)(tmp_path / "again" / "step_0")
    assert second.load(base, tmp_path / "again" / "step_0") == (0, 1)
    assert [path.name for path in checkpoint.glob("*.safetensors")] == ["model.safetensors"]
    ModelRunner.load(checkpoint, ModelSection(), EngineSection(num_slots=1, max_len=8))
    ChatRenderer(checkpoint).opening("w3")


def test_checkpoints_stay_whole_model_folders_after_the_one_that_was_resumed_is_pruned(tmp_path):
    model = write_model(tmp_path / "model")
    first = TorchTrainEngine(ModelSection(), TrainSection(), steps=3, seed=1)
    first.load(model, None)
    first.snapshot(term=1)(tmp_path / "checkpoints" / "step_0")

    resumed = TorchTrainEngine(ModelSection(), TrainSection(), steps=3, seed=1)
    resumed.load(model, tmp_path / "checkpoints" / "step_0")
    shutil.rmtree(tmp_path / "checkpoints" / "step_0")
    resumed.snapshot(term=2)(tmp_path / "checkpoints" / "step_1")

    TorchTrainEngine(ModelSection(), TrainSection(), steps=3, seed=1).load(model, tmp_path / "checkpoints" / "step_1")


def test_the_ratio_is_one_at_the_temperature_that_the_sample_carries(engine, trajectory, model_folder):
    from transformers import AutoModelForCausalLM

    subject = engine()
    model = AutoModelForCausalLM.from_pretrained(model_folder)

    for sampled_at, divided_by in ((0.5, 0.5), (2.0, 2.0), (0.0, 1.0)):
        group = []
        for token in (GOOD, BAD):
            logits = model(torch.tensor([[*PROMPT, token]])).logits[0, 2].detach() / divided_by
            behaviour = [0.0, 0.0, 0.0, logits.log_softmax(-1)[token].item()]
            made = trajectory([*PROMPT, token], [0, 0, 0, 1], behaviour, float(token == GOOD))
            group.append(msgspec.structs.replace(made, temperature=sampled_at))
            assert subject.logprobs([[*PROMPT, token]], sampled_at)[0][3] == pytest.approx(behaviour[3], abs=1e-5)

        result = engine().train(1, [group])

        assert result.metrics["policy/ratio_mean"] == pytest.approx(1.0, abs=1e-5), sampled_at


def varied(trajectory, num_groups=4):
    """Groups of sequences of many lengths and temperatures."""
    torch.manual_seed(5)
    groups = []
    for index in range(num_groups):
        group = []
        for member in range(4):
            length = int(torch.randint(4, 40, ()))
            tokens = torch.randint(32, (length,)).tolist()
            behaviour = [0.0, 0.0, *(-3.4 + torch.rand(length - 2)).tolist()]
            made = trajectory(tokens, [0, 0, *[1] * (length - 2)], behaviour, float((index + member) % 3))
            group.append(msgspec.structs.replace(made, temperature=(1.0, 0.7)[index % 2]))
        groups.append(group)
    return groups


def weights_after(subject, groups, steps=2):
    """[P] float32: all weights after `steps` updates."""
    from safetensors.torch import load

    for step in range(1, steps + 1):
        subject.train(step, groups)
    image = load(bytes(image_of(subject)))
    return torch.cat([image[name].flatten().float() for name in sorted(image)])


@pytest.mark.parametrize("micro_batch_tokens", [1, 50, 200])
def test_micro_batches_and_packing_change_an_update_by_less_than_1e_5(engine, trajectory, micro_batch_tokens):
    groups = varied(trajectory)
    whole = weights_after(engine(micro_batch_tokens=10_000), groups)

    cut = weights_after(engine(micro_batch_tokens=micro_batch_tokens), groups)

    assert (cut - whole).abs().max() < 1e-5


def test_gradient_checkpointing_gives_the_same_update_and_keeps_less(engine, trajectory):
    groups, kept = varied(trajectory), []
    for checkpointing in (False, True):
        subject = engine(gradient_checkpointing=checkpointing)
        num_bytes = 0

        def count(tensor):
            nonlocal num_bytes
            num_bytes += tensor.nbytes
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            kept.append((weights_after(subject, groups, 1), num_bytes))

    (plain, plain_bytes), (checkpointed, checkpointed_bytes) = kept
    assert torch.allclose(plain, checkpointed, atol=1e-7)
    assert checkpointed_bytes < plain_bytes / 2


def test_training_keeps_no_kv_cache_and_draws_no_dropout(model_folder, tmp_path, trajectory):
    folder = tmp_path / "model"
    shutil.copytree(model_folder, folder)
    described = json.loads((folder / "config.json").read_text()) | {"use_cache": True, "attention_dropout": 0.5}
    (folder / "config.json").write_text(json.dumps(described))
    for checkpointing in (False, True):
        train = TrainSection(minibatches=1, gradient_checkpointing=checkpointing)
        subject = TorchTrainEngine(ModelSection(), train, steps=1, seed=1)
        subject.load(folder, None)
        caches = []
        subject._model.base_model.register_forward_hook(lambda _, __, out: caches.append(out.past_key_values))  # noqa: B023

        result = subject.train(1, [group_of(subject, trajectory)])

        assert caches == [None] * len(caches)
        assert result.metrics["policy/kl"] == pytest.approx(0.0, abs=1e-6)


CPU = torch.device("cpu")


def test_a_micro_batch_points_at_the_position_before_each_sampled_token(trajectory):
    (first,) = sequences_of(trajectory([5, 6, 7, 8], [0, 0, 1, 1], [0, 0, -0.5, -0.25]), 1.5, 0)
    (second,) = sequences_of(trajectory([9, 10], [0, 1], [0, -1.0]), -1.0, 0)

    batch = micro_batch([first, second], CPU)

    assert batch.tokens_L.tolist() == [5, 6, 7, 8, 9, 10]
    assert batch.row.positions_L.tolist() == [0, 1, 2, 3, 0, 1]
    assert list(zip(batch.rows_N.tolist(), batch.places_N.tolist(), strict=True)) == [(0, 1), (0, 2), (1, 4)]
    assert batch.targets_N.tolist() == [7, 8, 10]
    assert batch.behaviour_N.tolist() == [-0.5, -0.25, -1.0]
    assert batch.advantages_N.tolist() == [1.5, 1.5, -1.0]


def test_a_sampled_first_token_is_left_out(trajectory):
    (sequence,) = sequences_of(trajectory([5, 6], [1, 1]), 1.0, 0)

    assert micro_batch([sequence], CPU).targets_N.tolist() == [6]


def test_only_tokens_of_the_present_version_count_as_fresh(trajectory):
    (old,) = sequences_of(trajectory([5, 6], [0, 1], version=2), 1.0, 3)
    (new,) = sequences_of(trajectory([5, 6], [0, 1], version=3), 1.0, 3)

    assert (old.fresh, new.fresh) == ([0, 0], [0, 1])


def test_sequences_of_like_length_share_a_run():
    runs = pack([10, 100, 11, 99], 200)

    assert [sorted(run) for run in runs] == [[1, 3], [0, 2]]


@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_log_probs_for_the_comparison_come_in_micro_batches_as_in_training(engine, temperature):
    rows = [[4, 5, 6, 7, 8, 9], [3, 1], [9, 8, 7, 6], [5], [2, 2, 2]]

    alone = [engine(micro_batch_tokens=1).logprobs([row], temperature)[0] for row in rows]
    together = engine(micro_batch_tokens=12).logprobs(rows, temperature)

    assert [len(found) for found in together] == [6, 2, 4, 1, 3]
    assert [found[0] for found in together] == [0.0] * 5
    assert all(a == pytest.approx(b, abs=1e-5) for a, b in zip(alone, together, strict=True))
