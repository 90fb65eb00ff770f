"""Every metric of a row of metrics.jsonl, in the one place that describes them; docs/metrics.md is made from it (tools/reference.py).

`<…>` in a name stands for anything without a slash at its ends; what a user's own code names may have slashes within.
"""

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple


class MetricDoc(NamedTuple):
    """One metric: `absent` says when a row lacks it, and is empty where every row has it."""

    name: str
    unit: str
    meaning: str
    absent: str = ""


Section = Mapping[str, tuple[MetricDoc, ...]]

NO_EVAL = "no evaluation ended since the row before"
NO_TORCH = "`train.kind=scripted`"
NO_PULL = "no engine has told yet"
NO_SAMPLING = "`train.dynamic_sampling` is off"
NO_CALL = "no reward function was called"
NO_FABRIC = "no fabric_controller"
NO_MIRROR = "`checkpoint.mirror` is empty"
NO_PACE = "no engine is paced (`engine.pace`)"
LIVE = "rows: `rubato monitor` shows it of the live actor"

M = MetricDoc
"""A short name: the table below is read, not the code."""

METRICS: Section = {
    "The step": (
        M("step", "steps", "the step that the row is of, from 1"),
        M("weights/version", "versions", "the version that the step published: its number"),
        M("weights/bytes", "bytes", "size of the weights that were published"),
        M("weights/delta_bytes", "bytes", "size of what changed in them, which travels between hosts in their place", "they travel whole"),
        M("weights/transfer_s", "s", "median time that an engine took to bring a version to its host: of the slowest engine", NO_PULL),
        M("weights/pull_s", "s", "median time from a pull's begin until its version is in place: of the slowest engine", NO_PULL),
        M("weights/pause_s", "s", "median time that no step ran for a swap: of the slowest engine", NO_PULL),
        M("weights/hidden_frac", "share", "1 − pause ÷ pull, by these medians: the least of any engine", NO_PULL),
    ),
    "Reward": (
        M("reward/mean", "reward", "mean over the samples of the batch"),
        M("reward/std", "reward", "their standard deviation (sample)", NO_TORCH),
        M("reward/zero_std_frac", "share", "groups of the batch whose rewards have no spread: they differ by less than 1e-6", NO_TORCH),
        M("reward/env", "reward", "part of the mean that came from the environment's steps", "an actor of one's own put the samples without it"),
        M("reward/<function>", "reward", "part of the mean that this reward function gave; a second function of one name has its place in the list behind it", "no such function"),
        M("reward/unconditioned", "reward", "mean over all that finished for the step, also what was left out", NO_SAMPLING),
        M("reward/filtered_frac", "share", "samples that dynamic sampling left out", NO_SAMPLING),
        M("env/<key>", "the environment's", "mean of a number in the environment's `info` (the newest of each rollout) over the samples that have it; true is 1. At most 32 keys, the first by name", "no sample has it"),
    ),
    "Tasks": (
        M("task/<name>/reward", "reward", "mean over the samples of the batch that are of this task", "none is, or the config names no `tasks`"),
        M("task/<name>/ended", "samples", "of this task that ended so far, without those that the job's end left unused", "none yet"),
        M("task/<name>/trained_frac", "share", "of these that were in a step", "none yet"),
        M("task/<name>/stale_frac", "share", "of these that were too old to train", "none was"),
    ),
    "Evaluation": (
        M("eval/version", "versions", "the version that was evaluated", NO_EVAL),
        M("eval/reward", "reward", "mean over the held-out rollouts that finished", f"{NO_EVAL}, or none finished"),
        M("eval/num", "rollouts", "those that finished", NO_EVAL),
        M("eval/failed", "rollouts", "those that failed", NO_EVAL),
        M("eval/samples", "rollouts", "of each prompt: `eval.samples`", NO_EVAL),
        M("eval/temperature", "1", "they were sampled at: 0, greedy, where there is one of each prompt", NO_EVAL),
        M("eval/top_p", "share", "of probability that they were sampled from", NO_EVAL),
        M("eval/avg@<k>", "reward", "mean over prompts of the mean reward of their rollouts that finished", "`eval.samples` is 1"),
        M("eval/pass@<k>", "share", "prompts of which one of k rollouts reaches `eval.pass_reward`, without bias; one that failed does not", "`eval.samples` is 1"),
        M("eval/reward/<function>", "reward", "as `reward/<function>` and `reward/env`, of the held-out rollouts", NO_EVAL),
        M("eval/task/<name>/reward", "reward", "mean over the held-out rollouts of this task that finished", f"{NO_EVAL}, or none of it finished"),
        M("eval/task/<name>/avg@<k>", "reward", "as `eval/avg@<k>`, of this task: `env` where the config names no `tasks`. Also where k is 1", f"{NO_EVAL}, or none of it finished"),
        M("eval/task/<name>/pass@<k>", "share", "as `eval/pass@<k>`, of this task", NO_EVAL),
        M("eval/env/<key>", "the environment's", "as `env/<key>`, of the held-out rollouts", NO_EVAL),
    ),
    "What was learned": (
        M("policy/taught_frac", "share", "groups of the batch whose advantages are not all 0", NO_TORCH),
        M("policy/loss", "loss", "loss of a minibatch, mean over the step's updates", NO_TORCH),
        M("policy/entropy", "nats", "entropy of the policy, mean over tokens", NO_TORCH),
        M("policy/clip_frac", "share", "tokens that a clip decides", NO_TORCH),
        M("policy/clip_high_frac", "share", "tokens that the upper clip decides", NO_TORCH),
        M("policy/ratio_mean", "ratio", "mean of π/μ before the step's first update: the policy over the one that sampled", NO_TORCH),
        M("policy/kl", "nats", "the estimator k3 of KL(μ ‖ π), before the step's first update", NO_TORCH),
        M("policy/fresh_frac", "share", "tokens that the step's own first weights sampled", NO_TORCH),
        M("policy/mismatch_kl", "nats", "`policy/kl` over those alone: engine against trainer; never negative", "`policy/fresh_frac` is 0"),
        M("policy/ess", "share", "effective sample size (Σw)² / (n·Σw²) of the importance weights before their cap, of n tokens", "no group taught"),
        M("policy/is_mean", "ratio", "importance weights as they are used", "importance weights are off"),
        M("policy/is_capped_frac", "share", "tokens whose weight is above `train.importance.cap`", "importance weights are off"),
        M("policy/kl_ref", "nats", "k3 of KL(π ‖ reference)", "no reference model"),
        M("policy/router_imbalance", "1", "how unevenly a sequence's tokens use experts: 1 where all are used alike", "no experts, or `train.router_aux_coef` is 0"),
        M("optim/grad_norm", "norm", "global norm of the gradient before it is scaled down, of the last of them", NO_TORCH),
        M("optim/lr", "1", "learning rate", NO_TORCH),
        M("optim/minibatches", "updates", "optimiser steps that the batch had tokens for", NO_TORCH),
        M("optim/updates", "updates", "those of them that were taken, with a gradient other than 0: at 0 the step changed no weight", NO_TORCH),
        M("optim/skipped", "updates", "optimiser steps left out because their gradient was not finite", NO_TORCH),
    ),
    "Age": (
        M("staleness/mean", "versions", "age of the batch's samples: the version that the step began with, less that of the first token"),
        M("staleness/max", "versions", "age of the oldest"),
        M("staleness/alpha", "versions", "the bound α on age after the step; with `staleness.alpha=auto` it moves", "the job has no bound"),
        M("staleness/dropped", "samples", "samples that ended for their age, since the sample buffer started"),
        M("staleness/publish_lag", "s", "from the end of the update until a version was announced: of the newest that is"),
        M("samples/damaged", "samples", "samples whose payload was gone or damaged, since the sample buffer started"),
    ),
    "Rollouts of the batch": (
        M("rollout/len_mean", "tokens", "length, with what was shown to the model"),
        M("rollout/sampled_mean", "tokens", "length of what the model sampled"),
        M("rollout/turns_mean", "turns", "turns"),
        M("rollout/cut_frac", "share", "of which a turn ended at its token limit, where that is more than one"),
        M("rollout/truncated_frac", "share", "that ended at a limit of turns or tokens, or as the environment said"),
        M("rollout/wall_s_mean", "s", "how long one took, on average"),
        M("rollout/wall_s_p99", "s", "99th percentile of how long one took"),
        M("rollout/env_frac", "share", "of their time in resets and steps of the environment"),
        M("rollout/reward_frac", "share", "of their time in waiting for the scores of reward functions"),
        M("rollout/room", "rollouts", "that the environment managers may run at once"),
        M("rollout/env_workers", "processes", "in which environments run; 0 where they run in their managers"),
        M("rollout/reward_workers", "processes", "in which reward functions run (`reward.workers`), of all reward services; 0 where there are none"),
        M("rollout/reward_each_s", "s", "what one trajectory more takes of such a worker in a call, fitted to the newest calls", NO_CALL),
        M("rollout/reward_alone_s", "s", "what a call of one trajectory takes, by the same fit", NO_CALL),
        M("rollout/slots", "requests", "that the engines decode at once"),
        M("rollout/error_frac", "share", "of all attempts since the environment managers started, those of which no sample came, but for cancelled ones"),
    ),
    "What became of every token": (
        M("tokens/generated", "tokens", "sampled in rollouts that ended, however they did: the sum of the other `tokens/…`"),
        M("tokens/held", "tokens", "of samples that have no fate yet: their group runs, waits, or no checkpoint covers its step"),
        M("tokens/<fate>", "tokens", "of samples with that fate: `trained`, `zero_spread`, `stale`, `failed`, `filtered`, `unused`, …", "none yet"),
        M("tokens/retried", "tokens", "of attempts that another one followed", "none yet"),
        M("tokens/eval", "tokens", "of held-out rollouts", "none yet"),
        M("attempts/lost", "attempts", "those whose holder was killed or fell silent: what they had sampled is not known"),
        M("length/<N>/ended", "samples", "that ended with at most N sampled tokens and more than N/2; `length/0`: of which no token is known", "none yet"),
        M("length/<N>/trained_frac", "share", "of these that were in a step", "none yet"),
        M("length/<N>/stale_frac", "share", "of these that were too old to train; of one that ran, N is what it had sampled until it was ended", "none was"),
        M("queue/held/depth", "samples", "scored samples of groups that are not complete"),
        M("queue/ready/depth", "samples", "samples of groups that may be claimed"),
        M("queue/bound/depth", "samples", "samples that a step is bound to"),
    ),
    "Time": (
        M("time/step", "s", "since the row before"),
        M("time/wall_s", "s", "training time so far, earlier launches included"),
        M("time/unix_s", "s", "when the row was written, since 1970"),
        M("time/wait_for_batch", "s", "the trainer waited for samples"),
        M("time/wait_for_permit", "s", "the trainer waited for its turn on the training pool", "the job shares none"),
        M("time/train", "s", "of the update"),
        M("time/train_cpu", "CPU s", "of the update, in the trainer's process"),
        M("time/publish", "s", "until training could go on: the weights copied, waits for an evaluation and for the version before included"),
        M("time/check", "s", "trainer and engines were compared", "no comparison was due"),
        M("perf/samples_s", "samples/s", "samples of the batch ÷ `time/step`"),
        M("perf/gen_tokens_s", "tokens/s", "sampled by all engines, as they reported last"),
        M("perf/train_tokens_s", "tokens/s", "tokens of the batch ÷ `time/train`"),
        M("checkpoint/mirror_behind", "steps", "from the newest copy in `checkpoint.mirror` to the newest checkpoint", NO_MIRROR),
        M("checkpoint/mirror_failures", "copies", "that failed one after the other; 0 where the newest attempt went through", NO_MIRROR),
        M("loop/lag_p99", "ms", "99th percentile of how late the trainer's event loop runs"),
    ),
    "Modelled time": (
        M("paced/engines", "engines", "those whose steps last what other hardware would take: throughput, times and ages of the row are *paced*, not measured", NO_PACE),
        M("paced/outlasted_frac", "share", "of their steps so far that took longer than their pace; above 0.02 the times are this host's", NO_PACE),
    ),
    "Engines and their orchestrator": (
        M("engine/degree", "devices", "that compute the engine's model together", LIVE),
        M("engine/asleep", "0 or 1", "the engine sleeps: its devices are another's", LIVE),
        M("orchestrator/switches", "switches", "merges and splits of engines so far", LIVE),
        M("orchestrator/moves", "requests", "that were moved to another engine so far, by switches too", LIVE),
        M("orchestrator/circuits", "switches", "and rebalancings whose caches travelled by circuits, so far", LIVE),
        M("orchestrator/agreed", "numbers", "number of the last ask that the fabric agreed to: that of the last switch or rebalancing whose circuits were lit, `number` of `switch_agreed` in its log", LIVE),
        M("orchestrator/electrical", "switches", "and rebalancings that asked for circuits and went without, so far", LIVE),
        M("orchestrator/remaining_s", "s", "until the last rollout is through, its turns to come and its environments included, as forecast at the newest look, moves left out; of the hardware, without `engine.pace.scale`", LIVE),
        M("orchestrator/forecast_s", "s", "what was forecast of the last load when most of it ran: until its last rollout is through", LIVE),
        M("orchestrator/took_s", "s", "what that became, up to a look later (`orchestrator.interval_s`); none while requests never run out", LIVE),
    ),
    "Processes": (
        M("idle/<actor>", "share", "of the last 10 s in which the actor had nothing to do"),
        M("cpu/<actor>", "CPU s", "of an actor of the trainer's host so far, with the processes that it started", "no /proc, or it shares its process"),
        M("cpu/host", "CPU s", "all cores of the trainer's host were busy so far, for this job or not", "no /proc"),
        M("cpu/cores", "cores", "of the trainer's host", "no /proc"),
    ),
    "Fabric": (
        M("fabric/phase/<phase>", "0 or 1", "the phase of the network", NO_FABRIC),
        M("fabric/reconfigurations", "changes", "of circuits so far", NO_FABRIC),
        M("fabric/hidden_s", "s", "of reconfigurations that no phase waited for, so far", NO_FABRIC),
        M("fabric/exposed_s", "s", "of reconfigurations that a phase waited for, so far", NO_FABRIC),
        M("fabric/circuits", "circuits", "lit now", NO_FABRIC),
        M("fabric/change", "changes", "number of the last change that was wanted", NO_FABRIC),
        M("fabric/electrical", "0 or 1", "everything takes the electrical path", NO_FABRIC),
        M("fabric/kept", "phases", "for which the circuits before were kept, so far", NO_FABRIC),
        M("fabric/dead_ports", "ports", "taken for broken", "none yet"),
    ),
}  # fmt: skip


def described(name: str) -> MetricDoc | None:
    """What the table says of a metric of a row: an exact name before a pattern, a pattern with more words before others."""
    return next((metric for pattern, metric in _patterns() if pattern.fullmatch(name)), None)


@lru_cache(maxsize=1)
def _patterns() -> list[tuple[re.Pattern[str], MetricDoc]]:
    every = [metric for section in METRICS.values() for metric in section]
    every.sort(key=lambda metric: (metric.name.count("<"), -len(metric.name)))
    return [(re.compile(re.sub(r"<[^>]*>", r".+", re.escape(metric.name))), metric) for metric in every]
