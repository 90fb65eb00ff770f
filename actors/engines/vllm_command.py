"""`rubato vllm-command CONFIG`: the line that starts the server of engine.kind=vllm_server, one for each pool that has a server of its own."""

import argparse
import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from rubato.actors.config import ModelSection, engine_specs, name_of
from rubato.actors.engines.engine import EngineError
from rubato.actors.engines.section import EngineConfig, EngineSection
from rubato.actors.engines.vllm_http import flaw_of_url
from rubato.actors.engines.vllm_launch import FIXED, check_given, on_cpu, settings
from rubato.bus.address import is_loopback
from rubato.runtime.config.compose import load
from rubato.runtime.errors import ConfigError

PORT = 8000
"""Where a tunnel or a proxy stands between, and engine.url is theirs."""


class Line(NamedTuple):
    """A program and what is added to its environment. What the environment is given from a variable of its own is `$NAME`."""

    environment: Mapping[str, str]
    words: tuple[str, ...]

    def __str__(self) -> str:
        given = [
            f'{name}="{value}"' if value.startswith("$") else f"{name}={shlex.quote(value)}" for name, value in self.environment.items()
        ]
        return " ".join([*given, shlex.join(self.words)])


def main(argv: Sequence[str]) -> int:
    """Print the line; RubatoError is the caller's to print."""
    parser = argparse.ArgumentParser(
        "rubato vllm-command",
        description="Print the line that starts the vLLM server of a config with engine.kind=vllm_server. Rubato has to be installed there too.",
    )
    parser.add_argument("words", nargs="+", metavar="CONFIG, key.sub=value", help="a YAML file; changes of single keys")
    parser.add_argument("--run-dir", type=Path, help="folder of the run, from which a relative model.path starts")
    given = parser.parse_args(list(argv))
    config = load(Path(given.words[0]), given.words[1:])
    folder = given.run_dir or (Path(config.run.dir) if config.run.dir else None)
    pools = [config.actor_config(role, pool) for role, spec in engine_specs(config).items() for pool in spec.pools or ("",)]
    served: list[EngineConfig] = [each for each in pools if each.engine.kind == "vllm_server"] or pools[:1]
    print("\n".join(dict.fromkeys(str(line_of(each, folder)) for each in served)))  # noqa: T201
    return 0


def line_of(config: EngineConfig, folder: Path | None) -> Line:
    """The line for a job whose run is in `folder`. Raises ConfigError, one sentence."""
    section, model = config.engine, Path(config.model.path)
    at_hub = name_of(config.model.path)
    if section.kind != "vllm_server":
        raise ConfigError(f"engine.kind is {section.kind}: only engine.kind=vllm_server has a server that others start.")
    if flaw := flaw_of_url(section.url):
        raise ConfigError(f"engine.url {section.url} {flaw}.")
    try:
        check_given(section.vllm)
    except EngineError as error:
        raise ConfigError(f"{error}.") from None
    if at_hub is not None and not (folder is not None and (folder / model).is_dir()):
        return line(at_hub.repo, config.model, section, revision=at_hub.revision)
    if folder is None and not model.is_absolute():
        raise ConfigError(f"model.path {model} starts at the run's folder: name that with --run-dir, or give the whole path.")
    return line(model if folder is None else folder.absolute() / model, config.model, section)


def line(model: Path | str, description: ModelSection, section: EngineSection, *, revision: str = "") -> Line:
    """The line for the model in that folder, or of that name at the hub, from where the server brings it by itself."""
    cpu = description.device == "cpu"
    host, port = _listens(section.url)
    flags = {
        **settings(model, description, section, cpu=cpu),
        **FIXED,
        **(on_cpu(section) if cpu else {}),
        **({"revision": revision} if revision else {}),
        "enable_scale_out": True,
        "disable_uvicorn_access_log": True,
        "host": host,
        "port": port,
        **section.vllm,
    }
    environment = {"VLLM_SERVER_DEV_MODE": "1"}
    if section.api_key_env:
        environment["VLLM_API_KEY"] = f"${section.api_key_env}"
    if cpu:
        environment |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", **({"TORCHDYNAMO_DISABLE": "1"} if flags["enforce_eager"] else {})}
    # The CPU build's `vllm` ends with an error: it asks for the version of a package of the other build's name.
    program = ("python", "-m", "vllm.entrypoints.openai.api_server") if cpu else ("vllm", "serve")
    return Line(environment, (*program, *(word for name, value in flags.items() for word in _flag(name, value))))


def _listens(url: str) -> tuple[str, int]:
    """Where the server listens: on loopback alone, for its routes that steer it ask for no key."""
    parts = urlsplit(url)
    if parts.scheme == "http" and is_loopback(parts.hostname or ""):
        return parts.hostname or "", parts.port or 80
    return "127.0.0.1", PORT


def _flag(name: str, value: Any) -> tuple[str, ...]:
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        return (f"--{flag}",) if value else (f"--no-{flag}",)
    return f"--{flag}", json.dumps(value) if isinstance(value, dict | list) else str(value)
