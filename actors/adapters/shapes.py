"""An adapter of low rank by its tensors: what it has of which model, in peft's names and format. Needs no torch.

To the output of each target, x·Wᵀ, it adds x·Aᵀ·Bᵀ·(alpha ÷ rank): A is [rank, inputs], B [outputs, rank].
"""

import difflib
import json
import math
import re
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec

from rubato.actors.checkpoints.model_folder import (
    ADAPTER_CONFIG,
    EMBED,
    HEAD,
    ITEM_BYTES,
    TensorPlace,
    map_file,
    read_header,
    read_tensors,
    sampled_slices,
    slice_of,
)
from rubato.actors.config import LoraSection

WEIGHTS = "adapter_model.safetensors"
"""Beside ADAPTER_CONFIG."""

PREFIX, DOWN, UP = "base_model.model.", ".lora_A.weight", ".lora_B.weight"
"""Of a tensor's name, around that of its module: A goes down to the rank, B up from it."""

BASE, RANK, ALPHA = "rubato.base", "rubato.rank", "rubato.alpha"
"""Keys of what an image says of itself in its header: its base model (`base_of`), and how it is scaled."""


NAME_FORM = re.compile(r"[\w@:+=-]{1,128}")
"""What names of adapters look like: blobs and folders are called by them."""


class AdapterError(Exception):
    """An adapter that can't be: which, why, and what to do."""


class Scaled(NamedTuple):
    """By how much an adapter of that rank counts."""

    rank: int
    alpha: float

    @property
    def factor(self) -> float:
        return self.alpha / self.rank


def require_name(adapter: str) -> None:
    """Raises AdapterError for what no adapter beside that of the run can be called."""
    if not NAME_FORM.fullmatch(adapter):
        raise AdapterError(f"{adapter[:128]!r} is no name of an adapter: that has 1 to 128 letters, digits, and characters of _ @ : + = -")


def target_modules(shapes: Mapping[str, tuple[int, ...]], targets: tuple[str, ...]) -> dict[str, tuple[int, int]]:
    """(outputs, inputs) by name of the modules that `targets` name, of a model with tensors of these `shapes`.

    Raises AdapterError where one names none, with the nearest name; and where one names what can have no adapter.
    """
    matrices = {name.removesuffix(".weight"): shape for name, shape in shapes.items() if name.endswith(".weight") and len(shape) == 2}
    outer = {EMBED.removesuffix(".weight"), HEAD.removesuffix(".weight")}
    found: dict[str, tuple[int, int]] = {}
    for target in targets:
        named = {name: shape for name, shape in matrices.items() if name == target or name.endswith(f".{target}")}
        if not named:
            ends = sorted({name.rpartition(".")[2] for name in matrices if name not in outer})
            near = "".join(f" (did you mean {end}?)" for end in difflib.get_close_matches(target.rpartition(".")[2], ends, 1))
            raise AdapterError(f"train.lora.targets: no module of the model is called {target}{near}; there are {', '.join(ends)}")
        if barred := sorted(name for name in named if name in outer or ".experts." in name):
            what = "routed experts" if ".experts." in barred[0] else "the embedding and the output head"
            raise AdapterError(f"train.lora.targets: {target} names {barred[0]}, but {what} get no adapter here: name other modules")
        found |= {name: (shape[0], shape[1]) for name, shape in named.items()}
    return {name: found[name] for name in matrices if name in found}


def adapter_shapes(modules: Mapping[str, tuple[int, int]], rank: int) -> dict[str, tuple[int, int]]:
    """Every tensor of an adapter, by its name."""
    shapes: dict[str, tuple[int, int]] = {}
    for name, (outputs, inputs) in modules.items():
        shapes[f"{PREFIX}{name}{DOWN}"] = (rank, inputs)
        shapes[f"{PREFIX}{name}{UP}"] = (outputs, rank)
    return shapes


def num_elements(shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Of all tensors together."""
    return sum(map(math.prod, shapes.values()))


def module_of(name: str) -> tuple[str, bool] | None:
    """The module that a tensor of an adapter belongs to, and whether it is its B; None for any other name."""
    for kind in (DOWN, UP):
        if name.startswith(PREFIX) and name.endswith(kind):
            return name.removeprefix(PREFIX).removesuffix(kind), kind == UP
    return None


def shapes_in(folder: Path) -> dict[str, tuple[int, ...]]:
    """Of the tensors of a model folder. Raises ValueError, one sentence. Blocks, reads headers alone."""
    return {name: stored.place.shape for name, stored in read_tensors(folder).items()}


def base_of(folder: Path) -> str:
    """What tells the model in `folder` from others: a digest of its tensors' names, shapes and some of their values. Raises ValueError. Blocks."""
    stored = read_tensors(folder)
    places = {name: each.place for name, each in stored.items()}
    digest = blake2b(digest_size=16)
    for name in sorted(places):
        digest.update(f"{name} {places[name].dtype} {places[name].shape}\n".encode())
    images: dict[Path, memoryview] = {}
    for cut in sampled_slices(dict(sorted(places.items())), 0, 0):
        file = stored[cut.name].file
        image = images[file] if file in images else images.setdefault(file, map_file(file))
        digest.update(slice_of(image, places[cut.name], cut))
    return digest.hexdigest()


def told_of(image: memoryview) -> Mapping[str, str]:
    """What an image says of itself; nothing where it is none."""
    try:
        size = int.from_bytes(image[:8], "little")
        return msgspec.json.decode(image[8 : 8 + size], type=_Header).metadata
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return {}


class _Header(msgspec.Struct, rename={"metadata": "__metadata__"}):
    metadata: dict[str, str] = {}


def telling(scaled: Scaled, base: str) -> dict[str, str]:
    """What an image says of itself."""
    return {"format": "pt", BASE: base, RANK: str(scaled.rank), ALPHA: repr(scaled.alpha)}


def scaled_by(image: memoryview, source: str) -> Scaled:
    """How an image that one of our trainers made is scaled. Raises AdapterError for any other."""
    told = told_of(image)
    try:
        return Scaled(int(told[RANK]), float(told[ALPHA]))
    except (KeyError, ValueError):
        raise AdapterError(f"{source} is no adapter: its header has no {RANK} and {ALPHA}") from None


def require_base(told: Mapping[str, str], base: str, source: str) -> None:
    """Raises AdapterError where the adapter `source` says that it belongs to another model than `base`."""
    if told.get(BASE, base) != base:
        raise AdapterError(f"{source} is an adapter of another base model (its digest is {told[BASE]}, this one's {base})")


# -- peft's folder -------------------------------------------------------------------------------------------------


class PeftConfig(msgspec.Struct):
    """What counts of an adapter_config.json."""

    peft_type: str
    r: Annotated[int, msgspec.Meta(ge=1)]
    lora_alpha: Annotated[float, msgspec.Meta(gt=0)]
    base_model_name_or_path: str | None = None
    target_modules: list[str] | str | None = None
    bias: str = "none"
    use_dora: bool = False
    use_rslora: bool = False
    fan_in_fan_out: bool = False
    rank_pattern: dict[str, int] = {}
    alpha_pattern: dict[str, float] = {}
    modules_to_save: list[str] | None = None

    def refused(self) -> str:
        """What of it is not built in."""
        plain = PeftConfig(self.peft_type, self.r, self.lora_alpha)
        names = ("bias", "use_dora", "use_rslora", "fan_in_fan_out", "rank_pattern", "alpha_pattern", "modules_to_save")
        others = [f"{name}={getattr(self, name)}" for name in names if getattr(self, name) != getattr(plain, name)]
        return ", ".join([f"peft_type={self.peft_type}"] if self.peft_type != "LORA" else others)


def config_image(section: LoraSection, base: Path) -> bytes:
    """An adapter_config.json as peft, transformers and vLLM read it."""
    alpha = int(section.alpha) if section.alpha == int(section.alpha) else section.alpha
    told: dict[str, Any] = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": str(base.resolve()), "inference_mode": True,
        "r": section.rank, "lora_alpha": alpha, "lora_dropout": section.dropout, "target_modules": list(section.targets),
        "bias": "none", "fan_in_fan_out": False,
    }  # fmt: skip
    return json.dumps(told, indent=2).encode()


def read_adapter(folder: Path) -> tuple[PeftConfig, memoryview]:
    """The config and the image of an adapter in peft's format. Raises AdapterError, one sentence. Blocks."""
    try:
        config = msgspec.json.decode((folder / ADAPTER_CONFIG).read_bytes(), type=PeftConfig)
        image = map_file(folder / WEIGHTS)
        places = read_header(image, str(folder / WEIGHTS))
    except FileNotFoundError as error:
        raise AdapterError(f"{folder} holds no adapter in peft's format: it has no {Path(error.filename).name}") from None
    except (OSError, ValueError, msgspec.MsgspecError) as error:
        raise AdapterError(f"the adapter in {folder} can't be read: {error}") from None
    if config.refused():
        raise AdapterError(f"the adapter in {folder} has {config.refused()}, which is not built in: it has to be plain LoRA")
    for name, place in places.items():
        if name.endswith(DOWN) and place.shape[:1] != (config.r,):
            raise AdapterError(f"the adapter in {folder}: {ADAPTER_CONFIG} says r={config.r}, but {name} has shape {[*place.shape]}")
    return config, image


def modules_of(image: memoryview, source: str) -> tuple[str, ...]:
    """The modules that an image has tensors for, in its order."""
    return tuple(dict.fromkeys(told[0] for told in map(module_of, read_header(image, source)) if told is not None))


def require_fit(places: Mapping[str, TensorPlace], wanted: Mapping[str, tuple[int, ...]], source: str) -> None:
    """Raises AdapterError where an adapter has other tensors than those `wanted`."""
    for name, shape in wanted.items():
        if name not in places:
            raise AdapterError(f"{source} has no {name}: it is an adapter of another model, or of other targets than train.lora.targets")
        if places[name].shape != shape:
            found = list(places[name].shape)
            raise AdapterError(
                f"{source}: {name} has shape {found}, not {list(shape)}: it is an adapter of another base model, or of another rank"
            )
    if more := sorted(places.keys() - wanted.keys()):
        raise AdapterError(f"{source} has {more[0]}, which train.lora.targets does not name")


def shapes_of_image(image: memoryview, model: Mapping[str, tuple[int, ...]], rank: int, source: str) -> dict[str, tuple[int, int]]:
    """Every tensor that an adapter has to have, by the modules that it has any for, over a model with tensors of the shapes `model`.

    Raises AdapterError, naming `source`, where one is of no module of the model, or of one that gets no adapter here.
    """
    found = {name: module_of(name) for name in read_header(image, source)}
    if strange := next((name for name, told in found.items() if told is None or f"{told[0]}.weight" not in model), ""):
        raise AdapterError(f"{source} has {strange}, for which this model has no place: it is an adapter of another base model")
    modules = tuple(dict.fromkeys(told[0] for told in found.values() if told is not None))
    if not modules:
        raise AdapterError(f"{source} has no tensors")
    return adapter_shapes(target_modules(model, modules), rank)


def check_start(folder: Path, model: Path, section: LoraSection) -> None:
    """Raises AdapterError, one sentence, where the adapter in `folder` can't be trained on over `model` as `section` says. Blocks."""
    config, image = read_adapter(folder)
    if (config.r, config.lora_alpha) != (section.rank, section.alpha):
        raise AdapterError(
            f"the adapter in {folder} has rank {config.r} and alpha {config.lora_alpha:g}, but train.lora says {section.rank} and "
            f"{section.alpha:g}: set train.lora.rank={config.r} and train.lora.alpha={config.lora_alpha:g}"
        )
    require_base(told_of(image), base_of(model), f"the adapter in {folder}")
    named, wants = (sorted({name.rpartition(".")[2] for name in names}) for names in (modules_of(image, str(folder)), section.targets))
    if named and named != wants:
        raise AdapterError(
            f"the adapter in {folder} is of {', '.join(named)}, but train.lora.targets says {', '.join(wants)}: set "
            f"train.lora.targets=[{', '.join(named)}]"
        )
    wanted = adapter_shapes(target_modules(shapes_in(model), section.targets), section.rank)
    require_fit(read_header(image, str(folder)), wanted, f"the adapter in {folder}")


def image_bytes(shapes: Mapping[str, tuple[int, ...]], dtype: str) -> int:
    """Of the values of tensors in BF16 or F32; a header comes on top."""
    return ITEM_BYTES[dtype] * num_elements(shapes)
