"""Says what the buffer holds and what a batch waits for, for the monitor."""

from typing import TYPE_CHECKING

from actors.samples.book import Book
from planning.staleness import HandOver

if TYPE_CHECKING:
    from runtime.observe.metrics import Metrics


def why_waiting(book: Book, plan: HandOver) -> tuple[str, str]:
    """(detail, holder): how many groups there are, which is the oldest that runs, and who holds it."""
    oldest = next(book.running(), None)
    if oldest is None:
        return f"{plan.why}; none runs: {book.admission().why}", ""
    holders = sorted({member.holder for member in oldest.members if member.state == "running"})
    held = f"at {', '.join(holders)}" if holders else "whose tickets nobody took yet"
    size = len(oldest.members)
    detail = f"{plan.why}; oldest group {oldest.id} has {oldest.num_settled} of {size} members, the rest {held}"
    return detail, holders[0] if holders else ""


def gauges(book: Book, metrics: "Metrics") -> None:
    """Depths in samples: held in groups that still run, ready to be claimed, bound to a step not trained yet."""
    metrics.gauge("queue/held/depth", sum(group.num_scored for group in book.running()))
    metrics.gauge("queue/ready/depth", sum(group.num_scored for group in book.ready()))
    metrics.gauge("queue/bound/depth", sum(group.num_scored for group in book.groups.values() if group.step))
    metrics.gauge("groups/ready", sum(1 for _ in book.ready()))
    metrics.gauge("groups/in_flight", sum(1 for _ in book.running()))
