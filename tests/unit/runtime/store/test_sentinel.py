"""What a URL of sentinels says and may not say, the ways that lead from it, and which sentinel is believed."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack

import pytest
from redis.asyncio.sentinel import MasterNotFoundError

from rubato.runtime.launch.gate import way_through, way_to
from rubato.runtime.store.redis import RedisStore
from rubato.runtime.store.sentinel import Sentinels, parse
from rubato.runtime.store.store import StoreError, StoreUnavailable

URL = "redis+sentinel://rubato:p%40ss@10.0.0.1:26380,10.0.0.2,[fd00::3]:26381/mymaster"


def test_a_url_names_sentinels_a_service_and_how_the_master_is_reached():
    found = parse(URL + "/2?sentinel_password=s%26t")

    assert found.hosts == (("10.0.0.1", 26380), ("10.0.0.2", 26379), ("fd00::3", 26381))
    assert found.service == "mymaster"
    assert found.server == {"username": "rubato", "password": "p@ss", "db": 2}
    assert found.sentinel == {"password": "s&t"}
    assert found.shown == "redis+sentinel://10.0.0.1:26380,10.0.0.2,[fd00::3]:26381/mymaster/2"


def test_tls_is_to_the_sentinels_too():
    found = parse("rediss+sentinel://h/s?ssl_ca_certs=/ca.crt")

    assert found.server == found.sentinel == {"ssl": True, "ssl_ca_certs": "/ca.crt"}


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("redis+sentinel://:secret@h:26379", "state.url names no service, "),
        ("redis+sentinel://:secret@h:26379/s/two", "a database's number"),
        ("redis+sentinel://:secret@/s", "state.url names no sentinel. Write redis+sentinel://HOST:PORT,HOST:PORT/SERVICE."),
        ("redis+sentinel://:secret@h,/s", "state.url names no sentinel."),
        ("redis+sentinel://:secret@h:port/s", "state.url names no sentinel: Port could not be cast to integer value. Write "),
        ("redis+sentinel://:secret@h:99999/s", "state.url names no sentinel: Port out of range 0-65535. Write "),
        ("redis+sentinel://:secret@h/s?timeout=3", "state.url has the option timeout. With redis+sentinel:// there are "),
        (
            "redis+sentinel://:secret@h/s?ssl_ca_certs=/ca.crt",
            "the option ssl_ca_certs. With redis+sentinel:// there are sentinel_password",
        ),
        ("rediss+sentinel://:secret@h/s?ssl_foo=1", "state.url has the option ssl_foo. With rediss+sentinel:// there are "),
        ("rediss+sentinel://:secret@h/s?ssl_cert_reqs=bogus", "It is one of none, optional, required."),
        ("redis+sentinel://:[secret@h/s", "can't be read. Write signs in it as %XX: "),
        ("redis+sentinel://" + ",".join(["h"] * 33) + "/s", "up to 32 sentinels"),
        ("redis+cluster://:secret@h:7000", "state.url names a Redis Cluster, which a run does not use: "),
    ],
)
def test_a_url_that_can_not_be_right_is_refused_at_once_and_without_its_password(url: str, said: str):
    with pytest.raises(StoreError) as told:
        RedisStore(url, "run")

    assert said in str(told.value)
    assert "secret" not in str(told.value)


def test_sentinels_of_this_host_alone_are_behind_the_gate_and_others_are_asked_by_each_host():
    assert way_to("redis+sentinel://127.0.0.1:1,[::1]:2/s") is not None
    assert way_to("redis+sentinel://127.0.0.1:1,10.0.0.2:2/s") is None
    assert way_to("rediss+sentinel://127.0.0.1:1/s") is None


def test_behind_the_gate_is_the_same_user_and_database_and_no_password_of_a_sentinel(tmp_path):
    way = way_through("redis+sentinel://rubato:${STATE_PASSWORD}@127.0.0.1:1,127.0.0.1:2/s/2?sentinel_password=x", tmp_path / "s")

    assert way == f"unix://{tmp_path / 's'}?username=rubato&password=${{STATE_PASSWORD}}&db=2"
    assert way_through("redis://127.0.0.1/3", tmp_path / "s") == f"unix://{tmp_path / 's'}?db=3"


# -- which is believed -----------------------------------------------------------------------------------------------


class SaidMaster:
    """What a sentinel says, over a socket of its own: of one service, or of none where `epoch` is 0."""

    def __init__(self, port: int, epoch: int, flags: str = "master") -> None:
        self.port, self.epoch, self.flags = port, epoch, flags
        self.asked = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            words = [(await reader.readline(), await reader.readline())[1].strip() for _ in range(int(line[1:]))]
            writer.write(self._masters() if words[0] == b"SENTINEL" else b"+OK\r\n")
        writer.close()

    def _masters(self) -> bytes:
        self.asked += 1
        told = {
            "name": "s",
            "ip": "127.0.0.1",
            "port": self.port,
            "flags": self.flags,
            "num-other-sentinels": 2,
            "config-epoch": self.epoch,
        }
        text = b"".join(b"$%d\r\n%s\r\n" % (len(word), word) for pair in told.items() for word in (str(each).encode() for each in pair))
        return b"*1\r\n*%d\r\n%s" % (2 * len(told), text) if self.epoch else b"*0\r\n"


@pytest.fixture
async def listening() -> AsyncGenerator[Callable]:
    """Sentinels that say what they are made with."""
    async with AsyncExitStack() as stack:

        async def begin(*said: SaidMaster) -> Sentinels:
            servers = [await stack.enter_async_context(await asyncio.start_server(each.serve, "127.0.0.1", 0)) for each in said]
            hosts = ",".join(f"127.0.0.1:{server.sockets[0].getsockname()[1]}" for server in servers)
            return Sentinels(parse(f"redis+sentinel://{hosts}/s"))

        yield begin


async def test_a_sentinel_that_was_cut_off_is_not_believed_once_a_newer_configuration_was_seen(listening):
    first, second = SaidMaster(1, epoch=3), SaidMaster(1, epoch=3)
    sentinels = await listening(first, second)
    before = await sentinels.discover_master("s")
    first.port, first.epoch = 2, 4
    after = await sentinels.discover_master("s")
    first.flags = "master,s_down"

    with pytest.raises(MasterNotFoundError, match=r"sees the master of s down; .* names the master of before"):
        await sentinels.discover_master("s")

    assert (before, after) == (("127.0.0.1", 1), ("127.0.0.1", 2))
    second.port, second.epoch = 3, 5
    assert await sentinels.discover_master("s") == ("127.0.0.1", 3)


async def test_the_one_that_answered_is_asked_first_the_next_time(listening):
    first, second = SaidMaster(1, epoch=1, flags="master,o_down"), SaidMaster(2, epoch=1)
    sentinels = await listening(first, second)

    for _ in range(3):
        await sentinels.discover_master("s")

    assert (first.asked, second.asked) == (1, 3)


async def test_a_service_that_no_sentinel_knows_is_told_at_once(listening):
    sentinels = await listening(SaidMaster(1, epoch=0), SaidMaster(1, epoch=0))

    with pytest.raises(StoreUnavailable, match=r"know no service 's' \(they know: none\)\. Correct state\.url\."):
        await sentinels.discover_master("s")
