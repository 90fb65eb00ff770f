"""A scenario: what is simulated, on which calibration, and the claims it is held against; read from YAML with overrides."""

import importlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple

from pydantic import AfterValidator, BaseModel, Field, ValidationError

from rubato.runtime.config import Section
from rubato.runtime.config.compose import compose
from rubato.runtime.config.explain import sentences
from rubato.runtime.config.overrides import given, read
from rubato.runtime.config.source import ConfigSource
from rubato.runtime.errors import ConfigError
from rubato.sim.claims import ClaimSpec
from rubato.sim.outcome import RunProgress, RunResult

KINDS: Final[Mapping[str, str]] = {
    "fabric_testbed": "rubato.sim.live.testbed",
    "failures": "rubato.sim.failures",
    "modelsync": "rubato.sim.rollmux.modelsync",
    "one_host": "rubato.sim.onehost.scenario",
    "orchestrrl_drift": "rubato.sim.orchestrrl.drift",
    "orchestrrl_joint": "rubato.sim.orchestrrl.joint",
    "orchestrrl_within": "rubato.sim.orchestrrl.within",
    "rollmux_chance": "rubato.sim.rollmux.chance",
    "rollmux_micro": "rubato.sim.rollmux.micro",
    "rollmux_trace": "rubato.sim.rollmux.trace",
    "rollmux_philly": "rubato.sim.rollmux.philly",
    "rollmux_tail": "rubato.sim.rollmux.tail",
    "rollpacker_stream": "rubato.sim.rollpacker.stream",
    "rollpacker_tail": "rubato.sim.rollpacker.tail",
    "rfabric_throughput": "rubato.sim.rfabric.throughput",
    "rfabric_characterisation": "rubato.sim.rfabric.characterisation",
    "rfabric_cost": "rubato.sim.rfabric.cost",
    "rollart_affinity": "rubato.sim.rollart.affinity",
    "rollart_end_to_end": "rubato.sim.rollart.end_to_end",
    "rollart_failures": "rubato.sim.rollart.failures",
    "rollart_prefill_decode": "rubato.sim.rollart.prefill_decode",
    "rollart_serverless": "rubato.sim.rollart.serverless",
    "rollart_sigma": "rubato.sim.rollart.sigma",
    "rollart_staleness": "rubato.sim.rollart.staleness",
    "rollart_weight_pull": "rubato.sim.rollart.weight_pull",
}
"""Which module simulates which kind of scenario; each holds a `KIND` and is imported only when asked for."""

INCLUDE_DEPTH = 4
"""A file that includes itself is refused here."""


class Scenario(Section):
    """Base of every kind's scenario; a kind adds the fields that its runner reads."""

    kind: str
    """Which runner reads it: one of `KINDS`."""
    title: str
    source: str
    """The paper whose figures are held against ours."""
    calibration: str
    """What the models' parameters come from; stands beside every figure."""
    seed: int = Field(default=1, ge=0)
    """Everything drawn at random follows from it."""
    chosen: dict[str, str] = Field(default_factory=dict)
    """Each parameter that was chosen by an outcome, or on which one rests: which outcome that is, and what it is otherwise."""
    claims: tuple[ClaimSpec, ...] = ()


def _launchable(job: dict[str, Any]) -> dict[str, Any]:
    try:
        compose(ConfigSource(job, "job", {}))
    except ConfigError as error:
        said = str(error).splitlines()[0].removeprefix("job")  # which the sentence about the key begins with
        raise ValueError(said.removeprefix(":").strip()) from error
    return job


LiveJob = Annotated[dict[str, Any], AfterValidator(_launchable)]
"""A live job's config as it is written, checked as `rubato launch` checks it: its actors' sections too."""


class ScenarioKind(NamedTuple):
    """A kind of scenario: its fields, and the function that simulates it; ValueError from it means that the scenario is impossible."""

    scenario: type[Scenario]
    run: Callable[[Any, RunProgress], RunResult]


class Loaded(NamedTuple):
    """A checked scenario with its runner."""

    scenario: Scenario
    kind: ScenarioKind
    optional: frozenset[str]
    """The file's own claims, where overrides were given: these may leave the run without their figures."""


def load(path: Path, overrides: Sequence[str] = ()) -> Loaded:
    """Read `path`, put the YAML files that it names in their place, apply `key.sub=value` overrides and check the whole.

    A value that ends in .yaml is a file, relative to the scenario's folder. Raises ConfigError with one sentence per mistake.
    """
    source = read(path)
    tree = _included(source.tree, path.parent)
    own = tree.get("claims")
    changed = given(tree, overrides)
    tree = _included(changed.tree, path.parent)
    source = ConfigSource(tree, str(path), source.lines, changed.overridden)
    kind = _kind(source)
    try:
        scenario = kind.scenario.model_validate(tree)
    except ValidationError as error:
        raise ConfigError("\n".join(sentences(error, source, kind.scenario))) from error
    stated = own if overrides and isinstance(own, list) else ()
    return Loaded(scenario, kind, frozenset(claim.get("name", "") for claim in stated if isinstance(claim, dict)))


def reason(error: Exception) -> str:
    """Why something can't be simulated, in words."""
    if isinstance(error, ValidationError):
        return sentences(error, ConfigSource({}, "", {}), BaseModel)[0].removeprefix(": ").rstrip(".")
    if isinstance(error, ArithmeticError):
        return f"a figure is beyond what can be computed ({error})"
    return str(error).rstrip(".")


def _kind(source: ConfigSource) -> ScenarioKind:
    name = source.tree.get("kind")
    module = KINDS.get(name) if isinstance(name, str) else None
    if module is None:
        raise ConfigError(source.sentence(("kind",), f"kind must be one of {', '.join(KINDS)}, not {name!r}."))
    return importlib.import_module(module).KIND


def _included(value: Any, folder: Path, depth: int = 0) -> Any:
    if isinstance(value, Mapping):
        return {key: _included(inner, folder, depth) for key, inner in value.items()}
    if isinstance(value, list):
        return [_included(inner, folder, depth) for inner in value]
    if isinstance(value, str) and value.endswith(".yaml"):
        path = folder / value
        if depth >= INCLUDE_DEPTH:
            raise ConfigError(f"{path} includes itself, or is included more than {INCLUDE_DEPTH} levels deep.")
        return _included(read(path).tree, path.parent, depth + 1)
    return value
