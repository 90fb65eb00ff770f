"""Bytes of a job's processes: what each key does to them, and which is the next to turn."""

import pytest

from rubato.planning.language_model import ModelSpec
from rubato.planning.memory import Bytes, Change, Process, Serving, Training, layer_activations, next_change, over, report, served, trained

GIB = 2**30
DENSE = ModelSpec(
    name="8B", layers=36, hidden=4096, heads=32, kv_heads=8, head_dim=128, qk_norm=True, ffn=12288, vocab=151936, tied_embeddings=False
)
EXPERTS = ModelSpec(
    name="30B-A3B", layers=48, hidden=2048, heads=32, kv_heads=4, head_dim=128, qk_norm=True, experts=128, experts_per_token=8, expert_ffn=768,
    vocab=151936,
)  # fmt: skip
SMALL = ModelSpec(name="small", layers=1, hidden=256, heads=8, kv_heads=4, head_dim=32, qk_norm=True, ffn=768, vocab=1000)


def process(total: int, available: int, device: str = "cuda:0", actor: str = "trainer-1") -> Process:
    return Process(actor, "", device, Bytes(weights=total), available)


@pytest.mark.parametrize(("adapter", "counted"), [(False, 25688), (True, 22328 - 4 * 8 * 7)])
def test_what_a_layer_keeps_of_a_token_is_what_autograd_was_seen_to_save(adapter, counted):
    """Counted over the hooks of saved tensors, float32; the adapter's own activations, of rank 8 on 7 projections, are not reckoned."""
    assert layer_activations(SMALL, 4, adapter=adapter) == counted


def test_a_parameter_takes_16_bytes_in_float32_and_18_in_bfloat16_with_masters():
    wide, _ = trained(DENSE, Training(1))
    narrow, _ = trained(DENSE, Training(1, compute=2))

    assert wide.weights + wide.grads + wide.master + wide.optimizer == 16 * DENSE.params
    assert narrow.weights + narrow.grads + narrow.master + narrow.optimizer == 18 * DENSE.params


def test_an_adapter_leaves_the_model_without_gradients_and_optimiser():
    found, _ = trained(DENSE, Training(1, compute=2, adapter_params=40_000_000))

    assert found.weights == 2 * DENSE.params + 2 * 40_000_000
    assert found.grads + found.master + found.optimizer == 16 * 40_000_000


def test_ranks_share_what_the_optimiser_moves_and_gather_layers():
    one, _ = trained(DENSE, Training(1, compute=2, shard=1, ranks=True))
    eight, _ = trained(DENSE, Training(1, compute=2, shard=8, ranks=True))

    assert one.optimizer // 8 == pytest.approx(eight.optimizer, rel=1e-6)
    assert one.weights == eight.weights < 2 * DENSE.params


def test_what_is_offloaded_is_in_host_memory():
    found, host = trained(DENSE, Training(1, compute=2, shard=4, ranks=True, offload=True))

    assert (found.grads, found.master, found.optimizer) == (0, 0, 0)
    assert host == 4 * (4 * DENSE.params // 4)


def test_checkpointing_keeps_a_layers_input_alone():
    without, _ = trained(DENSE, Training(8192, compute=2))
    keeping, _ = trained(DENSE, Training(8192, compute=2, checkpointing=True))

    assert keeping.activations < without.activations / 5


def test_all_experts_have_states_and_few_have_activations():
    found, _ = trained(EXPERTS, Training(4096, compute=2, checkpointing=True))

    assert found.optimizer == 8 * EXPERTS.params
    assert found.activations < found.optimizer / 10
    assert EXPERTS.params > 8 * EXPERTS.active_params


def test_a_second_model_is_held_for_a_reference():
    without, _ = trained(DENSE, Training(1, compute=2))
    beside, _ = trained(DENSE, Training(1, compute=2, reference=True))

    assert beside.total - without.total == 2 * DENSE.params


def test_an_engine_holds_a_cache_for_every_slot_and_a_version_beside_its_own():
    found = served(DENSE, Serving(2, num_slots=64, max_len=4096, batch_tokens=2048), 80 * GIB)
    adapter = served(DENSE, Serving(2, num_slots=64, max_len=4096, batch_tokens=2048, adapter=True), 80 * GIB)

    assert found.kv == 64 * 4096 * DENSE.kv_bytes_per_token
    assert found.weights == 2 * adapter.weights == 4 * DENSE.params


def test_an_engine_with_a_share_of_the_device_has_the_cache_that_is_left():
    found = served(DENSE, Serving(2, num_slots=4096, max_len=8192, batch_tokens=2048, share=0.5), 80 * GIB)

    assert found.total <= 40 * GIB
    assert found.kv > 0


def test_an_engine_whose_share_has_no_room_for_one_request_does_not_fit():
    found = served(DENSE, Serving(2, num_slots=64, max_len=4096, batch_tokens=2048, share=0.5), 24 * GIB)

    assert found.total > 12 * GIB
    assert found.kv == 4096 * DENSE.kv_bytes_per_token


def test_processes_of_one_device_share_it_and_what_is_not_known_is_not_judged():
    both = [process(50 * GIB, 80 * GIB), process(40 * GIB, 80 * GIB, actor="engine-1"), process(90 * GIB, 0, "cuda:1")]

    assert over(both) == {"cuda:0": 10 * GIB}


def test_the_next_key_is_the_first_that_makes_all_fit_else_the_one_that_helps_most():
    now = [process(100, 50)]
    some, none, more = Change("a=1", [process(80, 50)]), Change("b=1", [process(100, 50)]), Change("c=1", [process(60, 50)])

    assert next_change(now, [some, none, more]) == "c=1"
    assert next_change(now, [none, some, Change("d=1", [process(50, 50)]), more]) == "d=1"
    assert next_change(now, [none]) == ""
    assert next_change([process(50, 50)], [some]) == ""


def test_the_report_has_every_process_with_its_total():
    told = report([process(7, 10)], "")

    assert told["fits"] is True
    assert told["processes"][0]["bytes"]["total"] == 7
    assert told["processes"][0] | {"bytes": {}} == {
        "actor": "trainer-1", "pool": "", "device": "cuda:0", "bytes": {}, "available": 10, "host_bytes": 0
    }  # fmt: skip
