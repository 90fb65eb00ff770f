"""What a URL of sentinels says, what it may not say, and the ways that lead from it; no sentinel is asked."""

import pytest

from rubato.runtime.launch.gate import way_through, way_to
from rubato.runtime.store.redis import RedisStore
from rubato.runtime.store.sentinel import parse
from rubato.runtime.store.store import StoreError

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
        ("redis+sentinel://:secret@h/s?timeout=3", "state.url has the option timeout. With sentinels there are "),
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
