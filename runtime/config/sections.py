"""The sections of a config that the runtime itself reads, and the bases that actors make theirs from."""

import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self, cast, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    ValidationInfo,
    field_validator,
    model_serializer,
    model_validator,
)
from pydantic_core import PydanticCustomError

from rubato.bus.address import BadAddress, bare, host_port, parse_ports, spelt

YES, NO = ("yes", "y", "on", "1", "t", "true"), ("no", "n", "off", "0", "f", "false")
"""Words for true and false that other tools take."""


def _can_be_bound(listen: str) -> str:
    try:
        return listen and host_port(listen) and listen
    except BadAddress as error:
        raise ValueError(error) from error


ListenAddress = Annotated[str, AfterValidator(_can_be_bound)]


class Section(BaseModel):
    """Base of every config section: frozen, unknown keys refused, each field documented by the string below it."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, populate_by_name=True, allow_inf_nan=False, validate_default=True
    )

    follows: ClassVar[Mapping[str, str]] = {}
    """Key → the key of this section that its default depends on: a resumed run that changes the latter takes the default anew."""

    renamed: ClassVar[Mapping[str, str]] = {}
    """Key of before → its name today: the old one is taken, and the launch says so."""

    @model_validator(mode="before")
    @classmethod
    def _takes_old_keys(cls, given: object, info: ValidationInfo) -> object:
        if not isinstance(given, dict):
            return given
        tree = cast("dict[str, Any]", given)
        for old in cls.renamed.keys() & tree.keys():
            new = cls.renamed[old]
            if new in tree:
                raise ValueError(f"{old} is called {new} today, and both are given. Leave {old} out")
            tree = {new if key == old else key: value for key, value in tree.items()}
            if info.context is not None:
                info.context.append(f"the key {old} is called {new} today; {old}: {tree[new]} was taken for it")
        return tree

    @field_validator("*", mode="before")
    @classmethod
    def _no_word_for_a_truth(cls, value: object, info: ValidationInfo) -> object:
        """`steps: true` is a slip, not 1; and of the many words for yes and no, two are taken."""
        field = cls.model_fields.get(info.field_name or "")
        wanted: object = field.annotation if field is not None else None
        if isinstance(value, bool) and (wanted is int or wanted is float):
            raise PydanticCustomError("bool_for_number", "it must be a number")
        parts = (wanted, *get_args(wanted))
        word = isinstance(value, str) and str not in parts
        if bool in parts and not isinstance(value, bool) and (wanted is bool or word):
            if value in ("true", "false"):
                return value == "true"
            meant = str(value).lower()
            known = "true" if meant in YES else "false" if meant in NO else ""
            advice = f". Write {known}" if known else ""
            raise PydanticCustomError("word_for_truth", "it must be true or false", {"advice": advice})
        return value


class RunSection(Section):
    """The run as a whole."""

    name: str = Field(default="run", pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$", max_length=64)
    """Names the run folder under runs/; letters, digits, and _ . - inside."""
    seed: int = Field(default=1, ge=0)
    """Everything drawn at random in the run follows from it."""
    steps: int = Field(default=60, ge=0)
    """Training steps, after which the job is done; 0 trains nothing."""
    max_idle_steps: int = Field(default=10, ge=0)
    """Steps in a row that change no weight, though rewards differ, after which the run ends as failed: all optimiser steps left out, or
    all samples masked. 0: never."""
    dir: str = ""
    """Folder of the run; empty makes one under runs/ from the name and the date. --run-dir wins."""
    watch_s: float = Field(default=30.0, gt=0)
    """A stage that is blocked for longer is reported, once, in the words of `monitor --why`."""
    lease_s: float = Field(default=300.0, gt=0)
    """A host that can't reach the run's state for longer ends its actors; shorter cuts are ridden out."""


class BusSection(Section):
    """Where the run is reached from other hosts; by default from nowhere."""

    host: str = ""
    """Address of this host as other hosts reach it, such as 10.0.0.5 or fd00::5. Needs keys: rubato keys new --run DIR."""
    port: int = Field(default=0, ge=0, le=65535)
    """Port of the gate that joining hosts come to; 0 takes one of `ports`."""
    ports: str = ""
    """Range from which every other port comes that a host opens, such as 31000-31100; empty lets the system choose."""

    @field_validator("host")
    @classmethod
    def _is_spelt_for_a_port(cls, host: str) -> str:
        return spelt(bare(host))

    @field_validator("ports")
    @classmethod
    def _is_a_range(cls, ports: str) -> str:
        if ports and parse_ports(ports) is None:
            raise ValueError("must be two ports from 1 to 65535 in order, such as 31000-31100")
        return ports

    def bind(self, host: str) -> str:
        """The tcp address to bind on `host`."""
        return f"tcp://{host}:{self.ports or '*'}"


class StateSection(Section):
    """Where the little state lives that must outlive processes."""

    url: str = ""
    """redis://, rediss:// or unix:// address of a Redis or Valkey server, or redis+sentinel://HOST:PORT,HOST:PORT/SERVICE for one that fails
    over; empty starts one for this run."""
    durability: Literal["everysec", "always", "replicated"] = "everysec"
    """everysec: a killed server may lose two seconds of acknowledged writes; always: none, at one disk sync per write; replicated: a failover
    loses none, each waits for a replica."""
    shared: bool = False
    """Whether the server has a scope for other jobs too, as a cluster's has: RUN/cluster.json says how they reach it, and nothing else."""

    @property
    def window_s(self) -> float:
        """The server may forget what it acknowledged less than so long ago."""
        if self.durability == "always":
            return 0.0
        return 12.0 if self.fails_over and self.durability == "everysec" else 2.0  # a master cut off takes writes for another 10 s

    @property
    def fails_over(self) -> bool:
        """Whether `url` names sentinels."""
        return self.url.startswith(("redis+sentinel://", "rediss+sentinel://"))


class HostSection(Section):
    """What is known of this host; each host of a run has its own."""

    name: str = ""
    """How it is called where the run's hosts are listed; one that `launch.hosts` asks for has its name there. Empty: as its node agent."""
    labels: tuple[str, ...] = ()
    """What it is called by `actors.<role>.pools.<name>.labels`."""
    listen: ListenAddress = ""
    """host:port at which its node agent serves /metrics and /healthz, see docs/logging.md; port 0 takes a free one. Empty: nowhere."""


class HostsSection(Section):
    """Hosts alike that `launch.backend` brings into the run, each with processes of these pools."""

    count: int = Field(default=1, ge=1, le=1024)
    """How many of them."""
    pools: dict[str, Annotated[int, Field(ge=1, le=64)]] = Field(min_length=1)
    """Processes that each of them brings, by pool or by a role that has no pools: `far: 8, env_manager: 2`. A host must have what
    they need together: their GPUs, their cores and their labels."""
    gpus: int = Field(default=0, ge=0)
    """GPUs that a host is asked for where that is more than its pools need together."""
    cpus: int = Field(default=0, ge=0)
    """Cores that a host is asked for where that is more than its pools need together."""
    labels: tuple[str, ...] = ()
    """What a host must be beside the labels of its pools; it has them among its `host.labels` then."""


def _text(value: object) -> object:
    """`OMP_NUM_THREADS: 4` is meant as the environment has it, and the number of a job of Slurm as its name."""
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


class LaunchSection(Section):
    """Where the run gets hosts beside the one that launches it."""

    backend: str = "here"
    """The engine that places `hosts`: here (this host), ray (docs/ray.md), slurm (docs/slurm.md), or the import path of a HostPlacer."""
    address: Annotated[str, BeforeValidator(_text)] = "auto"
    """Where that engine is reached, in its own terms; auto: where it says itself that it is, as by a variable of the environment."""
    hosts: dict[str, HostsSection] = {}
    """Kinds of hosts by name. They need `bus.host`. Empty: the launching host, and what joins it by token."""
    names: str = "rubato.actors.hub.names"
    """Module that finds what the config names elsewhere, such as models at a hub, and brings it before actors start; empty: none does."""
    place_timeout_s: float = Field(default=300.0, gt=0)
    """A host that is not there after so long can't be had: at the launch the run ends, later another is asked for."""

    @field_validator("hosts")
    @classmethod
    def _have_names(cls, hosts: dict[str, HostsSection]) -> dict[str, HostsSection]:
        for name in hosts:
            if not POOL.fullmatch(name):
                raise ValueError(f"{name} can't be a name of hosts: use letters, digits, - and _")
            if name == "node":
                raise ValueError("node can't be a name of hosts: node-1 is the launching one")
        return hosts


def _dotted(tree: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """`{"engine": {"num_slots": 64}}` as `{"engine.num_slots": 64}`, which may be mixed."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        inner = cast("dict[str, Any]", value) if isinstance(value, dict) else {}
        found |= _dotted(inner, f"{above}{key}.") if inner else {f"{above}{key}": value}
    return found


DEVICES = "CUDA_VISIBLE_DEVICES"
"""The variable that says which GPUs a process sees."""

VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
POOL = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")


class PoolSection(Section):
    """Processes of one role that run on the same kind of hardware, with what they have of it and what differs in their config."""

    count: int = Field(default=1, ge=0, le=1024)
    """Processes that the launching host starts; more can be added while the job runs, on any host that has the labels."""
    hardware: str = ""
    """The class of the hardware, such as h20. It stands in the actors' records and on the monitor."""
    labels: tuple[str, ...] = ()
    """The pool's processes run only on hosts that have all of these among their `host.labels`."""
    gpus: int = Field(default=0, ge=0)
    """GPUs of each process: the next of its host that no pool has, and it sees no other. 0 leaves what it sees as it is."""
    cores: int = Field(default=0, ge=0)
    """Cores to which each process is pinned: the next of its host that no pool has. 0 leaves it to the system."""
    env: dict[str, Annotated[str, BeforeValidator(_text)]] = {}
    """Environment variables of its processes."""
    set: Annotated[dict[str, Any], AfterValidator(_dotted)] = {}
    """Config keys that are different for its processes, such as engine.num_slots: 64; of sections that the role reads."""

    @property
    def own_process(self) -> bool:
        """Whether its processes differ from the launcher from their very start."""
        return bool(self.gpus or self.cores or self.env)

    @model_validator(mode="after")
    def _has_a_sound_environment(self) -> Self:
        if self.gpus and DEVICES in self.env:
            raise ValueError(f"gpus={self.gpus} and env.{DEVICES}={self.env[DEVICES]} both say which GPUs. Keep one of them")
        for name, value in self.env.items():
            if not VARIABLE.fullmatch(name) or "\0" in value:
                raise ValueError(f"{name!r} in env can't be set: name a variable by letters, digits and _, its value without NUL")
        return self


class ActorSpec(Section):
    """One role of the job: which class, how many processes, how often they may be restarted."""

    target: str = Field(alias="class")
    """Import path: package.module:Class or path/to/file.py:Class."""
    count: int = Field(default=1, ge=0, le=1024)
    """Processes started at launch; more can be added while the job runs. With `pools` it is the sum of theirs."""
    restarts: int = Field(default=5, ge=0)
    """Restarts of one actor within `restart_window_s` before its failure ends the job."""
    restart_window_s: float = Field(default=300.0, gt=0)
    """Deaths further back than this are forgotten."""
    threads: int = Field(default=1, ge=1)
    """Threads that numeric libraries in the process may use."""
    pools: dict[str, PoolSection] = {}
    """Where its processes run and what differs between them: then each belongs to one of these. See docs/pools.md."""

    @property
    def members(self) -> tuple[str, ...]:
        """The pool of each process that is started at launch; empty names where the role has no pools."""
        of_pools = tuple(name for name, pool in self.pools.items() for _ in range(pool.count))
        return of_pools if self.pools else ("",) * self.count

    @model_validator(mode="before")
    @classmethod
    def _counts_are_given_once(cls, given: object) -> object:
        if not isinstance(given, dict):
            return given
        tree = cast("dict[str, Any]", given)
        if tree.get("pools") and "count" in tree:
            raise ValueError(f"count={tree['count']} and pools both say how many. Leave count out, and set that of each pool")
        return cast("object", given)

    @model_validator(mode="after")
    def _has_pools_that_can_be_named(self) -> Self:
        for name in self.pools:
            if not POOL.fullmatch(name):
                raise ValueError(f"{name} can't be a pool's name: use letters, digits, - and _")
        return self.model_copy(update={"count": len(self.members)}) if self.pools else self

    @model_serializer(mode="wrap")
    def _without_a_count_beside_pools(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        tree = handler(self)
        if self.pools:
            del tree["count"]
        return tree


class ReportSection(Section):
    """Who turns figures into words; import paths, because the runtime itself knows no word of RL."""

    console: str = "rubato.actors.report.console:StepTable"
    """Class whose `header()` and `line(step, steps, row)` make the launcher's step table."""
    finish: str = "rubato.actors.report"
    """Module run as `python -m MODULE RUN_DIR` when the job has ended; empty runs none."""
    advice: str = "rubato.actors.report.advice:advice_metrics"
    """Function that says what a change would gain, for `rubato monitor`: `advice_metrics(rows, alpha)`; empty gives no advice."""
    fit: str = "rubato.actors.report.fit"
    """Module whose `told(config, folder)` says for a dry run what memory the job takes, and sentences where it can't fit; empty: none does."""
    monitor: str = ""
    """Module whose `main(argv)` is `rubato monitor` of such a run; empty is the usual one."""


class BaseRoot(Section):
    """The runtime's own sections; the root of a job adds one field per section that its actors declare."""

    run: RunSection = RunSection()
    bus: BusSection = BusSection()
    state: StateSection = StateSection()
    host: HostSection = HostSection()
    launch: LaunchSection = LaunchSection()
    prepare: tuple[str, ...] = ()
    """Modules run one after another as `python -m MODULE RUN_DIR` before actors start."""
    actors: dict[str, ActorSpec]
    """The job's roles by name."""
    report: ReportSection = ReportSection()

    @model_validator(mode="after")
    def _has_each_pool_once(self) -> Self:
        """`rubato drain --pool NAME` names no role."""
        found: dict[str, str] = {}
        for role, name in ((role, name) for role, spec in self.actors.items() for name in spec.pools):
            if name in found:
                raise ValueError(f"actors.{found[name]} and actors.{role} both have a pool {name}. Call one of them otherwise")
            found[name] = role
        return self

    @model_validator(mode="after")
    def _has_a_way_for_hosts(self) -> Self:
        known = {name: role for role, spec in self.actors.items() for name in spec.pools or (role,)}
        for name, part in ((name, part) for name, asked in self.launch.hosts.items() for part in asked.pools):
            if part not in known:
                raise ValueError(
                    f"launch.hosts.{name}.pools has {part}, which is no pool of this job, nor a role without pools. "
                    f"These are {', '.join(known)}"
                )
        if self.launch.hosts and not self.bus.host:
            raise ValueError("launch.hosts needs bus.host, the address at which they reach this host")
        return self

    @model_validator(mode="after")
    def _has_a_port_for_each(self) -> Self:
        ports = parse_ports(self.bus.ports)
        needed = sum(spec.count for spec in self.actors.values()) + 3
        if self.bus.host and ports is not None and ports[1] - ports[0] + 1 < needed:
            raise ValueError(
                f"bus.ports={self.bus.ports} is too narrow: this job needs {needed} ports, one for each actor, the node agent, the gate "
                "and a command of rubato"
            )
        return self


class ActorConfig(Section):
    """The config sections an actor reads, as fields named like the sections."""
