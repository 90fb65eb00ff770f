"""Weights in parts: each is brought from the host whose ranks wrote it, side by side, and this host's agent makes one image of them, once."""

import asyncio

from rubato.actors.weights.relayed import PULL_S, Relayed
from rubato.bus.errors import AskFailed
from rubato.runtime.actor import Actor
from rubato.runtime.blobs.blob import BlobInfo, BlobMissing
from rubato.runtime.blobs.blob_messages import NotPulled
from rubato.runtime.blobs.parts import JoinParts, index_in, whole_name
from rubato.runtime.errors import first_cause


async def whole_image(actor: Actor, info: BlobInfo, index: memoryview, *, by_rings: bool) -> tuple[BlobInfo, memoryview]:
    """The image of the version that `index`, which is `info`, names the parts of. Raises BlobMissing and BlobCorrupt."""
    name, version, term, digest, _ = info
    found = index_in(index)
    try:
        async with asyncio.TaskGroup() as tasks:
            for part in found.parts:
                if part.node != actor.node:
                    here = BlobInfo(part.name, version, term, part.digest, part.size_bytes)
                    tasks.create_task(Relayed(actor, part.node, by_rings=by_rings).pull(here, part.delta, part.delta_bytes))
    except ExceptionGroup as group:
        raise first_cause(group) from None
    try:
        reply = await actor.ref(actor.node).ask(JoinParts(name, version, term), timeout=PULL_S)
    except AskFailed as error:
        raise BlobMissing(str(error)) from error
    if isinstance(reply, NotPulled):
        raise BlobMissing(reply.why)
    whole, image = await actor.blobs.get(whole_name(name), version)
    if whole.term != term:
        raise BlobMissing(f"blob {name} version {version} of term {term} was replaced")
    return BlobInfo(name, version, term, digest, whole.size_bytes), image
