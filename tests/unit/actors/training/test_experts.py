"""A mixture of experts as it is trained: its balance, its routers' type, and the names under which it is published and saved."""

import pytest
import torch
from safetensors.torch import load, load_file
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from rubato.actors.config import ModelSection, TrainSection
from rubato.actors.training import experts
from rubato.actors.training.forward import computed, mixture_of, read_model, row_of
from rubato.actors.training.torch_train import TorchTrainEngine
from rubato.actors.training.train_engine import TrainError, image_of
from tests import ranks

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    torch.manual_seed(3)
    config = Qwen3MoeConfig(
        vocab_size=32, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=16,
        max_position_embeddings=64, num_experts=5, num_experts_per_tok=2, moe_intermediate_size=24, norm_topk_prob=True,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("mixture")
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    return folder


def engine(folder, *, dtype="float32", **options):
    train = TrainSection(**{"lr": 1e-2, "minibatches": 1, **options})
    found = TorchTrainEngine(ModelSection(path=str(folder), dtype=dtype), train, steps=5, seed=1)
    found.load(folder, None)
    return found


def test_it_is_published_and_saved_under_the_names_of_its_checkpoint(mixture, tmp_path):
    stored = load_file(mixture / "model.safetensors")
    subject = engine(mixture)
    before = load(bytes(image_of(subject)))

    row = subject.train(1, ranks.batch(1)).metrics
    image = load(bytes(image_of(subject)))
    subject.snapshot(term=1)(tmp_path / "step_1")

    assert {name: value.shape for name, value in before.items()} == {name: value.shape for name, value in stored.items()}
    assert all(torch.equal(before[name], value) for name, value in stored.items())
    assert any(".experts.4.up_proj." in name for name in stored)
    assert row["policy/router_imbalance"] > 1.0
    moved = [name for name, value in image.items() if not torch.equal(value, stored[name])]
    assert {kind for name in moved for kind in ("gate_proj", "up_proj", "down_proj", "mlp.gate") if kind in name} == {
        "gate_proj", "up_proj", "down_proj", "mlp.gate",
    }  # fmt: skip
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "step_1", dtype=torch.float32)
    tokens = torch.arange(9)
    with torch.no_grad():
        theirs = saved(tokens[None]).logits[0].log_softmax(-1)
    ours = subject.logprobs([tokens.tolist()])[0]
    assert ours[1:] == pytest.approx([float(theirs[i, i + 1]) for i in range(8)], abs=1e-5)


def test_it_goes_on_from_its_checkpoint_as_if_never_interrupted(mixture, tmp_path):
    whole, first = engine(mixture), engine(mixture)
    for step in (1, 2):
        expected = whole.train(step, ranks.batch(step)).metrics["policy/loss"]
    first.train(1, ranks.batch(1))
    first.snapshot(term=1)(tmp_path / "step_1")
    again = TorchTrainEngine(ModelSection(path=str(mixture)), first._train_section, steps=5, seed=1)
    again.load(mixture, tmp_path / "step_1")

    found = again.train(2, ranks.batch(2)).metrics["policy/loss"]

    assert found == pytest.approx(expected, rel=1e-6)
    assert bytes(image_of(again)) == bytes(image_of(whole))


def test_the_imbalance_is_that_of_the_formula_and_1_where_experts_are_used_alike():
    torch.manual_seed(1)
    lengths, top_k, num = [4, 3], 2, 4
    logits = torch.randn(7, num)
    row, shares = row_of(lengths, CPU), torch.tensor([4 / 7, 3 / 7])

    found = experts.imbalance([logits], row, shares, top_k)

    expected, begin = 0.0, 0
    for length, share in zip(lengths, shares.tolist(), strict=True):
        probs = logits[begin : begin + length].softmax(-1)
        chosen = [set(each.topk(top_k).indices.tolist()) for each in probs]
        for i in range(num):
            used = num / (top_k * length) * sum(i in each for each in chosen)
            expected += share * used * float(probs[:, i].sum()) / length
        begin += length
    assert float(found) == pytest.approx(expected, rel=1e-6)
    even = torch.eye(num).repeat(1, 1) * 50.0
    assert float(experts.imbalance([even], row_of([num], CPU), torch.ones(1), 1)) == pytest.approx(1.0, abs=1e-4)


def test_the_loss_of_balance_is_the_same_however_a_batch_is_cut_and_has_a_gradient(mixture):
    weights = []
    for options in ({}, {"micro_batch_tokens": 24}, {"gradient_checkpointing": True}, {"router_aux_coef": 0.0}):
        subject = engine(mixture, **{"router_aux_coef": 0.1, **options})
        subject._optimizer = torch.optim.SGD(subject._masters.values(), lr=1e-2)
        subject.train(1, ranks.batch(1))
        weights.append(torch.cat([value.flatten() for _, value in sorted(load(bytes(image_of(subject))).items())]))
    whole, cut, checkpointed, without = weights

    assert (cut - whole).abs().max() < 1e-6
    assert (checkpointed - whole).abs().max() < 1e-6
    assert (without - whole).abs().max() > 1e-5


def test_training_for_balance_alone_brings_balance(mixture):
    subject = engine(mixture, router_aux_coef=10.0, lr=1e-2)
    rows = [subject.train(step, ranks.batch(1)).metrics["policy/router_imbalance"] for step in range(1, 6)]

    assert rows[-1] < rows[0]


def test_in_bfloat16_a_router_multiplies_in_float32(mixture):
    model = read_model(mixture, "bfloat16", CPU)
    router = model.model.layers[0].mlp.gate
    hidden = torch.randn(6, 32, dtype=torch.bfloat16)

    logits, scores, _ = router(hidden)
    logits.sum().backward()

    assert logits.dtype == torch.float32
    assert torch.equal(logits, hidden.float() @ router.weight.detach().float().t())
    assert scores.dtype == torch.bfloat16
    assert router.weight.grad is not None
    assert router.weight.grad.dtype == torch.bfloat16


def test_in_bfloat16_it_trains(mixture):
    subject = engine(mixture, dtype="bfloat16", gradient_checkpointing=True)

    found = subject.train(1, ranks.batch(1)).metrics

    assert found["optim/updates"] == 1
    assert found["policy/router_imbalance"] > 1.0


def test_a_row_tells_the_routers_logits_only_where_they_are_watched(mixture):
    model, row = read_model(mixture, "float32", CPU), row_of([4, 3], CPU)
    before = computed(model, torch.arange(7), row).routed

    mixture_of(model).watch_routers()
    found = computed(model, torch.arange(7), row).routed

    assert before == ()
    assert [logits.shape for logits in found] == [(7, 5), (7, 5)]


def test_experts_that_files_name_in_other_ways_are_refused_by_name(tmp_path):
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    MixtralForCausalLM(MixtralConfig(vocab_size=32, num_local_experts=2, **sizes)).save_pretrained(tmp_path)

    with pytest.raises(TrainError, match=r"MixtralForCausalLM stores its experts by names like .*block_sparse_moe.*not built in"):
        read_model(tmp_path, "float32", CPU)
