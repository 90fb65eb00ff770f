"""The scope that a run shares: whoever has its address reaches those keys alone, and finds them after the server was started again."""

import pytest
from redis.asyncio import Redis
from redis.exceptions import NoPermissionError

from rubato.runtime.errors import LaunchError
from rubato.runtime.launch.folder import RunFolder
from rubato.runtime.launch.shared import FILE, SharedScope, open_shared, password_for, scope_of, write_shared
from rubato.runtime.store.embedded import EmbeddedRedis, ScopedGuest
from rubato.runtime.store.redis import RedisStore

RUN, PASSWORD = "lab-1234", "a" * 32


@pytest.fixture
async def server(tmp_path):
    guest = ScopedGuest(scope_of(RUN), password_for(PASSWORD))
    server = EmbeddedRedis(tmp_path, password=PASSWORD, guest=guest)
    await server.start()
    yield server
    await server.stop()


async def test_a_guest_reads_and_writes_its_scope_and_no_other_key(server, tmp_path):
    write_shared(tmp_path, SharedScope(scope_of(RUN), server.guest_url))
    shared = open_shared(tmp_path)
    mine, others = RedisStore(server.url, RUN), RedisStore(server.guest_url, RUN)
    owner = RedisStore(server.url, scope_of(RUN))
    await mine.write({"jobs/a": b"secret"})

    await shared.write({"permits/line/x": b"1"})
    assert await shared.get("permits/line/x") == b"1"
    assert await owner.get("permits/line/x") == b"1"
    with pytest.raises(Exception, match=r"no permission|NOPERM|refused"):
        await others.get("jobs/a")
    with pytest.raises(Exception, match=r"no permission|NOPERM|refused"):
        await others.write({"jobs/a": b"mine"})
    link = Redis.from_url(server.guest_url)
    for command in (("KEYS", "*"), ("CONFIG", "GET", "*"), ("ACL", "LIST"), ("HGETALL", f"rubato:{{{RUN}}}:keys")):
        with pytest.raises(NoPermissionError):
            await link.execute_command(*command)
    await link.aclose()
    for store in (shared, mine, others, owner):
        await store.close()


def test_a_guest_s_password_tells_nothing_of_the_owner_s():
    assert PASSWORD not in password_for(PASSWORD)
    assert password_for(PASSWORD) != password_for("b" * 32)


def test_an_address_that_others_may_read_is_refused(tmp_path):
    write_shared(tmp_path, SharedScope(scope_of(RUN), "redis://h"))
    assert (tmp_path / FILE).stat().st_mode & 0o777 == 0o600
    (tmp_path / FILE).chmod(0o644)

    with pytest.raises(LaunchError, match=r"may be read by others \(mode 644\)"):
        open_shared(tmp_path)


def test_a_folder_that_shares_nothing_is_told(tmp_path):
    with pytest.raises(LaunchError, match="shares nothing"):
        open_shared(tmp_path)


def test_sockets_of_a_killed_launch_lie_where_they_lay_for_the_next(tmp_path):
    killed = RunFolder(tmp_path / "run")
    card = killed.open(resume=False, force=False)
    killed.config.write_text("")
    killed.write(card)
    killed._lock.close()  # as the kernel does when a process dies

    again = RunFolder(tmp_path / "run")
    assert again.open(resume=True, force=False, same_sockets=True).sockets == card.sockets
    again.close()
