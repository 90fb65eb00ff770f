"""Which engines share GPUs, and which of them are planned for."""

import msgspec
import pytest

from rubato.actors import catalog
from rubato.actors.messages.orchestration import RequestSeen
from rubato.actors.orchestrator.fleet import Speeds, cache_traffic, carried, servers
from rubato.planning.engine_info import EngineInfo, EngineProfile
from rubato.planning.roofline import Roofline

H800 = EngineProfile("h800", "qwen2.5-14b", 1)


def engine(name, profile=H800, serves="both"):
    return EngineInfo(name, 64, profile=profile, serves=serves)


def test_engines_of_another_pool_share_no_gpus():
    found = servers([engine("a1"), engine("b1"), engine("a2")], lambda name: f"here {name[0]}")

    assert [[each.name for each in server.engines] for server in found] == [["a1", "a2"], ["b1"]]


def test_an_engine_whose_place_nobody_knows_may_share_gpus_with_any():
    merged = [engine("grown"), engine("sleeps")]

    assert servers(merged, {"grown": "here pool", "sleeps": ""}.__getitem__) == []


def test_engines_that_only_prefill_or_whose_hardware_nobody_says_are_left_out():
    given = [engine("prefills", serves="prefill"), engine("decodes", serves="decode"), engine("unknown", None)]

    (server,) = servers(given, lambda name: "here pool")

    assert [each.name for each in server.engines] == ["decodes"]


REAL = EngineProfile("h800", "", 1)
OWN = catalog.model("qwen2.5-7b")


def restarted(*restart_s):
    engines = [msgspec.structs.replace(engine(f"e{num}", REAL), restart_s=each) for num, each in enumerate(restart_s)]
    (server,) = servers(engines, lambda name: "here pool")
    return server


def test_an_engine_that_is_started_anew_costs_its_last_start_and_the_prefill_of_what_it_had():
    speeds = Speeds((), lambda: OWN).of(restarted(20.0, 30.2))

    one, two = speeds[1], speeds[2]
    assert one.spec.model == OWN
    assert one.reconfigure_s(0, two) == 30.0
    assert one.reconfigure_s(5000, two) == pytest.approx(30.0 + two.prefill_s(5000))
    assert one.reconfigure_s(0, one) == 0.0


def test_a_later_start_counts_once_it_was_seen():
    speeds = Speeds((), lambda: OWN)
    speeds.of(restarted(20.0, 20.0))

    found = speeds.of(restarted(20.0, 90.0))

    assert found[2].reconfigure_s(0, found[1]) == 90.0


def test_no_cache_travels_from_an_engine_that_gives_none_away():
    request = RequestSeen("r", "e0", "", 0, 10, 20, 100, 0)

    assert cache_traffic(restarted(20.0, 20.0), [request], {"r": "e1"}, OWN) == ()
    (demand,) = cache_traffic(restarted(0.0, 0.0), [msgspec.structs.replace(request, shown=10, sampled=20)], {"r": "e1"}, OWN)
    assert demand[2] == 30 * OWN.kv_bytes_per_token


class SlowLink(Roofline):
    def kv_move_s(self, tokens):
        return 1000 * super().kv_move_s(tokens)


def test_of_a_switch_the_caches_are_told_that_travel_and_not_those_that_are_computed_again():
    server = restarted(0.0, 0.0)
    (speed, *_) = Speeds((), lambda: OWN).of(server).values()
    asked = RequestSeen("asked", "e0", "", 0, 2000, 0, 100, 0)
    runs = [msgspec.structs.replace(asked, request_id=name, engine=at, sampled=50) for name, at in (("runs", "e0"), ("stays", "e1"))]
    to, degrees = dict.fromkeys(("asked", "runs", "stays"), "e1"), {"e0": 1, "e1": 1}

    assert carried([asked, *runs], to, degrees, {1: speed}) == {"runs": "e1"}, "one that has no token yet has no cache"
    assert carried([asked, *runs], to, degrees, {1: SlowLink(speed.spec)}) == {}
