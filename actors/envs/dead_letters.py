"""Dead letters: what the sample buffer failed to take in, delivery after delivery. They are kept, counted and shown, not retried for ever."""

import msgspec

from actors.messages.samples import GiveUp, Put
from runtime.actor import Actor
from runtime.store.errors import StoreUnavailable

STREAM = "dead_letters"
"""The Store's stream of them; the newest `KEPT` stay."""
KEPT = 1000
DELIVERIES = 3
"""Failed deliveries after which a letter is dead. A buffer that is merely away fails none."""
REASON = "dead_letter"
"""Of the attempt that it ends."""


class DeadLetter(msgspec.Struct, frozen=True):
    """One entry of the stream."""

    trajectory_id: str
    attempt: int
    holder: str
    request: str
    """Put or GiveUp."""
    error: str


async def bury(actor: Actor, request: Put | GiveUp, error: str) -> None:
    """Keep a word of it in the Store, count it for the monitor, and tell the user."""
    ticket = request.trajectory.ticket if isinstance(request, Put) else request.ticket
    letter = DeadLetter(ticket.trajectory_id, ticket.attempt, actor.name, type(request).__name__, error[:2000])
    actor.metrics.count("dead_letters")
    actor.log.error("dead_letter", **msgspec.structs.asdict(letter))
    actor.notice(
        f"{letter.trajectory_id}: {DELIVERIES} deliveries failed; the attempt counts as failed ({error[:200]})"
    )
    try:
        await actor.store.append(STREAM, msgspec.msgpack.encode(letter), limit=KEPT)
    except StoreUnavailable as away:
        actor.log.warning("dead_letter_not_kept", error=str(away))
