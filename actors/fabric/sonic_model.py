"""Names of the sonic-ocs model: its paths, and how a circuit is written. Shared by the driver and the emulated switch."""

import re

from planning.circuits import Cross

BULK = "/restconf/operations/sonic-ocs:bulk-update"
DATA = "/restconf/data/sonic-ocs:sonic-ocs"
CONFIG, TABLE = "OCS_CROSS_CONNECT", "OCS_CROSS_CONNECT_TABLE"

ID = re.compile(r"([1-9]\d{0,4})A-([1-9]\d{0,4})B")


def cross_id(cross: Cross) -> str:
    return f"{cross.ingress + 1}A-{cross.egress + 1}B"


def parse_id(text: str) -> Cross:
    """Raises ValueError for what is no id of a circuit."""
    match = ID.fullmatch(text)
    if match is None:
        raise ValueError(f"{text[:40]!r} is no circuit: 1A-2B is one")
    return Cross(int(match[1]) - 1, int(match[2]) - 1)


def entry(cross: Cross) -> dict[str, str]:
    return {"cross_connect_id": cross_id(cross), "a_side": f"{cross.ingress + 1}A", "b_side": f"{cross.egress + 1}B"}
