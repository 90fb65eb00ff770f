"""Driver for SONiC optical circuit switches, over RESTCONF with the sonic-ocs model.

The switch acknowledges its database, not its mirrors; an added circuit that exists already is passed over in silence, even when it is
invalid. So a circuit that is to be made anew is deleted and added in one request, and state is read afterwards.
"""

from typing import Any

from actors.fabric.driver import Status, SwitchCapabilities, SwitchState
from actors.fabric.errors import BadAnswer, PartlyApplied
from actors.fabric.restconf import Restconf
from actors.fabric.sonic_model import BULK, CONFIG, DATA, TABLE, cross_id, entry, parse_id
from planning.circuits import Cross

STATUS: dict[str, Status] = {
    "tuned": "tuned",
    "tuning": "tuning",
    "failed": "failed",
    "blocked": "failed",
    "invalid": "invalid",
}

WORST: tuple[Status, ...] = ("tuned", "tuning", "failed", "invalid")


class SonicDriver:
    """Our ports count from 0, SONiC's from 1; inputs are its A side, outputs its B side."""

    def __init__(self, client: Restconf, capabilities: SwitchCapabilities) -> None:
        self.capabilities = capabilities
        self._client = client

    async def read(self) -> SwitchState:
        """What the table of states holds; a circuit that is configured and not listed there is still being tuned."""
        config = _entries(await self._client.get(f"{DATA}/{CONFIG}"), CONFIG)
        states = {_cross(entry): entry for entry in _entries(await self._client.get(f"{DATA}/{TABLE}"), TABLE)}
        return SwitchState({cross: _status(states.get(cross, {})) for cross in map(_cross, config)})

    async def apply(self, delete: tuple[Cross, ...], add: tuple[Cross, ...]) -> None:
        body = {"delete": [cross_id(c) for c in delete], "add": [entry(c) for c in add]}
        answer = await self._client.send("POST", BULK, {"sonic-ocs:input": body})
        try:
            output = answer["sonic-ocs:output"]
            counts = int(output["deleted_count"]), int(output["added_count"])
        except (TypeError, KeyError, ValueError, OverflowError) as error:
            raise BadAnswer(f"bulk-update was answered with {str(answer)[:200]}") from error
        if counts != (len(delete), len(add)):
            asked = f"{len(delete)} to delete and {len(add)} to add"
            raise PartlyApplied(f"the switch was given {asked}; it deleted {counts[0]} and added {counts[1]}")

    async def close(self) -> None:
        await self._client.close()


def _entries(body: Any, table: str) -> list[dict[str, Any]]:
    """The list inside {"sonic-ocs:TABLE": {"TABLE_LIST": [...]}}; empty for an empty table."""
    if not body:
        return []
    try:
        found = body[f"sonic-ocs:{table}"].get(f"{table}_LIST", [])
        return [dict(each) for each in found]
    except (TypeError, KeyError, AttributeError, ValueError) as error:
        raise BadAnswer(f"{table} was answered with {str(body)[:200]}") from error


def _cross(found: dict[str, Any]) -> Cross:
    try:
        return parse_id(str(found["cross_connect_id"]))
    except (KeyError, ValueError) as error:
        raise BadAnswer(f"a circuit was answered as {str(found)[:200]}") from error


def _status(found: dict[str, Any]) -> Status:
    """Revisions of the model call the field `status`, `config_status` or `state`; the worst of those that are there counts."""
    named = [str(found[key]).lower() for key in ("config_status", "status", "state") if key in found]
    known: list[Status] = [STATUS[name] for name in named if name in STATUS]
    if not known:
        return "tuning"
    return max(known, key=WORST.index)
