"""The roofline: its two roofs, its parallelism, and the profile that it is calibrated on."""

from pathlib import Path

import pytest
import yaml

from rubato.planning.roofline import Deployment, Roofline
from rubato.sim.training_model import TrainerSpec

CONFIGS = Path(__file__).parents[2] / "configs"


def parts(gpu: str = "h800", model: str = "qwen3-8b") -> dict:
    names = {"gpu": f"hardware/{gpu}.yaml", "model": f"models/{model}.yaml"}
    return {key: yaml.safe_load((CONFIGS / name).read_text()) for key, name in names.items()}


def engine(gpu: str = "h800", model: str = "qwen3-8b", **changes) -> Roofline:
    return Roofline(Deployment.model_validate({**parts(gpu, model), **changes}))


def test_a_small_batch_takes_the_time_to_read_weights_and_kv():
    model = engine()
    spec = model.spec

    read = spec.model.weight_bytes + 1000 * spec.model.kv_bytes_per_token
    assert model.step_s(1, 1000) == pytest.approx(read / (3.35e12 * 0.72))


def test_a_large_batch_of_short_contexts_is_bound_by_compute_on_a_gpu_of_little_compute():
    flops = engine("h20").spec.model.forward_flops_per_token(10) * 200

    assert engine("h20").step_s(200, 2000) == pytest.approx(flops / (148e12 * 0.55))
    assert engine("h800").step_s(200, 2000) < engine("h20").step_s(200, 2000)


def test_a_7b_step_is_within_a_tenth_of_the_profile_that_names_the_bandwidth():
    """Frontier, H800, Llama-2-7B: 0.167 ms per layer of linear operators at TP1, 32 layers; Qwen2.5-7B has 13 % more weights."""
    scaled = engine(model="qwen2.5-7b").step_s(1, 0) * 6.74 / 7.62

    assert scaled == pytest.approx(0.167e-3 * 32, rel=0.1)


def test_tensor_parallelism_divides_reading_and_adds_collectives():
    one, two = engine(), engine(tp=2)

    added = 2 * 36 * (3e-6 + 2 * 0.5 * 4096 * 2 / 165e9)
    assert two.step_s(1, 1000) == pytest.approx(one.step_s(1, 1000) / 2 + added)


def test_a_mixture_of_experts_reads_more_experts_the_larger_the_batch():
    model = engine(model="qwen2-57b-a14b", tp=4)

    small, large = model.step_s(1, 0), model.step_s(64, 0)
    assert small < 0.4 * large
    assert model.step_s(256, 0) < 1.1 * large


def test_weights_that_do_not_fit_are_refused_with_the_way_out():
    with pytest.raises(ValueError, match="give it more tp or pp"):
        engine(model="qwen2-57b-a14b")


def test_prefill_behind_a_prefix_costs_more_than_at_the_start_and_less_than_both():
    model = engine()

    assert model.prefill_s(1000) < model.prefill_s(1000, 8000) < model.prefill_s(9000)


def test_a_training_step_is_its_flops_over_what_the_gpus_reach():
    spec = TrainerSpec.model_validate({**parts(), "gpus": 32, "scoring_passes": 1, "recompute": False})

    forward = 1_000_000 * spec.model.forward_flops_per_token(500)
    assert spec.step_s(1_000_000, 1000) == pytest.approx(4 * forward / (32 * 989e12 * 0.4) + 2 * 31 / 32 * spec.model.weight_bytes / 48.5e9)


def test_the_pipelines_bubble_shrinks_with_micro_batches():
    spec = TrainerSpec.model_validate({**parts(), "gpus": 32, "pp": 4})

    assert spec.bubble == pytest.approx(3 / 11)
    assert spec.model_copy(update={"micro_batches": 64}).bubble < 0.05
