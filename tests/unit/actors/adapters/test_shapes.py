"""An adapter by its tensors: which modules, how many bytes, of which model."""

import pytest

from rubato.actors.adapters import shapes
from rubato.actors.checkpoints.hf_files import ModelConfig, Rope
from rubato.actors.checkpoints.model_folder import read_header
from rubato.actors.config import PROJECTIONS, LoraSection
from rubato.actors.engines.kinds import shapes_of
from tests.models import write_model

QWEN3_8B = ModelConfig(
    "qwen3", vocab_size=151936, hidden_size=4096, intermediate_size=12288, num_layers=36, num_heads=32, num_kv_heads=8, head_dim=128,
    rms_eps=1e-6, rope=Rope(1e6), tied=False, qk_norm=True, qkv_bias=False, out_bias=False, mlp_bias=False, max_positions=40960, window=None,
)  # fmt: skip


def test_an_adapter_of_an_8b_model_is_at_most_a_hundredth_of_its_bytes():
    whole = shapes_of(QWEN3_8B)
    lora = LoraSection()

    adapter = shapes.adapter_shapes(shapes.target_modules(whole, lora.targets), lora.rank)

    assert 8.1e9 < shapes.num_elements(whole) < 8.3e9
    assert 0.004 < shapes.image_bytes(adapter, "BF16") / shapes.image_bytes(whole, "BF16") <= 0.01


def test_each_layer_has_two_matrices_for_each_projection():
    adapter = shapes.adapter_shapes(shapes.target_modules(shapes_of(QWEN3_8B), PROJECTIONS), 16)

    assert len(adapter) == 36 * 7 * 2
    assert adapter["base_model.model.model.layers.35.self_attn.k_proj.lora_B.weight"] == (1024, 16)
    assert adapter["base_model.model.model.layers.0.mlp.down_proj.lora_A.weight"] == (16, 12288)


def test_a_target_may_name_one_module_alone():
    assert shapes.target_modules(shapes_of(QWEN3_8B), ("layers.3.mlp.up_proj",)) == {"model.layers.3.mlp.up_proj": (12288, 4096)}


@pytest.mark.parametrize(
    ("target", "sentence"),
    [
        ("q_porj", r"no module of the model is called q_porj \(did you mean q_proj\?\); there are .*, v_proj$"),
        ("mlp", "no module of the model is called mlp; there are down_proj, gate_proj"),
        ("lm_head", "names lm_head, but the embedding and the output head get no adapter"),
        ("embed_tokens", "names model.embed_tokens, but the embedding"),
    ],
)
def test_a_target_that_can_have_no_adapter_is_told_in_one_sentence(target, sentence):
    with pytest.raises(shapes.AdapterError, match=sentence):
        shapes.target_modules(shapes_of(QWEN3_8B), ("v_proj", target))


def test_routed_experts_are_refused():
    with pytest.raises(shapes.AdapterError, match="routed experts get no adapter"):
        shapes.target_modules({"model.layers.0.mlp.experts.0.up_proj.weight": (8, 8)}, ("up_proj",))


def test_a_model_is_told_from_another_of_the_same_shape(base, tmp_path):
    other = write_model(tmp_path / "other", seed=1)

    assert shapes.base_of(base) == shapes.base_of(base)
    assert shapes.base_of(base) != shapes.base_of(other)


@pytest.fixture
def saved(tmp_path, base, adapter_image):
    """`saved(…)`: the folder of an adapter in peft's format."""

    def make(lora=None, **options):
        lora = lora or LoraSection(rank=4, alpha=8)
        folder = tmp_path / "adapter"
        folder.mkdir()
        (folder / shapes.WEIGHTS).write_bytes(adapter_image(lora=lora, **options))
        (folder / "adapter_config.json").write_bytes(shapes.config_image(lora, base))
        return folder

    return make


def test_an_adapter_that_fits_is_begun_with(saved, base):
    shapes.check_start(saved(), base, LoraSection(rank=4, alpha=8))


@pytest.mark.parametrize(
    ("lora", "sentence"),
    [
        (LoraSection(rank=8, alpha=8), "has rank 4 and alpha 8, but train.lora says 8 and 8: set train.lora.rank=4"),
        (
            LoraSection(rank=4, alpha=8, targets=("q_proj",)),
            r"is of down_proj, .*, v_proj, but train.lora.targets says q_proj: set train.lora.targets=\[down_proj, .*, v_proj\]$",
        ),
        (
            LoraSection(rank=4, alpha=8, targets=("layers.0.mlp.up_proj", *PROJECTIONS[:5], "down_proj")),
            "which train.lora.targets does not name",
        ),
    ],
)
def test_an_adapter_of_other_settings_is_refused_in_one_sentence(saved, base, lora, sentence):
    folder = saved()

    with pytest.raises(shapes.AdapterError, match=sentence):
        shapes.check_start(folder, base, lora)


@pytest.mark.parametrize("vocab_size", [97, 101])
def test_an_adapter_of_another_base_is_refused_in_one_sentence(saved, tmp_path, vocab_size):
    other = write_model(tmp_path / "other", seed=1, vocab_size=vocab_size)
    folder = saved()

    with pytest.raises(shapes.AdapterError, match="is an adapter of another base model"):
        shapes.check_start(folder, other, LoraSection(rank=4, alpha=8))


def test_an_adapter_that_says_nothing_of_its_base_is_refused_by_its_shapes(saved, base):
    places = read_header(memoryview((saved() / shapes.WEIGHTS).read_bytes()), "it")
    wanted = {name: (*place.shape[:-1], place.shape[-1] + 1) for name, place in places.items()}

    with pytest.raises(shapes.AdapterError, match="another base model, or of another rank"):
        shapes.require_fit(places, wanted, "it")


@pytest.mark.parametrize("what", ['"use_dora": true', '"bias": "all"', '"rank_pattern": {"q_proj": 2}'])
def test_what_is_no_plain_lora_is_refused_by_name(saved, base, what):
    folder = saved()
    config = folder / "adapter_config.json"
    config.write_text(config.read_text().replace('"peft_type"', f'{what}, "peft_type"').replace('"bias": "none",', "", "bias" in what))

    with pytest.raises(shapes.AdapterError, match="which is not built in"):
        shapes.check_start(folder, base, LoraSection(rank=4, alpha=8))


def test_a_folder_without_an_adapter_is_told(base):
    with pytest.raises(shapes.AdapterError, match="holds no adapter in peft's format: it has no adapter_config"):
        shapes.check_start(base, base, LoraSection())


@pytest.mark.parametrize(
    ("told", "sentence"),
    [
        ('"r": 0', r"can't be read: Expected `int` >= 1 - at `\$.r`"),
        ('"r": "four"', r"can't be read: Expected `int`, got `str`"),
        ('"r": 8', r"adapter_config.json says r=8, but base_model.* has shape \[4, 96\]"),
        ('"r": 4, "lora_alpha": 0', r"can't be read: Expected `float` > 0.0 - at `\$.lora_alpha`"),
    ],
)
def test_a_folder_whose_config_is_not_of_its_tensors_is_refused(saved, told, sentence):
    config = (folder := saved()) / "adapter_config.json"
    config.write_text(
        config.read_text().replace('"lora_alpha": 8,', "" if "lora_alpha" in told else '"lora_alpha": 8,').replace('"r": 4', told)
    )

    with pytest.raises(shapes.AdapterError, match=sentence):
        shapes.read_adapter(folder)
