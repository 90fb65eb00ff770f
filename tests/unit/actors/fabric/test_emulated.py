"""The emulated switch: what is dark when, whom a conflict costs its port, and how the dialect refuses."""

import asyncio
import base64
import json

import pytest

from rubato.actors.fabric.driver import Login
from rubato.actors.fabric.emulated import Dialect, OcsDevice
from rubato.actors.fabric.restconf import BULK, CONFIG, DATA, TABLE
from rubato.planning.circuits import Cross

A, B, C = Cross(0, 4), Cross(4, 0), Cross(1, 5)
LOGIN = Login("rubato", "secret")
RIGHT = b"Basic " + base64.b64encode(b"rubato:secret")


@pytest.fixture
def with_device(on_stage):
    def run(play):
        async def main(context):
            await play(OcsDevice(8, 0.010))

        on_stage(main)

    return run


def bulk(delete=(), add=()):
    entries = [{"cross_connect_id": each, "a_side": "", "b_side": ""} for each in add]
    return json.dumps({"sonic-ocs:input": {"delete": list(delete), "add": entries}}).encode()


def test_new_circuits_carry_light_after_the_delay(with_device):
    async def play(device):
        assert device.update((), (A, B)) == (0, 2)

        assert device.status() == {A: "tuning", B: "tuning"}
        await asyncio.sleep(0.010)
        assert device.status() == {A: "tuned", B: "tuned"}

    with_device(play)


def test_while_mirrors_move_the_others_stay_lit(with_device):
    async def play(device):
        device.update((), (A, B))
        await asyncio.sleep(0.010)

        device.update((B,), (C,))

        assert device.status() == {A: "tuned", C: "tuning"}

    with_device(play)


def test_changes_are_made_one_after_another(with_device):
    async def play(device):
        device.update((), (A,))
        device.update((), (B,))
        await asyncio.sleep(0.010)

        assert device.status() == {A: "tuned", B: "tuning"}
        await asyncio.sleep(0.010)
        assert device.status() == {A: "tuned", B: "tuned"}

    with_device(play)


def test_a_circuit_that_is_lit_while_the_last_light_is_dealt_with_is_told_of_next(with_device):
    async def play(device):
        loop, seen = asyncio.get_running_loop(), []
        device.update((), (A, B))

        async with asyncio.timeout(1):
            async for lit in device.light():
                seen.append(lit)
                if lit:
                    break
                loop.now += 0.020

        assert seen == [(), (A, B)]

    with_device(play)


def test_one_circuit_that_wants_a_taken_port_becomes_invalid(with_device):
    async def play(device):
        device.update((), (A, B))

        device.update((), (Cross(0, 7),))

        assert device.status() == {A: "tuning", Cross(0, 7): "invalid", B: "tuning"}

    with_device(play)


def test_several_circuits_take_the_ports_of_the_old_ones(with_device):
    async def play(device):
        device.update((), (A, B))

        device.update((), (Cross(0, 7), C))

        assert device.status()[A] == "invalid"
        assert device.status()[Cross(0, 7)] == "tuning"

    with_device(play)


def test_an_invalid_circuit_stays_so_until_it_is_deleted_and_added_anew(with_device):
    async def play(device):
        device.update((), (A, B))
        device.update((), (Cross(0, 7), C))
        device.update((Cross(0, 7),), ())

        assert device.update((), (A,)) == (0, 1)
        assert device.status()[A] == "invalid"
        assert device.update((A,), (A,)) == (1, 1)
        assert device.status()[A] == "tuning"

    with_device(play)


def test_circuits_over_a_dead_port_fail(with_device):
    async def play(device):
        device.dead_ports.add(4)
        device.update((), (A, B, C))
        await asyncio.sleep(1)

        assert device.status() == {A: "failed", C: "tuned", B: "failed"}

    with_device(play)


@pytest.mark.parametrize(
    ("method", "path", "authorization", "body", "status"),
    [
        ("GET", f"{DATA}/{CONFIG}", b"", b"", 401),
        ("GET", f"{DATA}/{CONFIG}", b"Basic cnViYXRvOndyb25n", b"", 401),
        ("GET", "/restconf/data/elsewhere", RIGHT, b"", 404),
        ("POST", BULK, RIGHT, b"{", 400),
        ("POST", BULK, RIGHT, b"[" * 200_000, 400),
        ("POST", BULK, RIGHT, b"[]", 400),
        ("POST", BULK, RIGHT, b'{"sonic-ocs:input": 1}', 400),
        ("POST", BULK, RIGHT, b"\xff\xfe", 400),
        ("POST", BULK, RIGHT, bulk(add=["1A-9B"]), 400),
        ("POST", BULK, RIGHT, bulk(add=["0A-1B"]), 400),
        ("POST", BULK, RIGHT, bulk(add=["1A"]), 400),
        ("DELETE", f"{DATA}/{CONFIG}/{CONFIG}_LIST=1A-2B", RIGHT, b"", 404),
    ],
)
def test_the_dialect_refuses_what_it_does_not_know(with_device, method, path, authorization, body, status):
    async def play(device):
        device.update((), (A,))

        answer = Dialect(device, LOGIN).answer(method, path, authorization, body)

        assert answer.status == status
        assert "error-message" in answer.body["ietf-restconf:errors"]["error"][0]
        assert list(device.status()) == [A]

    with_device(play)


def test_single_circuits_are_patched_in_and_deleted(with_device):
    async def play(device):
        dialect = Dialect(device, LOGIN)
        one = {f"sonic-ocs:{CONFIG}": {f"{CONFIG}_LIST": [{"cross_connect_id": "1A-5B"}]}}

        assert dialect.answer("PATCH", f"{DATA}/{CONFIG}", RIGHT, json.dumps(one).encode()).status == 204
        listed = dialect.answer("GET", f"{DATA}/{TABLE}", RIGHT, b"").body[f"sonic-ocs:{TABLE}"][f"{TABLE}_LIST"]
        assert listed == [{"cross_connect_id": "1A-5B", "a_side": "1A", "b_side": "5B", "status": "tuning"}]
        assert dialect.answer("DELETE", f"{DATA}/{CONFIG}/{CONFIG}_LIST=1A-5B", RIGHT, b"").status == 204
        assert device.status() == {}

    with_device(play)
