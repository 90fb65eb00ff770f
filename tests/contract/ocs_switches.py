"""Switches for the contract suite of OCS drivers: the emulated one, a fake Polatis, and Debian's netconfd."""

import asyncio
import base64
import getpass
import json
import shutil
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from rubato.actors.fabric.driver import Login, OcsDriver, SwitchCapabilities
from rubato.actors.fabric.emulated import Dialect, HttpFront, OcsDevice, encoded
from rubato.actors.fabric.restconf import Restconf, SonicDriver
from rubato_ocs.netconf import NetconfDriver, NetconfSession
from rubato_ocs.polatis import PAIRS, PolatisDriver

LOGIN = Login("rubato", "secret")
CAPABILITIES = SwitchCapabilities(8, 0.005)
YANG = Path(__file__).parent / "yang"
SYSTEM_YANG = Path("/usr/share/yuma/modules")


def sonic(transport: httpx.AsyncBaseTransport, login: Login = LOGIN) -> SonicDriver:
    return SonicDriver(Restconf("http://switch", login, timeout_s=5, transport=transport), CAPABILITIES)


def polatis(transport: httpx.AsyncBaseTransport, login: Login = LOGIN) -> PolatisDriver:
    return PolatisDriver(Restconf("http://switch", login, timeout_s=5, transport=transport), CAPABILITIES)


def answering(status: int, body: object) -> httpx.MockTransport:
    """Says the same to everything."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return httpx.MockTransport(lambda request: httpx.Response(status, content=content))


def emulated() -> httpx.MockTransport:
    dialect = Dialect(OcsDevice(CAPABILITIES.num_ports, CAPABILITIES.reconfiguration_s), LOGIN)

    def answer(request: httpx.Request) -> httpx.Response:
        authorization = request.headers.get("authorization", "").encode()
        found = dialect.answer(request.method, request.url.path, authorization, request.content)
        return httpx.Response(found.status, content=encoded(found))

    return httpx.MockTransport(answer)


class FakePolatis:
    """Keeps the list that was put; refuses one that uses a port twice, as the model's `unique` does."""

    def __init__(self) -> None:
        self.pairs: list[dict[str, int]] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        right = "Basic " + base64.b64encode(b"rubato:secret").decode()
        if request.headers.get("authorization") != right:
            return httpx.Response(401)
        assert request.url.path == PAIRS
        if request.method == "PUT":
            pairs = json.loads(request.content)["optical-switch:cross-connects"]["pair"]
            if any(len({pair[side] for pair in pairs}) < len(pairs) for side in ("ingress", "egress")):
                return httpx.Response(409, json={"errors": {"error": [{"error-tag": "in-use"}]}})
            self.pairs = pairs
            return httpx.Response(204)
        if not self.pairs:
            return httpx.Response(204)
        return httpx.Response(200, json={"optical-switch:cross-connects": {"pair": self.pairs}})


@asynccontextmanager
async def over_http() -> AsyncGenerator[OcsDriver]:
    """The emulated switch behind uvicorn, on a free port of this host."""
    front = HttpFront(Dialect(OcsDevice(8, CAPABILITIES.reconfiguration_s), LOGIN), "127.0.0.1:0")
    serving = asyncio.get_running_loop().create_task(front.serve())
    driver = SonicDriver(Restconf(front.url, LOGIN, timeout_s=5), CAPABILITIES)
    yield driver
    await driver.close()
    front.stop()
    await serving


@asynccontextmanager
async def over_netconf(folder: Path) -> AsyncGenerator[OcsDriver]:
    """netconfd with the optical-switch model; its own subsystem program stands in for ssh. It keeps small files in ~/.yuma, wherever it is told to; a
    startup configuration there is neither read nor written."""
    if not shutil.which("netconfd"):
        pytest.skip("no netconfd on the PATH: apt-get install netconfd")
    address = folder / "netconfd.sock"
    server = await asyncio.create_subprocess_exec(
        "netconfd", "--module=optical-switch", f"--modpath={YANG}:{SYSTEM_YANG}", "--no-startup", "--with-startup=true",
        f"--ncxserver-sockname={address}", f"--superuser={getpass.getuser()}", f"--log={folder}/log",
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    try:
        async with asyncio.timeout(20):
            while not address.exists():
                assert server.returncode is None, (folder / "log").read_text()
                await asyncio.sleep(0.02)
        session = NetconfSession(
            ("env", "SSH_CONNECTION=127.0.0.1 1 127.0.0.1 830", f"USER={getpass.getuser()}",
             "netconf-subsystem", f"--ncxserver-sockname=830@{address}"), timeout_s=10,
        )  # fmt: skip
        driver = NetconfDriver(session, CAPABILITIES)
        yield driver
        await driver.close()
    finally:
        if server.returncode is None:
            server.kill()
        await server.wait()
