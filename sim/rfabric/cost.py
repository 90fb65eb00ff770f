"""Network cost of five fabrics from 1,024 to 32,768 GPUs, and where RFabric's cost efficiency of 1.81 holds."""

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import Field

from sim.claims import Value
from sim.hardware import GpuSpec, Prices
from sim.outcome import Outcome, Plot, Progress, Table
from sim.rfabric.counts import FABRICS, Parts, Sizes
from sim.scenario import Kind, Scenario

Key = tuple[int, int, str]
"""Radix, GPUs, fabric."""


class CostScenario(Scenario):
    """Which sizes and prices; `throughput` is each fabric's, relative to the fat-tree's."""

    gpu: GpuSpec
    prices: Prices
    price_sweep: tuple[Prices, ...] = ()
    gpus: tuple[int, ...] = (1024, 2048, 4096, 8192, 16384, 32768)
    radices: tuple[int, ...] = (64, 128)
    oversubscription: int = Field(default=3, ge=1)
    core_share: float = Field(default=0.5, ge=0, le=1)
    core_shares: tuple[float, ...] = (0.25, 0.5, 1.0)
    ocs_radix: int = Field(default=320, ge=2)
    throughput: Mapping[str, float]


def run(scenario: CostScenario, progress: Progress) -> Outcome:
    """Count, price, compare."""
    parts = {key: _parts(scenario, key, scenario.core_share) for key in _keys(scenario)}
    progress(1, 2, "pricing")
    figures = dict(_figures(scenario, parts))
    tables = {"cost": Table(COST_COLUMNS, list(_rows(scenario, parts))), "sensitivity": _sensitivity(scenario)}
    progress(2, 2, "done")
    return Outcome(
        figures, tables, {"cost": Plot("Network cost", lambda f: _draw(f, scenario, parts))}, (), _notes(scenario)
    )


COST_COLUMNS = (
    "radix", "gpus", "fabric", "tiers", "eps_ports", "transceivers", "ocs_ports", "usd", "usd_per_gpu",
    "throughput", "throughput_per_network_usd", "throughput_per_total_usd", "break_even_throughput",
)  # fmt: skip


def _keys(s: CostScenario) -> Iterator[Key]:
    return ((radix, gpus, fabric) for radix in s.radices for gpus in s.gpus for fabric in FABRICS)


def _parts(s: CostScenario, key: Key, core_share: float) -> Parts:
    radix, gpus, fabric = key
    return FABRICS[fabric](Sizes(gpus, radix, s.oversubscription, core_share, s.ocs_radix, s.gpu.gpus_per_server))


def _rows(s: CostScenario, parts: Mapping[Key, Parts]) -> Iterator[tuple[Any, ...]]:
    for (radix, gpus, fabric), part in parts.items():
        usd, reference = part.usd(s.prices), parts[radix, gpus, "fat-tree"].usd(s.prices)
        total, total_reference = usd + gpus * s.gpu.usd, reference + gpus * s.gpu.usd
        throughput = s.throughput[fabric]
        yield (
            radix, gpus, fabric, part.tiers, part.eps_ports, part.transceivers, part.ocs_ports, usd, usd / gpus,
            throughput, throughput * reference / usd, throughput * total_reference / total, usd / reference,
        )  # fmt: skip


def _figures(s: CostScenario, parts: Mapping[Key, Parts]) -> Iterator[tuple[str, Value]]:
    for (radix, gpus, fabric), part in parts.items():
        reference = parts[radix, gpus, "fat-tree"].usd(s.prices)
        yield f"usd_{fabric}_r{radix}_{gpus}", part.usd(s.prices)
        yield f"efficiency_{fabric}_r{radix}_{gpus}", s.throughput[fabric] * reference / part.usd(s.prices)


def _sensitivity(s: CostScenario) -> Table:
    rows = [
        (prices.name, share, radix, gpus, _ratio(s, prices, share, radix, gpus))
        for prices in (s.prices, *s.price_sweep)
        for share in s.core_shares
        for radix in s.radices
        for gpus in s.gpus
    ]
    return Table(("prices", "core_share", "radix", "gpus", "fat_tree_usd_per_rfabric_usd"), rows)


def _ratio(s: CostScenario, prices: Prices, share: float, radix: int, gpus: int) -> float:
    tree, ours = (_parts(s, (radix, gpus, name), share).usd(prices) for name in ("fat-tree", "rfabric"))
    return tree / ours


def _notes(s: CostScenario) -> tuple[str, ...]:
    return (f"Prices: {s.prices.name}; core share {s.core_share}; GPU {s.gpu.usd:,.0f} $.",)


def _draw(figure: Any, s: CostScenario, parts: Mapping[Key, Parts]) -> None:
    axes = figure.subplots(1, len(s.radices), sharey=True, squeeze=False)[0]
    for ax, radix in zip(axes, s.radices, strict=True):
        for fabric in FABRICS:
            ax.plot(s.gpus, [parts[radix, n, fabric].usd(s.prices) / 1e6 for n in s.gpus], marker="o", label=fabric)
        ax.set(xscale="log", yscale="log", title=f"radix {radix}", xlabel="GPUs", ylabel="M$")
        ax.set_xscale("log", base=2)
    axes[0].legend(fontsize=7)


KIND = Kind(CostScenario, run)
