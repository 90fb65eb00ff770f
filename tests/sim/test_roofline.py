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


def test_a_small_batch_takes_the_time_to_read_weights_and_the_least_of_every_layer():
    model = engine()

    assert model.step_s(1, 1000) == pytest.approx(model.spec.model.weight_bytes / (3.35e12 * 0.85) + 36 * (24.4e-6 + 9.8e-6))


def test_attention_takes_its_least_until_reading_the_cache_takes_longer():
    model = engine()
    per_token = model.spec.model.kv_bytes_per_token / (3.35e12 * 0.85)
    enough = 36 * 9.8e-6 / per_token

    assert model.step_s(8, enough / 2) == model.step_s(8, 0)
    assert model.step_s(8, 3 * enough) == pytest.approx(model.step_s(8, 0) + 2 * enough * per_token)


def test_a_large_batch_of_short_contexts_is_bound_by_compute_on_a_gpu_of_little_compute():
    flops = engine("h20").spec.model.forward_flops_per_token(10) * 200

    assert engine("h20").step_s(200, 2000) == pytest.approx(flops / (148e12 * 0.55) + 36 * 24.4e-6)
    assert engine("h800").step_s(200, 2000) < engine("h20").step_s(200, 2000)


LLAMA = {"name": "Llama-2-7B", "layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 32, "head_dim": 128, "ffn": 11008, "vocab": 32000}


@pytest.mark.parametrize(("degree", "split_ms", "launched_ms"), [(1, 5.15, 10.6), (2, 2.83, 9.3), (4, 1.69, 8.8), (8, 1.21, 8.7)])
def test_a_step_is_within_a_twentieth_of_the_profile_at_every_degree(degree, split_ms, launched_ms):
    """Frontier, H800, Llama-2-7B, one token: kernels that are split, 32 layers; all a layer's operators with their launches."""
    norms_s, attention_s = 32 * 6.0e-6, 32 * 9.8e-6
    spec = Deployment.model_validate({**parts(), "model": LLAMA, "tp": degree})
    head_s = 2 * spec.model.embedding_params / (degree * 3.35e12 * 0.85)
    collectives_s = 0 if degree == 1 else 64 * (3e-6 + 2 * (degree - 1) / degree * 4096 * 2 / 165e9)

    layers_s = Roofline(spec).step_s(1, 0) - head_s - collectives_s

    assert layers_s == pytest.approx(split_ms * 1e-3 + norms_s + attention_s, rel=0.05)
    assert layers_s + 0.006 == pytest.approx(launched_ms * 1e-3, rel=0.15)


def test_large_degrees_use_less_of_the_bandwidth_the_more_so_the_smaller_the_model():
    def gain(model):
        return engine(model=model, tp=1).step_s(1, 0) / engine(model=model, tp=4).step_s(1, 0)

    assert gain("qwen3-8b") < gain("qwen2.5-14b") < gain("qwen2.5-32b") < 4


def test_tensor_parallelism_divides_reading_and_adds_collectives():
    one, two = engine(), engine(tp=2)

    least = 36 * (24.4e-6 + 9.8e-6)
    added = 2 * 36 * (3e-6 + 2 * 0.5 * 4096 * 2 / 165e9)
    assert two.step_s(1, 1000) == pytest.approx((one.step_s(1, 1000) - least) / 2 + least + added)


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
