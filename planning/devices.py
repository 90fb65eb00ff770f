"""Which GPUs and cores of a host its next process gets: the first that no other process of the job has."""

from collections.abc import Collection, Sequence
from typing import NamedTuple, TypeVar

ItemT = TypeVar("ItemT", str, int)


class HostResources(NamedTuple):
    """What one host has for a job's processes. `devices` are named as CUDA_VISIBLE_DEVICES names them, `cores` as the system numbers them."""

    labels: frozenset[str]
    devices: tuple[str, ...]
    cores: tuple[int, ...]


class ProcessNeeds(NamedTuple):
    """What one process takes of its host: all of `labels` must be the host's, and `gpus` and `cores` are its alone."""

    labels: tuple[str, ...] = ()
    gpus: int = 0
    cores: int = 0


class ProcessPlace(NamedTuple):
    """What a process was given; or `why_not`, the end of a sentence that begins with the host, and nothing."""

    devices: tuple[str, ...] = ()
    cores: tuple[int, ...] = ()
    why_not: str = ""


def place(host: HostResources, taken: Collection[ProcessPlace], needs: ProcessNeeds) -> ProcessPlace:
    """The next place on `host` beside `taken`, those of the processes that it has already: in the order of the host's own lists."""
    if missing := [label for label in needs.labels if label not in host.labels]:
        return ProcessPlace(why_not=f"does not have the label {missing[0]}")
    devices = _free(host.devices, {device for each in taken for device in each.devices})
    cores = _free(host.cores, {core for each in taken for core in each.cores})
    for what, wanted, free, num in (
        ("GPU", needs.gpus, len(devices), len(host.devices)),
        ("core", needs.cores, len(cores), len(host.cores)),
    ):
        if wanted > free:
            return ProcessPlace(why_not=f"has {free} of {num} {what}s free, and each process takes {wanted}")
    return ProcessPlace(devices[: needs.gpus], cores[: needs.cores])


def _free(all_of: Sequence[ItemT], taken: Collection[ItemT]) -> tuple[ItemT, ...]:
    return tuple(item for item in all_of if item not in taken)
