"""Configuration: sections declared by actors, composed into one tree, read from YAML with dotted overrides."""

from rubato.runtime.config.config import Config, load_without_types
from rubato.runtime.config.sections import ActorConfig, ActorSpec, BusSection, ReportSection, RunSection, Section, StateSection

__all__ = [
    "ActorConfig",
    "ActorSpec",
    "BusSection",
    "Config",
    "ReportSection",
    "RunSection",
    "Section",
    "StateSection",
    "load_without_types",
]
