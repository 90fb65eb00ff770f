"""Prints what saves take of host memory, as measured in the processes of two ranks: a list for each of saved, shares, published, rows.

`python -m tests.unit.actors.ranks.save_memory FOLDER`, with MALLOC_MMAP_THRESHOLD_ below the size of its tensors: memory of theirs is then the
system's again as soon as it is freed. A process that did other work before has free memory of such sizes to hand out, and would measure that.
"""

import asyncio
import re
import sys
from pathlib import Path

import msgspec
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from rubato.actors.config import TrainSection
from rubato.actors.messages.ranks import DraftPart, JoinTerm, LoadRank, TakeRows, TrainShare, WriteRows, WriteSection
from rubato.actors.ranks.rank import TrainRank
from rubato.bus.message import Buffer
from rubato.runtime.memory import MemoryBlobStore, MemoryStore
from tests import ranks
from tests.unit.actors.conftest import FakeKernel
from tools.bench.forked import forked

MEMBERS = ("trainer_rank-1", "trainer_rank-2")


def wide_folder(folder: Path) -> Path:
    """A random model of 10 million parameters, nearly all of which are its embedding and its head."""
    torch.manual_seed(3)
    config = Qwen3Config(
        vocab_size=40_000,
        hidden_size=128,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=64,
        tie_word_embeddings=False,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


def memory(name: str) -> int:
    """VmRSS, what this process has, or VmHWM, the most that it had since `forget_peak`."""
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(found[1]) * 1024 if found else 0


def forget_peak() -> int:
    """Returns what this process has."""
    Path("/proc/self/clear_refs").write_text("5")
    return memory("VmRSS")


async def measured(rank: int, folder: Path, model: Path) -> tuple[int, int, int, int]:
    train = TrainSection(mesh={"shard": 2}, micro_batch_tokens=64)  # type: ignore[arg-type]
    groups = Buffer(msgspec.msgpack.encode(ranks.batch(1, num_groups=1)))
    async with asyncio.TaskGroup() as tasks:
        context = FakeKernel(MEMBERS[rank], tasks, MemoryStore())
        context.blobs = MemoryBlobStore()
        subject = TrainRank(TrainRank.Config(train=train), context)
        assert await subject.join_term(JoinTerm(1, rank, MEMBERS, "trainer-1", str(folder / "store"), train.model_dump_json()))
        loaded = await subject.load(LoadRank(1, str(model), ""))
        await subject.train(TrainShare(1, 1, groups))
        before = forget_peak()
        for number in range(3):
            (folder / f"save.{number}").mkdir(exist_ok=True)
            taken = await subject.take_rows(TakeRows(1, 1))
            await subject.write_rows(WriteRows(1, str(folder / f"save.{number}")))
        saved = memory("VmHWM") - before
        drafted = await subject.draft_part(DraftPart(1, "weights.part0", 1, 1, loaded.section_bytes))
        write = WriteSection(1, drafted.segment, loaded.section_bytes, 0)
        await subject.write_section(write)
        before = forget_peak()
        for _ in range(3):
            await subject.write_section(write)
        published = memory("VmHWM") - before
        for task in context.spawned:
            task.cancel()
    return saved, taken.num_bytes, published, loaded.num_bytes


def main(folder: Path) -> None:
    model = wide_folder(folder / "wide")
    found = forked(2, folder, lambda rank: asyncio.run(measured(rank, folder, model)))
    print(msgspec.json.encode(found).decode())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
