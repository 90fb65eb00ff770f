"""A state URL that can't be right is refused at once; one that nobody answers, after the patience of its store."""

import asyncio
from pathlib import Path

import pytest

from rubato.runtime.store.redis import RedisStore
from rubato.runtime.store.store import StoreError, StoreUnavailable


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("http://:secret@host:80", "state.url starts with http://; "),
        ("user:secret@localhost:6379", "state.url names no protocol; "),
        ("", "state.url names no protocol; "),
    ],
)
def test_a_url_of_no_store_is_refused_with_what_to_write_and_without_its_password(url: str, said: str):
    with pytest.raises(StoreError) as told:
        RedisStore(url, "run")

    assert (
        str(told.value)
        == f"{said}write one of redis://, rediss://, unix://, redis+sentinel://, rediss+sentinel:// and the server's address."
    )


@pytest.mark.parametrize("run_id", ["", "a{b}"])
def test_a_run_id_that_would_break_its_keys_is_refused(run_id: str):
    with pytest.raises(ValueError, match="run id"):
        RedisStore("redis://localhost", run_id)


async def test_a_socket_that_is_missing_is_named_with_what_to_do_and_without_its_password(tmp_path: Path):
    store = RedisStore(f"unix://{tmp_path}/no.sock?password=secret", "run", patience_s=0.1)

    with pytest.raises(StoreUnavailable) as told:
        await store.get("k")

    await store.close()
    sentence = str(told.value)
    assert sentence.startswith(f"unix://{tmp_path}/no.sock could not be reached for 0 s (")
    assert sentence.endswith("Start that server or correct state.url, or leave state.url out to use the embedded server.")
    assert "secret" not in sentence


async def test_a_server_that_asks_for_another_password_is_not_asked_twice(tmp_path: Path):
    attempts = 0

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal attempts
        attempts += 1
        await reader.read(1000)
        writer.write(b"-WRONGPASS invalid username-password pair or user is disabled.\r\n")
        await reader.read(1000)
        writer.close()

    server = await asyncio.start_unix_server(refuse, tmp_path / "s.sock")
    store = RedisStore(f"unix://{tmp_path}/s.sock?password=secret", "run")

    with pytest.raises(StoreUnavailable) as told:
        await store.get("k")

    await store.close()
    server.close()
    await server.wait_closed()
    assert attempts == 1
    assert str(told.value) == (
        f"unix://{tmp_path}/s.sock refused the password. Set state.url with one, or leave state.url out to use the embedded server."
    )
