"""The KV cache of an engine that sleeps and forgets it."""

import torch

from rubato.actors.checkpoints.hf_files import read_config
from rubato.actors.engines.model import KVCache
from tests.models import write_model


def test_a_dropped_cache_holds_no_memory_keeps_its_shape_and_is_zeros_again(tmp_path):
    cache = KVCache(read_config(write_model(tmp_path)), 4, 64, torch.device("cpu"), torch.float32)
    shape, size = cache.shape_of(3), cache.num_bytes(3)
    cache.put(1, torch.ones(shape))

    cache.drop()
    held = cache._table.untyped_storage().nbytes()
    told = cache.shape_of(3), cache.num_bytes(3)
    cache.on(torch.device("cpu"), kept=False)

    assert held == 4
    assert told == (shape, size)
    assert not cache.take(1, 3).any()
    cache.put(1, torch.ones(shape))
    assert cache.take(1, 3).all()
