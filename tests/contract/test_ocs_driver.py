"""The OcsDriver contract, over every driver and a switch that speaks its protocol; then what each protocol can get wrong."""

import asyncio
import shutil
from contextlib import asynccontextmanager, suppress

import httpx
import pytest
import pytest_asyncio

from rubato.actors.fabric.driver import (
    BadAnswer,
    BadCredentials,
    FabricError,
    Login,
    NoSuchPort,
    PartlyApplied,
    PortConflict,
    SwitchRefused,
    SwitchTimedOut,
    SwitchUnreachable,
)
from rubato.actors.fabric.restconf import Restconf, SonicDriver
from rubato.planning.circuits import Cross
from rubato.sim.virtual import run_virtual
from tests.contract.ocs_switches import CAPABILITIES, FakePolatis, answering, emulated, over_http, over_netconf, polatis, sonic

A, B, C, D = Cross(0, 4), Cross(4, 0), Cross(1, 5), Cross(0, 5)


@asynccontextmanager
async def plain(driver):
    yield driver
    await driver.close()


@pytest_asyncio.fixture(params=["sonic", "sonic over http", "polatis", "netconf"])
async def driver(request, tmp_path):
    opened = {
        "sonic": lambda: plain(sonic(emulated())),
        "sonic over http": over_http,
        "polatis": lambda: plain(polatis(httpx.MockTransport(FakePolatis()))),
        "netconf": lambda: over_netconf(tmp_path),
    }[request.param]
    async with opened() as made:
        yield made


async def lit(driver):
    """What carries light once the mirrors rest."""
    for _ in range(2000):
        state = await driver.read()
        if "tuning" not in state.circuits.values():
            return state.lit
        await asyncio.sleep(0.002)
    raise AssertionError("the mirrors never rest")


@pytest.mark.parametrize("driver", ["sonic", "sonic over http", "polatis"], indirect=True)
async def test_a_driver_that_is_closed_says_that_the_switch_is_out_of_reach(driver):
    await driver.apply((), (A,))

    await driver.close()

    for asked in (driver.read(), driver.apply((A,), (B,))):
        with pytest.raises(SwitchUnreachable, match="the connection was closed before"):
            await asked


async def test_a_switch_holds_nothing_at_first(driver):
    assert (await driver.read()).circuits == {}


async def test_what_is_added_carries_light_in_the_end(driver):
    await driver.apply((), (A, B))

    assert await lit(driver) == (A, B)


async def test_one_request_deletes_and_adds_and_leaves_the_rest(driver):
    await driver.apply((), (A, B, C))

    await driver.apply((A, C), (D,))

    assert await lit(driver) == (D, B)


async def test_a_circuit_may_change_one_end(driver):
    await driver.apply((), (A, B))

    await driver.apply((A,), (C._replace(ingress=0),))

    assert await lit(driver) == (D, B)


async def test_all_can_be_deleted(driver):
    await driver.apply((), (A, B))

    await driver.apply((A, B), ())

    assert (await driver.read()).circuits == {}


async def test_a_circuit_over_a_taken_port_never_looks_as_if_it_carried_light(driver):
    await driver.apply((), (A, B))

    with suppress(PortConflict):
        await driver.apply((), (Cross(0, 6),))
    assert await lit(driver) == (A, B)


async def test_a_port_that_the_switch_does_not_have_is_refused_and_changes_nothing(driver):
    await driver.apply((), (A,))

    with pytest.raises((NoSuchPort, SwitchRefused)):
        await driver.apply((), (Cross(3, 8),))

    assert await lit(driver) == (A,)


async def test_deleting_what_is_not_there_is_never_taken_for_a_success_that_changed_something(driver):
    await driver.apply((), (A,))

    with suppress(FabricError):
        await driver.apply((C,), (B,))
    assert set(await lit(driver)) <= {A, B}
    assert A in await lit(driver)


@pytest.mark.parametrize("login", [Login("rubato", "wrong"), Login()])
@pytest.mark.parametrize("make", [lambda at: sonic(emulated(), at), lambda at: polatis(httpx.MockTransport(FakePolatis()), at)])
async def test_wrong_credentials_are_named(make, login):
    made = make(login)

    with pytest.raises(BadCredentials, match="switch_password_file"):
        await made.read()
    with pytest.raises(BadCredentials):
        await made.apply((), (A,))


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ({"sonic-ocs:output": {"deleted_count": 0, "added_count": 1}}, PartlyApplied),
        ({"sonic-ocs:output": {}}, BadAnswer),
        ({"sonic-ocs:output": {"deleted_count": "x", "added_count": 2}}, BadAnswer),
        (b'{"sonic-ocs:output": {"deleted_count": 1e999, "added_count": 2}}', BadAnswer),
        ({"ietf-restconf:errors": {"error": [{"error-message": "no"}]}}, SwitchRefused),
        (b"<html>", BadAnswer),
        (b"", BadAnswer),
        ([1], BadAnswer),
    ],
)
async def test_a_200_that_is_no_success_is_none(body, error):
    made = sonic(answering(200, body))

    with pytest.raises(error):
        await made.apply((), (A, B))


@pytest.mark.parametrize("make", [sonic, polatis])
@pytest.mark.parametrize("body", [b"<html>", b"[" * 200_000, [1], {"other": 1}, {"sonic-ocs:OCS_CROSS_CONNECT": {"OCS_CROSS_CONNECT_LIST": [{"cross_connect_id": "1-2"}]}, "optical-switch:cross-connects": {"pair": [{"ingress": "x"}]}}, b'{"sonic-ocs:OCS_CROSS_CONNECT": 1e999, "optical-switch:cross-connects": {"pair": [{"ingress": 1e999, "egress": 9}]}}'])  # fmt: skip
async def test_a_state_that_is_not_in_the_dialect_is_refused(make, body):
    with pytest.raises(BadAnswer):
        await make(answering(200, body)).read()


@pytest.mark.parametrize("around", [b"%b", b'{"error": %b}'])
async def test_an_answer_that_nests_almost_too_deeply_is_no_other_error(around):
    depths = iter(range(800, 1000))

    def deeper(request):
        depth = next(depths)
        return httpx.Response(200, content=around % (b"[" * depth + b"]" * depth))

    made = sonic(httpx.MockTransport(deeper))
    for _ in range(200):
        with pytest.raises((BadAnswer, SwitchRefused)):
            await made.read()


class Slow(httpx.AsyncByteStream):
    """A body in `num` parts, each `pause_s` after the one before."""

    def __init__(self, part, num, pause_s=0.0):
        self.part, self.num, self.pause_s = part, num, pause_s
        self.sent = 0

    async def __aiter__(self):
        for _ in range(self.num):
            self.sent += 1
            await asyncio.sleep(self.pause_s)
            yield self.part


@pytest.mark.parametrize("make", [sonic, polatis])
def test_a_switch_that_trickles_has_one_deadline_for_its_whole_answer(make):
    trickle = Slow(b" ", 1000, 0.3)

    async def main():
        with pytest.raises(SwitchTimedOut, match="within 5 s"):
            await make(httpx.MockTransport(lambda request: httpx.Response(200, stream=trickle))).read()

    run_virtual(main)
    assert trickle.sent == 17


@pytest.mark.parametrize("make", [sonic, polatis])
async def test_an_answer_without_end_is_read_no_further_than_its_bound(make):
    flood = Slow(bytes(1 << 20), 40)

    with pytest.raises(BadAnswer, match="more than 16 MiB"):
        await make(httpx.MockTransport(lambda request: httpx.Response(200, stream=flood))).read()

    assert flood.sent == 17


@pytest.mark.parametrize("make", [sonic, polatis])
@pytest.mark.parametrize("status", [400, 404, 500, 503])
async def test_an_error_status_is_named_whatever_the_body(make, status):
    for body in (b"", b"<html>", {"errors": {"error": [{"error-message": "why"}]}}):
        with pytest.raises(SwitchRefused):
            await make(answering(status, body)).apply((), (A,))


@pytest.mark.parametrize(("cause", "error"), [(httpx.ReadTimeout, SwitchTimedOut), (httpx.ConnectError, SwitchUnreachable), (httpx.RemoteProtocolError, SwitchUnreachable)])  # fmt: skip
@pytest.mark.parametrize("make", [sonic, polatis])
async def test_no_answer_is_named(make, cause, error):
    def fail(request):
        raise cause("broken")

    made = make(httpx.MockTransport(fail))

    with pytest.raises(error):
        await made.read()
    with pytest.raises(error):
        await made.apply((), (A,))


async def test_a_polatis_that_keeps_less_than_it_was_given_is_found_out():
    class Forgetful(FakePolatis):
        def __call__(self, request):
            answer = super().__call__(request)
            self.pairs = self.pairs[:1]
            return answer

    with pytest.raises(PartlyApplied, match="of 2 pairs the switch lists 1"):
        await polatis(httpx.MockTransport(Forgetful())).apply((), (A, B))


async def test_a_closed_port_is_unreachable():
    made = SonicDriver(Restconf("http://127.0.0.1:9", Login(), timeout_s=5), CAPABILITIES)

    with pytest.raises(SwitchUnreachable):
        await made.read()
    await made.close()


@pytest.mark.skipif(not shutil.which("netconfd"), reason="no netconfd on the PATH: apt-get install netconfd")
async def test_a_netconf_edit_is_all_or_nothing_and_the_session_goes_on(tmp_path):
    async with over_netconf(tmp_path) as made:
        await made.apply((), (A, B))

        with pytest.raises(SwitchRefused, match="data-missing"):
            await made.apply((C,), (Cross(2, 6),))

        assert await lit(made) == (A, B)
