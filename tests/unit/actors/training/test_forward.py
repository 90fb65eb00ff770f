"""Log-probabilities from the output head in chunks: the plain way's figures and gradients, without its memory."""

import math

import pytest
import torch
from torch.nn import Linear
from torch.utils._python_dispatch import TorchDispatchMode

from rubato.actors.training import forward
from rubato.actors.training.forward import masters_of, read_model, take_masters, token_logprobs
from rubato.actors.training.train_engine import TrainError

N, D, V = 13, 16, 41
TEMPERATURES = torch.linspace(0.5, 2.0, N)


def plain(hidden, head, tokens, temperatures):
    """The same with one [N, V] matrix, by torch's own log_softmax."""
    all_NV = torch.log_softmax(head(hidden).float() / temperatures[:, None], dim=-1)
    return all_NV.gather(-1, tokens[:, None])[:, 0], -(all_NV.exp() * all_NV).sum(-1)


def inputs(dtype=torch.float32, *, bias=True, seed=1):
    torch.manual_seed(seed)
    head = Linear(D, V, bias=bias).to(dtype)
    return torch.randn(N, D, dtype=dtype, requires_grad=True), head, torch.randint(V, (N,))


def gradients(of, hidden, head, tokens, weights):
    hidden.grad = None
    head.zero_grad()
    logprobs, entropy = of(hidden, head, tokens, TEMPERATURES)
    (logprobs * weights).sum().backward()
    return [logprobs.detach(), entropy.detach(), hidden.grad, *(p.grad for p in head.parameters())]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("tokens_at_once", [1, 5, N, 1000])
def test_chunks_give_the_plain_ways_figures_and_gradients_to_1e_6(monkeypatch, bias, tokens_at_once):
    monkeypatch.setattr(forward, "LOGITS_AT_ONCE", tokens_at_once * V)
    hidden, head, tokens = inputs(bias=bias)
    weights = torch.randn(N)

    found = gradients(token_logprobs, hidden, head, tokens, weights)
    expected = gradients(plain, hidden, head, tokens, weights)

    assert len(found) == 5 if bias else 4
    for ours, reference in zip(found, expected, strict=True):
        assert torch.allclose(ours, reference, rtol=1e-6, atol=1e-6)


def test_gradients_are_those_of_finite_differences():
    torch.manual_seed(2)
    hidden, head, tokens = torch.randn(3, 4, requires_grad=True), Linear(4, 7), torch.tensor([0, 3, 6])
    temperatures = torch.tensor([0.5, 1.0, 2.0])
    (found,) = torch.autograd.grad(token_logprobs(hidden, head, tokens, temperatures)[0].sum(), hidden)

    with torch.no_grad():
        for row, column in ((0, 0), (1, 2), (2, 3)):
            step = torch.zeros_like(hidden)
            step[row, column] = 1e-2
            above, below = (plain(hidden + sign * step, head, tokens, temperatures)[0].sum() for sign in (1, -1))
            assert found[row, column].item() == pytest.approx(((above - below) / 2e-2).item(), abs=1e-3)


def test_bfloat16_differs_from_the_plain_way_by_its_rounding_alone(monkeypatch):
    monkeypatch.setattr(forward, "LOGITS_AT_ONCE", 5 * V)
    hidden, head, tokens = inputs(torch.bfloat16)
    weights = torch.randn(N)

    found = gradients(token_logprobs, hidden, head, tokens, weights)

    assert [t.dtype for t in found] == [torch.float32] * 2 + [torch.bfloat16] * 3
    for ours, reference in zip(found, gradients(plain, hidden, head, tokens, weights), strict=True):
        assert torch.allclose(ours, reference, rtol=1e-2, atol=1e-2)


def test_a_head_that_is_the_embedding_gets_both_gradients(monkeypatch):
    monkeypatch.setattr(forward, "LOGITS_AT_ONCE", 4 * V)
    tokens, inputs_N = torch.arange(N) % V, torch.arange(N) * 3 % V
    embedding = torch.nn.Embedding(V, D)
    head = Linear(D, V, bias=False)
    head.weight = embedding.weight

    found = []
    for of in (token_logprobs, plain):
        embedding.zero_grad()
        of(embedding(inputs_N).tanh(), head, tokens, TEMPERATURES)[0].sum().backward()
        found.append(embedding.weight.grad.clone())

    assert torch.allclose(*found, atol=1e-6)


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that any operation makes."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, tuple) else (made,):
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return made


@pytest.mark.parametrize(("of", "all_at_once"), [(plain, True), (token_logprobs, False)])
def test_no_matrix_of_tokens_by_vocabulary_ever_exists(monkeypatch, of, all_at_once):
    num, vocabulary, at_once = 256, 512, 16
    monkeypatch.setattr(forward, "LOGITS_AT_ONCE", at_once * vocabulary)
    hidden, head = torch.randn(num, D, requires_grad=True), Linear(D, vocabulary)

    with Largest() as largest:
        logprobs, _ = of(hidden, head, torch.zeros(num, dtype=torch.int64), torch.ones(num))
        logprobs.sum().backward()

    assert (largest.elements >= num * vocabulary) is all_at_once
    if not all_at_once:
        assert largest.elements == max(at_once, D) * vocabulary


def test_token_logprobs_and_entropy_match_hand_computed_values():
    head = Linear(2, 2, bias=False)
    head.weight.data = torch.eye(2)
    hidden = torch.tensor([[0.0, 0.0], [math.log(3.0), 0.0], [math.log(3.0), 0.0]])

    logprobs, entropy = token_logprobs(hidden, head, torch.tensor([1, 0, 0]), torch.tensor([1.0, 1.0, 0.5]))

    assert logprobs.tolist() == pytest.approx([math.log(0.5), math.log(0.75), math.log(0.9)])
    expected = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
    assert entropy.tolist()[:2] == pytest.approx([math.log(2.0), expected])


def test_a_model_whose_logits_are_not_its_heads_output_is_refused(tmp_path):
    from transformers import GraniteConfig, GraniteForCausalLM

    config = GraniteConfig(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        logits_scaling=8.0,
        pad_token_id=None,
    )
    GraniteForCausalLM(config).save_pretrained(tmp_path)

    with pytest.raises(TrainError, match="GraniteForCausalLM scales or caps its logits"):
        read_model(tmp_path, "float32", torch.device("cpu"))


def test_in_bfloat16_gradients_of_micro_batches_add_up_in_the_masters_type():
    model, ones = Linear(1, 1, bias=False), torch.ones(1, 1, dtype=torch.bfloat16)
    masters = masters_of(model, torch.bfloat16)

    for _ in range(512):
        model(ones).sum().backward()

    assert masters["weight"].grad.item() == 512.0  # bfloat16 has no 257: it would stay at 256
    assert model.weight.grad is None


def test_the_model_computes_with_its_masters_rounded():
    model = Linear(1, 1, bias=False)
    masters = masters_of(model, torch.bfloat16)
    masters["weight"].data.fill_(1.001)

    take_masters(model, masters)

    assert (masters["weight"].dtype, model.weight.dtype) == (torch.float32, torch.bfloat16)
    assert model.weight.item() == 1.0
