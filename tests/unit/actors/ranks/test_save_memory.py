"""What a save takes of host memory in a rank's process, measured there."""

import ctypes
import re
from pathlib import Path

import msgspec
import pytest

from rubato.actors.config import TrainSection
from rubato.actors.messages.ranks import DraftPart, JoinTerm, LoadRank, TakeRows, TrainShare, WriteRows, WriteSection
from rubato.actors.ranks.rank import TrainRank
from rubato.bus.message import Buffer
from rubato.runtime.memory import MemoryBlobStore
from tests import ranks
from tools.bench.forked import forked

MEMBERS = ("trainer_rank-1", "trainer_rank-2")


@pytest.fixture(scope="session")
def wide_folder(tmp_path_factory):
    """A random model of 10 million parameters, nearly all of which are its embedding and its head."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

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
    folder = tmp_path_factory.mktemp("wide")
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


def memory(name: str) -> int:
    """VmRSS, what this process has, or VmHWM, the most that it had since `forget_peak`."""
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(found[1]) * 1024 if found else 0


M_MMAP_THRESHOLD = -3
"""Of mallopt: larger memory is the system's again as soon as it is freed, as that of tensors of 32 MiB always is."""


def forget_peak() -> int:
    """Returns what this process has, without what the allocator keeps for later."""
    libc = ctypes.CDLL(None)
    libc.mallopt(M_MMAP_THRESHOLD, 2**20)
    libc.malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return memory("VmRSS")


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_saves_take_no_more_than_a_fifth_beyond_one_ranks_shares(wide_folder, tmp_path, on_stage):
    train = TrainSection(mesh={"shard": 2}, micro_batch_tokens=64)  # type: ignore[arg-type]
    groups = Buffer(msgspec.msgpack.encode(ranks.batch(1, num_groups=1)))

    def work(rank: int) -> tuple[int, ...]:
        measured: list[int] = []

        async def play(context):
            context.blobs = MemoryBlobStore()
            subject = TrainRank(TrainRank.Config(train=train), context)
            assert await subject.join_term(JoinTerm(1, rank, MEMBERS, "trainer-1", str(tmp_path / "store"), train.model_dump_json()))
            loaded = await subject.load(LoadRank(1, str(wide_folder), ""))
            await subject.train(TrainShare(1, 1, groups))
            before = forget_peak()
            for number in range(3):
                (tmp_path / f"save.{number}").mkdir(exist_ok=True)
                taken = await subject.take_rows(TakeRows(1, 1))
                await subject.write_rows(WriteRows(1, str(tmp_path / f"save.{number}")))
            saved = memory("VmHWM") - before
            drafted = await subject.draft_part(DraftPart(1, "weights.part0", 1, 1, loaded.section_bytes))
            write = WriteSection(1, drafted.segment, loaded.section_bytes, 0)
            await subject.write_section(write)
            before = forget_peak()
            for _ in range(3):
                await subject.write_section(write)
            measured.extend((saved, taken.num_bytes, memory("VmHWM") - before, loaded.num_bytes))

        on_stage(play, name=MEMBERS[rank])
        return tuple(measured)

    for saved, shares, published, rows in forked(2, tmp_path, work):
        assert shares > 50 * 2**20
        assert 0.8 * shares < saved <= 1.2 * shares
        assert rows > 15 * 2**20
        assert published <= 0.2 * rows  # beyond the memory of the blob
