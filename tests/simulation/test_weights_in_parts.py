"""Weights that ranks of several hosts have written: engines bring each part from where it lies, and see one image, or none."""

import os

from rubato.runtime.blobs.blob import PIECE_BYTES, BlobInfo, digest_of
from rubato.runtime.blobs.parts import Index, Part, part_name, section_head, whole_name
from rubato.runtime.blobs.patches import put_delta
from tests.simulation.test_weights_across_hosts import job
from tests.virtual import virtual

IMAGE = os.urandom(2 * PIECE_BYTES + 64)
CUT = PIECE_BYTES + 128

NODES = {"a": "node-1", "b": "node-2"}


def sections(image):
    """Rows of the hosts a and b, which take turns in the image."""
    ours, theirs = [(0, 64), (CUT, len(image) - CUT)], [(64, CUT - 64)]
    return {
        host: section_head(pieces) + b"".join(image[at : at + num] for at, num in pieces) for host, pieces in (("a", ours), ("b", theirs))
    }


async def publish(made, version, image=IMAGE, *, deltas=False, leave_out=()):
    """As the trainer on host a does, after its ranks on a and b; returns the index."""
    parts = []
    for number, (host, content) in enumerate(sections(image).items()):
        info = BlobInfo(part_name("weights", number), version, 1, digest_of(content), len(content))
        delta = await put_delta(made.blobs[host], info, memoryview(content)) if deltas else None
        if host not in leave_out:
            await made.blobs[host].put(*info[:3], [content])
        told = (delta.digest, delta.size_bytes) if delta else ()
        parts.append(Part(NODES[host], info.name, info.digest, info.size_bytes, *told))
    index = Index(len(image), tuple(parts))
    await made.blobs["a"].put("weights", version, 1, [index.encoded()])
    return index


def given(made):
    return [made.actors[f"node-{n}"].given for n in range(1, 5)]


@virtual
async def test_each_host_brings_each_part_once_and_every_engine_gets_the_whole(tmp_path):
    async with job(tmp_path) as made:
        made.blobs["b"].drafts = []
        draft = made.blobs["b"].draft
        made.blobs["b"].draft = lambda name, *of: made.blobs["b"].drafts.append(name) or draft(name, *of)
        await publish(made, 1)

        await made.pull_all()

        assert made.held() == {f"engine-{n}": (1, IMAGE) for n in range(1, 5)}
        # Of the index a piece for b, c and d; of a's part two pieces for each of them; of b's two for c and d, since a has no engine.
        assert sum(given(made)) == 3 * 1 + 3 * 2 + 2 * 2
        assert given(made)[0] <= 2 * (1 + 2)
        assert given(made)[1] >= 2
        assert made.blobs["b"].drafts.count(whole_name("weights")) == 1  # for two engines
        assert await made.blobs["a"].newest(part_name("weights", 1)) is None


@virtual
async def test_what_changed_in_each_part_travels_in_its_place(tmp_path):
    async with job(tmp_path) as made:
        await publish(made, 1, deltas=True)
        await made.pull_all()
        before, changed = sum(given(made)), IMAGE[:80] + b"changed" + IMAGE[87:-3] + b"end"

        index = await publish(made, 2, changed, deltas=True)
        await made.pull_all()

        assert all(part.delta for part in index.parts)
        assert index.delta_bytes < 400
        assert made.held() == {f"engine-{n}": (2, changed) for n in range(1, 5)}
        assert sum(given(made)) - before == 3 * 1 + 3 * 1 + 2 * 1  # index and deltas are of one piece each


@virtual
async def test_a_version_of_which_a_part_is_gone_or_another_is_not_taken_and_the_next_is(tmp_path):
    async with job(tmp_path) as made:
        await publish(made, 1)
        await made.pull_all()

        await publish(made, 2, IMAGE[::-1], leave_out=("b",))
        await made.pull_all()
        gone = made.held()
        await made.blobs["b"].put(part_name("weights", 1), 2, 1, [sections(IMAGE)["b"]])
        await made.pull_all()
        other = made.held()
        await publish(made, 3, IMAGE[::-1])
        await made.pull_all()

        assert gone == other == {f"engine-{n}": (1, IMAGE) for n in range(1, 5)}
        assert made.held() == {f"engine-{n}": (3, IMAGE[::-1]) for n in range(1, 5)}


@virtual
async def test_when_the_host_of_a_part_is_lost_relays_that_have_it_give_it(tmp_path):
    async with job(tmp_path) as made:
        await publish(made, 1)
        await made.actors["engine-3"].weights.pull()
        made.serving.pop("node-2").cancel()

        await made.actors["engine-4"].weights.pull()

        assert made.held()["engine-4"] == (1, IMAGE)


@virtual
async def test_an_engine_where_the_trainer_lives_brings_the_parts_of_other_hosts(tmp_path):
    async with job(tmp_path) as made:
        await publish(made, 1)

        await made.start(type(made.actors["engine-1"]), "engine-5", "a")

        assert made.held()["engine-5"] == (1, IMAGE)
        assert made.actors["node-2"].given == 2
