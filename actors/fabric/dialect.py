"""The RESTCONF dialect of SONiC optical switches, as the emulated one answers it: requests in, status and JSON out."""

import base64
import hmac
import json
from typing import Any, NamedTuple

from actors.fabric.device import OcsDevice
from actors.fabric.driver import Login
from actors.fabric.sonic_model import BULK, CONFIG, DATA, TABLE, entry, parse_id
from planning.circuits import Cross

MOST_BYTES = 1 << 20
"""A bulk-update of 1,008 circuits is about 100 kB."""


class Answer(NamedTuple):
    """An HTTP status and its JSON body; None for none."""

    status: int
    body: Any = None


class Dialect:
    """Stateless but for the device behind it. Refuses what it does not understand; never raises."""

    def __init__(self, device: OcsDevice, login: Login) -> None:
        self._device = device
        self._allowed = b"Basic " + base64.b64encode(f"{login.user}:{login.password}".encode())

    def answer(self, method: str, path: str, authorization: bytes, body: bytes) -> Answer:
        if not hmac.compare_digest(authorization, self._allowed):
            return _refused(401, "access-denied", "user or password is wrong")
        try:
            return self._answer(method, path, body)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            return _refused(400, "invalid-value", str(error))

    def _answer(self, method: str, path: str, body: bytes) -> Answer:
        prefix = f"{DATA}/{CONFIG}/{CONFIG}_LIST="
        match method, path:
            case "POST", _ if path == BULK:
                asked = json.loads(body)["sonic-ocs:input"]
                delete = [self._known(str(each)) for each in asked.get("delete", [])]
                add = [self._known(str(each["cross_connect_id"])) for each in asked.get("add", [])]
                counts = self._device.update(delete, add)
                return Answer(200, {"sonic-ocs:output": {"deleted_count": counts[0], "added_count": counts[1]}})
            case "PATCH", _ if path == f"{DATA}/{CONFIG}":
                asked = json.loads(body)[f"sonic-ocs:{CONFIG}"][f"{CONFIG}_LIST"]
                self._device.update((), [self._known(str(each["cross_connect_id"])) for each in asked])
                return Answer(204)
            case "DELETE", _ if path.startswith(prefix):
                deleted, _ = self._device.update([self._known(path.removeprefix(prefix))], ())
                return Answer(204) if deleted else _refused(404, "invalid-value", "no such circuit")
            case "GET", _ if path == f"{DATA}/{CONFIG}":
                return _listed(CONFIG, [entry(cross) for cross in self._device.status()])
            case "GET", _ if path == f"{DATA}/{TABLE}":
                return _listed(TABLE, [{**entry(c), "status": s} for c, s in self._device.status().items()])
        return _refused(404, "operation-not-supported", f"{method} {path[:100]}")

    def _known(self, text: str) -> Cross:
        cross = parse_id(text)
        if max(cross) >= self._device.num_ports:
            raise ValueError(f"{text} names a port beyond {self._device.num_ports}")
        return cross


def _listed(table: str, entries: list[dict[str, str]]) -> Answer:
    return Answer(200, {f"sonic-ocs:{table}": {f"{table}_LIST": entries}})


def _refused(status: int, tag: str, message: str) -> Answer:
    error = {"error-type": "application", "error-tag": tag, "error-message": message}
    return Answer(status, {"ietf-restconf:errors": {"error": [error]}})
