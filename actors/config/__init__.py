"""Config sections that more than one actor reads, and short ones; the others lie with their actors."""

import difflib
import os
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self, cast
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field, PlainValidator, StrictInt, StrictStr, model_validator

from rubato.actors.messages.generation import GENERATION
from rubato.runtime.config import ActorConfig, ActorSpec, Config, Section
from rubato.runtime.config.sections import ListenAddress

CUDA = re.compile(r"^cuda:(0|[1-9]\d{0,2})$")
"""A GPU by its place among those that a process sees."""

NAME = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95})(?:@([^\s@:]{1,200}))?")
COMMIT = re.compile(r"[0-9a-f]{40}")


class HubName(NamedTuple):
    """What a repository is called at a hub, and a branch, a tag or a commit of it; an empty one is its main branch."""

    repo: str
    revision: str = ""

    @property
    def is_pinned(self) -> bool:
        """Whether it names one commit, which never changes."""
        return COMMIT.fullmatch(self.revision) is not None

    def __str__(self) -> str:
        return f"{self.repo}@{self.revision}" if self.revision else self.repo


def name_of(text: str) -> HubName | None:
    """`owner/name` or `owner/name@revision`; None for what has another form."""
    found = NAME.fullmatch(text)
    return HubName(found[1], found[2] or "") if found else None


class ModelSection(Section):
    """The policy model, in HF format."""

    path: Annotated[str, AfterValidator(os.path.expanduser)] = ""
    """Folder with config.json, *.safetensors and tokenizer.json; relative paths start at the run folder, ~ is your home. Or its name at
    the hub, Qwen/Qwen3-8B or Qwen/Qwen3-8B@REVISION: see docs/running.md."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Compute type of engines, in which weights reach them, and of the trainer where `train.dtype` says no other."""
    device: Annotated[str, AfterValidator(lambda given: _device(given))] = "auto"
    """Where engines and trainer run: auto, cpu, cuda, or cuda:1 and so on of the GPUs that the process sees; auto takes CUDA where present."""
    torch_threads: int = Field(default=1, ge=1)
    """Intra-op threads of each torch process."""


class WeightsSection(Section):
    """How weights travel between hosts: engines pull that way, and the fabric plans circuits for it."""

    broadcast: Literal["tree", "rings"] = "tree"
    """tree: each host pulls from its parent, and serves two. rings: half of the pieces from either neighbour on a ring of all hosts,
    which keeps both directions of every circuit busy; the further away hosts are, the longer the ring takes to fill."""


def _alpha(value: object) -> object:
    value = int(value) if isinstance(value, str) and value.isascii() and value.isdigit() else value  # of ${NAME}
    if value == "auto" or (isinstance(value, int) and not isinstance(value, bool) and value >= 0):
        return value
    raise ValueError(f"{value!r} is neither a whole number at least 0 nor auto")


Alpha = Annotated[int | Literal["auto"], PlainValidator(_alpha)]
"""The staleness bound in weight versions, or auto."""


class StalenessSection(Section):
    """How far rollouts may lag behind training."""

    alpha: Alpha = 1
    """Bound α in weight versions: 0 is synchronous on-policy; auto moves it between `alpha_min` and `alpha_max` to where samples/s ×
    effective sample size is highest."""
    alpha_min: int = Field(default=0, ge=0)
    """Where `alpha` is auto."""
    alpha_max: int = Field(default=8, ge=0)
    """Where `alpha` is auto; nothing older is trained."""
    bounded: bool = True
    """False lifts the bound: nothing is dropped for its age, and only `samples.unbounded_batches` limits what is in flight."""
    stragglers: Literal["wait", "drop"] = "wait"
    """Of groups that would grow too old while they run: wait lets the step wait for them; drop ends them, and others take their place."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.stragglers == "drop" and not self.bounded:
            raise ValueError("stragglers=drop ends what is older than the bound, and bounded=false lifts it. Leave one of them out")
        if self.alpha_min > self.alpha_max:
            raise ValueError(f"alpha_min={self.alpha_min} is above alpha_max={self.alpha_max}. Swap them")
        if self.alpha == "auto" and not self.bounded:
            raise ValueError("alpha=auto moves a bound, and bounded=false lifts it. Leave one of them out")
        fields = StalenessSection.model_fields
        for name in ("alpha_min", "alpha_max"):
            given = getattr(self, name)
            if self.alpha != "auto" and given != fields[name].default:
                raise ValueError(f"{name}={given} bounds an alpha that moves, but alpha={self.alpha}. Set alpha=auto, or leave it out")
        return self

    @property
    def bound(self) -> int:
        """α, the largest where it is auto, or -1 where there is no bound: the form it has in messages."""
        return -1 if not self.bounded else self.alpha_max if self.alpha == "auto" else self.alpha


Decay = Annotated[float, Field(ge=0, lt=1)]


class ScriptedTrainSection(Section):
    """Figures of the scripted trainer."""

    step_s: float = Field(default=0.1, ge=0)
    """A training step."""
    weights_mib: float = Field(default=1.0, gt=0)
    """Size of the weights that it publishes."""
    switch_s: float = Field(default=0.0, ge=0)
    """Its way to host memory at the end of a permit, and the way back; see docs/rollmux.md."""


class Loss(NamedTuple):
    """What `train.loss` names: the import path of a function, the bounds that its paper has for `clip_low` and `clip_high`, and
    over what the loss of a minibatch is a mean."""

    function: str
    clip_low: float
    clip_high: float
    mean_over: Literal["tokens", "trajectories", "budget"] = "tokens"
    """trajectories: of the mean over each one's tokens. budget: over `train.budget_tokens` for each trajectory, whatever it has."""


LOSSES: Mapping[str, Loss] = {
    "grpo": Loss("rubato.actors.training.losses:clipped_loss", 0.2, 0.2, "trajectories"),
    "dr_grpo": Loss("rubato.actors.training.losses:clipped_loss", 0.2, 0.2, "budget"),
    "dapo": Loss("rubato.actors.training.losses:clipped_loss", 0.2, 0.28),
    "gspo": Loss("rubato.actors.training.variants:gspo_loss", 3e-4, 4e-4, "trajectories"),
    "cispo": Loss("rubato.actors.training.variants:cispo_loss", 1.0, 0.28),
    "ppo": Loss("rubato.actors.training.variants:dual_clipped_loss", 0.2, 0.2),
}
"""Those that are built in. CISPO bounds weights from above alone: 1 leaves the lower side open."""

ADVANTAGES = ("group", "rloo", "reinforce_pp")


def one_of(value: str, names: Collection[str], other: str = "") -> str:
    """`value`, which must be among `names`. Raises ValueError, a sentence with the nearest name."""
    if value in names:
        return value
    near = difflib.get_close_matches(value, names, n=1)
    raise ValueError(f"{value!r} is none of {', '.join(names)}{other}" + (f". Did you mean {near[0]}?" if near else ""))


def _device(value: str) -> str:
    return value if CUDA.match(value) else one_of(value, ("auto", "cpu", "cuda"), ", and no cuda:N")


def _loss(value: str) -> str:
    return value if ":" in value else one_of(value, tuple(LOSSES), ", and no path/to/file.py:function")


class ImportanceSection(Section):
    """How samples that older weights made are weighed: by the policy's probability over that of the one that sampled."""

    mode: Annotated[Literal["auto", "off", "truncate", "mask"], BeforeValidator(lambda given: "off" if given is False else given)] = "auto"
    """truncate: weights end at `cap`; mask: what weighs more is left out; off: no bound; auto: truncate where staleness.alpha is above 0,
    but off for a loss of one's own around the policy that sampled, whose proximal_N it would move."""
    level: Literal["token", "sequence"] = "token"
    """sequence: the weight of all its sampled tokens together, for each of them; wants proximal=recomputed."""
    cap: float = Field(default=2.0, ge=1)
    """Largest weight."""


MOST_RANKS = 1024


class MeshSection(Section):
    """Ranks: processes that hold the model together and train it as one. See docs/ranks.md."""

    replicate: int = Field(default=1, ge=1, le=MOST_RANKS)
    """Copies of the model, each in shares over `shard` ranks."""
    shard: int = Field(default=1, ge=1, le=MOST_RANKS)
    """Ranks over which each copy's weights, gradients and optimiser states are shared out. With 1 copy of 1 rank the trainer's own process trains."""
    offload: bool = False
    """Shares lie in host memory, and come to the device layer by layer: for models whose optimiser states it has no room for."""

    @property
    def size(self) -> int:
        """Ranks in all."""
        return self.replicate * self.shard

    @model_validator(mode="after")
    def _can_be_started(self) -> Self:
        if self.size > MOST_RANKS:
            raise ValueError(f"train.mesh has {self.replicate} x {self.shard} = {self.size} ranks, of which there may be {MOST_RANKS}")
        return self


PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""The matrices of a decoder's layer, as its modules are called."""


class LoraSection(Section):
    """An adapter of low rank, which alone is trained, published and saved: the model under it stays as it is. See docs/adapters.md."""

    rank: int = Field(default=16, ge=1, le=512)
    """Of the two matrices whose product is added to each target."""
    alpha: float = Field(default=32.0, gt=0)
    """What they add is multiplied by alpha over rank."""
    targets: Annotated[
        tuple[str, ...], BeforeValidator(lambda given: (given,) if isinstance(given, str) else given), Field(min_length=1)
    ] = PROJECTIONS
    """Modules that get them, by the end of their name, such as q_proj, or layers.0.mlp.up_proj for one alone."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Share of a target's inputs that the adapter is not shown in training."""
    start: Annotated[str, AfterValidator(os.path.expanduser)] = ""
    """Folder of an adapter in peft's format to begin with, of this rank and these targets; relative paths start at the run folder. Empty:
    one that adds nothing yet."""


class TrainSection(Section):
    """The shape of a batch, which the sample buffer reads too, what is learned from it, and the optimiser."""

    follows: ClassVar[Mapping[str, str]] = {"clip_low": "loss", "clip_high": "loss"}

    kind: Literal["torch", "scripted"] = "torch"
    """torch, or scripted: weights of a given size without a meaning, where only their way matters."""
    scripted: ScriptedTrainSection = ScriptedTrainSection()
    batch_groups: int = Field(default=32, ge=1)
    """Groups per training step."""
    group_size: int = Field(default=8, ge=2)
    """Rollouts of one task; advantages are taken within them, so one alone would teach nothing."""
    lr: float = Field(default=5e-4, gt=0)
    """AdamW's learning rate."""
    lr_final: float = Field(default=1.0, gt=0, le=1)
    """Share of `lr` that is left at the last step of `lr_steps`; the rate falls linearly."""
    lr_steps: int = Field(default=0, ge=0)
    """Length of that schedule, beyond which the rate stays; 0 takes `run.steps` as the run began: a resumed one keeps it."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps over which the learning rate rises from 0."""
    betas: tuple[Decay, Decay] = (0.9, 0.95)
    """AdamW's decay rates of the first and second moment."""
    weight_decay: float = Field(default=0.0, ge=0)
    """AdamW's decoupled weight decay."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradients are scaled down to this global norm."""
    loss: Annotated[str, AfterValidator(_loss)] = "dapo"
    """grpo, dr_grpo, dapo, gspo, cispo, ppo, or your own as path/to/file.py:function; see docs/learning.md."""
    advantage: Annotated[str, AfterValidator(lambda given: one_of(given, ADVANTAGES))] = "group"
    """group: against the group's mean, over its deviation (dr_grpo: not over it). rloo: against the others' mean. reinforce_pp: over the batch."""
    hooks: tuple[str, ...] = ()
    """StepHooks of your own as path/to/file.py:Class: what is to be done around each step. See docs/learning.md."""
    clip_low: float = Field(default=0.2, ge=0, le=1)
    """The policy ratio is clipped below 1 - this; where it is not given, what the loss's paper has."""
    clip_high: float = Field(default=0.28, ge=0)
    """The policy ratio is clipped above 1 + this; where it is not given, what the loss's paper has."""
    dual_clip: float = Field(default=3.0, gt=1)
    """ppo alone: a bad token's ratio counts up to this."""
    budget_tokens: int = Field(default=1024, ge=1)
    """dr_grpo alone: sums over tokens are divided by this, however long sequences are."""
    proximal: Literal["auto", "recomputed", "behaviour"] = "auto"
    """Clipping is around this policy: the step's first one, recomputed, or the one that sampled; around that one the clipped ratio is the
    importance weight too. auto: behaviour, or recomputed with importance.level=sequence."""
    importance: ImportanceSection = ImportanceSection()
    kl_coef: float = Field(default=0.0, ge=0)
    """Weight of the divergence from the reference model."""
    reference: Annotated[str, AfterValidator(os.path.expanduser)] = ""
    """Folder of the reference model, read like model.path; empty takes the base model."""
    router_aux_coef: float = Field(default=0.001, ge=0)
    """Weight of the loss that keeps the experts of a model in balance; without effect on a model without experts."""
    dynamic_sampling: bool = False
    """Groups without reward spread end as `filtered`, and others take their place in the batch."""
    overlong: Literal["keep", "mask", "penalty"] = "keep"
    """Samples that were cut at their token limit: trained like others; not trained; with `overlong_penalty` off their reward."""
    overlong_penalty: float = Field(default=1.0, ge=0)
    """Taken off the reward before advantages, with overlong=penalty."""
    minibatches: int = Field(default=2, ge=1)
    """Optimiser updates per step, where every group has reward spread; fewer of the same size where not."""
    micro_batch_tokens: int = Field(default=8192, ge=1)
    """Tokens of one forward and backward pass, of whole sequences side by side: bounds the trainer's memory."""
    dtype: Literal["model", "float32", "bfloat16"] = "model"
    """Compute type of the trainer; model: that of the engines, `model.dtype`."""
    master_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of weights, summed gradients and optimiser states where training computes in bfloat16; they are float32 where it doesn't.
    In bfloat16 a step below 1/256 of a weight is lost: 8 bytes per parameter, where float32 takes 18."""
    gradient_checkpointing: bool = False
    """Keep no activations within layers and compute them again: a third more time, and memory for far longer micro-batches."""
    lora: LoraSection | None = None
    """Train an adapter in place of the model; kind torch alone."""
    mesh: MeshSection = MeshSection()
    rank_timeout_s: float = Field(default=60.0, gt=0)
    """A rank that the others wait for longer, or that is not heard of, ends the term of all: they begin again with the newest checkpoint."""

    @property
    def has_model(self) -> bool:
        """Whether a model is trained: the scripted trainer has none."""
        return self.kind != "scripted"

    @model_validator(mode="before")
    @classmethod
    def _clips_of_the_paper(cls, given: object) -> object:
        if not isinstance(given, dict):
            return given
        tree = cast("dict[str, Any]", given)
        _, low, high, _ = LOSSES.get(str(tree.get("loss")), LOSSES["dapo"])
        return {"clip_low": low, "clip_high": high, **tree}

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.clip_low > self.clip_high and self.loss != "cispo":
            raise ValueError(
                f"clip_low={self.clip_low:g} is above clip_high={self.clip_high:g}: the ratio stays within 1 - clip_low and "
                "1 + clip_high, and the lower side may not be the wider one. Swap them"
            )
        if self.lora is not None and self.kind != "torch":
            raise ValueError(f"lora has no effect with kind={self.kind}, which has no model. Set train.kind=torch, or leave train.lora out")
        if self.reference and not self.kl_coef:
            raise ValueError(f"reference={self.reference} has no effect with kl_coef=0. Set train.kl_coef")
        if self.proximal == "behaviour" and self.importance.level == "sequence":
            raise ValueError(
                "importance.level=sequence weighs the recomputed policy against the one that sampled, and "
                "proximal=behaviour leaves no such policy. Set train.proximal=recomputed"
            )
        return self

    def resolved(self, *, alpha: int, folder: Path) -> Self:
        """Without `auto`, for a job with the staleness bound `alpha` (-1: none) whose paths start at `folder`."""
        proximal = "recomputed" if self.importance.level == "sequence" else "behaviour"
        proximal = proximal if self.proximal == "auto" else self.proximal
        # Around the policy that sampled, a weight is cut by moving `proximal_N`: a loss of one's own gets that only where it was asked for.
        as_is = ":" in self.loss and proximal == "behaviour"
        auto = "truncate" if alpha and not as_is else "off"
        mode = auto if self.importance.mode == "auto" else self.importance.mode
        return self.model_copy(
            update={
                "importance": self.importance.model_copy(update={"mode": mode}),
                "proximal": proximal,
                "reference": str(folder / self.reference) if self.reference else "",
                "lora": self.lora and self.lora.model_copy(update={"start": str(folder / self.lora.start) if self.lora.start else ""}),
            }
        )


MOST_STOPS, LONGEST_STOP = 64, 256


def _stops(given: object) -> object:
    """One alone needs no list."""
    return (given,) if isinstance(given, str | int) and not isinstance(given, bool) else given


def _fitting_stops(given: tuple[int | str, ...]) -> tuple[int | str, ...]:
    for each in given:
        if isinstance(each, str) and not 0 < len(each) <= LONGEST_STOP:
            raise ValueError(f"a text that ends a turn has 1 to {LONGEST_STOP} characters, not {len(each)}")
        if isinstance(each, int) and each < 0:
            raise ValueError(f"{each} is no token: ids begin at 0")
    if len(given) > MOST_STOPS:
        raise ValueError(f"{len(given)} things end a turn; {MOST_STOPS} may")
    return given


Stops = Annotated[tuple[StrictInt | StrictStr, ...], BeforeValidator(_stops), AfterValidator(_fitting_stops)]
"""What ends a turn: token ids, tokens, and other texts."""


class RolloutSection(Section):
    """How one trajectory is played."""

    max_turns: int = Field(default=14, ge=1)
    """Turns after which a trajectory is cut (truncated)."""
    max_new_tokens: int = Field(default=16, ge=1)
    """Tokens the model may sample per turn; less than max_len."""
    max_len: int = Field(default=512, ge=2)
    """Tokens of a whole trajectory; it is cut when the next turn may not fit. At most engine.max_len."""
    temperature: float = Field(default=1.0, ge=0)
    """Sampling temperature of training rollouts; held-out tasks have their own, `eval.temperature`."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Must be 1: the trainer has the whole vocabulary's log-probs, and could not tell what a cut left out."""
    stop: Stops = ()
    """What ends a turn, beside what the model's folder says: token ids, tokens such as <|eot_id|>, or other texts; see docs/tasks.md."""
    system_prompt: str = ""
    """First message of every trajectory, where set."""
    renderer: str = ""
    """Renderer of the package `renderers`, such as qwen3; empty renders by the model's own chat template."""
    chat_template_kwargs: dict[str, Any] = {}
    """Variables for the model's chat template, or the renderer, such as enable_thinking: false."""
    tools: tuple[dict[str, Any], ...] = ()
    """Tool schemas for the model's chat template; empty takes what the environment's class declares as `tools`."""
    generate_timeout_s: float = Field(default=300.0, gt=0)
    """Longest wait for one completion, engine restarts included."""
    generate_tries: int = Field(default=3, ge=1)
    """Tries per turn where the engine aborts a request; sampled tokens are kept."""
    reward_timeout_s: float = Field(default=120.0, gt=0)
    """Longest wait for a score, restarts of the reward service included."""
    put_timeout_s: float = Field(default=600.0, gt=0)
    """Longest a finished trajectory is offered to the sample buffer while that is away."""
    hold_s: float = Field(default=8.0, gt=0)
    """Period at which the tickets of running trajectories are renewed; at most a third of samples.ticket_ttl_s."""


RESERVED_SCORES = frozenset({"mean", "std", "zero_std_frac", "unconditioned", "filtered_frac"})
"""`reward/<name>` of these is something else than what a reward function gave."""


def is_url(target: str) -> bool:
    """Whether a reward function is asked over HTTP, rather than found by its import path."""
    return "://" in target


def _url(given: str) -> str:
    try:
        there = bool(re.match(r"^https?://[^/?#\s]+\S*$", given)) and urlsplit(given).port != 0
    except ValueError:  # of a port that can't be
        there = False
    if given and not there:
        raise ValueError(f"{given!r} is no URL of a server. Give one such as http://127.0.0.1:8000/")
    return given


RewardTarget = Annotated[str, AfterValidator(lambda given: _url(given) if is_url(given) else given)]
"""An import path, or a URL."""


class SandboxedSection(Section):
    """Keys of a section whose user code may run in a sandbox."""

    sandbox: Literal["none", "bwrap"] = "none"
    """bwrap: user code runs in a sandbox of Debian's bubblewrap, or the launch is refused: see docs/security.md."""
    sandbox_network: bool = False
    """The sandbox has the host's network, in place of none."""
    sandbox_read: tuple[Annotated[str, AfterValidator(lambda given: os.path.abspath(os.path.expanduser(given)))], ...] = ()
    """Files and folders that the sandbox shows, read-only, beside the system, Python and the code that the run keeps."""
    sandbox_env: tuple[str, ...] = ()
    """Environment variables that are passed on into it, such as OPENAI_API_KEY."""
    sandbox_tmp_mb: int = Field(default=512, ge=1)
    """Size of its own /tmp, in memory, of its /dev/shm, and of each file, in MiB."""

    @model_validator(mode="after")
    def _has_a_sandbox(self) -> Self:
        fields = SandboxedSection.model_fields
        if self.sandbox == "none" and (idle := [name for name in fields if getattr(self, name) != fields[name].default]):
            raise ValueError(f"{idle[0]} has no effect without a sandbox. Set sandbox=bwrap, or leave it out")
        if self.sandbox != "none" and getattr(self, "isolation", "") == "inline":
            raise ValueError(
                f"isolation=inline is in the manager's own process, and sandbox={self.sandbox} in workers. Leave isolation out"
            )
        return self


class RewardSection(SandboxedSection):
    """Reward functions, added to what environments give."""

    functions: tuple[RewardTarget, ...] = ()
    """Import paths: package.module:function or path/to/file.py:function. See actors/rewards/functions.py for the signature. Or URLs."""
    url: Annotated[str, AfterValidator(_url)] = ""
    """Invoke URL of one more function: `rubato serve-rewards`, or what speaks as it does (docs/rewards.md)."""
    timeout_s: float = Field(default=5.0, gt=0)
    """Longest one call of a function may take; its process is killed after it. Over a URL: longest one try."""
    deadline_factor: float | None = Field(default=None, ge=1)
    """A call lasts at most so many times the longest that one with a score above 0 took, of the same task: from `deadline_least_s` to
    `timeout_s`. Each trajectory has a call of its own then. Empty: always `timeout_s`. See docs/rollpacker.md."""
    deadline_least_s: float = Field(default=2.0, gt=0)
    """Where `deadline_factor` is set."""
    workers: int = Field(default=1, ge=1)
    """Processes that run the functions; calls that are under way at URLs."""
    min_workers: int | None = Field(default=None, ge=0)
    """Processes that stay while there is nothing to do: from here to `workers` there are as many as calls need. Empty: always all."""
    memory_mb: int = Field(default=8192, ge=0)
    """Private writable memory of each of those processes in MiB; 0 leaves it unbounded. Shared mappings are not counted, nor bounded."""
    max_processes: int = Field(default=256, ge=1)
    """Processes and threads that each of them may have, itself included."""

    @model_validator(mode="after")
    def _bounds(self) -> Self:
        if self.min_workers is not None and self.min_workers > self.workers:
            raise ValueError(f"min_workers={self.min_workers} is more than workers={self.workers}. Raise workers")
        return self

    @property
    def targets(self) -> tuple[str, ...]:
        """All functions, import paths and URLs."""
        return (*self.functions, self.url) if self.url else self.functions

    @property
    def names(self) -> tuple[str, ...]:
        """What each function is called in metrics and in samples.jsonl: its own name, `url` where it is asked at one; with its place in the
        list where that is taken."""
        names: list[str] = []
        for place, target in enumerate(self.targets, 1):
            name = "url" if is_url(target) else target.rpartition(":")[2]
            while name in names or name in RESERVED_SCORES or name == "env":
                name += f"_{place}"
            names.append(name)
        return tuple(names)


class SamplesSection(Section):
    """Tickets: how long they last and how often they are handed out."""

    ticket_ttl_s: float = Field(default=30.0, gt=0)
    """A ticket that is neither renewed nor put within this time goes to another attempt."""
    max_attempts: int = Field(default=3, ge=1)
    """Attempts per rollout before it is `failed`; a drained environment manager costs none."""
    max_barren_groups: int | None = Field(default=None, ge=1)
    """Groups in a row that may come to nothing, with fewer than two scored rollouts or filtered, before the run ends, exit 1.
    Empty: ten batches' worth, at least 128."""
    extra_rollouts: int = Field(default=0, ge=0)
    """Rollouts of each group beyond `train.group_size`: the first `group_size` that are scored train, and the others are cancelled.
    No group waits for stragglers, which makes training see a selection of what is quick: see docs/samples.md."""
    unbounded_batches: int = Field(default=8, ge=1)
    """Batches' worth of groups that may be under way where `staleness.bounded` is false."""
    policy: Annotated[tuple[str, ...], BeforeValidator(lambda given: (given,) if isinstance(given, str) else given)] = ()
    """Classes that change how batches are made, package.module:Class or path/to/file.py:Class, each around the one before. See
    docs/samples.md. Empty: as `staleness`, `tail_batching` and `train.dynamic_sampling` say."""
    unsettled_mb: int = Field(default=256, ge=1)
    """MiB of samples that are kept in memory for as long as the Store may forget them; beyond that a put waits."""
    rotate_mb: float = Field(default=256, ge=0)
    """MiB of RUN/samples.jsonl, some 600,000 samples, at which it is closed as samples-000001.jsonl.gz and so on; 0: never. See docs/samples.md."""
    keep: int = Field(default=2048, ge=0)
    """Trajectories that stay in RUN/trajectories for `rubato samples`, whole groups spread over the run; 0: none. One takes five bytes a token."""


class TailBatchingSection(Section):
    """RollPacker's tail batching: short rounds put off the prompts that take longest, and long rounds train those. See docs/rollpacker.md."""

    enabled: bool = False
    """Go by rounds."""
    eta_prompts: float = Field(default=1.25, ge=1, le=16)
    """A short round launches so many times the prompts of a batch, and trains the first that are complete."""
    eta_responses: float = Field(default=1.25, ge=1, le=16)
    """And so many times `train.group_size` responses of each; the first that are scored train."""


class BatchSections(ActorConfig):
    """What decides how batches are made."""

    staleness: StalenessSection = Field(default_factory=StalenessSection)
    train: TrainSection = Field(default_factory=TrainSection)
    samples: SamplesSection = Field(default_factory=SamplesSection)
    tail_batching: TailBatchingSection = Field(default_factory=TailBatchingSection)


class EvalSection(Section):
    """Held-out evaluation, on tasks that are never trained on. Rewards are over the rollouts that finished; see `failed`."""

    every: int = Field(default=10, ge=0)
    """Steps between evaluations, the first of the base model; 0 leaves only the final one."""
    num_tasks: int = Field(default=64, ge=1)
    """Held-out prompts of each evaluation, of each of `tasks`; a data set shows each held-out row once, and no more than it has."""
    final_num_tasks: int = Field(default=200, ge=0)
    """The same in the evaluation after the last step; 0 leaves it out."""
    samples: int = Field(default=1, ge=1)
    """Rollouts of each prompt: one is greedy; more are sampled, for avg@k and pass@k."""
    temperature: float = Field(default=1.0, gt=0)
    """Sampling temperature where there are several samples."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus sampling where there are several samples."""
    pass_reward: float = 1.0
    """A rollout of at least this reward passes."""
    timeout_s: float = Field(default=300.0, gt=0)
    """Longest an evaluation may take. One that takes longer is given up."""


class CheckSection(Section):
    """Whether trainer and engines give the same tokens the same log-probabilities: a run where they don't ends with the likely cause."""

    enabled: bool = True
    """Compare before the first step, after the first update, then every so often, and after the last step. The next step waits for it."""
    every: int = Field(default=50, ge=0)
    """Steps between later comparisons; 0 leaves out all but the last."""
    num_prompts: int = Field(default=16, ge=1)
    """Random prompts to sample from."""
    num_tokens: int = Field(default=32, ge=1)
    """Tokens sampled after each."""
    limit_float32: float = Field(default=1e-3, gt=0)
    """Largest mean |Δ log-prob| in float32."""
    limit_bfloat16: float = Field(default=3e-2, gt=0)
    """Largest mean |Δ log-prob| in bfloat16, whose 8-bit mantissa makes two orders of summation differ by this much."""
    timeout_s: float = Field(default=120.0, gt=0)
    """Longest the engines may take to answer; without an answer the comparison is left out, and told."""

    def due(self, num_published: int, step: int, last: int) -> bool:
        """Whether to compare, now that this launch has published so many versions, `step` the newest, of `last` steps."""
        return self.enabled and (num_published <= 2 or step == last or (self.every > 0 and step % self.every == 0))


LOGGERS = {"tensorboard": "tensorboard", "wandb": "wandb", "prometheus": "prometheus_client"}
"""Our loggers → the package that each needs: the extra of the same name brings it."""


class LoggingSection(Section):
    """Where metrics go besides RUN/metrics.jsonl."""

    loggers: tuple[str, ...] = ()
    """tensorboard, wandb, prometheus, or your own as path/to/file.py:Class; see docs/logging.md."""
    kwargs: dict[str, Any] = {}
    """Arguments of the constructor of your own class."""
    wandb_project: str = "rubato"
    """Project of the run at Weights & Biases."""
    wandb_mode: Literal["online", "offline"] = "online"
    """offline: written to RUN/wandb alone, to be sent later by `wandb sync`."""
    prometheus_listen: ListenAddress = Field(default="127.0.0.1:9108", min_length=1)
    """host:port of the endpoint /metrics, an IPv6 address in brackets; port 0 takes a free one."""

    @model_validator(mode="after")
    def _known(self) -> Self:
        for name in self.loggers:
            if name not in LOGGERS and ":" not in name:
                near = next((f". Did you mean {near}?" for near in difflib.get_close_matches(name, LOGGERS, n=1)), "")
                raise ValueError(f"{name!r} is none of {', '.join(LOGGERS)}, and no path/to/file.py:Class{near}")
        return self


class ProxySection(Section):
    """The LLMProxy: how much it holds, and for how long."""

    picker: str = ""
    """Which engine takes a request: a class of yours, as `package.module:Class` or `file.py:Class`; see actors/proxy/picker.py. Without it, by
    affinity or engine.serves where these are set, else the least loaded."""
    balance: Literal["fixed", "auto"] = "fixed"
    """Of engines that only prefill or only decode: fixed leaves each at its engine.serves, auto lets them change where requests wait longer."""
    balance_s: float = Field(default=10.0, gt=0)
    """Period at which auto decides; at most one engine changes each time."""

    request_timeout_s: float = Field(default=600.0, gt=0)
    """Longest life of one request, where its asker sets no shorter deadline."""
    max_waiting: int = Field(default=4096, ge=1)
    """Requests that may wait for an engine; more are answered Aborted."""
    max_deaths: int = Field(default=3, ge=1)
    """A request under which this many engines died is taken for the cause and answered Aborted."""
    results_kept: int = Field(default=4096, ge=0)
    """Results kept for askers that lost their reply; the oldest is forgotten first."""
    results_mb: int = Field(default=64, ge=0)
    """Size limit of those results, in MiB."""
    sessions_kept: int = Field(default=65536, ge=1)
    """Sessions whose engine is remembered; the least recently used is forgotten first."""


class ClusterSection(Section):
    """The cluster that the job shares pools with others of; a job that is submitted to one gets this section from there."""

    dir: str = ""
    """Folder of the cluster; empty where the job has its engines and its trainer to itself."""
    job: str = Field(default="job", pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$", max_length=64)
    """What the job is called there."""
    rollout_pool: str = "rollout"
    """The pool on which its engines run, in turns with those of other jobs."""
    training_pool: str = "training"
    """The pool on which its trainer runs, in turns with those of other jobs."""
    lease: str = ""
    """Class of a way of one's own by which trainer and engines get the right to compute, `package.module:Class` or `file.py:Class`; see
    actors/cluster/lease.py."""

    @model_validator(mode="after")
    def _one_lease(self) -> Self:
        if self.dir and self.lease:
            raise ValueError(f"dir names a cluster, whose permits are the lease, and lease names {self.lease}: leave one of the two out")
        return self


def engine_specs(job: Config) -> dict[str, ActorSpec]:
    """The roles that run engines: a config may name several."""
    return {role: spec for role, spec in job.actors.items() if GENERATION in job.actor_class(role).provides}
