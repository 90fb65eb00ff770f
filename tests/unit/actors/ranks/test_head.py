"""The trainer's side of ranks on two hosts: what they write of a version comes to an engine of a third, and is what the trainer can export."""

import asyncio
from contextlib import asynccontextmanager

import msgspec

from rubato.actors.checkpoints.model_folder import read_header, sampled_slices, slice_digest, slice_of
from rubato.actors.config import TrainSection
from rubato.actors.messages.weights import WeightsDigest, WeightsTaken
from rubato.actors.ranks.head import RankedEngine, RankedSender
from rubato.actors.ranks.rank import TrainRank
from rubato.actors.training.train_engine import image_of
from rubato.actors.weights.transport import WeightsVersion
from tests.simulation.test_weights_across_hosts import NODES, Engine, Job, Node, Trainer

TRAIN = TrainSection(kind="scripted", mesh={"shard": 2}, scripted={"weights_mib": 1, "step_s": 0.0})  # type: ignore[arg-type]


class Rank(TrainRank):
    def end_process(self, code):
        """It is the test's."""


class Hosts:
    """The registry of a run on several hosts."""

    def __init__(self, directory):
        self._directory = directory
        self.change = directory.change

    def find(self, name):
        record = self._directory.find(name)
        return record and msgspec.structs.replace(record, node=NODES[name])


class OnHost:
    """An actor of such a run."""

    def __init__(self, actor):
        self._actor, self.directory, self.node = actor, Hosts(actor.directory), NODES[actor.name]

    def __getattr__(self, name):
        return getattr(self._actor, name)


@asynccontextmanager
async def trainer(folder, second):
    """A trainer on host a, one rank there and one on the host `second`, and an engine on c; gives the job, the TrainEngine and the sender."""
    async with asyncio.TaskGroup() as tasks:
        made = Job(tasks, folder)
        for number, host in enumerate("abc", 1):
            await made.start(Node, f"node-{number}", host)
        for number, host in enumerate(("a", second), 1):
            await made.start(Rank, f"trainer_rank-{number}", host, TrainRank.Config(train=TRAIN))
        await made.start(Trainer, "trainer-1", "a")
        await made.start(Engine, "engine-1", "c")
        actor = OnHost(made.actors["trainer-1"])
        engine = RankedEngine(actor, TRAIN, asyncio.get_running_loop())
        await asyncio.to_thread(engine.load, folder, None)
        yield made, engine, RankedSender(actor)
        for task in made.serving.values():
            task.cancel()


async def test_a_version_of_ranks_on_two_hosts_is_whole_at_a_third_and_none_of_the_second_hosts_rows_are_the_trainers(tmp_path):
    async with trainer(tmp_path, "b") as (made, engine, sender):
        announce = await sender.send(WeightsVersion("", 0, 3), engine)
        exported = bytes(await asyncio.to_thread(image_of, engine))  # which what is under way outlives
        before = await made.blobs["a"].newest("weights")
        published = await announce()
        await made.actors["engine-1"].weights.pull()
        near, far = [await made.blobs[host].newest(f"weights.part{number}") for number, host in enumerate("ab")]
        gone = [await made.blobs[host].newest(f"weights.part{number}") for number, host in enumerate("ba")]

    assert before is None
    assert (published.version, published.term, published.size_bytes) == (0, 3, len(exported))
    assert made.held() == {"engine-1": (0, exported)}
    assert abs(near.size_bytes - far.size_bytes) < 64
    assert near.size_bytes + far.size_bytes < len(exported) + 128
    assert gone == [None, None]


async def test_an_engine_that_computes_with_other_tensors_than_ranks_of_two_hosts_wrote_disagrees(tmp_path):
    async with trainer(tmp_path, "b") as (_, engine, sender):
        await (await sender.send(WeightsVersion("", 0, 3), engine))()
        image = await asyncio.to_thread(image_of, engine)

    header = read_header(image, "the image")
    digests = [slice_digest(slice_of(image, header[cut.name], cut)) for cut in sampled_slices(header, 7, 0)]
    told = [WeightsTaken("engine-1", 0, 3, WeightsDigest("float32", b"".join(each))) for each in (digests, digests[::-1])]

    assert sender.disagreement(told[0]) == ""
    assert "trainer and engine disagree" in sender.disagreement(told[1])


async def test_ranks_of_one_host_write_one_blob(tmp_path):
    async with trainer(tmp_path, "a") as (made, engine, sender):
        published = await (await sender.send(WeightsVersion("", 0, 3), engine))()
        exported = bytes(await asyncio.to_thread(image_of, engine))
        info, image = await made.blobs["a"].get("weights", 0)
        part = await made.blobs["a"].newest("weights.part0")

    assert bytes(image) == exported
    assert (published.digest, published.size_bytes) == (info.digest, len(exported))
    assert part is None
