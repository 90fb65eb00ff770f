"""The one table that tells the monitor which config keys and metrics to show; everything else here knows no job's words."""

from typing import NamedTuple


class Shown(NamedTuple):
    """One figure: what it is called on the screen, the metric it is read from, and how it is written (a format spec)."""

    label: str
    metric: str
    spec: str = ".2f"


class Names(NamedTuple):
    """Where the monitor finds things. Config keys are dotted paths; the rest are names of metrics."""

    steps: str = "run.steps"
    bound: str = "staleness.alpha"
    """Config key of the bound shown as `alpha`."""
    version: str = "weights/version"
    """Metric shown as `version`, of the whole run and of each actor that has it."""
    age: str = "staleness/max"
    dropped: str = "staleness/dropped"
    """Per row; the screen shows the sum."""
    pulled: str = "weights/pulled"
    """Share of the newest version that an actor has pulled, 0 to 1."""
    failures: tuple[str, ...] = ("reward/failed/", "rollout/error/", "bus/refused/")
    """Counters whose names begin so tell what goes wrong, the reason at the end; shown as totals and rates."""
    queue_prefix: str = "queue/"
    queue_suffix: str = "/depth"
    trend: Shown = Shown("reward", "reward/mean")
    """Drawn as a sparkline."""
    headline: tuple[Shown, ...] = (
        Shown("eval", "eval/reward"),
        Shown("entropy", "policy/entropy"),
        Shown("kl", "policy/kl", ".3f"),
        Shown("clip", "policy/clip_frac", ".1%"),
        Shown("grad", "optim/grad_norm"),
        Shown("tok/s", "perf/gen_tokens_s", ",.0f"),
    )
    """Newest value each, in order of interest: the last ones fall off a narrow screen."""
    flow: tuple[Shown, ...] = (
        Shown("in flight", "rollout/in_flight", ",.0f"),
        Shown("generating", "proxy/in_flight", ",.0f"),
        Shown("held", "queue/held/depth", ",.0f"),
        Shown("ready", "queue/ready/depth", ",.0f"),
        Shown("bound", "queue/bound/depth", ",.0f"),
        Shown("trained", "samples/trained", ",.0f"),
    )
    """Summed over live actors, in the order in which work passes through."""
    network: tuple[Shown, ...] = (
        Shown("circuits", "fabric/circuits", ",.0f"),
        Shown("epoch", "fabric/epoch", ",.0f"),
        Shown("hidden s", "fabric/hidden_s", ".3f"),
        Shown("exposed s", "fabric/exposed_s", ".3f"),
    )
    """A line of its own, where any of them is known."""
    network_phase: str = "fabric/phase/"
    """Gauges whose names begin so, one of them 1: the phase, at the name's end."""
    network_down: str = "fabric/electrical"
    """Above 0, no circuit can be relied on."""


DEFAULT = Names()
