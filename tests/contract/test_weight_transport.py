"""The WeightTransport contract, over blobs of the host and over a collective transport of two ranks that has no image of a version."""

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from rubato.actors.checkpoints.model_folder import slice_digest
from rubato.actors.messages.weights import WeightsDigest, WeightsPublished, WeightsTaken
from rubato.actors.weights.transport import BlobReceiver, BlobSender, WeightsMissing, WeightsReceiver, WeightsSender, WeightsVersion
from rubato.runtime.actor import RunInfo
from rubato.runtime.blobs.client import BlobClient
from rubato.runtime.blobs.server import BlobServer
from rubato.runtime.kernel import NODE
from rubato.runtime.memory import MemoryBlobStore
from tests.contract.weight_transports import CollectiveReceiver, CollectiveSender, Group


class Source:
    """A rank's share of weights that training changes in place."""

    def __init__(self, tensors: dict[str, np.ndarray]) -> None:
        self.tensors = tensors

    def image_bytes(self) -> int:
        return len(safetensors.numpy.save(self.tensors))

    def export(self, memory: memoryview):
        memory[:] = safetensors.numpy.save(self.tensors)
        return lambda: None


class Bed:
    """The senders of all ranks, and two engines' receivers."""

    def __init__(self, senders: list[WeightsSender], receivers: list[WeightsReceiver]) -> None:
        self.senders, self.receivers = senders, receivers
        self.sources: list[Source] = []

    async def sent(self, version: WeightsVersion, value: float):
        """Send two tensors filled with `value`, shared out among the ranks; returns how to announce them, rank by rank."""
        shares: list[dict[str, np.ndarray]] = [{} for _ in self.senders]
        for index, name in enumerate(("body", "head")):
            shares[index % len(shares)][name] = np.full((3, 4), value + index, "<f4")
        self.sources = [Source(share) for share in shares]
        async with asyncio.TaskGroup() as tasks:
            sending = [tasks.create_task(sender.send(version, source)) for sender, source in zip(self.senders, self.sources, strict=True)]
        return [task.result() for task in sending]

    async def publish(self, version: WeightsVersion, value: float) -> WeightsPublished:
        announces = await self.sent(version, value)
        first, *others = await asyncio.gather(*(announce() for announce in announces))
        assert first is not None
        assert not any(others)
        return first

    async def received(self, receiver: WeightsReceiver, wanted: WeightsPublished) -> dict[str, float]:
        """The value of each tensor, which comes in one part alone."""
        found: dict[str, float] = {}
        async for part in receiver.receive(wanted):
            assert (part.of.adapter, part.of.version) == (wanted.adapter, wanted.version)
            tensors = safetensors.numpy.load(bytes(part.image))
            assert not found.keys() & tensors.keys()
            found |= {name: float(tensor[0, 0]) for name, tensor in tensors.items()}
        return found


def host(blobs: Any) -> Any:
    """As an actor of a run on one host has it."""

    async def offload(fn: Any, *args: Any) -> Any:
        return fn(*args)

    return SimpleNamespace(
        blobs=blobs, node=NODE, offload=offload, ref=None, peers=lambda what: (),
        directory=SimpleNamespace(find=lambda name: None), run=RunInfo("test", Path("run"), 7, 1),
    )  # fmt: skip


@pytest.fixture(params=["blobs in memory", "blobs of an agent", "collective"])
async def bed(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncGenerator[Bed]:
    if request.param == "collective":
        group = Group(num_ranks=2, num_engines=2)
        yield Bed([CollectiveSender(group, r) for r in range(2)], [CollectiveReceiver(group, n) for n in range(2)])
        return
    shared = MemoryBlobStore()
    path = tmp_path / "blobs.sock"
    server = BlobServer(path)
    await server.start()
    handles = [BlobClient(path) if "agent" in request.param else shared for _ in range(3)]
    yield Bed([BlobSender(host(handles[0]))], [BlobReceiver(host(handle)) for handle in handles[1:]])
    for handle in handles:
        await handle.close()
    await server.close()


async def test_every_engine_receives_the_version_that_the_ranks_sent_together(bed: Bed):
    published = await bed.publish(WeightsVersion("", 1, 1), 5.0)

    for receiver in bed.receivers:
        newest = await receiver.newest("")
        assert newest is not None
        assert (newest.version, newest.term, newest.adapter) == (published.version, 1, "")
        assert await bed.received(receiver, newest) == {"body": 5.0, "head": 6.0}


async def test_what_training_changes_after_send_is_not_in_the_version(bed: Bed):
    announces = await bed.sent(WeightsVersion("", 1, 1), 5.0)

    for source in bed.sources:
        for tensor in source.tensors.values():
            tensor += 100.0
    published, *_ = await asyncio.gather(*(announce() for announce in announces))

    assert published is not None
    assert await bed.received(bed.receivers[0], published) == {"body": 5.0, "head": 6.0}


async def test_a_version_is_there_only_once_it_is_announced(bed: Bed):
    announces = await bed.sent(WeightsVersion("", 1, 1), 5.0)

    before = await bed.receivers[0].newest("")
    await asyncio.gather(*(announce() for announce in announces))
    after = await bed.receivers[0].newest("")

    assert before is None
    assert after is not None


async def test_a_later_version_and_a_higher_term_are_the_newest(bed: Bed):
    await bed.publish(WeightsVersion("", 1, 1), 5.0)
    await bed.publish(WeightsVersion("", 2, 1), 7.0)
    second = await bed.receivers[0].newest("")
    assert second is not None
    values = await bed.received(bed.receivers[0], second)

    await bed.publish(WeightsVersion("", 1, 2), 9.0)
    restarted = await bed.receivers[0].newest("")

    assert (second.version, values) == (2, {"body": 7.0, "head": 8.0})
    assert restarted is not None
    assert (restarted.version, restarted.term) == (1, 2)
    assert await bed.received(bed.receivers[0], restarted) == {"body": 9.0, "head": 10.0}


async def test_adapters_have_versions_of_their_own(bed: Bed):
    await bed.publish(WeightsVersion("", 3, 1), 5.0)
    await bed.publish(WeightsVersion("maths", 1, 1), 50.0)
    whole, adapter = await bed.receivers[0].newest(""), await bed.receivers[0].newest("maths")

    assert whole is not None
    assert adapter is not None
    assert (whole.version, adapter.version) == (3, 1)
    assert await bed.received(bed.receivers[0], whole) == {"body": 5.0, "head": 6.0}
    assert await bed.received(bed.receivers[0], adapter) == {"body": 50.0, "head": 51.0}
    assert await bed.receivers[0].newest("chemistry") is None


async def test_a_version_that_was_never_sent_is_missing(bed: Bed):
    await bed.publish(WeightsVersion("", 1, 1), 5.0)

    with pytest.raises(WeightsMissing):
        await bed.received(bed.receivers[0], WeightsPublished(9, 1, "", 0))

    assert (await bed.receivers[0].newest("")) is not None


async def test_an_engine_that_can_not_tell_what_it_computes_with_disagrees_with_no_sender(bed: Bed):
    await bed.publish(WeightsVersion("", 1, 1), 5.0)

    assert [sender.disagreement(WeightsTaken("engine-1", 1, 1)) for sender in bed.senders] == [""] * len(bed.senders)


async def test_blobs_tell_an_engine_that_computes_with_tensors_of_another_adapter(tmp_path: Path):
    bed = Bed([BlobSender(host(MemoryBlobStore()))], [])
    await bed.publish(WeightsVersion("maths", 1, 1), 5.0)
    whole, adapter = (WeightsTaken("engine-1", 1, 1, WeightsDigest("float32", slice_digest(b"other") * 64), name) for name in ("", "maths"))

    assert bed.senders[0].disagreement(whole) == ""
    assert "engine-1 says that it has weights version 1" in bed.senders[0].disagreement(adapter)
