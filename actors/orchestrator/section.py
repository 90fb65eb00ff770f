"""The orchestrator's section of the config, and what a job must have for it."""

from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple

from pydantic import AfterValidator, Field

from rubato.actors import catalog
from rubato.actors.config import engine_specs, one_of
from rubato.runtime.config import ActorSpec, Section
from rubato.runtime.config import Config as Job

REBALANCE, SWITCH = PLANNERS = ("rebalance", "switch")

PACED = ("torch", "scripted")
"""Kinds of engine that are one device: only a pace lets them have another degree."""


DEGREES = ("engine.pace.degree", "engine.vllm.tensor_parallel_size")
"""Keys of the config that say how many GPUs an engine starts with."""


def _planners(given: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(one_of(name, PLANNERS) for name in given))


class OrchestratorSection(Section):
    """Requests move off engines that would be last, and engines merge and split as the load changes. See docs/orchestrrl.md."""

    enabled: bool = False
    """Without it no orchestrator is started, and the job is as if it had none."""
    planners: Annotated[tuple[str, ...], AfterValidator(_planners)] = PLANNERS
    """What it does: rebalance moves requests, switch changes how many GPUs an engine has."""
    degrees: tuple[int, ...] = ()
    """GPUs that an engine may have where it switches; empty: every power of two that the model and a host's engines allow."""
    interval_s: float = Field(default=0.5, gt=0)
    """Period of rebalancing; a request moves once in ten of them."""
    switch_s: float = Field(default=5.0, gt=0)
    """Period of looking for a switch; an engine that changed is left alone for two of them."""


def check_orchestrator(job: Job) -> None:
    """Compare the section with the job's engines. Raises ValueError with one sentence."""
    section: OrchestratorSection = job.section("orchestrator")
    if not section.enabled:
        return
    if job.has("cluster") and job.section("cluster").dir:
        raise ValueError(
            "orchestrator.enabled is true, but with cluster.dir engines sleep and wake by the job's turns: leave one of the two out"
        )
    engine = job.section("engine")
    if engine.pace is None and engine.kind not in PACED and not engine.hardware:
        raise ValueError(
            f"orchestrator.enabled is true, but nothing says on what engine.kind={engine.kind} runs, and the orchestrator counts with it: "
            "set engine.hardware to a class of configs/hardware, such as h100"
        )
    if engine.pace is None and engine.kind in PACED:
        raise ValueError(
            "orchestrator.enabled is true, but it counts with the hardware of engine.pace, which is not set: set engine.pace.hardware "
            "and engine.pace.model"
        )
    if not section.planners:
        raise ValueError(
            f"orchestrator.planners is empty, so it would do nothing: name {' or '.join(PLANNERS)}, or set orchestrator.enabled=false"
        )
    if job.has("proxy") and job.section("proxy").balance == "auto":
        raise ValueError(
            "orchestrator.enabled is true, but with proxy.balance=auto engines of one pool prefill or decode by turns, and a request "
            "could move to one of the other kind: set proxy.balance=fixed"
        )
    _check_degrees(section.degrees, engine)
    pools = _pools(job)
    if engine.pace is None:
        _check_devices(job, engine, SWITCH in section.planners)
    if job.bus.host or not pools:
        return  # other hosts may bring as many as it takes; if no engine decodes, the proxy says so
    if all(pool.engines < 2 for pool in pools):
        raise ValueError(f"orchestrator.enabled is true, but {_alone(pools)}: add engines")
    for degree in section.degrees:
        _check_divides(degree, pools)


class _Pool(NamedTuple):
    """Engines that the launching host starts in one pool that decodes; without pools, all of them under an empty name."""

    name: str
    engines: int
    degree: int
    """GPUs of each at its start; 0 where this host does not show it."""

    def takes(self, degree: int) -> bool:
        return not self.degree or (degree % self.degree == 0 and (self.engines * self.degree) % degree == 0)


def _pools(job: Job) -> list[_Pool]:
    found: dict[str, _Pool] = {}
    for pool in (each for spec in engine_specs(job).values() for each in _pools_of(spec, job.section("engine"))):
        known = found.get(pool.name)
        # Requests move between roles: what counts is the pool, and for those without one the host.
        found[pool.name] = pool if known is None else known._replace(engines=known.engines + pool.engines)
    return list(found.values())


def _pools_of(spec: ActorSpec, engine: Any) -> list[_Pool]:
    if not spec.pools:
        return [_Pool("", spec.count, engine.degree)]
    # A job is checked once more with the keys of each pool, as if all had them: then the others' own degree is not known.
    differ = any(key.startswith(("engine.pace", "engine.vllm")) for pool in spec.pools.values() for key in pool.set)
    return [
        _Pool(name, pool.count, int(next((pool.set[key] for key in DEGREES if key in pool.set), 0 if differ else engine.degree)))
        for name, pool in spec.pools.items()
        if pool.set.get("engine.serves", engine.serves) != "prefill"
    ]


def _alone(pools: Sequence[_Pool]) -> str:
    if not pools[0].name:
        return f"with {pools[0].engines} engine there is nowhere to move a request to"
    return f"no pool that decodes ({', '.join(pool.name for pool in pools)}) has two engines, and requests move within one pool"


def _check_degrees(degrees: tuple[int, ...], engine: Any) -> None:
    """Compare them with the model and its hardware. A real engine's model may be made only when the job begins: its engine refuses them."""
    pace = engine.pace
    gpu = catalog.hardware(engine.hardware if pace is None else pace.hardware)
    heads = 0 if pace is None else catalog.model(pace.model).heads
    for degree in degrees:
        if degree < 1 or heads % degree:
            raise ValueError(
                f"orchestrator.degrees has {degree}, which does not divide the {heads} attention heads of {pace.model}"
                if pace is not None
                else f"orchestrator.degrees has {degree}, and an engine has one GPU at least"
            )
        if degree > gpu.gpus_per_server:
            raise ValueError(
                f"orchestrator.degrees has {degree}, and a server has {gpu.gpus_per_server} {gpu.name}: engines merge within one host"
            )


def _check_devices(job: Job, engine: Any, switches: bool) -> None:
    """A real engine has the GPUs that its process sees: its own alone, by a pool, which it then can't exchange; or else the host's first."""
    specs = engine_specs(job).values()
    unplaced = sum(spec.count for spec in specs if not spec.pools)
    if unplaced > 1 and not catalog.hardware(engine.hardware).cpu:
        planners = f" and orchestrator.planners=[{REBALANCE}]" if switches else ""
        raise ValueError(
            f"orchestrator.enabled is true, but the {unplaced} engines of kind {engine.kind} have no pool, so all would take the host's first "
            f"{engine.hardware}: give each its own by a pool with gpus: 1{planners}"
        )
    for spec in specs:
        for name, pool in spec.pools.items():
            if pool.gpus and switches:
                raise ValueError(
                    f"orchestrator.planners has {SWITCH}, but each engine of pool {name} sees {pool.gpus} GPUs and none of the others': "
                    f"set orchestrator.planners=[{REBALANCE}]"
                )


def _check_divides(degree: int, pools: Sequence[_Pool]) -> None:
    """One pool at least can use it."""
    if any(pool.takes(degree) for pool in pools):
        return
    told = [f"{pool.engines * pool.degree} GPUs, {pool.degree} in each engine" for pool in pools]
    if not pools[0].name:
        raise ValueError(f"orchestrator.degrees has {degree}, into which {told[0]}, can't be divided")
    named = [f"{each} of pool {pool.name}" for each, pool in zip(told, pools, strict=True)]
    raise ValueError(
        f"orchestrator.degrees has {degree}, into which no pool can be divided, and engines merge within one pool: {'; '.join(named)}"
    )
