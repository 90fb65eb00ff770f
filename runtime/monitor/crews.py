"""The table of actors: a line for each, or one for all that are alike where a run has many."""

from collections.abc import Sequence

from rubato.runtime.monitor.blocked import SILENT_S
from rubato.runtime.monitor.snapshot import VERSION
from rubato.runtime.monitor.views import ActorView
from rubato.runtime.registry import role_of

PULLED = "weights/pulled"
"""Share of the newest version that an actor has pulled, 0 to 1."""

COLUMNS = ("name", "state", "inc", "mail", "rate/s", "idle")
WIDTHS = (19, 8, 4, 4, 6, 4)
"""50 columns with the spaces between: a second panel fits into 80."""

ALIKE = 8
"""Of a role or a pool: more of them are told together."""


def actor_lines(actors: Sequence[ActorView]) -> list[str]:
    """A line for each; where a pool, or a role without pools, has more than `ALIKE` that are well, one line for all of these."""
    crews: dict[tuple[str, str], list[ActorView]] = {}
    for actor in actors:
        crews.setdefault((actor["role"], actor["pool"]), []).append(actor)
    lines: list[str] = []
    for (role, pool), crew in crews.items():
        well = [actor for actor in crew if actor["state"] == "ready" and actor["silent_s"] <= SILENT_S]
        if len(well) <= ALIKE:
            well = []
        else:
            lines.append(" ".join(cells(_crew_row(role, well))) + (f"  {pool} at {_places(well)}" if pool else ""))
        lines += [" ".join(cells(actor_row(actor))) + _in_pool(actor) for actor in crew if actor not in well]
    return lines


def _crew_row(role: str, crew: Sequence[ActorView]) -> tuple[str, ...]:
    """Sums of mailboxes and rates, the mean of the idle shares."""
    versions = sorted({actor["metrics"][VERSION] for actor in crew if VERSION in actor["metrics"]})
    state = "ready" if not versions else f"v{versions[0]:.0f}" + (f"–{versions[-1]:.0f}" if versions[-1] > versions[0] else "")
    mail, rate_s = sum(actor["mailbox"] for actor in crew), sum(actor["rate_s"] for actor in crew)
    return f"{role} × {len(crew)}", state, "", str(mail), short(rate_s), f"{sum(actor['idle'] for actor in crew) / len(crew):.0%}"


def _places(crew: Sequence[ActorView]) -> str:
    hosts = {actor["host"] for actor in crew}
    return next(iter(hosts)) if len(hosts) == 1 else f"{len(hosts)} hosts"


def crowd(names: Sequence[str]) -> list[str]:
    """`names`; in place of those of a role that has more than `ALIKE` of them, their number."""
    roles: dict[str, list[str]] = {}
    for name in names:
        roles.setdefault(role_of(name), []).append(name)
    return [who for role, some in roles.items() for who in (some if len(some) <= ALIKE else [f"{len(some)} {role}"])]


def actor_row(actor: ActorView) -> tuple[str, ...]:
    """The figures of one actor under COLUMNS; a ready one that has a weight version shows that as its state."""
    version = actor["metrics"].get(VERSION)
    state = f"v{version:.0f}" if version is not None and actor["state"] == "ready" else actor["state"]
    if actor["state"] == "ready" and actor["metrics"].get(PULLED, 1.0) < 1.0:
        state = "pulling"
    idle = f"{actor['idle']:.0%}"
    return actor["name"], state, str(actor["incarnation"]), str(actor["mailbox"]), short(actor["rate_s"]), idle


def cells(texts: Sequence[str]) -> list[str]:
    """Words to the left, figures to the right, each cut to its column."""
    cut = [clip(text, width) for text, width in zip(texts, WIDTHS, strict=True)]
    return [f"{text:{'<' if index < 2 else '>'}{WIDTHS[index]}}" for index, text in enumerate(cut)]


def _in_pool(actor: ActorView) -> str:
    where = f"{actor['hardware']} at {actor['host']}" if actor["hardware"] else f"at {actor['host']}"
    return f"  {actor['pool']} {where}" if actor["pool"] else ""


def clip(text: str, width: int) -> str:
    """`text` in at most `width` columns; an ellipsis marks what was cut."""
    return text if len(text) <= width else text[: width - 1] + "…"


def short(value: float) -> str:
    """`410`, `5.9k`, `1.2M`."""
    for size, unit in ((1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.1f}{unit}"
    return f"{value:.0f}"
