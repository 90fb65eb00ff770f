"""The engines' section of the config."""

from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from rubato.actors import plugins
from rubato.actors.config import ClusterSection, ModelSection, TrainSection, WeightsSection
from rubato.planning.engine_info import EngineProfile
from rubato.runtime.config import ActorConfig, Section


class ScriptedSection(Section):
    """Figures of the scripted engine, in seconds of loop time."""

    prefill_s: float = Field(default=0.0, ge=0)
    """From getting a slot to the first token."""
    token_s: float = Field(default=0.01, ge=0)
    """Each token."""
    update_s: float = Field(default=0.0, ge=0)
    """Pause of a weight update."""
    stop_share: float = Field(default=0.25, ge=0, le=1)
    """Probability that a token is a stop token, where the request names any."""
    vocab_size: int = Field(default=256, ge=1)
    """Token ids are drawn below this, where the model folder has no config.json that says better."""
    kv_bytes_per_token: int = Field(default=4, ge=4, multiple_of=4)
    """What of a cache travels with a request that moves: the token itself, and zeros up to so many bytes."""
    told_lengths: bool = False
    """Where a request names stop tokens, the first token of its prompt says how many are sampled: none but the last is a stop token."""


class PaceSection(Section):
    """The hardware that an engine lasts like: a class, the model that it would serve there, and GPUs."""

    hardware: str
    """Class that steps, weight swaps and KV moves last like: a name from configs/hardware, such as h20. See docs/pace.md."""
    model: str
    """Shape whose times count: a name from configs/models, such as qwen3-8b. What is computed stays model.path."""
    scale: float = Field(default=1.0, gt=0)
    """Times are multiplied by this: below 1 hours pass in minutes, above 1 a slow host keeps up."""
    degree: int = Field(default=1, ge=1)
    """GPUs of the class that share each layer (tensor parallelism)."""

    @field_validator("hardware")
    @classmethod
    def _class(cls, name: str) -> str:
        plugins.load(plugins.HARDWARE)(name)
        return name

    @field_validator("model")
    @classmethod
    def _model(cls, name: str) -> str:
        plugins.load(plugins.MODEL_SHAPE)(name)
        return name

    @model_validator(mode="after")
    def _fits(self) -> Self:
        plugins.load(plugins.PACE_CHECK)(self.hardware, self.model, self.degree)
        return self


class EngineSection(Section):
    """What each engine worker runs, and its sizes."""

    kind: str = "torch"
    """torch, vllm, vllm_server or scripted; or your own class as `package.module:Class`."""
    serves: Literal["both", "prefill", "decode"] = "both"
    """What it is there for; set per pool, so that prompts are prefilled on engines of one pool and decoded on those of another."""
    num_slots: int = Field(default=64, ge=1)
    """Requests decoded at once; more wait."""
    max_len: int = Field(default=1024, ge=2)
    """Longest prompt and completion together, in tokens."""
    max_batch_tokens: int = Field(default=2048, ge=1)
    """Tokens computed in one step; longer prefills are cut into several."""
    gather_s: float = Field(default=0.0, ge=0, le=1)
    """An idle engine waits so long after a first request for others to share its steps: worth it where requests are a few tokens long."""
    kv_on_update: Literal["recompute", "keep"] = "recompute"
    """What a weight update does to KV caches: compute them again under the new weights, or go on with the old. keep is for requests
    under way, and with torch for their sessions; what begins after an update never meets a cache of older weights."""
    prefix_cache: bool = True
    """Keep the slot of a finished request for the next turn of its session, until it is needed."""
    stream_every: int = Field(default=16, ge=1)
    """Progress of a long request is reported each time this many tokens were sampled: what an engine's death costs at most."""
    results_kept: int = Field(default=1024, ge=0)
    """Finished results kept for askers that lost their reply; the oldest is forgotten first."""
    check_s: float = Field(default=2.0, gt=0)
    """Period of looking for newer weights without being told: the net under a lost announcement."""
    pace: PaceSection | None = None
    """Time is modelled: with kind torch or scripted, everything lasts what this hardware would take for it."""
    hardware: str = ""
    """Hardware class, such as h100 of configs/hardware, that planners assume for an engine that computes for real. It changes no time."""
    scripted: ScriptedSection = ScriptedSection()
    enforce_eager: bool | None = None
    """vLLM computes without CUDA graphs, which start sooner and decode slower; unset: only on CPU, where there are none."""
    vllm: dict[str, Any] = Field(default_factory=dict)
    """Further arguments for vLLM's AsyncEngineArgs; with kind vllm_server, of the line that `rubato vllm-command` prints."""
    url: str = ""
    """With kind vllm_server: where that server is. Beyond loopback it is https; see docs/vllm.md."""
    api_key_env: str = Field(default="", pattern=r"^([A-Za-z_][A-Za-z0-9_]*)?$")
    """Name of the environment variable that holds the server's key."""

    @property
    def degree(self) -> int:
        """GPUs that the engine is started with."""
        return self.pace.degree if self.pace is not None else int(self.vllm.get("tensor_parallel_size", 1))

    @property
    def profile(self) -> EngineProfile | None:
        """What planners reckon with: what its pace models, or what it is said to run on."""
        if (pace := self.pace) is not None:
            return EngineProfile(pace.hardware, pace.model, pace.degree, pace.scale)
        return EngineProfile(self.hardware, "", self.degree) if self.hardware else None

    @property
    def first_at_once(self) -> bool:
        """A request's first token is reported by itself: planners of modelled time count with its prefill."""
        return self.pace is not None

    @property
    def told(self) -> dict[str, Any]:
        """For the log of its start, beside its kind."""
        return {} if self.pace is None else {"pace": self.pace.model_dump()}

    @field_validator("kind")
    @classmethod
    def _known(cls, kind: str) -> str:
        if kind not in ("torch", "vllm", "vllm_server", "scripted") and ":" not in kind:
            raise ValueError(f"{kind} is not torch, vllm, vllm_server or scripted, nor a class of yours as package.module:Class")
        return kind

    @field_validator("hardware")
    @classmethod
    def _class(cls, name: str) -> str:
        if name:
            plugins.load(plugins.HARDWARE)(name)
        return name

    @model_validator(mode="after")
    def _has_a_server(self) -> Self:
        if self.kind == "vllm_server":
            if not self.url:
                raise ValueError("engine.kind=vllm_server needs engine.url, where that server is, such as http://127.0.0.1:8000")
            if flaw := plugins.load(plugins.SERVER_URL)(self.url):
                raise ValueError(f"engine.url {self.url} {flaw}")
        elif self.url or self.api_key_env:
            key = "url" if self.url else "api_key_env"
            raise ValueError(f"engine.{key} has no effect on engine.kind={self.kind}: set engine.kind=vllm_server, or leave it out")
        return self

    @model_validator(mode="after")
    def _can_be_paced(self) -> Self:
        if self.pace is not None and self.kind not in ("torch", "scripted"):
            raise ValueError(
                f"engine.pace has no effect on the steps of engine.kind={self.kind}. Set engine.kind=torch or scripted, or leave "
                "engine.pace out"
            )
        if self.pace is not None and self.hardware:
            raise ValueError(
                f"engine.hardware={self.hardware} says what a real engine runs on, but engine.pace models one: leave one of the two out"
            )
        return self


class EngineConfig(ActorConfig):
    """All that a worker, its engine and its mechanisms read."""

    model: ModelSection = ModelSection()
    engine: EngineSection = EngineSection()
    weights: WeightsSection = WeightsSection()
    cluster: ClusterSection = ClusterSection()
    train: TrainSection = Field(default_factory=TrainSection)
