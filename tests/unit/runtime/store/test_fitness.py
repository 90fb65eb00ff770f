"""What a launch says of a server of the user's, and refuses there."""

import pytest

from rubato.runtime.config.sections import StateSection
from rubato.runtime.store.fitness import concerns, failed_over, problems, refusal
from rubato.runtime.store.redis import MIN_REPLICAS

SENTINEL = "redis+sentinel://h/s"
SOUND = {"aof_enabled": 1, "maxmemory_policy": "noeviction", "cluster_enabled": 0, MIN_REPLICAS: 1}


def state(durability: str = "everysec", url: str = SENTINEL) -> StateSection:
    return StateSection.model_validate({"url": url, "durability": durability})


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (state("always"), "state.durability=always holds for one server, and a failover may lose writes. Take replicated or everysec."),
        (state("replicated", url=""), "state.durability=replicated needs a server with a replica. Set state.url too, or take always."),
    ],
)
def test_a_durability_that_the_url_can_not_give_is_refused(given: StateSection, said: str):
    assert list(problems(given)) == [said]


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("http://h:secret@x", "state.url"),
        ("redis+sentinel://a:1", "names no service"),
        ("redis://:secret@h?nosuch=1", "the option nosuch. With redis:// there are db."),
        ("redis://h?socket_timeout=abc", "the option socket_timeout"),
        ("redis://h?ssl=1", "the option ssl"),
        ("redis://h?db=x", "a database that is no number"),
        ("redis://h/abc", "a database that is no number"),
        ("rediss://h?ssl_cert_reqs=some", "an ssl_cert_reqs that there is not"),
        ("unix:///tmp/s?port=1", "the option port"),
    ],
)
def test_a_url_that_can_not_be_used_is_told_without_its_password(url: str, said: str):
    (found,) = problems(state(url=url))

    assert said in found
    assert "secret" not in found


@pytest.mark.parametrize(
    "url", ["redis://u:p@h:1/2", "redis://h?db=3", "rediss://h/0?ssl_cert_reqs=none&ssl_ca_certs=/ca", "unix:///tmp/s?password=p&db=1"]
)
def test_a_url_of_one_server_is_taken_with_its_options(url: str):
    assert list(problems(state(url=url))) == []


@pytest.mark.parametrize(
    "given", [state(), state("replicated"), state("replicated", "redis://h"), state("always", "redis://h"), state("always", "")]
)
def test_every_other_is_taken(given: StateSection):
    assert list(problems(given)) == []


@pytest.mark.parametrize(
    ("figures", "durability", "said"),
    [
        (SOUND, "replicated", ""),
        ({**SOUND, MIN_REPLICAS: 0}, "everysec", ""),
        ({**SOUND, MIN_REPLICAS: 0}, "replicated", "state.url names has none. Start one, or take everysec."),
        ({"cluster_enabled": 0}, "replicated", "Set there: min-replicas-to-write 1, and on its replicas too."),
        ({"cluster_enabled": 1}, "everysec", "state.url names a Redis Cluster, which a run does not use"),
    ],
)
def test_a_server_that_a_run_can_not_use_is_refused(figures: dict[str, object], durability: str, said: str):
    found = refusal(figures, state(durability))

    assert said in found
    assert bool(said) == bool(found)


def test_a_master_that_takes_writes_while_it_is_cut_off_is_said_where_a_failover_would_lose_them():
    alone = {name: value for name, value in SOUND.items() if name != MIN_REPLICAS}

    assert "Set there: min-replicas-to-write 1" in concerns(alone, state())[0]
    assert concerns(alone, state(url="redis://h")) == concerns(SOUND, state()) == []


def test_a_failover_is_told_with_what_it_may_have_lost():
    assert failed_over(state("replicated"), "a:1", "b:2") == "the Store failed over from a:1 to b:2. What it had acknowledged is there"
    assert "With state.durability=everysec what it acknowledged just before may be lost" in failed_over(state(), "a:1", "b:2")


def test_the_window_of_what_may_be_forgotten_is_that_of_the_server():
    assert [state(durability).window_s for durability in ("everysec", "replicated")] == [12.0, 2.0]
    assert [state(durability, "redis://h").window_s for durability in ("everysec", "always")] == [2.0, 0.0]
