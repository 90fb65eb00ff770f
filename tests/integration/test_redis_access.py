"""Who may do what on a run's Redis: our user only what our scripts do, nobody else anything, and over TLS only with the right authority."""

import asyncio
import os
import secrets
import shutil
import socket
import subprocess
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
from redis.asyncio import Redis
from redis.exceptions import AuthenticationError, NoPermissionError
from redis.exceptions import ConnectionError as LinkError

from rubato.runtime.store.embedded import COMMANDS, EmbeddedRedis, installed_server, rule
from rubato.runtime.store.redis import RedisStore
from rubato.runtime.store.store import StoreUnavailable
from tests.stores import need_server, packaged_program

ROOT = Path(__file__).parents[2]


@pytest.fixture
async def server(tmp_path: Path) -> AsyncGenerator[EmbeddedRedis]:
    server = EmbeddedRedis(tmp_path, program=packaged_program())
    await server.start()
    yield server
    await server.stop()


async def test_our_user_may_do_nothing_but_what_our_scripts_do(server: EmbeddedRedis):
    client = Redis.from_url(server.url, protocol=2)
    forbidden = [
        ("CONFIG", "GET", "*"),
        ("CONFIG", "SET", "dir", "/tmp"),
        ("KEYS", "*"),
        ("FLUSHALL",),
        ("ACL", "LIST"),
        ("DEBUG", "SLEEP", "0"),
        ("MODULE", "LIST"),
        ("REPLICAOF", "10.0.0.1", "6379"),
        ("SCRIPT", "FLUSH"),
        ("SHUTDOWN",),
        ("SUBSCRIBE", "news"),
        ("GET", "another:application"),
        ("EVAL", "return redis.call('get', 'another:application')", "0"),
        ("EVAL", "return redis.call('flushall')", "0"),
    ]
    for words in forbidden:
        with pytest.raises((NoPermissionError, Exception), match=r"(?i)permission|can't run|can't access"):
            await client.execute_command(*words)
    await client.set("rubato:x", "1")

    assert await client.get("rubato:x") == b"1"
    await client.aclose()


@pytest.mark.parametrize("user", ["", "default:guessed@", "rubato:guessed@"])
async def test_nobody_else_may_do_anything(server: EmbeddedRedis, user: str):
    client = Redis.from_url(f"unix://{user}{server.socket}", protocol=2)

    # redis-py wraps the one refusal and not the other.
    with pytest.raises((AuthenticationError, LinkError), match=r"(?i)authentication required|invalid username-password"):
        await client.execute_command("INFO")
    await client.aclose()


def test_the_rule_in_the_documentation_is_the_one_in_use():
    text = (ROOT / "docs" / "security.md").read_text()

    assert f"ACL SETUSER {rule('PASSWORD')}" in text
    assert list(COMMANDS) == sorted(COMMANDS)


async def test_a_user_without_a_right_is_told_which_and_where_to_look(server: EmbeddedRedis, tmp_path: Path):
    store = RedisStore(server.url, "run", patience_s=0.1)
    store._keys = "another:key"  # as on a server that was set up by hand for other keys

    with pytest.raises(StoreUnavailable, match=r"does not allow its user a command: .*docs/security.md"):
        await store.get("k")
    await store.close()


class Authority:
    """A certificate authority of the test's own, and a server certificate for 127.0.0.1."""

    def __init__(self, folder: Path) -> None:
        self.certificate, self.server, self.server_key = folder / "ca.crt", folder / "server.crt", folder / "server.key"
        key, request, names = folder / "ca.key", folder / "server.csr", folder / "names"
        names.write_text("subjectAltName=IP:127.0.0.1,DNS:localhost")
        new = ("-newkey", "rsa:2048", "-nodes", "-days", "2")
        self._run("req", "-x509", *new, "-keyout", key, "-out", self.certificate, "-subj", "/CN=test")
        self._run("req", *new[:3], "-keyout", self.server_key, "-out", request, "-subj", "/CN=127.0.0.1")
        signing = ("-CA", self.certificate, "-CAkey", key, "-CAcreateserial", "-days", "2", "-extfile", names)
        self._run("x509", "-req", "-in", request, *signing, "-out", self.server)

    def _run(self, *words: object) -> None:
        subprocess.run(["openssl", *map(str, words)], check=True, capture_output=True)


@pytest.fixture
async def tls(tmp_path: Path) -> AsyncGenerator[tuple[int, Authority, str]]:
    """Port of a Redis that speaks TLS alone, its authority, and the password of our user."""
    program = need_server(installed_server(), "no redis-server on the PATH")
    if shutil.which("openssl") is None:
        pytest.skip("no openssl on the PATH to make a certificate with")
    authority, password = Authority(tmp_path), secrets.token_urlsafe(16)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    configuration = tmp_path / "redis.conf"
    lines = ["port 0", f"tls-port {port}", "bind 127.0.0.1", "tls-auth-clients no", f'dir "{tmp_path}"', 'save ""']
    lines += [f"tls-cert-file {authority.server}", f"tls-key-file {authority.server_key}"]
    lines += [f"tls-ca-cert-file {authority.certificate}", "user default off", f"user {rule(password)}"]
    configuration.write_text("\n".join(lines) + "\n")
    process = await asyncio.create_subprocess_exec(
        program, configuration, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=dict(os.environ, LC_ALL="C")
    )
    while True:  # it sends no event when it listens
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.close()
            break
        except OSError:
            if process.returncode is not None:
                pytest.skip(f"{program} was built without TLS")
            await asyncio.sleep(0.02)
    yield port, authority, password
    process.terminate()
    await process.wait()


async def test_a_rediss_url_with_the_right_authority_works(tls: tuple[int, Authority, str]):
    port, authority, password = tls
    store = RedisStore(f"rediss://rubato:{password}@127.0.0.1:{port}?ssl_ca_certs={authority.certificate}", "run")

    await store.write({"k": b"v"})

    assert await store.get("k") == b"v"
    await store.close()


async def test_a_server_with_an_unknown_certificate_is_refused_and_the_password_stays_here(tls):
    port, _, password = tls
    store = RedisStore(f"rediss://rubato:{password}@127.0.0.1:{port}", "run", patience_s=0.1)

    with pytest.raises(StoreUnavailable, match="certificate") as told:
        await store.get("k")
    await store.close()

    assert password not in str(told.value)
