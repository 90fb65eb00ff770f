"""Opens the driver that the config names, or that of the emulated switch."""

import ssl
from pathlib import Path
from urllib.parse import urlsplit

import httpx

from actors.fabric.driver import BadCredentials, Login, OcsDriver, SwitchCapabilities, SwitchUnreachable
from actors.fabric.netconf import NetconfDriver, NetconfSession
from actors.fabric.restconf import PolatisDriver, Restconf, SonicDriver
from actors.fabric.section import FabricSection
from actors.messages.fabric import FindSwitch, SwitchRequest
from bus.errors import AskFailed
from runtime.courier import Ref
from runtime.errors import ConfigError

BUS_URL = "http://optical-switch.invalid"
"""Stands for the switch that is reached over the bus; the name never resolves."""


class BusTransport(httpx.AsyncBaseTransport):
    """Carries HTTP requests to an actor."""

    def __init__(self, switch: Ref, *, timeout_s: float) -> None:
        self._switch = switch
        self._timeout_s = timeout_s

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        authorization = request.headers.get("authorization", "").encode()
        asked = SwitchRequest(request.method, request.url.path, authorization, await request.aread())
        try:
            reply = await self._switch.ask(asked, timeout=self._timeout_s)
        except AskFailed as error:
            raise httpx.ConnectError(f"{self._switch.name}: {error}") from error
        return httpx.Response(reply.status, content=reply.body)


def device(section: FabricSection) -> OcsDriver:
    """The switch at `switch_url`. Raises BadCredentials where the password or the certificate can't be read."""
    capabilities = SwitchCapabilities(section.ports, section.reconfiguration_s)
    if section.driver == "netconf":
        return NetconfDriver(NetconfSession(ssh(section.switch_url), timeout_s=section.switch_timeout_s), capabilities)
    client = Restconf(section.switch_url, login(section), timeout_s=section.switch_timeout_s, trusted=trusted(section))
    return PolatisDriver(client, capabilities) if section.driver == "polatis" else SonicDriver(client, capabilities)


def check_files(section: FabricSection) -> None:
    """Raises ConfigError where this host lacks a file by which the switch and the controller know each other."""
    if section.enabled and section.switch_url and section.driver != "netconf":
        try:
            login(section)
            trusted(section)
        except BadCredentials as error:
            raise ConfigError(f"{error}. Give another file, or none.") from error


def login(section: FabricSection) -> Login:
    """User, and the password in its file. Raises BadCredentials where that can't be read."""
    file = section.switch_password_file
    try:
        return Login(section.switch_user, Path(file).read_text("utf-8").strip() if file else "")
    except OSError as error:
        raise BadCredentials(f"fabric.switch_password_file {file} can't be read: {error.strerror}") from error
    except ValueError as error:
        raise BadCredentials(f"fabric.switch_password_file {file} is no text file in UTF-8") from error


def trusted(section: FabricSection) -> ssl.SSLContext | None:
    """Trusts `switch_ca_file` alone; None where there is none. Raises BadCredentials where it holds no certificate."""
    file = section.switch_ca_file
    try:
        return ssl.create_default_context(cafile=file) if file else None
    except ssl.SSLError as error:
        raise BadCredentials(f"fabric.switch_ca_file {file} holds no certificate in PEM") from error
    except OSError as error:
        raise BadCredentials(f"fabric.switch_ca_file {file} can't be read: {error.strerror}") from error
    except ValueError as error:
        raise BadCredentials(f"fabric.switch_ca_file {file!r} is no path") from error


async def emulated(section: FabricSection, switch: Ref) -> OcsDriver:
    """The actor `switch`, by HTTP where it listens. Raises SwitchUnreachable."""
    try:
        address = await switch.ask(FindSwitch(), timeout=section.switch_timeout_s)
    except AskFailed as error:
        raise SwitchUnreachable(f"{switch.name}: {error}") from error
    transport = None if address.url else BusTransport(switch, timeout_s=section.switch_timeout_s)
    login = Login(address.user, address.password)
    client = Restconf(address.url or BUS_URL, login, timeout_s=section.switch_timeout_s, transport=transport)
    return SonicDriver(client, SwitchCapabilities(section.ports, section.reconfiguration_s))


def ssh(url: str) -> tuple[str, ...]:
    """The command that opens a NETCONF session at ssh://user@host:port; it asks nothing and needs a key."""
    parts = urlsplit(url)
    user = f"{parts.username}@" if parts.username else ""
    return (
        "ssh",
        "-o",
        "BatchMode=yes",
        "-p",
        str(parts.port or 830),
        "-s",
        "--",
        f"{user}{parts.hostname}",
        "netconf",
    )
