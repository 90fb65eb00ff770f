"""Operations on adapters: losses and steps are those of plain PyTorch, and a model learns by its own operations alone."""

import struct

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load as load_tensors
from transformers import AutoModelForCausalLM

from rubato.actors.config import ModelSection, TrainSection
from rubato.actors.gateway.tinker.torch_models import TorchModels
from rubato.actors.messages.tinker import Begin, Datum, ForwardBackward, OptimStep, Tensor
from rubato.actors.training.train_engine import TrainError, image_of
from tests.models import write_model
from tests.unit.actors.gateway.tinker.conftest import BEGIN, ROWS, datum, floats, ints, lively, sampled, taught

CLOSE = 1e-5
"""Relative."""


class Reference:
    """The model that peft makes of what was saved, in plain PyTorch: one sequence at a time, whole logits."""

    def __init__(self, base, folder, files):
        folder.mkdir()
        for name, content in files.items():
            (folder / name).write_bytes(content)
        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        self.model = PeftModel.from_pretrained(model, folder, is_trainable=True)
        self.parameters = {name.replace(".default", ""): p for name, p in self.model.named_parameters() if p.requires_grad}

    def logprobs(self, each):
        tokens = torch.tensor(struct.unpack(f"<{len(each.tokens) // 4}i", each.tokens)).unsqueeze(0)
        targets = values(each.inputs["target_tokens"])
        found = self.model(tokens).logits[0].log_softmax(-1)
        return found.gather(-1, targets.view(len(targets), -1)).view(targets.shape)

    def gradient(self, loss, data):
        """Of the sum of `loss(logprobs, inputs)`, and the sum."""
        total = sum(loss(self.logprobs(each), {name: values(tensor) for name, tensor in each.inputs.items()}).sum() for each in data)
        total.backward()
        return {name: p.grad for name, p in self.parameters.items()}, float(total.detach())


def held(files):
    """Every tensor of a folder's files, by file and name."""
    return {
        (file, name): tensor.numpy().tobytes()
        for file, content in files.items()
        if file != "adapter_config.json"
        for name, tensor in load_tensors(content).items()
    }


def values(tensor):
    return torch.frombuffer(bytearray(tensor.data), dtype=getattr(torch, tensor.dtype)).view(tensor.shape)


def gradient_of(models, name):
    return load_tensors(models.files(name, optimizer=False, gradient=True)["gradients.state"])


def apart(found, expected):
    """The largest relative difference, of tensors and of all together."""
    assert found.keys() == expected.keys()
    each = [float((found[n] - expected[n]).norm() / expected[n].norm()) for n in expected]
    flat = [torch.cat([tensors[n].flatten() for n in expected]) for tensors in (found, expected)]
    return max(*each, float((flat[0] - flat[1]).norm() / flat[1].norm()))


def ratio(logprobs, inputs):
    return torch.exp(logprobs - inputs["logprobs"])


def ppo(low, high):
    return lambda p, x: -torch.min(ratio(p, x) * x["advantages"], ratio(p, x).clamp(low, high) * x["advantages"])


def cispo(low, high):
    return lambda p, x: -(ratio(p, x).clamp(low, high).detach() * p * x["advantages"])


def bounded(p, x):
    """As ppo, by bounds of each token."""
    held = torch.max(torch.min(ratio(p, x), x["clip_high_threshold"]), x["clip_low_threshold"])
    return -torch.min(ratio(p, x) * x["advantages"], held * x["advantages"])


def gspo(low, high, mask=None):
    def loss(p, x):
        marked = x["advantages"] if mask is None else x[mask]
        log_ratio = (p.detach() - x["logprobs"])[marked != 0].mean()
        each = torch.exp(log_ratio + p - p.detach())
        return -torch.min(each * x["advantages"], each.clamp(low, high) * x["advantages"])

    return loss


def every_other(num):
    return floats([float(i % 2) for i in range(num)])


def spread(low, high):
    return lambda num: floats([low if i % 2 else high for i in range(num)])


WIDE = ForwardBackward(
    "cross_entropy",
    tuple(
        datum(
            row,
            target_tokens=ints([[t, t + 1, 5] for t in row], 3),
            weights=floats([[0.6, 0.3, 0.1 * (i % 2)] for i in range(len(row))], 3),
        )
        for row in ROWS
    ),
)
"""Three targets for each token, as a client sends a distribution."""

CASES = {
    "cross_entropy": (taught(weights=(0.0, 0.7)), lambda p, x: -p * x["weights"]),
    "cross_entropy of distributions": (WIDE, lambda p, x: -p * x["weights"]),
    "a client's own gradient": (taught(weights=(-1.5, 2.5)), lambda p, x: -p * x["weights"]),
    "importance_sampling": (sampled("importance_sampling"), lambda p, x: -ratio(p, x) * x["advantages"]),
    "weighed": (sampled("importance_sampling", weights=every_other), lambda p, x: -ratio(p, x) * x["advantages"] * x["weights"]),
    "ppo": (sampled("ppo"), ppo(0.8, 1.2)),
    "ppo, other bounds": (sampled("ppo", config={"clip_low_threshold": 0.9, "clip_high_threshold": 1.5}), ppo(0.9, 1.5)),
    "ppo, each token's bounds": (
        sampled("ppo", clip_low_threshold=spread(0.7, 0.95), clip_high_threshold=spread(1.05, 1.3)), bounded
    ),
    "cispo": (sampled("cispo"), cispo(0.0, 4.0)),
    "cispo, other bounds": (sampled("cispo", config={"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}), cispo(0.9, 1.1)),
    "dro": (sampled("dro"), lambda p, x: -(p * x["advantages"] - 0.5 * 0.05 * (p - x["logprobs"]) ** 2)),
    "dro, other beta": (sampled("dro", config={"beta": 0.4}), lambda p, x: -(p * x["advantages"] - 0.2 * (p - x["logprobs"]) ** 2)),
    "gspo": (sampled("gspo"), gspo(0.8, 1.2)),
    "gspo of marked tokens": (sampled("gspo", sequence_ratio_mask=every_other), gspo(0.8, 1.2, "sequence_ratio_mask")),
}  # fmt: skip


@pytest.fixture(scope="module")
def compared(base, tmp_path_factory):
    """`compared(micro_batch_tokens)`: models whose "a" stands as the reference does, and has no gradient."""
    folder, made = tmp_path_factory.mktemp("compared"), {}
    for size in (16384, 8):
        made[size] = TorchModels(ModelSection(), TrainSection(micro_batch_tokens=size), base, folder / "aside", 1 << 40)
        made[size].load()
        lively(made[size], "a")
    reference = Reference(base, folder / "reference", made[8].files("a", optimizer=False))

    def pair(size):
        made[size].set_to("a", folder / "reference", optimizer=False)
        reference.model.zero_grad()
        return made[size], reference

    return pair


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("micro_batch_tokens", [16384, 8])
def test_a_loss_and_its_gradient_are_those_of_plain_pytorch(compared, case, micro_batch_tokens):
    operation, loss = CASES[case]
    models, reference = compared(micro_batch_tokens)

    found = models.forward_backward("a", operation)

    expected, total = reference.gradient(loss, operation.data)
    assert apart(gradient_of(models, "a"), expected) < CLOSE
    assert found.metrics["loss:sum"] == pytest.approx(total, rel=1e-4)
    logprobs = reference.logprobs(operation.data[0]).detach().flatten()
    assert torch.frombuffer(bytearray(found.logprobs[0]), dtype=torch.float32) == pytest.approx(logprobs, rel=1e-4)
    assert [len(each) for each in found.losses] == [len(d.inputs["target_tokens"].data) // 2 for d in operation.data]


def test_without_backward_all_is_told_and_nothing_gathers(compared):
    models, _ = compared(8)

    seen = models.forward_backward("a", sampled("ppo", forward_only=True))

    assert "gradients.state" not in models.files("a", optimizer=True, gradient=True)
    assert seen == models.forward_backward("a", sampled("ppo"))


def test_gradients_add_up_over_calls(compared):
    models, _ = compared(8)
    models.forward_backward("a", taught(rows=ROWS))
    expected = gradient_of(models, "a")
    models.optim_step("a", OptimStep(0.0))

    for row in ROWS:
        models.forward_backward("a", taught(rows=[row]))

    assert apart(gradient_of(models, "a"), expected) < CLOSE


def test_a_step_is_that_of_plain_adamw_with_its_own_figures(tuned, base, tmp_path):
    models = tuned()
    lively(models, "a")
    reference = Reference(base, tmp_path / "reference", models.files("a", optimizer=False))
    models.set_to("a", tmp_path / "reference", optimizer=False)
    optimizer = torch.optim.AdamW(reference.parameters.values(), lr=1.0)

    for step in (OptimStep(0.01), OptimStep(0.02, 0.8, 0.9, 1e-8, 0.1, 0.3), OptimStep(0.005, grad_clip_norm=1e9)):
        found = models.forward_backward("a", taught())
        metrics = models.optim_step("a", step)
        reference.gradient(lambda p, x: -p * x["weights"], taught().data)
        norm = torch.nn.utils.clip_grad_norm_(reference.parameters.values(), step.grad_clip_norm or torch.inf)
        figures = {"lr": step.learning_rate, "betas": (step.beta1, step.beta2), "eps": step.eps, "weight_decay": step.weight_decay}
        optimizer.param_groups[0].update(figures)
        optimizer.step()
        optimizer.zero_grad()
        assert metrics["grad_norm"] == pytest.approx(float(norm), rel=1e-4)
        assert found.metrics["loss:sum"] > 0

    weights = load_tensors(models.files("a", optimizer=False)["adapter_model.safetensors"])
    assert apart(weights, {name: p.detach() for name, p in reference.parameters.items()}) < 1e-4


def test_a_gradient_that_is_not_finite_moves_nothing(compared):
    models, _ = compared(8)
    before = held(models.files("a", optimizer=True))
    far = sampled("importance_sampling", logprobs=lambda num: floats([-200.0] * num))

    models.forward_backward("a", far)
    metrics = models.optim_step("a", OptimStep(0.1))

    assert metrics == {"skipped": 1.0}
    assert held(models.files("a", optimizer=True, gradient=True)) == before


@pytest.mark.parametrize("budget_bytes", [0, 1 << 40])
def test_models_in_turns_learn_what_each_learns_alone_also_where_a_gradient_is_put_aside(tuned, budget_bytes):
    begins = {"a": BEGIN, "b": Begin("toy", 2, 5, train_mlp=False)}
    together = tuned(budget_bytes)
    for name, begin in begins.items():
        together.begin(name, begin)
    for _ in range(2):
        for rows in (ROWS[:1], ROWS[1:]):
            for name in begins:
                together.forward_backward(name, taught(rows=rows, weights=(0.0, 1.0 if name == "a" else -0.3)))
        for name in begins:
            together.optim_step(name, OptimStep(0.02))

    for name, begin in begins.items():
        alone = tuned()
        alone.begin(name, begin)
        for _ in range(2):
            for rows in (ROWS[:1], ROWS[1:]):
                alone.forward_backward(name, taught(rows=rows, weights=(0.0, 1.0 if name == "a" else -0.3)))
            alone.optim_step(name, OptimStep(0.02))
        assert held(alone.files(name, optimizer=True)) == held(together.files(name, optimizer=True))


def test_what_was_saved_goes_on_to_the_last_bit(tuned, tmp_path):
    models = tuned()
    lively(models, "a")
    models.forward_backward("a", taught(rows=ROWS[:1]))
    saved = tmp_path / "saved"
    saved.mkdir()
    for name, content in models.files("a", optimizer=True, gradient=True).items():
        (saved / name).write_bytes(content)

    other = tuned()
    other.begin("mine", Begin("toy", 4, 99))
    other.set_to("mine", saved, optimizer=True, gradient=True)
    for each, name in ((models, "a"), (other, "mine")):
        each.forward_backward(name, taught(rows=ROWS[1:]))
        each.optim_step(name, OptimStep(0.02))

    assert held(other.files("mine", optimizer=True)) == held(models.files("a", optimizer=True))
    assert bytes(image_of(other.source("mine"))) == bytes(image_of(models.source("a")))


def test_where_a_call_raises_half_way_the_gradient_is_what_it_was(tuned, monkeypatch):
    from rubato.actors.adapters import stepwise

    models = tuned(micro_batch_tokens=8)
    lively(models, "a")
    models.forward_backward("a", taught())
    before = gradient_of(models, "a")
    calls, whole = [], stepwise._micro_batch

    def raising(*args, **kwargs):
        calls.append(1)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("of memory")
        return whole(*args, **kwargs)

    monkeypatch.setattr(stepwise, "_micro_batch", raising)
    with pytest.raises(MemoryError, match="the device is out of memory"):
        models.forward_backward("a", taught())

    assert len(calls) == 2
    after = gradient_of(models, "a")
    assert all(torch.equal(after[name], before[name]) for name in before)


def ragged(**changed):
    each = taught(rows=[ROWS[0]]).data[0]
    return ForwardBackward("cross_entropy", (Datum(each.tokens, each.inputs | changed),))


@pytest.mark.parametrize(
    ("operation", "sentence"),
    [
        (ForwardBackward("stable_reinforce", taught().data), "loss_fn=stable_reinforce is not there; there are cross_entropy"),
        (ForwardBackward("ppo", (), {}), "there is no datum"),
        (sampled("dro", config={"clip_low_threshold": 1.0}), "loss_fn_config of dro has clip_low_threshold, but it takes beta"),
        (sampled("ppo", config={"clip_low_threshold": float("nan")}), "it has to be finite"),
        (ForwardBackward("ppo", taught().data), "datum 0 of 3: ppo needs advantages, which it lacks"),
        (ragged(mask=floats([1.0] * 4)), "datum 0 of 1: cross_entropy knows no mask"),
        (ragged(target_tokens=ints([1, 2, 3])), r"target_tokens has shape \[3\], but the input has 4 tokens"),
        (ragged(weights=floats([1.0] * 3)), r"weights has shape \[3\], but target_tokens has \[4\]"),
        (ragged(weights=floats([1.0, float("inf"), 0.0, 0.0])), "weights holds a number that is not finite"),
        (ragged(weights=ints([1, 1, 1, 1])), "weights is int64, not float32"),
        (ragged(weights=Tensor("float32", (4,), b"123")), r"weights has 3 bytes, which are not float32 of shape \[4\]"),
        (ragged(target_tokens=ints([1, 2, 3, 97])), "target_tokens has the token 97, but the model's vocabulary has 97"),
        (ForwardBackward("cross_entropy", (Datum(b"", {}),)), "its input has no tokens"),
        (ForwardBackward("cross_entropy", (Datum(b"123", {}),)), "its input is no row of int32"),
        (ForwardBackward("cross_entropy", (Datum(bytes(4 * 1025), {}),)), "its input has 1025 tokens, but the model takes 1024"),
        (OptimStep(float("inf")), "adam_params.learning_rate=inf can't be"),
        (OptimStep(1e300), "adam_params.learning_rate=1e\\+300 can't be"),
        (OptimStep(0.1, beta2=1.0), "adam_params.beta2=1.0 can't be"),
    ],
)
def test_what_can_not_be_is_told_and_changes_nothing(compared, operation, sentence):
    models, _ = compared(8)
    before = held(models.files("a", optimizer=True, gradient=True))

    with pytest.raises(TrainError, match=sentence):
        models.optim_step("a", operation) if isinstance(operation, OptimStep) else models.forward_backward("a", operation)

    assert held(models.files("a", optimizer=True, gradient=True)) == before


@pytest.mark.parametrize(
    ("begin", "sentence"),
    [
        (Begin("toy", 0), "rank=0 can't be"),
        (Begin("toy", 4096), "rank=4096 can't be"),
        (Begin("toy", 4, train_attn=False, train_mlp=False), "the output head gets no adapter here"),
    ],
)
def test_what_can_be_no_adapter_is_told(compared, begin, sentence):
    models, _ = compared(8)

    with pytest.raises(TrainError, match=sentence):
        models.begin("b", begin)

    models.begin("b", BEGIN)
    models.drop("b")


def test_tokens_are_scored_under_a_model_a_folder_and_the_base_model(tuned, tmp_path):
    models = tuned()
    row = ROWS[2]
    tokens = struct.pack(f"<{len(row)}i", *row)
    alone = models.score(tokens)
    models.begin("a", BEGIN)
    fresh = models.score(tokens, model="a")
    lively(models, "b")
    saved = tmp_path / "saved"
    saved.mkdir()
    for name, content in models.files("b", optimizer=False).items():
        (saved / name).write_bytes(content)

    moved, from_folder = models.score(tokens, model="b", top=3), models.score(tokens, folder=saved, top=3)

    seen = models.forward_backward("b", ForwardBackward("cross_entropy", taught(rows=[row]).data, forward_only=True))
    assert fresh == alone == models.score(tokens)
    assert moved == from_folder
    logprobs, ids, best = (values(Tensor(*t)) for t in (
        ("float32", (7,), moved.logprobs), ("int32", (7, 3), moved.top_ids), ("float32", (7, 3), moved.top_logprobs)
    ))  # fmt: skip
    assert logprobs[0].isnan()
    assert logprobs[1:] == pytest.approx(torch.frombuffer(bytearray(seen.logprobs[0]), dtype=torch.float32), rel=1e-5)
    assert ids[0].tolist() == [-1] * 3
    assert (best[1:, 0] >= logprobs[1:] - 1e-6).all()
    assert (best[1:].diff() <= 0).all()
    with pytest.raises(TrainError, match="the 98 likeliest tokens can't be told"):
        models.score(tokens, top=98)


def test_of_a_mixture_of_experts_what_is_no_expert_is_trained(tmp_path):
    models = TorchModels(ModelSection(), TrainSection(), write_model(tmp_path / "model", "qwen3_moe"), tmp_path / "aside", 1 << 40)
    models.load()
    models.begin("a", BEGIN)

    names = load_tensors(models.files("a", optimizer=False)["adapter_model.safetensors"])

    assert {name.split(".")[-3] for name in names} == {"q_proj", "k_proj", "v_proj", "o_proj"}
