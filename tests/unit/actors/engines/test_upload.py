"""Weights on their way onto a GPU, and by what is attended there."""

import pytest
import torch

from rubato.actors.config import ModelSection, TrainSection
from rubato.actors.engines.runner import ModelRunner, PinnedBuffers
from rubato.actors.engines.section import EngineSection
from rubato.actors.training.torch_train import TorchTrainEngine
from tests.models import write_model

NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def attend_by_cudnn(on: bool) -> None:
    torch.backends.cuda.enable_cudnn_sdp(on)


@pytest.fixture
def cudnn_plans():
    """As a process begins."""
    before = torch.backends.cuda.cudnn_sdp_enabled()
    attend_by_cudnn(True)
    yield
    attend_by_cudnn(before)


def test_no_engine_attends_by_what_is_planned_anew_for_each_length(cudnn_plans, tmp_path):
    ModelRunner.load(write_model(tmp_path), ModelSection(device="cpu"), EngineSection(num_slots=2, max_len=64))

    assert not torch.backends.cuda.cudnn_sdp_enabled()


def test_no_trainer_attends_by_what_is_planned_anew_for_each_shape(cudnn_plans):
    TorchTrainEngine(ModelSection(device="cpu"), TrainSection(), steps=1, seed=1)

    assert not torch.backends.cuda.cudnn_sdp_enabled()


@pytest.mark.gpu
@NEEDS_GPU
@pytest.mark.parametrize("size", [0, 1, 7, 1 << 23, (1 << 23) + 1, 3 << 23, (5 << 22) + 3])
def test_what_is_sent_arrives_whole_though_it_is_changed_at_once(size):
    buffers = PinnedBuffers(torch.device("cuda"))
    for dtype in (torch.bfloat16, torch.float32):
        tensor = torch.randn(size).to(dtype)
        expected = tensor.clone()

        sent = buffers.send(tensor)
        tensor.zero_()

        assert sent.is_cuda
        assert torch.equal(sent.cpu(), expected)
