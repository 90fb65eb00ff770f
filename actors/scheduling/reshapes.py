"""What planned degrees mean for the engines of one server: who stays, who sleeps, and who has which requests afterwards."""

from collections.abc import Collection

from actors.scheduling.fleet import GpuGroup
from actors.scheduling.switches import Reshape, Shape
from planning.engine_info import EngineInfo
from planning.parallelism import Change, StepPlan


def as_merge(server: GpuGroup, change: Change) -> Reshape:
    """The engine with the largest cache stays, for the others' requests travel."""
    by_name = {each.name: each for each in server.engines}
    keeps = max(change.old, key=lambda name: (by_name[name].degree, name))
    wanted = {
        name: Shape(change.degree) if name == keeps else Shape(server.profile.degree, True) for name in change.old
    }
    requests = dict.fromkeys(change.parts[0], keeps)
    return Reshape(f"merge {' + '.join(change.old)}", wanted, requests, change.why)


def as_split(server: GpuGroup, change: Change) -> Reshape | None:
    """Engines that sleep wake for the parts; None where there are too few."""
    (old,) = change.old
    asleep = [each.name for each in server.engines if each.asleep]
    names = [old, *asleep[: len(change.parts) - 1]]
    if len(names) < len(change.parts):
        return None
    requests = {request: name for name, part in zip(names, change.parts, strict=True) for request in part}
    return Reshape(f"split {old}", dict.fromkeys(names, Shape(change.degree)), requests, change.why)


def as_step(server: GpuGroup, plan: StepPlan, here: Collection[str]) -> Reshape:
    """Engines that have a planned degree keep it; the largest of the others take the largest of the rest, and those left over sleep.

    Requests that are `here` go where they are planned; those that still wait at a proxy are for the router.
    """
    free = sorted(server.engines, key=lambda each: (each.asleep, -each.degree, each.name))
    taken: dict[int, EngineInfo] = {}
    places = sorted(range(len(plan.degrees)), key=lambda place: -plan.degrees[place])
    for place in places:
        if same := [each for each in free if not each.asleep and each.degree == plan.degrees[place]]:
            taken[place] = same[0]
            free.remove(same[0])
    for place in places:
        if place not in taken:
            taken[place] = free.pop(0)
    wanted = {each.name: Shape(server.profile.degree, True) for each in free}
    wanted |= {each.name: Shape(plan.degrees[place]) for place, each in taken.items()}
    requests = {
        request: each.name for place, each in taken.items() for request in plan.assigned[place] if request in here
    }
    return Reshape(f"shape for the step of {server.engines[0].name}", wanted, requests, plan.why)
