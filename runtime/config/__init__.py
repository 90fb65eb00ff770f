"""Configuration: sections declared by actors, composed into one tree, read from YAML with dotted overrides."""

from runtime.config.config import Config, from_mapping, load, load_without_types
from runtime.config.sections import ActorConfig, ActorSpec, BusSection, ReportSection, RunSection, Section, StateSection

__all__ = [
    "ActorConfig",
    "ActorSpec",
    "BusSection",
    "Config",
    "ReportSection",
    "RunSection",
    "Section",
    "StateSection",
    "from_mapping",
    "load",
    "load_without_types",
]
