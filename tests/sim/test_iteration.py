"""A job's traffic by hand, and an iteration on fabrics: what must not change it, and what must never make it faster."""

from collections import Counter
from itertools import combinations
from pathlib import Path

import pytest

from rubato.planning.hardware import GpuSpec
from rubato.planning.language_model import ModelSpec
from rubato.runtime.config.overrides import read
from rubato.sim.net.network import complete
from rubato.sim.rfabric import iteration
from rubato.sim.rfabric import job as jobs
from rubato.sim.rfabric.fabrics import FABRICS, FabricSpec, case
from rubato.sim.rfabric.job import TrainingSpec, generation_operations, place

CONFIGS = Path(__file__).parents[2] / "configs"
MODEL = ModelSpec.model_validate(read(CONFIGS / "models" / "qwen2-57b-a14b.yaml").tree)
GPU = GpuSpec.model_validate(read(CONFIGS / "hardware" / "h800.yaml").tree)
SPEC = TrainingSpec.model_validate(
    {"train_share": 0.5, "pipeline": 4, "expert": 8, "sequence_tokens": 4096, "sequences": 512, "updates": 2, "compute_efficiency": 0.5}
)  # fmt: skip


def job(gpus=1024, **changes):
    return place(SPEC.model_copy(update=changes), MODEL, GPU, gpus)


def seconds(name, fabric=None, **changes):
    return FABRICS[name](case(job(**changes), FabricSpec.model_validate({"core_share": 1.0, **(fabric or {})}))).seconds


def sent(transfers):
    total = Counter()
    for source, _, size in transfers:
        total[source] += size
    return total


def test_a_server_dispatches_all_its_tokens_to_their_experts_but_those_at_home():
    one = job()

    by_server = sent(jobs.expert_transfers(one))

    assert by_server == pytest.approx(dict.fromkeys(range(one.train_servers), 4096 * 3584 * 2 * 8 * 7 / 8), rel=1e-12)
    assert sent((b, a, v) for a, b, v in jobs.expert_transfers(one)) == by_server


def test_without_duplicates_a_token_crosses_once_per_server_that_has_any_of_its_experts():
    plain, once = job(), job(deduplicate=True)
    small = once._replace(model=MODEL.model_copy(update={"experts": 6, "experts_per_token": 3}))
    server_of = (0, 1, 2, 2, 3, 3)
    drawn = [len({server_of[e] for e in chosen}) for chosen in combinations(range(6), 3)]

    assert small.token_copies(4) == pytest.approx(sum(drawn) / len(drawn), rel=1e-12)
    assert (plain.token_copies(8), once.token_copies(1)) == (8, 1)
    by_server = sent(jobs.expert_transfers(once))
    assert by_server[0] == pytest.approx(once.token_copies(8) * 4096 * 3584 * 2 * 7 / 8, rel=1e-12)


def test_an_execution_on_a_full_tree_takes_what_its_operations_take_one_after_another():
    one = job()  # 2 replicas of 32 servers: 16 micro-batches and 3 more slots to fill the pipeline; 7 layers a stage
    rate, activation = GPU.nic_busbw_bytes_s * 8, 4096 * 3584 * 2

    execution = FABRICS["fat-tree"](case(one, FabricSpec())).phases["execution"]

    experts, stages = 4 * 7 * 19 * 7 * activation / rate, 19 * 2 * activation / rate
    assert execution.network_s == pytest.approx(experts + stages, rel=1e-9)
    assert execution.seconds == pytest.approx(19 * jobs.compute_s(one) + experts + stages, rel=1e-9)


def test_ring_attention_passes_keys_and_values_once_forward_and_twice_backward():
    one = job(context=2, expert=4)  # as many replicas, 32 micro-batches

    on_tree = FABRICS["fat-tree"](case(one, FabricSpec())).phases["execution"]

    times = {name: (runs, done.seconds) for name, runs, done in on_tree.runs}
    assert times["context"][0] == 3 * 1 * 7 * 35
    assert times["context"][1] == pytest.approx(2 * 2 * 4 * 128 * 2048 / (GPU.nic_busbw_bytes_s * 8), rel=1e-9)


def test_gradients_cross_once_per_replica():
    one = job()

    by_server = sent(jobs.gradient_transfers(one))

    experts = MODEL.routed_params / 32 * (one.data - 1) / one.data
    dense = (MODEL.params - MODEL.routed_params) / 4 * (8 * one.data - 1) / (8 * one.data)
    assert by_server[0] == pytest.approx(6 * (experts + dense), rel=1e-12)


def test_context_parallelism_divides_tokens_and_passes_keys_and_values_round():
    one = job(context=2)

    assert one.train_servers == 2 * 8 * 4 * one.data
    assert sent(jobs.context_transfers(one))[0] == pytest.approx(2 * 2 * 4 * 128 * 2048, rel=1e-12)
    assert sent(jobs.expert_transfers(one))[0] == pytest.approx(sent(jobs.expert_transfers(job()))[0] / 2, rel=1e-12)
    assert jobs.context_transfers(job()) == []


def test_every_pod_gets_the_model_and_hands_it_on():
    one = job()
    pods = jobs.generation_pods(one, 32)

    got = Counter()
    for _, target, size in jobs.weight_send(one, pods) + jobs.weight_local(one, pods):
        got[target] += size

    generating = range(one.train_servers, one.servers)
    assert [got[server] for server in generating] == pytest.approx([MODEL.weight_bytes] * len(generating), rel=1e-9)


def test_generation_keeps_to_its_pods():
    spec = jobs.GenerationSpec(expert=8, batch=256, prefill=8, prompt_tokens=2048)
    one = job(generation=spec)
    pods = jobs.generation_pods(one, 32)

    pod_of = {server: i for i, pod in enumerate(pods) for server in pod}
    for name, times, transfers in generation_operations(one, pods):
        assert transfers, name
        assert times > 0
        assert all(pod_of[a] == pod_of[b] for a, b, _ in transfers), name


def test_no_fabric_beats_the_fat_tree_and_rails_equal_it():
    tree = seconds("fat-tree")

    assert seconds("rail-optimised") == pytest.approx(tree, rel=1e-9)
    assert all(seconds(name) >= tree * (1 - 1e-9) for name in FABRICS)


def test_slower_circuit_switches_and_lost_planes_are_never_faster():
    delays = [seconds("rfabric", {"delay": {"ocs_s": d}}) for d in (0.0, 0.01, 0.1, 120.0)]

    assert delays == sorted(delays)
    assert delays[-1] == pytest.approx(seconds("topoopt-like"), rel=1e-9)
    assert seconds("oversubscribed", {"lost": 0.25}) >= seconds("oversubscribed")
    assert seconds("rfabric", {"lost": 0.25}) >= seconds("rfabric") * (1 - 1e-9)


def test_one_topology_for_the_whole_job_is_what_a_fabric_that_can_not_change_has():
    chosen = seconds("topoopt-like", gpus=2048)

    assert seconds("rfabric", {"delay": {"ocs_s": 120.0}}, gpus=2048) == pytest.approx(chosen, rel=1e-9)
    assert chosen < seconds("topoopt-like", {"shares": [1.0]}, gpus=2048)


def test_circuits_shared_by_bytes_as_if_all_ran_at_once_are_slower():
    large = case(job(gpus=2048), FabricSpec(core_share=1.0))

    chosen, plain = FABRICS["rfabric"](large), FABRICS["rfabric-unweighted"](large)

    assert chosen.phases["execution"].network_s < 0.8 * plain.phases["execution"].network_s
    assert chosen.seconds < plain.seconds
    assert FABRICS["rfabric"](case(job(gpus=2048), FabricSpec(core_share=1.0, shares=(1.0,)))).seconds == plain.seconds


@pytest.mark.parametrize("name", ["rfabric", "topoopt-like", "sip", "sip-phased"])
def test_no_circuits_are_picked_by_what_the_simulation_finds(name, monkeypatch):
    before = FABRICS[name](case(job(), FabricSpec(core_share=1.0)))

    def worse(network, wanted):
        done = complete(network, wanted)
        return done._replace(seconds=done.seconds * (2 + 1e3 * (len(network.capacity) % 7)))

    monkeypatch.setattr(iteration, "complete", worse)
    after = FABRICS[name](case(job(), FabricSpec(core_share=1.0)))

    assert after.seconds > before.seconds
    assert after.topology == before.topology


def test_the_parts_of_a_delay_add_up():
    parts = {"drain_s": 0.01, "control_s": 0.02, "ocs_s": 0.03, "relink_s": 0.04}

    assert seconds("rfabric", {"delay": parts}) == pytest.approx(seconds("rfabric", {"delay": {"ocs_s": 0.1}}), rel=1e-9)


def test_a_job_without_room_is_refused():
    with pytest.raises(ValueError, match="512 GPUs leave no room to train"):
        job(gpus=512, pipeline=28)
