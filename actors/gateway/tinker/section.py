"""The section `tinker` of the config."""

import re
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field

from rubato.runtime.config import Section
from rubato.runtime.config.sections import ListenAddress

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)?")
"""Of a model, as clients know it."""


def _named(models: dict[str, str]) -> dict[str, str]:
    if strange := [name for name in models if len(name) > 128 or not NAME.fullmatch(name)]:
        raise ValueError(f"{strange[0][:128]!r} is no name of a model. Give one such as Qwen/Qwen3-8B")
    return models


class TinkerSection(Section):
    """A server of Tinker's API on the job's engines and trainer. See docs/tinker.md."""

    listen: ListenAddress = Field(default="127.0.0.1:0", min_length=1)
    """HOST:PORT; port 0 takes a free one. RUN/tinker.json has the address, and the key where the run made one."""
    models: Annotated[dict[str, str], AfterValidator(_named)] = {}
    """Names by which clients know the base model, such as Qwen/Qwen3-8B, each with its folder, which is that of model.path. Empty: the
    name of that folder."""
    keys: str = ""
    """File of lines `TENANT KEY`; keys begin with tml-. Empty: one tenant, whose key the run makes."""
    alpha: Annotated[int, Field(ge=0)] | None = None
    """Bound on age, in optim_steps: a sampling client that follows its model samples under nothing older, and no loss of policy gradients
    is taken of what was sampled here under older weights. Empty: none."""
    session_s: float = Field(default=3600.0, gt=0)
    """A session that nothing is heard of for so long is over: its models are unloaded; what was saved stays."""
    poll_s: float = Field(default=30.0, gt=0, le=40)
    """Longest that a request for a result waits for it; the client asks again."""
    order_s: float = Field(default=60.0, gt=0)
    """Longest that an operation waits for the one before it, by its seq_id, to come in: after it the client is told, and it is none."""
    max_body_mb: int = Field(default=64, ge=1, le=1024)
    """MiB of a request."""
    max_models: int = Field(default=64, ge=1, le=1024)
    """Models of all tenants at once; more are refused until one is unloaded."""
    adapters_mb: int = Field(default=8192, ge=1)
    """MiB of models, with optimisers and gradients, that the trainer has in memory; those used longest ago lie in files."""
    max_pending: int = Field(default=1024, ge=1)
    """Operations of one model that wait to be carried out; beyond them clients are told to back off."""
    max_pending_mb: int = Field(default=1024, ge=1)
    """MiB of them, of all models."""
    max_samples: int = Field(default=4096, ge=1)
    """Completions that are under way or wait for an engine, of all tenants; beyond them clients are told to back off."""
    results_kept: int = Field(default=1024, ge=16)
    """Results of each model's operations, and of samples, that are kept for clients that lost an answer; the oldest goes first."""
    results_mb: int = Field(default=256, ge=1)
    """MiB of them, of each model, and of samples."""
    samplers: int = Field(default=32, ge=1, le=64)
    """Saved weights that engines can have at once, beside the models: the one used longest ago makes room, and comes back when it is asked for."""
    snapshots_kept: int = Field(default=64, ge=1)
    """Snapshots without a name, of each model; the oldest goes first."""
    digests: int = Field(default=262_144, ge=0)
    """Sampled sequences whose versions are remembered; the oldest is forgotten first."""


def names_of(section: TinkerSection, model_path: str) -> dict[str, str]:
    """Folder by name of a model."""
    return section.models or {Path(model_path).name or "model": model_path}
