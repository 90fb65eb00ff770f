"""How often each kind of communication recurs in a disaggregated job: section 3 and Figure 3 of the RFabric paper, and its Table 1."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from pydantic import Field

from rubato.planning.hardware import GpuSpec
from rubato.planning.language_model import BF16, ModelSpec
from rubato.planning.roofline import Deployment, Roofline
from rubato.runtime.config import Section
from rubato.sim.claims import Value
from rubato.sim.net.collectives import ring_all_reduce_s
from rubato.sim.outcome import Cell, Plot, RunProgress, RunResult, Table
from rubato.sim.rfabric.job import GRADIENT, TOKEN_AND_LOGPROB
from rubato.sim.scenario import Scenario, ScenarioKind


class SplitJob(Section):
    """A dense model trained on some servers and generated for on others; a tensor-parallel group fills a server."""

    train_servers: int = Field(ge=1)
    """One pipeline stage each."""
    engines: int = Field(ge=1)
    """One server each."""
    prompts: int = Field(ge=1)
    """Per iteration."""
    samples: int = Field(ge=1)
    """Per prompt."""
    mini_batch: int = Field(ge=1)
    """Prompts per optimizer step."""
    micro_batch: int = Field(ge=1)
    """Sequences."""
    prompt_tokens: int = Field(ge=1)
    response_tokens: int = Field(ge=1)
    compute_efficiency: float = Field(gt=0, le=1)
    recompute: bool = True


class CharacterisationScenario(Scenario):
    """The job, and the delay of the circuit switch that windows are compared with."""

    model: ModelSpec
    gpu: GpuSpec
    job: SplitJob
    ocs_s: float = Field(default=0.010, gt=0)


class TrafficWindow(NamedTuple):
    """One kind of communication of one rank: time between two of them, bytes of one, and where it runs."""

    seconds: float
    size_bytes: float
    primitive: str
    domain: str


def run(scenario: CharacterisationScenario, progress: RunProgress) -> RunResult:
    """Every kind's window."""
    progress(0, 1, "windows")
    found = windows(scenario)
    rows: list[tuple[Cell, ...]] = [
        (name, w.seconds, w.size_bytes, w.primitive, w.domain, w.seconds > scenario.ocs_s) for name, w in found.items()
    ]
    figures: dict[str, Value] = {f"{name}_s": w.seconds for name, w in found.items()}
    figures |= {f"{name}_outlasts_ocs": w.seconds > scenario.ocs_s for name, w in found.items()}
    order = [found[name].seconds for name in ORDER]
    figures["order"] = order == sorted(order)
    figures["bimodal_ratio"] = found["weight_sync"].seconds / found["train_dp"].seconds
    columns = ("communication", "window_s", "bytes", "primitive", "domain", "outlasts_ocs")
    plots = {"windows": Plot("Traffic windows", lambda f: _draw(f, scenario, found))}
    return RunResult(figures, {"windows": Table(columns, rows)}, plots, (), _notes(scenario))


ORDER = ("gen_tp", "train_tp", "train_pp", "train_dp", "weight_sync")


def windows(s: CharacterisationScenario) -> Mapping[str, TrafficWindow]:
    """The rows of Table 1 that a dense job has."""
    job, model = s.job, s.model
    tp = s.gpu.gpus_per_server
    tokens = job.prompt_tokens + job.response_tokens
    layers = -(-model.layers // job.train_servers)
    slot = slot_s(s)
    passes = 4 if job.recompute else 3
    micro_batches = -(-job.mini_batch * job.samples // job.micro_batch)
    update = (micro_batches + job.train_servers - 1) * slot
    generation = generation_s(s)
    iteration = max(update * job.prompts / job.mini_batch, generation)
    engine = Roofline(Deployment(gpu=s.gpu, model=model, tp=tp))
    batch = min(engine.spec.num_slots, -(-job.prompts * job.samples // job.engines))
    step = engine.step_s(batch, batch * (job.prompt_tokens + job.response_tokens / 2))
    activation = job.micro_batch * tokens * model.hidden * BF16
    kv = job.prompt_tokens * model.kv_bytes_per_token
    responses = job.prompts * job.samples
    return {
        "gen_tp": TrafficWindow(step / (2 * model.layers), batch * model.hidden * BF16, "AllReduce", "HBD"),
        "gen_prefill_decode": TrafficWindow(generation / responses * job.engines, kv, "M2N", "ToR-Agg"),
        "train_tp": TrafficWindow(slot / (2 * layers * (passes - 1)), activation, "AllReduce", "HBD"),
        "train_pp": TrafficWindow(slot / 2, activation / tp, "P2P", "ToR-Agg"),
        "train_dp": TrafficWindow(update, GRADIENT * model.params / tp / job.train_servers, "AllReduce", "ToR-Agg-Core"),
        "response_stream": TrafficWindow(iteration / responses, job.response_tokens * TOKEN_AND_LOGPROB, "G2T", "ToR-Agg-Core"),
        "weight_sync": TrafficWindow(iteration, model.weight_bytes, "T2G", "ToR-Agg-Core"),
    }


def slot_s(s: CharacterisationScenario) -> float:
    """Forward and backward of one micro-batch in one stage; the all-reduces of tensor parallelism are not hidden."""
    job, model, tp = s.job, s.model, s.gpu.gpus_per_server
    tokens = job.micro_batch * (job.prompt_tokens + job.response_tokens)
    passes = 4 if job.recompute else 3
    context = (job.prompt_tokens + job.response_tokens) / 2
    flops = passes * tokens * model.forward_flops_per_token(context) / job.train_servers
    layers = -(-model.layers // job.train_servers)
    reduce_s = ring_all_reduce_s(tp, tokens * model.hidden * BF16, s.gpu.nvlink_busbw_bytes_s)
    return flops / (tp * s.gpu.peak_flops * job.compute_efficiency) + 2 * (passes - 1) * layers * reduce_s


def generation_s(s: CharacterisationScenario) -> float:
    """All responses of an iteration, of equal length, in as many full batches as an engine needs."""
    job = s.job
    engine = Roofline(Deployment(gpu=s.gpu, model=s.model, tp=s.gpu.gpus_per_server))
    each = -(-job.prompts * job.samples // job.engines)
    total, left = 0.0, each
    while left > 0:
        batch = min(left, engine.spec.num_slots)
        context = batch * (job.prompt_tokens + job.response_tokens / 2)
        total += batch * engine.prefill_s(job.prompt_tokens) + job.response_tokens * engine.step_s(batch, context)
        left -= batch
    return total


def _notes(s: CharacterisationScenario) -> tuple[str, ...]:
    return (
        f"{s.job.train_servers} servers train (PP{s.job.train_servers} x TP8), {s.job.engines} generate (TP8); windows are against "
        f"{1e3 * s.ocs_s:g} ms of circuit switching.",
        "Responses are of equal length here: a long tail lengthens the iteration, and with it the window of weight sync.",
    )


def _draw(figure: Any, s: CharacterisationScenario, found: Mapping[str, TrafficWindow]) -> None:
    ax = figure.subplots()
    paper = {claim.name.removesuffix("_s"): claim.paper for claim in s.claims if claim.name.endswith("_s") and claim.paper is not None}
    names = [name for name in ORDER if name in found]
    ax.barh(names, [found[name].seconds for name in names], color="0.6", label="simulated")
    ax.plot([paper[name] for name in names if name in paper], [name for name in names if name in paper], "kx", label="paper")
    ax.axvline(s.ocs_s, color="k", linestyle=":", label="circuit switch")
    ax.set(xscale="log", xlabel="window, s")
    ax.legend(fontsize=7)


KIND = ScenarioKind(CharacterisationScenario, run)
