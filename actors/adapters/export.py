"""`rubato export CHECKPOINT --merged OUT`: a checkpoint as a model of its own, an adapter merged into its base model."""

import argparse
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from rubato.actors.adapters import shapes
from rubato.actors.checkpoints import checkpoint as checkpoints
from rubato.actors.checkpoints.model_check import check_model_folder
from rubato.actors.checkpoints.model_folder import ADAPTER_CONFIG, INDEX, WEIGHTS, files_beside_weights, map_file, read_header, weight_files
from rubato.runtime.errors import ConfigError, LaunchError, has_no_room

LEFT_OUT = {checkpoints.MANIFEST, checkpoints.RECEIPTS, ADAPTER_CONFIG, "optimizer.state", "trainer.json"}
"""What belongs to a checkpoint, or to the adapter, and not to the model."""


def main(argv: Sequence[str]) -> int:
    """Write the folder; RubatoError is the caller's to print."""
    parser = argparse.ArgumentParser("rubato export", description="Write a checkpoint as a whole model in Hugging Face's format.")
    parser.add_argument("checkpoint", type=Path, help="a checkpoint, or a run: its newest; also the folder of an adapter in peft's format")
    parser.add_argument("--merged", type=Path, required=True, metavar="OUT", help="the folder to write, which must not exist")
    parser.add_argument("--base", type=Path, help="the adapter's base model, where it is not where the adapter says")
    given = parser.parse_args(list(argv))
    if given.merged.exists():
        raise LaunchError(f"{given.merged} exists already: name a folder that does not.")
    found = export(chosen(given.checkpoint), given.merged, given.base)
    print(f"{given.merged}: {found}")  # noqa: T201
    return 0


def chosen(given: Path) -> Path:
    """The folder itself, or a run's newest whole checkpoint. Raises LaunchError."""
    if not given.is_dir():
        raise LaunchError(f"{given} is no folder. Name a checkpoint, a run, or the folder of an adapter.")
    folder = given / "checkpoints"
    if not folder.is_dir():
        return given
    newest, _ = checkpoints.newest(folder)
    if newest is None:
        raise LaunchError(f"{folder} holds no checkpoint that is whole.")
    return newest


def export(source: Path, out: Path, base: Path | None) -> str:
    """Write `out`, whole or not at all; returns what it is. Raises LaunchError, one sentence. Blocks."""
    building = out.with_name(f".{out.name}.building")
    shutil.rmtree(building, ignore_errors=True)
    try:
        building.mkdir(parents=True)
        if (source / ADAPTER_CONFIG).exists():
            told = _merge(source, building, base)
        else:
            _copy(source, building)
            told = f"the model of {source}"
        building.rename(out)
    except (shapes.AdapterError, ConfigError, ValueError) as error:
        raise LaunchError(str(error).removesuffix(".") + ".") from error
    except OSError as error:
        if has_no_room(error):
            raise
        raise LaunchError(f"{out} can't be written: {error.strerror}.") from error
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return told


def _copy(source: Path, out: Path) -> None:
    check_model_folder(source, key="the checkpoint")
    files = weight_files(source)
    for file in (*files, *([source / INDEX] if files[0].name != WEIGHTS else [])):
        shutil.copyfile(file, out / file.name)
    _write_rest(source, out)


def _merge(source: Path, out: Path, base: Path | None) -> str:
    """One file of the base model after the other, so that no more than one is in memory."""
    config, image = shapes.read_adapter(source)
    model = base or Path(config.base_model_name_or_path or "")
    if not config.base_model_name_or_path and base is None:
        raise shapes.AdapterError(f"the adapter in {source} does not say what its base model is: name it with --base")
    if not model.is_dir():
        raise shapes.AdapterError(f"the base model of the adapter in {source}, {model}, is not there: say with --base where it is now")
    check_model_folder(model, key="--base")
    shapes.require_base(shapes.told_of(image), shapes.base_of(model), f"the adapter in {source}")
    modules = _modules(image, source, shapes.shapes_in(model))
    files = weight_files(model)
    for file in files:
        _merge_file(file, out / file.name, image, modules, shapes.Scaled(config.r, config.lora_alpha).factor)
    if files[0].name != WEIGHTS:
        shutil.copyfile(model / INDEX, out / INDEX)
    _write_rest(model, out)
    return f"the adapter in {source} merged into {model} ({len(modules)} matrices changed)"


def _modules(image: memoryview, source: Path, whole: Mapping[str, tuple[int, ...]]) -> set[str]:
    """The modules that an adapter changes. Raises AdapterError for one that its base model lacks, or has in another shape."""
    places = read_header(image, str(source))
    named = [told for told in map(shapes.module_of, places) if told is not None]
    modules = {module for module, _ in named}
    if len(named) != len(places) or len(named) != 2 * len(modules):
        raise shapes.AdapterError(f"the adapter in {source} has tensors that are no pairs of lora_A and lora_B, which is not built in")
    for module in sorted(modules):
        down, up = (places[f"{shapes.PREFIX}{module}{kind}"].shape for kind in (shapes.DOWN, shapes.UP))
        if whole.get(f"{module}.weight") != (up[0], down[1]):
            raise shapes.AdapterError(f"the adapter in {source} is of another base model: that has no {module} of shape {[up[0], down[1]]}")
    return modules


def _merge_file(file: Path, to: Path, image: memoryview, modules: set[str], factor: float) -> None:
    import torch
    from safetensors.torch import load, save_file

    adapter, tensors = load(bytes(image)), load(bytes(map_file(file)))
    for module in modules:
        weight = tensors.get(f"{module}.weight")
        if weight is None:
            continue
        down, up = (adapter[f"{shapes.PREFIX}{module}{kind}"].float() for kind in (shapes.DOWN, shapes.UP))
        merged = torch.addmm(weight.float(), up, down, alpha=factor)
        if not torch.isfinite(merged).all():
            raise shapes.AdapterError(f"{module} is not finite after merging: the adapter or its base is damaged")
        tensors[f"{module}.weight"] = merged.to(weight.dtype)
    save_file(tensors, to, {"format": "pt"})


def _write_rest(model: Path, out: Path) -> None:
    for name, content in _described(model):
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_bytes(content)


def _described(model: Path) -> Iterator[tuple[str, bytes]]:
    return ((name, content) for name, content in files_beside_weights(model).items() if name not in LEFT_OUT)
