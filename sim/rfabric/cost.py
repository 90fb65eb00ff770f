"""Network cost of five fabrics from 1,024 to 32,768 GPUs, and throughput per dollar: Figure 7 of the RFabric paper and its 1.81."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, NamedTuple

from pydantic import Field

from rubato.planning.hardware import GpuSpec
from rubato.planning.language_model import ModelSpec
from rubato.sim.claims import Value
from rubato.sim.hardware import Prices
from rubato.sim.outcome import Cell, Plot, RunProgress, RunResult, Table
from rubato.sim.rfabric import fabrics
from rubato.sim.rfabric.counts import FABRICS, FabricParts, FabricSize
from rubato.sim.rfabric.fabrics import FabricSpec, case
from rubato.sim.rfabric.job import Gpus, TrainingSpec, place
from rubato.sim.scenario import Scenario, ScenarioKind

Radix = Annotated[int, Field(ge=16, le=1024, multiple_of=16)]

Key = tuple[int, int, str]
"""Radix, GPUs, fabric."""


class CostScenario(Scenario):
    """Sizes, prices, and the job whose throughput is simulated on each fabric."""

    model: ModelSpec
    gpu: GpuSpec
    job: TrainingSpec
    fabric: FabricSpec = FabricSpec()
    prices: Prices
    price_sweep: tuple[Prices, ...] = ()
    core_shares: tuple[Annotated[float, Field(ge=0, le=1)], ...] = (0.25, 0.5, 1.0)
    """RFabric's, in the sweep; `fabric.core_share` elsewhere."""
    gpus: Gpus = (1024, 2048, 4096, 8192, 16384, 32768)
    radices: tuple[Radix, ...] = (64, 128)
    ocs_radix: int = Field(default=320, ge=2)
    sip_gpus: int = Field(default=4096, ge=0)
    """Largest size at which SiP is simulated: planning circuits for each server takes minutes above. Its cost needs none."""


class PricedFabric(NamedTuple):
    """A fabric at one size. `throughput` is relative to the fat-tree's, None where it was not simulated."""

    parts: FabricParts
    usd: float
    usd_total: float
    """With the GPUs."""
    throughput: float | None


def run(scenario: CostScenario, progress: RunProgress) -> RunResult:
    """Count, price, simulate, compare."""
    found: dict[Key, PricedFabric] = {}
    keys = [(radix, gpus, name) for radix in scenario.radices for gpus in scenario.gpus for name in FABRICS]
    for i, key in enumerate(keys):
        progress(i, len(keys), f"{key[2]}, {key[1]} GPUs, radix {key[0]}")
        found[key] = _priced(scenario, key, found)
    tables = {"cost": Table(COLUMNS, [_row(found, key) for key in keys]), "sensitivity": _sensitivity(scenario)}
    plots = {"cost": Plot("Network cost", lambda f: _draw(f, scenario, found))}
    return RunResult(dict(_figures(scenario, found)), tables, plots, (), list(_notes(scenario, found)))


def _priced(s: CostScenario, key: Key, found: Mapping[Key, PricedFabric]) -> PricedFabric:
    radix, gpus, name = key
    parts = _parts(s, key, s.fabric.core_share)
    usd = parts.usd(s.prices)
    seconds = None if name == "sip" and gpus > s.sip_gpus else _iteration_s(s, key)
    reference = seconds if name == "fat-tree" else _iteration_s(s, (radix, gpus, "fat-tree"))
    return PricedFabric(parts, usd, usd + gpus * s.gpu.usd, reference / seconds if reference and seconds else None)


def _iteration_s(s: CostScenario, key: Key) -> float:
    radix, gpus, name = key
    spec = s.fabric.model_copy(update={"radix": radix})
    return fabrics.FABRICS[name](case(place(s.job, s.model, s.gpu, gpus), spec, s.seed)).seconds


def _parts(s: CostScenario, key: Key, core_share: float) -> FabricParts:
    radix, gpus, name = key
    return FABRICS[name](FabricSize(gpus, radix, s.fabric.oversubscription, core_share, s.ocs_radix, s.gpu.gpus_per_server))


COLUMNS = (
    "radix", "gpus", "fabric", "tiers", "eps_ports", "transceivers", "ocs_ports", "usd", "usd_per_gpu", "throughput",
    "per_network_usd", "per_total_usd", "break_even_network", "break_even_total",
)  # fmt: skip
"""Throughput per dollar, relative to the fat-tree's; and the throughput at which that would be 1."""


def _row(found: Mapping[Key, PricedFabric], key: Key) -> tuple[Cell, ...]:
    one, tree = found[key], found[(*key[:2], "fat-tree")]
    network, total = one.usd / tree.usd, one.usd_total / tree.usd_total
    per = ("", "", "") if one.throughput is None else (one.throughput, one.throughput / network, one.throughput / total)
    parts = one.parts
    counted = (parts.tiers, parts.eps_ports, parts.transceivers, parts.ocs_ports)
    return (*key, *counted, one.usd, one.usd / key[1], *per, network, total)


def _figures(s: CostScenario, found: Mapping[Key, PricedFabric]) -> Iterator[tuple[str, Value]]:
    for (radix, gpus, name), one in found.items():
        tree = found[radix, gpus, "fat-tree"]
        yield f"relative_cost_{name}_r{radix}_{gpus}", one.usd / tree.usd
        yield f"network_per_gpu_cost_{name}_r{radix}_{gpus}", one.usd / (one.usd_total - one.usd)
        if one.throughput is not None:
            yield f"efficiency_{name}_r{radix}_{gpus}", one.throughput * tree.usd / one.usd
            yield f"total_efficiency_{name}_r{radix}_{gpus}", one.throughput * tree.usd_total / one.usd_total
    for radix in s.radices:
        yield f"order_of_cost_r{radix}", all(_in_order(found, radix, gpus) for gpus in s.gpus)
        at = [found[radix, gpus, "rfabric"].usd < found[radix, gpus, "fat-tree"].usd for gpus in s.gpus]
        yield f"rfabric_below_fat_tree_r{radix}", all(at)


def _in_order(found: Mapping[Key, PricedFabric], radix: int, gpus: int) -> bool:
    tree, rail, ours, over, flat = (
        found[radix, gpus, name].usd for name in ("fat-tree", "rail-optimised", "rfabric", "oversubscribed", "sip")
    )
    return tree == rail > ours > over > flat


def _sensitivity(s: CostScenario) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for prices in (s.prices, *s.price_sweep):
        for share in s.core_shares:
            for radix in s.radices:
                for gpus in s.gpus:
                    tree = _parts(s, (radix, gpus, "fat-tree"), share).usd(prices)
                    rows.append((prices.name, share, radix, gpus, tree / _parts(s, (radix, gpus, "rfabric"), share).usd(prices)))
    return Table(("prices", "core_share", "radix", "gpus", "fat_tree_usd_per_rfabric_usd"), rows)


def _notes(s: CostScenario, found: Mapping[Key, PricedFabric]) -> Iterator[str]:
    yield f"Prices: {s.prices.name} list; RFabric's core share {s.fabric.core_share}; a GPU {s.gpu.usd:,.0f} $. Optics on every link."
    for radix in s.radices:
        by_tiers: dict[int, list[str]] = {}
        for gpus in s.gpus:
            tree, ours = found[radix, gpus, "fat-tree"], found[radix, gpus, "rfabric"]
            text = f"{gpus}: {tree.usd / ours.usd:.2f} x {ours.throughput or 0:.2f} = {(ours.throughput or 0) * tree.usd / ours.usd:.2f}"
            by_tiers.setdefault(tree.parts.tiers, []).append(text)
        for tiers, texts in by_tiers.items():
            yield f"radix {radix}, {tiers}-tier fat-tree, cost ratio x throughput = efficiency: {'; '.join(texts)}"


def _draw(figure: Any, s: CostScenario, found: Mapping[Key, PricedFabric]) -> None:
    axes = figure.subplots(1, len(s.radices), sharey=True, squeeze=False)[0]
    for ax, radix in zip(axes, s.radices, strict=True):
        for name in FABRICS:
            ax.plot(s.gpus, [found[radix, n, name].usd / 1e6 for n in s.gpus], marker="o", label=name)
        ax.plot(s.gpus, [n * s.gpu.usd / 1e6 for n in s.gpus], "k:", label="GPUs")
        ax.set(yscale="log", title=f"radix {radix}", xlabel="GPUs", ylabel="M$")
        ax.set_xscale("log", base=2)
    axes[0].legend(fontsize=7)


KIND = ScenarioKind(CostScenario, run)
