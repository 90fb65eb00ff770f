"""The orchestrator's section of the config, and what a job must have for it."""

from typing import Annotated, Any

from pydantic import AfterValidator, Field

from actors import catalog
from actors.config import one_of
from runtime.config import Config as Job
from runtime.config import Section

REBALANCE, SWITCH = PLANNERS = ("rebalance", "switch")

SLEEPING = ("torch", "scripted")
"""Kinds of engine that can give their devices away, and take them again."""


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
    engine, spec = job.section("engine"), job.actors["engine"]
    if engine.kind == "vllm":
        raise ValueError(
            f"orchestrator.enabled is true, but engine.kind={engine.kind} can be neither paced nor put to sleep: set "
            f"engine.kind={' or '.join(SLEEPING)}"
        )
    if engine.pace is None:
        raise ValueError(
            "orchestrator.enabled is true, but it counts with the hardware of engine.pace, which is not set: set engine.pace.hardware "
            "and engine.pace.model"
        )
    if spec.count < 2 and not job.bus.host:
        raise ValueError(
            f"orchestrator.enabled is true, but with {spec.count} engine there is nowhere to move a request to: add engines"
        )
    _check_degrees(section.degrees, engine.pace, spec.count * engine.pace.degree)


def _check_degrees(degrees: tuple[int, ...], pace: Any, num_gpus: int) -> None:
    heads = catalog.model(pace.model).heads
    for degree in degrees:
        if degree < 1 or heads % degree:
            raise ValueError(
                f"orchestrator.degrees has {degree}, which does not divide the {heads} attention heads of {pace.model}"
            )
        if degree % pace.degree or num_gpus % degree:
            raise ValueError(
                f"orchestrator.degrees has {degree}, into which {num_gpus} GPUs, {pace.degree} in each engine, can't be divided"
            )
