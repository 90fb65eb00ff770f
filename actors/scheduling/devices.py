"""GPUs of a job's place, as its config has them."""

from typing import Any

from actors.cluster.pools import SchedulerSection
from actors.scheduling.needs import ENGINE, TRAINER
from runtime.config.sections import DEVICES
from runtime.config.yaml_core import dump_yaml, read_yaml


def prepared(config: str, section: SchedulerSection) -> str:
    """The job's config, in which each role that computes has pools whose GPUs its place names, where the cluster names any."""
    tree: dict[str, Any] = read_yaml(config)
    for role, pool, has in _roles(section):
        spec = tree["actors"][role]
        if not has:
            continue
        if not spec.get("pools"):
            spec["pools"] = {pool: {"count": spec.pop("count", 1)}}
        for each in spec["pools"].values():
            each["gpus"] = 0  # or it would say twice which
    return dump_yaml(tree)


def overrides(config: str, section: SchedulerSection, node: int, group: int) -> list[str]:
    """What a life of the job at that place is launched with. `config` is prepared."""
    actors: dict[str, Any] = read_yaml(config)["actors"]
    return [
        f"actors.{role}.pools.{name}.env.{DEVICES}='{devices}'"
        for role, _, devices in _roles(section, node, group)
        if devices
        for name in actors[role]["pools"]
    ]


def _roles(section: SchedulerSection, node: int = 0, group: int = 0) -> list[tuple[str, str, str]]:
    """Role, the name of its pool where it had none, and the GPUs that it has there."""
    return [
        (ENGINE, "rollout", section.rollout.devices_of(node)),
        (TRAINER, "training", section.training.devices_of(group)),
    ]
