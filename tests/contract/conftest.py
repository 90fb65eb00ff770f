"""Engines as fixtures."""

import os
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path

import pytest
import pytest_asyncio

from tests.contract.engines import KEY, pristine, running, served
from tests.models import weights_image, write_model


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(scope="session")
def other_image(tmp_path_factory) -> memoryview:
    """Other weights of the same model."""
    return weights_image(write_model(tmp_path_factory.mktemp("other"), seed=1))


@pytest.fixture(scope="session")
def server_of(tmp_path_factory):
    """The URL of a vLLM server of a model folder, started by the first who asks."""
    pytest.importorskip("vllm")
    os.environ[KEY] = "a key of the tests"
    urls: dict[Path, str] = {}
    with ExitStack() as stack:

        def url(folder: Path) -> str:
            if folder not in urls:
                urls[folder] = stack.enter_context(served(folder, tmp_path_factory.mktemp("vllm") / "log"))
            return urls[folder]

        yield url


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def slow_starters():
    """Engines that take long to start, by kind, handed from test to test."""
    async with AsyncExitStack() as stack:
        yield stack, {}


@pytest_asyncio.fixture(loop_scope="module")
async def engine(request, model_folder, slow_starters):
    """An engine as it is after its start. vLLM is started anew only where a test left it otherwise."""
    if request.param != "vllm":
        options = {"url": request.getfixturevalue("server_of")(model_folder)} if request.param == "vllm_server" else {}
        async with running(request.param, model_folder, **options) as engine:
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
