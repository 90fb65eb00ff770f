"""Engines as fixtures."""

from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import pytest_asyncio

from tests.contract.engines import pristine, running
from tests.models import weights_image, write_model


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(scope="session")
def other_image(tmp_path_factory) -> memoryview:
    """Other weights of the same model."""
    return weights_image(write_model(tmp_path_factory.mktemp("other"), seed=1))


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def slow_starters():
    """Engines that take long to start, by kind, handed from test to test."""
    async with AsyncExitStack() as stack:
        yield stack, {}


@pytest_asyncio.fixture(loop_scope="module")
async def engine(request, model_folder, slow_starters):
    """An engine as it is after its start. vLLM is started anew only where a test left it otherwise."""
    if request.param != "vllm":
        async with running(request.param, model_folder) as engine:
            yield engine
        return
    pytest.importorskip("vllm")
    stack, kept = slow_starters
    if "vllm" not in kept:
        kept["vllm"] = await stack.enter_async_context(running("vllm", model_folder))
    engine = kept["vllm"]
    yield engine
    if not pristine(engine):
        await kept.pop("vllm").stop()
