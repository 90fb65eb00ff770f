"""What every engine promises of a mixture of experts: it samples what the trainer published, by the trainer's own log-probabilities."""

import random
import struct

import pytest

from rubato.actors.config import ModelSection, TrainSection
from rubato.actors.engines.engine import Work
from rubato.actors.messages.generation import Sampling, VersionSpan
from rubato.actors.messages.samples import Segment, Ticket, Trajectory
from rubato.actors.training.torch_train import TorchTrainEngine
from rubato.actors.training.train_engine import image_of
from rubato.bus.message import unpack_f32, unpack_i32
from tests import ranks
from tests.contract.engines import OF_VLLM, collect, prompt_of, running
from tests.models import VOCAB, logprobs, write_model

pytestmark = pytest.mark.slow


def batch():
    """Two groups of random rollouts with spread."""
    chance = random.Random(1)
    return [[rollout(chance, group, index) for index in range(4)] for group in range(2)]


def rollout(chance, group, index):
    num = chance.randrange(10, 30)
    tokens, mask = [chance.randrange(2, VOCAB) for _ in range(num)], [0, *[1] * (num - 1)]
    spans = (VersionSpan(0, 1, num),)
    segment = Segment(struct.pack(f"<{num}i", *tokens), bytes(mask), struct.pack(f"<{num}f", *[-4.0] * num), spans)
    return Trajectory(Ticket("t", f"g{group}", 1, 0, 0, 0), (segment,), float(index), 1, False, 0.1)


@pytest.mark.parametrize("kind", ["torch"])
async def test_an_engine_samples_what_was_trained(kind, tmp_path):
    folder = write_model(tmp_path / "model", "qwen3_moe")
    trainer = TorchTrainEngine(ModelSection(path=str(folder)), TrainSection(lr=1e-2, minibatches=1), steps=3, seed=1)
    trainer.load(folder, None)
    untrained = TorchTrainEngine(ModelSection(path=str(folder)), TrainSection(), steps=3, seed=1)
    untrained.load(folder, None)
    trainer.train(1, batch())
    work = Work("r", "", prompt_of(0), Sampling(24, seed=1))

    async with running(kind, folder) as engine:
        await engine.update(1, image_of(trainer))
        tokens, _ = await collect(engine, work)

    whole = [*work.prompt, *unpack_i32(tokens.ids)]
    found, expected, before = unpack_f32(tokens.logprobs), trainer.logprobs([whole])[0][-24:], untrained.logprobs([whole])[0][-24:]
    assert max(abs(one - other) for one, other in zip(found, expected, strict=True)) < 1e-3
    assert max(abs(one - other) for one, other in zip(found, before, strict=True)) > 1e-2


@pytest.mark.parametrize("kind", [pytest.param("vllm", marks=OF_VLLM)])
async def test_vllm_begins_with_a_checkpoint_of_two_ranks_and_takes_what_was_trained_since(kind, tmp_path, monkeypatch):
    """Of a mixture, whose experts vLLM lays out anew on a CPU."""
    pytest.importorskip("vllm")
    monkeypatch.setattr("rubato.actors.ranks.torch_rank.FILE_BYTES", 100_000)  # several files with an index
    train = {"lr": 1e-2, "minibatches": 1}
    folder, _ = ranks.saved_by(2, write_model(tmp_path / "model", "qwen3_moe"), tmp_path, 1, None, **train)
    trainer = TorchTrainEngine(ModelSection(path=str(folder)), TrainSection(**train), steps=3, seed=1)
    trainer.load(folder, None)
    work = Work("r", "", prompt_of(0), Sampling(24, seed=1))

    async with running(kind, folder) as engine:
        begun, _ = await collect(engine, work)
        trainer.train(1, batch())
        await engine.update(1, image_of(trainer))
        after, _ = await collect(engine, work)

    first, then = ([*work.prompt, *unpack_i32(tokens.ids)] for tokens in (begun, after))
    assert len([*folder.glob("model-*.safetensors")]) > 1
    assert furthest(begun, logprobs(folder, first)) < 1e-3
    assert furthest(after, trainer.logprobs([then])[0]) < 1e-3
    assert furthest(after, logprobs(folder, then)) > 1e-2


def furthest(tokens, expected):
    """Most that a sampled token's log-probability is from the last of `expected`."""
    found = unpack_f32(tokens.logprobs)
    return max(abs(one - other) for one, other in zip(found, expected[-len(found) :], strict=True))
