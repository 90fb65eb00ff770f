"""`rubato eval MODEL [CONFIG]`: the evaluation that a run does, outside a run, as a job of the same actors with an Evaluator for a trainer."""

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from rubato.actors.adapters import shapes
from rubato.actors.checkpoints import checkpoint as checkpoints
from rubato.actors.checkpoints.model_check import check_model_folder
from rubato.actors.checkpoints.model_folder import ADAPTER_CONFIG
from rubato.actors.config import engine_specs, name_of
from rubato.runtime.config import Config
from rubato.runtime.config.compose import compose
from rubato.runtime.config.overrides import read
from rubato.runtime.errors import LaunchError
from rubato.runtime.importer import FOLDER as CODE
from rubato.runtime.importer import KeptCode
from rubato.runtime.launch import commands

KEPT = ("sample_buffer", "llm_proxy", "env_manager", "reward_service")
"""Roles that an evaluation needs besides those with engines, as the config has them; of all others none is started."""

SHOWN = ("version", "reward", "num", "failed")


def main(argv: Sequence[str]) -> int:
    """Evaluate, and print a table or JSON; RubatoError is the caller's to print."""
    usage = "%(prog)s RUN [CONFIG] [key.sub=value …] [options]\n       %(prog)s MODEL CONFIG [key.sub=value …] [options]"
    parser = argparse.ArgumentParser("rubato eval", usage=usage, description="Evaluate a model on held-out tasks.")
    parser.add_argument("model", help="a model folder, its name at the hub, a checkpoint, or a run: its newest checkpoint")
    help_words = "a YAML file, by default the run's own config; changes of single keys, e.g. eval.samples=8"
    parser.add_argument("words", nargs="*", default=[], metavar="CONFIG, key.sub=value", help=help_words)
    parser.add_argument("--all", action="store_true", help="every checkpoint of the run MODEL")
    parser.add_argument("--json", action="store_true", help="print JSON, one line for each model")
    parser.add_argument("--out", type=Path, help="add the rows to this file too")
    given = parser.parse_intermixed_args(argv)
    models = find_models(given.model, every=given.all)
    config, overrides = _config_of(given.model, given.words)
    text = job_of(config, overrides, models)
    Path("runs").mkdir(exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="eval-", dir="runs"))
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file, redirect_stdout(sys.stderr):
        file.write(text)
        file.flush()
        code = commands.launch([file.name, "--run-dir", str(folder)])
    rows = [json.loads(line) for line in _lines(folder / "evals.jsonl")]
    told = [
        {"model": model, **row, "samples_file": str(folder / "evals" / f"{row['version']}.jsonl")}
        for model, row in zip(models, rows, strict=False)
    ]
    if given.out is not None:
        with given.out.open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in told)
    if told:
        print("\n".join(map(json.dumps, told)) if given.json else table(told))  # noqa: T201
        print(f"each sample: {', '.join(row['samples_file'] for row in told)}", file=sys.stderr)  # noqa: T201
    return code


def _config_of(model: str, words: Sequence[str]) -> tuple[Path, Sequence[str]]:
    """The config that is named, else that of the run which `model` is or is a checkpoint of; and the changes of keys."""
    if words and ("=" not in words[0] or Path(words[0]).is_file()):
        return Path(words[0]), words[1:]
    resolved = Path(model).resolve()
    run = resolved if (resolved / "checkpoints").is_dir() else resolved.parent.parent
    if not (run / "config.yaml").is_file():
        raise LaunchError(f"{model} is of no run with a config.yaml, so eval needs a config: rubato eval {model} configs/quickstart.yaml")
    if changed := KeptCode(run / CODE).changed():
        files = ", ".join(map(str, changed[:3])) + (", …" if len(changed) > 3 else "")
        print(f"changed since {run} began, and taken as they are now: {files}", file=sys.stderr)  # noqa: T201
    return run / "config.yaml", words


def find_models(named: str, *, every: bool) -> list[str]:
    """The model folders to evaluate, checkpoints in the order of their steps; or one model's name at a hub. Raises LaunchError."""
    given = Path(named)
    if not given.is_dir():
        if name_of(named) and not given.parent.is_dir() and not every:
            return [named]
        raise LaunchError(f"{given} is no folder. Name a model folder, a checkpoint, or the folder of a run.")
    folder = given / "checkpoints"
    if not folder.is_dir():
        if every:
            raise LaunchError(f"{given} has no checkpoints: --all goes with the folder of a run.")
        if (given / ADAPTER_CONFIG).exists():
            _adapter_in(given)
        else:
            check_model_folder(given)
        return [str(given.resolve())]
    found = checkpoints.by_step(folder) if every else [path for path in [checkpoints.newest(folder)[0]] if path]
    if not found:
        raise LaunchError(f"{folder} holds no checkpoint that is whole. Name a model folder.")
    for path in found:
        try:
            checkpoints.check(path)
        except checkpoints.CheckpointError as error:
            raise LaunchError(f"{error}. Evaluate the others one by one.") from error
    return [str(path.resolve()) for path in found]


def job_of(config: Path, overrides: Sequence[str], models: Sequence[str]) -> str:
    """The job that evaluates `models` as `config` says, as YAML. Raises ConfigError with one sentence per mistake."""
    source = read(config, overrides)
    whole = compose(source)  # what is wrong in it is told in its own words
    tree: dict[str, Any] = whole.tree()
    for role, spec in tree["actors"].items():
        if role not in KEPT and role not in engine_specs(whole):
            spec |= {"count": whole.actor_class(role).least, "pools": {}}
    tree["actors"]["trainer"] = {"class": "rubato.actors.training.evaluator:Evaluator"}
    tree["evaluate"] = {"models": [*models]}
    tree["model"]["path"] = models[0]
    if train := tree.get("train"):
        train |= {"reference": "", "mesh": {}, "lora": None}
    if (Path(models[0]) / ADAPTER_CONFIG).exists():
        is_moved = any(given.startswith("model.path=") for given in overrides)
        tree["model"]["path"], lora = _adapted(Path(models[0]), whole, is_moved=is_moved)
        tree["train"] = {**(train or {}), "lora": lora}
    tree["run"] |= {"steps": 0, "dir": ""}
    tree["report"]["finish"] = ""
    tree["prepare"] = []
    tree["bus"] = {}
    tree["state"]["url"] = ""
    return compose(source._replace(tree=tree)).dump()


def _adapted(adapter: Path, config: Config, *, is_moved: bool) -> tuple[str, dict[str, Any]]:
    """The base model of the adapter in a folder, and `train.lora` as its engines have it. A checkpoint has both from the config of its run;
    any other folder says them itself, but for a base model that the config was given. Raises LaunchError."""
    lora = config.section("train").lora
    if lora is not None and (adapter / checkpoints.MANIFEST).exists():
        base = adapter.parents[1] / config.model_path  # relative paths start at the run folder
        named = config.model_path if name_of(config.model_path) and not base.is_dir() else str(base)
        return named, {**lora.model_dump(), "start": ""}
    told, image = _adapter_in(adapter)
    named = config.model_path if is_moved else told.base_model_name_or_path or ""
    if Path(named).is_dir() and named:
        named = str(Path(named).resolve())
    elif not name_of(named):
        raise LaunchError(
            f"the base model of the adapter in {adapter}, {named or 'of which it says nothing'}, is not there: name it with model.path=…"
        )
    return named, {"rank": told.r, "alpha": told.lora_alpha, "targets": [*shapes.modules_of(image, str(adapter))]}


def _adapter_in(folder: Path) -> tuple[shapes.PeftConfig, memoryview]:
    try:
        return shapes.read_adapter(folder)
    except shapes.AdapterError as error:
        raise LaunchError(f"{error}.") from None


def table(rows: Sequence[dict[str, Any]]) -> str:
    """One line for each model; figures of several samples between the counts and the model's name."""
    more = [name for name in rows[0] if "@" in name and not name.startswith("task/")]
    lines = [" ".join([*(f"{name:>8}" for name in (*SHOWN, *more)), " model"])]
    for row in rows:
        found = [row.get(name, "-") for name in (*SHOWN, *more)]
        cells = [f"{value:.3f}" if isinstance(value, float) else str(value) for value in found]
        lines.append(" ".join([*(f"{cell:>8}" for cell in cells), f" {row['model']}"]))
    return "\n".join(lines)


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []
