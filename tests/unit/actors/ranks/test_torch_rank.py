"""Several ranks against one: what a step computes, what is published, and what a checkpoint holds."""

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load as load_tensors
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rubato.actors.config import LOSSES
from rubato.actors.training.train_engine import TrainError, image_of
from rubato.runtime.blobs import parts
from tests import ranks
from tools.bench.forked import forked

STEPS = 3
USUAL = {"lr": 1e-2, "minibatches": 1, "micro_batch_tokens": 64}


class Case(NamedTuple):
    """One way to train, and how far several ranks may be from one."""

    options: dict[str, Any]
    grads: float = 1e-5
    weights: float = 1e-6
    figures: float = 1e-6

    @property
    def model(self) -> str:
        return self.options.get("wide", "float32")


def in_float64(**options: Any) -> Case:
    return Case({"wide": "float64", **options}, grads=1e-10, weights=1e-6)


IN_FLOAT64 = {loss: in_float64(loss=loss) for loss in LOSSES}
IN_FLOAT32 = {f"{loss} in float32": Case({"loss": loss}) for loss in LOSSES}
FEW = {
    "many micro-batches, two updates, recomputed": in_float64(loss="grpo", minibatches=2, proximal="recomputed", micro_batch_tokens=16),
    "one micro-batch on a few ranks": Case({"micro_batch_tokens": 512}),
}
MORE = {
    "shares in host memory": Case({"offload": True}),
    "clipped": in_float64(max_grad_norm=0.05),
    "a reference model": in_float64(kl_coef=0.1),
    "activations computed again": Case({"gradient_checkpointing": True, "micro_batch_tokens": 16}),
    "importance by sequence": in_float64(loss="gspo", importance={"level": "sequence", "mode": "mask"}, proximal="recomputed"),
    "masked and over the batch": in_float64(advantage="reinforce_pp", overlong="mask"),
    # Adam divides by the root of what it divides: where a gradient is all but 0, any rounding of it is a whole step.
    "AdamW": Case({"sgd": False}, weights=1e-2 * 1e-2),
    # The two add up products of 8 bits in another order.
    "bfloat16": Case({"dtype": "bfloat16"}, grads=3e-2, weights=1e-3, figures=3e-2),
}  # fmt: skip
ALL = IN_FLOAT64 | IN_FLOAT32 | FEW | MORE


def trained(engine: Any, model: Path) -> dict[str, Any]:
    engine.load(model, None)
    rows = [dict(engine.train(step, ranks.batch(step, version=step - 1)).metrics) for step in range(1, STEPS + 1)]
    tensors = {"grads": engine.grads, "weights": engine.weights()}
    return {"rows": rows, **{kind: {name: value.double().tolist() for name, value in found.items()} for kind, found in tensors.items()}}


def of_ranks(folders: dict[str, Path], folder: Path, mesh: tuple[int, int], cases: dict[str, Case]) -> dict[str, Any]:
    """What the first of the ranks has of each case: one fork of them computes all."""

    def work(rank: int) -> dict[str, Any]:
        found = {}
        for number, (name, case) in enumerate(cases.items()):
            engine = ranks.many(folders[case.model], rank, folder / f"store.{number}", mesh, **USUAL | case.options)
            found[name] = trained(engine, folders[case.model])
            engine.leave()
        return found if rank == 0 else {}

    return forked(mesh[0] * mesh[1], folder, work)[0]


def relative(found: Any, expected: Any) -> float:
    one, other = torch.tensor(found, dtype=torch.float64), torch.tensor(expected, dtype=torch.float64)
    return float((one - other).norm() / other.norm().clamp(min=1e-12))


MESHES = {"2 ranks": (1, 2), "4 ranks": (1, 4), "2 copies of 2 ranks": (2, 2)}


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("mesh", "cases"),
    [
        *(pytest.param(mesh, FEW, id=name) for name, mesh in MESHES.items()),
        pytest.param((1, 2), IN_FLOAT64 | MORE, id="2 ranks, each way to train"),
        *(pytest.param(mesh, ALL, id=f"{name}, all", marks=[pytest.mark.slow, pytest.mark.nightly]) for name, mesh in MESHES.items()),
    ],
)
def test_ranks_learn_what_one_does(model_folder, exact_folder, tmp_path, mesh, cases):
    folders = {"float32": model_folder, "float64": exact_folder}

    found = of_ranks(folders, tmp_path, mesh, cases)

    for name, case in cases.items():
        options = {key: value for key, value in case.options.items() if key != "offload"}
        expected = trained(ranks.one(folders[case.model], **USUAL | options), folders[case.model])
        for row, wanted in zip(found[name]["rows"], expected["rows"], strict=True):
            assert row.keys() == wanted.keys(), name
            for key in ("policy/loss", "optim/grad_norm"):
                assert row[key] == pytest.approx(wanted[key], rel=case.figures, abs=1e-9), (name, key)
            assert row == pytest.approx(wanted, rel=100 * case.figures, abs=1e-5), name
        for tensor, grads in expected["grads"].items():
            assert relative(found[name]["grads"][tensor], grads) <= case.grads, (name, tensor)
        for tensor, weights in expected["weights"].items():
            distance = torch.tensor(found[name]["weights"][tensor]) - torch.tensor(weights)
            assert float(distance.abs().max()) <= case.weights, (name, tensor)


@pytest.mark.parametrize("mesh", [(1, 2), (2, 2)])
@pytest.mark.parametrize("options", [{}, {"kl_coef": 0.1}, {"gradient_checkpointing": True}, {"dtype": "bfloat16"}])
def test_ranks_tell_what_their_collectives_send(model_folder, tmp_path, mesh, options):
    def work(rank: int) -> tuple[tuple[int, int], int]:
        from torch import distributed as dist

        sent, gather, scatter = [0], dist.all_gather_single, dist.reduce_scatter_single

        def counted_gather(output, given, **rest):
            sent[0] += output.numel() * output.itemsize // 2
            return gather(output, given, **rest)

        def counted_scatter(**given):
            sent[0] += given["input"].numel() * given["input"].itemsize // 2
            return scatter(**given)

        engine = loaded(
            ranks.many(model_folder, rank, tmp_path / "store", mesh, **USUAL | {"micro_batch_tokens": 16} | options), model_folder
        )
        engine.exchanged()
        dist.all_gather_single, dist.reduce_scatter_single = counted_gather, counted_scatter
        engine.train(1, ranks.batch(1, version=0))
        return engine.exchanged(), sent[0]

    for (of_shares, of_copies), sent in forked(mesh[0] * mesh[1], tmp_path, work):
        assert sent
        assert of_shares == pytest.approx(sent, rel=0.03)
        assert bool(of_copies) == (mesh[0] > 1)


def test_what_ranks_publish_is_the_image_of_one(model_folder, tmp_path):
    size = len(image_of(loaded(ranks.one(model_folder, **USUAL), model_folder)))
    shared = memoryview(torch.zeros(size, dtype=torch.uint8).share_memory_().numpy())

    def work(rank: int) -> tuple[int, bytes]:
        engine = loaded(ranks.many(model_folder, rank, tmp_path / "store", (2, 2), **USUAL), model_folder)
        engine.export(shared)()
        pieces = parts.joined(engine.pieces())
        rows = bytearray(sum(num for _, num in pieces))
        engine.pack(memoryview(rows))
        return engine.image_bytes(), parts.section_head(pieces) + rows

    told = forked(4, tmp_path, work)

    assert [each for each, _ in told] == [size] * 4
    packed = bytearray(size)
    for _, section in told:
        for at, piece in parts.pieces_in(memoryview(section)):
            assert not any(packed[at : at + len(piece)])
            packed[at : at + len(piece)] = piece
    assert packed == bytes(shared)
    expected = load_tensors(bytes(image_of(loaded(ranks.one(model_folder, **USUAL), model_folder))))
    found = load_tensors(bytes(shared))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_the_rank_that_holds_a_number_that_is_none_names_its_tensor(model_folder, tmp_path):
    size = len(image_of(loaded(ranks.one(model_folder, **USUAL), model_folder)))

    def work(rank: int) -> list[str]:
        engine = loaded(ranks.many(model_folder, rank, tmp_path / "store", (1, 2), **USUAL), model_folder)
        rows = engine._state()["model.layers.0.mlp.up_proj.weight"].to_local()
        if rank == 1:
            rows[-1, -1] = float("inf")
        said = []
        for publish in (lambda: engine.export(memoryview(bytearray(size)))(), lambda: engine.pack(memoryview(bytearray(size)))):
            try:
                publish()
            except TrainError as error:
                said.append(str(error))
        return said

    first, second = forked(2, tmp_path, work)

    assert first == []
    assert len(second) == 2
    for said in second:
        assert said.startswith("model.layers.0.mlp.up_proj.weight is not finite, so this version of the weights is not published")


def test_log_probabilities_are_those_of_one_each_from_one_rank(model_folder, tmp_path):
    sequences = [[1, 2, 3], [4, 5, 6, 7, 8], [9, 10], [11, 12, 13, 14]]

    def work(rank: int) -> list[list[float]]:
        return loaded(ranks.many(model_folder, rank, tmp_path / "store", (1, 2), **USUAL), model_folder).logprobs(sequences)

    first, second = forked(2, tmp_path, work)

    expected = loaded(ranks.one(model_folder, **USUAL), model_folder).logprobs(sequences)
    assert all(bool(one) != bool(other) for one, other in zip(first, second, strict=True))
    for one, other, wanted in zip(first, second, expected, strict=True):
        assert one or other == pytest.approx(wanted, abs=1e-5)


def loaded(engine: Any, model: Path, checkpoint: Path | None = None) -> Any:
    engine.load(model, checkpoint)
    return engine


def test_a_checkpoint_goes_on_with_other_numbers_of_ranks(model_folder, tmp_path, monkeypatch):
    monkeypatch.setattr("rubato.actors.ranks.torch_rank.FILE_BYTES", 20_000)  # several files with an index
    alone = ranks.one(model_folder, **USUAL, sgd=False)
    expected = [ranks.went_on(alone, model_folder, None, 1)]
    expected += [alone.train(step, ranks.batch(step, version=step - 1)).metrics["policy/loss"] for step in (2, 3)]

    losses, checkpoint = [], None
    for step, num in ((1, 2), (2, 4)):
        checkpoint, loss = ranks.saved_by(num, model_folder, tmp_path, step, checkpoint, **USUAL)
        losses.append(loss)
    losses.append(ranks.went_on(ranks.one(model_folder, **USUAL, sgd=False), model_folder, checkpoint, 3))
    ours = loaded(ranks.one(model_folder, **USUAL, sgd=False), model_folder, checkpoint).weights()
    theirs = AutoModelForCausalLM.from_pretrained(checkpoint).state_dict()

    assert losses == pytest.approx(expected, rel=1e-6)
    assert all(torch.equal(theirs[name], value) for name, value in ours.items())
    assert len([*checkpoint.glob("model-*.safetensors")]) > 1
    assert load_file(checkpoint / "optimizer.state").keys() == {
        f"{index}.{name}" for index in range(len(alone._masters)) for name in ("step", "exp_avg", "exp_avg_sq")
    }


@pytest.mark.timeout(600)
def test_a_mixture_of_experts_is_trained_published_and_saved_by_two_ranks_as_by_one(mixture_folder, tmp_path):
    case = {**USUAL, "router_aux_coef": 0.1, "micro_batch_tokens": 32}
    subject = ranks.one(mixture_folder, **case)
    expected = trained(subject, mixture_folder)
    image = image_of(subject)
    shared = memoryview(torch.zeros(len(image), dtype=torch.uint8).share_memory_().numpy())

    def work(rank: int) -> Any:
        engine = ranks.many(mixture_folder, rank, tmp_path / "store", (1, 2), **case)
        found = trained(engine, mixture_folder)
        engine.export(shared)()
        (tmp_path / "rows").mkdir(exist_ok=True)
        engine.saved(1).write(tmp_path / "rows")
        return found

    found = forked(2, tmp_path, work)[0]

    for row, wanted in zip(found["rows"], expected["rows"], strict=True):
        assert row == pytest.approx(wanted, rel=1e-4, abs=1e-5)
    for kind, most in (("grads", 1e-5), ("weights", 1e-5)):
        assert max(relative(found[kind][name], value) for name, value in expected[kind].items()) <= most
    published, saved = load_tensors(bytes(shared)), load_file(tmp_path / "rows" / "model.safetensors")
    assert published.keys() == load_file(mixture_folder / "model.safetensors").keys()
    for name, value in load_tensors(bytes(image)).items():
        assert torch.allclose(published[name], value, atol=1e-5)
        assert torch.equal(published[name], saved[name])
