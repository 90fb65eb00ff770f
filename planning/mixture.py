"""Which task of a weighted mixture the next group is of."""

from collections.abc import Mapping


def next_task(weights: Mapping[str, float], owed: Mapping[str, float]) -> tuple[str, dict[str, float]]:
    """The task of the next group, and what each task is owed after it, in groups; a task that `owed` does not know is owed nothing.

    Of every group each task is owed its share, which is its weight over the sum of all, and the one that is owed most gets it; of equals
    the first. So no task is ever ahead of its share by a whole group, and after weights have changed no task catches up with what the new
    ones would have given it before. The weights' sum must be above 0.
    """
    total = sum(weights.values())
    due = {name: owed.get(name, 0.0) + weight / total for name, weight in weights.items()}
    chosen = max((name for name, weight in weights.items() if weight > 0), key=due.__getitem__)
    return chosen, due | {chosen: due[chosen] - 1.0}
