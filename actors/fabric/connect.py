"""Opens the driver that the config names, or that of the emulated switch."""

import ssl
from collections.abc import Callable
from pathlib import Path

import httpx

from rubato.actors.fabric.driver import BadCredentials, Login, OcsDriver, SwitchUnreachable
from rubato.actors.fabric.restconf import Restconf, SonicDriver
from rubato.actors.fabric.section import OCS, FabricSection
from rubato.actors.messages.fabric import FindSwitch, SwitchRequest
from rubato.bus.errors import AskFailed
from rubato.runtime.courier import Ref
from rubato.runtime.errors import ConfigError
from rubato.runtime.importer import check_module, load_configured

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
    make: Callable[[FabricSection], OcsDriver] = load_configured(section.driver_path, key="fabric.driver")
    return make(section)


def sonic(section: FabricSection) -> OcsDriver:
    """The driver of a switch that speaks SONiC's RESTCONF."""
    return SonicDriver(restconf(section), section.capabilities)


def restconf(section: FabricSection) -> Restconf:
    """A client of the switch at `switch_url`. Raises BadCredentials where the password or the certificate can't be read."""
    return Restconf(section.switch_url, login(section), timeout_s=section.switch_timeout_s, trusted=trusted(section))


def check_driver(section: FabricSection) -> None:
    """Raises ConfigError where this host lacks the driver, or a file by which the switch and the controller know each other."""
    if not (section.enabled and section.switch_url):
        return
    try:
        check_module(section.driver_path, key="fabric.driver")
    except ConfigError as error:
        raise ConfigError(f"{error} The drivers of {', '.join(OCS)} are a package: pip install ./plugins/ocs") from error
    if section.switch_url.startswith("http"):
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
    return SonicDriver(client, section.capabilities)
