"""The planners against the optimum on small cases: of a mixed-integer program (HiGHS), in which every set of requests on every instance is
a column, and of merges within a step by enumeration.
"""

from itertools import combinations, permutations
from pathlib import Path
from random import Random

import numpy as np
import pytest
import yaml
from scipy.optimize import Bounds, LinearConstraint, milp

from rubato.planning.makespan import Instance, Load, finish_s, left_after
from rubato.planning.parallelism import coming, within
from rubato.planning.rebalance import moved, rebalance
from rubato.planning.roofline import Deployment, Roofline

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
CASES = 25
"""Of each of three engines."""
LOOKS = 8
"""At engines in the time that the last one would take: merges begin at one of them."""


def hardware(model: str, slots: int, memory: float) -> dict[int, Roofline]:
    gpu = yaml.safe_load((CONFIGS / "hardware/h800.yaml").read_text())
    shape = yaml.safe_load((CONFIGS / f"models/{model}.yaml").read_text())
    specs = {
        degree: Deployment.model_validate({"gpu": gpu, "model": shape, "tp": degree, "num_slots": slots, "memory_use": memory})
        for degree in (1, 2, 4)
    }
    return {degree: Roofline(spec) for degree, spec in specs.items()}


PLENTY = hardware("qwen2.5-14b", 256, 0.9)
FEW_SLOTS = hardware("qwen2.5-14b", 2, 0.9)
LITTLE_KV = hardware("qwen2.5-14b", 256, 0.40)
"""Room for some 7,000 tokens on one GPU."""


def requests(chance: Random, num: int, cached: bool) -> list[Load]:
    """Lengths of a long tail: log-normal, a mean of some 1,500 tokens."""
    found: list[Load] = []
    for i in range(num):
        context, left = chance.randint(50, 2000), min(5000.0, chance.lognormvariate(6.8, 1.0))
        found.append(Load(f"r{i}", context, left, context if cached else 0, chance.choice((0.0, 0.0, 2.0))))
    return found


def soonest_s(instance: Instance, engines: dict[int, Roofline]) -> float:
    """With its requests in the best order: where slots or room are few, the order counts."""
    engine = engines[instance.degree]
    room = sum(load.context + load.remaining for load in instance.loads)
    if len(instance.loads) <= engine.spec.num_slots and room <= engine.kv_tokens:
        return instance.through_s(engines)
    return min(instance._replace(loads=order).through_s(engines) for order in permutations(instance.loads))


def subsets(num: int) -> list[tuple[int, ...]]:
    return [each for size in range(num + 1) for each in combinations(range(num), size)]


def least_max(columns: list[tuple[tuple[int, ...], tuple[int, ...], float]], sums: list[tuple[int, int]]) -> float:
    """The least possible longest time of a choice of columns (requests, resources, seconds).

    The choice covers every request once; `sums` are the least and the most of each resource.
    """
    columns = [column for column in columns if column[2] < float("inf")]
    num = 1 + max(max(requests, default=0) for requests, _, _ in columns)
    cover, used = np.zeros((num, len(columns) + 1)), np.zeros((len(sums), len(columns) + 1))
    for at, (members, resources, _) in enumerate(columns):
        cover[list(members), at] = 1
        used[:, at] = resources
    longest = np.zeros((len(columns), len(columns) + 1))
    longest[:, -1] = -1
    longest[np.arange(len(columns)), np.arange(len(columns))] = [seconds for _, _, seconds in columns]
    aim = np.zeros(len(columns) + 1)
    aim[-1] = 1
    found = milp(
        aim,
        integrality=[*([1] * len(columns)), 0],
        bounds=Bounds(0, [*([1] * len(columns)), np.inf]),
        constraints=[
            LinearConstraint(cover, 1, 1),
            LinearConstraint(used, [least for least, _ in sums], [most for _, most in sums]),
            LinearConstraint(longest, -np.inf, 0),
        ],
        options={"mip_rel_gap": 0.0},
    )
    assert found.success, found.message
    return float(found.fun)


def optimal_step(loads: list[Load], num_gpus: int, engines: dict[int, Roofline]) -> float:
    sets = [
        (members, tuple(sorted((loads[i] for i in members), key=lambda load: (-load.remaining, load))))
        for members in subsets(len(loads))[1:]
    ]
    columns = [
        (members, (degree,), soonest_s(Instance("", degree, ordered), engines))
        for members, ordered in sets
        for degree in engines
        if degree <= num_gpus
    ]
    return least_max(columns, [(0, num_gpus)])


def optimal_moves(instances: list[Instance], engines: dict[int, Roofline]) -> float:
    loads = [(at, load) for at, each in enumerate(instances) for load in each.loads]
    columns = []
    for at, target in enumerate(instances):
        for members in subsets(len(loads)):
            own = [loads[i][1] for i in members if loads[i][0] == at]
            come = [
                moved(loads[i][1], engines[instances[loads[i][0]].degree], engines[target.degree])[0] for i in members if loads[i][0] != at
            ]
            taken = target._replace(loads=(*own, *come))
            columns.append((members, tuple(int(at == k) for k in range(len(instances))), soonest_s(taken, engines)))
    return least_max(columns, [(1, 1)] * len(instances))


def partitions(names: list[str]) -> list[list[list[str]]]:
    """Of a set into sets."""
    if not names:
        return [[]]
    first, *rest = names
    found = []
    for given in partitions(rest):
        found += [[[first], *given], *([*given[:at], [first, *given[at]], *given[at + 1 :]] for at in range(len(given)))]
    return found


def later(each: Instance, at_s: float, engines: dict[int, Roofline]) -> Instance:
    return each._replace(loads=tuple(left_after(each.loads, engines[each.degree], at_s)))


def merged_s(group: list[Instance], at_s: float, engines: dict[int, Roofline]) -> float:
    """When a group of engines of one GPU is through that merges then, its requests in the best order; one engine stays as it is."""
    if len(group) == 1:
        return group[0].through_s(engines)
    if len(group) not in engines:
        return float("inf")
    loads = tuple(load for each in group for load in later(each, at_s, engines).loads)
    cost_s = engines[1].reconfigure_s(sum(load.cached for load in loads), engines[len(group)])
    return at_s + cost_s + soonest_s(Instance("", len(group), loads), engines)


def optimal_merges(instances: list[Instance], engines: dict[int, Roofline], looks: list[float]) -> float:
    """Over every way to group the engines, and for each group over every look at which it may merge."""
    by_name = {each.name: each for each in instances}
    soonest: dict[tuple[str, ...], float] = {}
    for names in subsets(len(instances))[1:]:
        group = [instances[i] for i in names]
        soonest[tuple(sorted(each.name for each in group))] = min(merged_s(group, at_s, engines) for at_s in looks)
    return min(max(soonest[tuple(sorted(group))] for group in groups) for groups in partitions(list(by_name)))


def planned_merges(instances: list[Instance], engines: dict[int, Roofline], looks: list[float]) -> float:
    """Asked at each look, of what is left then; engines that merged do not change again."""
    left, through_s = {each.name: each for each in instances}, 0.0
    for at_s in looks:
        now = [later(each, at_s, engines) for each in left.values()]
        loads = {load.name: load for each in now for load in each.loads}
        for change in within(now, engines).changes:
            (part,) = change.parts
            then_s = finish_s([loads[name] for name in part], engines[change.degree])
            through_s = max(through_s, at_s + change.costs_s + then_s)
            for name in change.old:
                del left[name]
    return max([through_s, *(each.through_s(engines) for each in left.values())])


def show(what: str, gaps: list[float]) -> None:
    print(f"{what}: {len(gaps)} cases, gap mean {100 * sum(gaps) / len(gaps):.2f} %, worst {100 * max(gaps):.1f} %")


@pytest.mark.parametrize("engines", [PLENTY, FEW_SLOTS, LITTLE_KV], ids=["plenty", "few slots", "little KV"])
def test_the_coming_step_is_within_5_percent_of_the_optimum_on_average(engines: dict[int, Roofline]):
    gaps = []
    for seed in range(CASES):
        chance = Random(f"step {seed}")
        loads = requests(chance, chance.randint(2, 6), cached=False)
        gpus = chance.choice((2, 3, 4, 6))
        gaps.append(coming(loads, gpus, engines).predicted_s / optimal_step(loads, gpus, engines) - 1)

    show("coming step", gaps)
    assert min(gaps) >= -1e-6
    assert sum(gaps) / len(gaps) <= 0.05


@pytest.mark.parametrize("engines", [PLENTY, FEW_SLOTS, LITTLE_KV], ids=["plenty", "few slots", "little KV"])
def test_rebalancing_is_within_5_percent_of_the_optimum_on_average(engines: dict[int, Roofline]):
    gaps = []
    for seed in range(CASES):
        chance = Random(f"moves {seed}")
        loads = requests(chance, chance.randint(2, 6), cached=True)
        cut = sorted(chance.randint(0, len(loads)) for _ in range(2))
        parts = (loads[: cut[0]], loads[cut[0] : cut[1]], loads[cut[1] :])
        instances = [Instance(name, chance.choice((1, 1, 2)), tuple(part)) for name, part in zip("abc", parts, strict=True)]
        gaps.append(rebalance(instances, engines, now_s=0.0).after_s / optimal_moves(instances, engines) - 1)

    show("rebalancing", gaps)
    assert min(gaps) >= -1e-6
    assert sum(gaps) / len(gaps) <= 0.05


@pytest.mark.parametrize("engines", [PLENTY, FEW_SLOTS, LITTLE_KV], ids=["plenty", "few slots", "little KV"])
def test_merges_within_a_step_are_within_5_percent_of_the_optimum_on_average(engines: dict[int, Roofline]):
    gaps = []
    for seed in range(CASES):
        chance = Random(f"merges {seed}")
        asked = requests(chance, chance.randint(2, 5), cached=True)
        loads = [each._replace(wait_s=0.0) for each in asked]  # what the orchestrator plans for waits for nothing
        num = chance.choice((2, 3, 4))
        of = [chance.randrange(num) for _ in loads]
        instances = [
            Instance(name, 1, tuple(load for at, load in zip(of, loads, strict=True) if at == place), "server")
            for place, name in enumerate("abcd"[:num])
        ]
        through_s = max(each.through_s(engines) for each in instances)
        looks = [through_s * look / LOOKS for look in range(LOOKS)]
        gaps.append(planned_merges(instances, engines, looks) / optimal_merges(instances, engines, looks) - 1)

    show("merges within a step", gaps)
    assert min(gaps) >= -1e-6
    assert sum(gaps) / len(gaps) <= 0.05
