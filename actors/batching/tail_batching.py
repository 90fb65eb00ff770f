"""RollPacker's tail batching, `tail_batching`: groups are opened by rounds, and a round's batch is trained (planning/tail.py decides).

A group plays one prompt in one round. One that a short round puts off ends as `surplus`, with all that was sampled for it, and its prompt
gets another group in a long round. A restart goes on with the rounds under way. The receipt of a step has the state too: where the Store
forgot a step that a checkpoint covers, what that step's moment had under way is launched anew.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Self

import msgspec

from rubato.actors.config import SamplesSection, StalenessSection
from rubato.actors.samples.group import Group, Receipt
from rubato.actors.samples.groups import Groups
from rubato.actors.samples.policy import BatchPolicy, PolicyJob, PolicyPlugin
from rubato.planning.staleness import Admission, AdmissionView, HandOver, SupplyView, min_version
from rubato.planning.tail import TailRound, TailRules, TailState, begin, close, drop, reopen, replace, resumed, train, trainable
from rubato.runtime.config import Config

PUT_OFF = "other prompts of its round were complete before; it waits for a long round"
FORGOTTEN = "the Store forgot its round, and its prompt is launched anew"

GIVEN_UP = ("group_too_small", "filtered")
"""Fates of groups whose prompt is the cause: as without tail batching it trains no more, and another prompt takes its place."""


class Tail(msgspec.Struct):
    """Where tail batching stands. A prompt's number is its place in what the mixture gave."""

    state: TailState = TailState()
    rows: dict[int, tuple[str, int]] = {}
    """Prompt → its task and row, until a checkpoint covers its step."""
    groups: dict[int, str] = {}
    """Prompt → the group that plays it, while its round is under way."""
    steps: dict[int, tuple[int, tuple[int, ...]]] = {}
    """Step that no checkpoint covers → its round and that one's prompts."""


class TailBatching(PolicyPlugin):
    """What is opened and what is trained goes by rounds."""

    key, draws = "tail_batching", True

    def __init__(
        self, below: BatchPolicy, groups: Groups, etas: tuple[float, float], on_round: Callable[[TailRound], None] = lambda round_: None
    ) -> None:
        """`etas` are of prompts and of responses. Raises ValueError for rules that can't be."""
        super().__init__(below, groups)
        limits = groups.limits
        self._rules = TailRules(limits.batch_groups, limits.group_size, *etas, groups.alpha).checked()
        self._on_round = on_round
        self._tail = Tail()

    @classmethod
    def of(cls, below: BatchPolicy, groups: Groups, job: PolicyJob) -> Self:
        """As `PolicyPlugin`; rounds are logged as they begin, with their reason."""
        section = job.config.tail_batching

        def tell(round_: TailRound) -> None:
            job.log.info("round", number=round_.number, kind=round_.kind, prompts=len(round_.prompts), why=round_.why)

        return cls(below, groups, (section.eta_prompts, section.eta_responses), tell)

    @classmethod
    def check(cls, job: Config) -> None:
        """As `PolicyPlugin`."""
        check_sections(job.section("staleness"), job.section("samples"))

    # -- rounds -------------------------------------------------------------------------------------------------

    def admit(self, view: AdmissionView) -> Admission:
        """How many groups the next round would open, and why."""
        state, round_ = begin(self._wanted(), self._rules)
        if round_ is not None:
            return Admission(len(round_.prompts), round_.why)
        if state.rounds:
            why = f"{len(state.rounds)} rounds are under way, as many as staleness.alpha={self._rules.alpha} lets or the steps left need"
            return Admission(0, why)
        return Admission(0, "the steps left have all the groups they train")

    def _wanted(self) -> TailState:
        """The state, with as many prompts in all as the steps that have no groups yet need: some of a step may have to be replaced."""
        state = self._tail.state
        held = len(state.again) + len(state.waiting) + sum(len(round_.prompts) for round_ in self._unbound())
        steps = self.groups.limits.steps - self.groups.training.committed - len(self.groups.steps)
        return state._replace(total=state.fresh + max(0, steps * self._rules.prompts - held))

    def _unbound(self) -> Iterator[TailRound]:
        """Rounds of which no step has the batch yet."""
        bound = {number for number, _ in self._tail.steps.values()}
        return (round_ for round_ in self._tail.state.rounds if round_.number not in bound)

    def open(self) -> bool | None:
        """As `PolicyPlugin`: what rounds under way lack, or else the next round."""
        return self._mend() or self._begin()

    def _begin(self) -> bool:
        state, round_ = begin(self._wanted(), self._rules)
        if round_ is None:
            return False
        self._draw(state.fresh)
        self._tail.state = state
        for prompt in round_.prompts:
            self._launch(prompt, round_.launch)
        self._on_round(round_)
        return True

    def _mend(self) -> bool:
        """Launch again what rounds lack: a group ended by itself, or the Store forgot it. Whether there was any."""
        lacking = [(r, prompt) for r in self._unbound() for prompt in r.prompts if self._group(prompt) is None]
        for round_, prompt in lacking:
            ended = self.groups.ended(self._tail.groups.get(prompt, ""))
            if ended is not None and ended.fate in GIVEN_UP:
                state, other = replace(self._wanted(), round_.number, prompt)
                self._draw(state.fresh)
                self._forget([prompt])
                self._tail.state = state
                self._launch(other, round_.launch)
            else:
                self._tail.state = reopen(self._tail.state, round_.number)
                self._launch(prompt, round_.launch)
        return bool(lacking)

    def _draw(self, end: int) -> None:
        """Know the rows of all prompts below `end`. Raises ConfigError where a sampler of the user's fails; those before it are known."""
        while (number := self._num_drawn()) < end:
            self._tail.rows[number] = self.groups.limits.mixture.draw(self.groups.training.tasks)
            self.groups.changes.training = True

    def _num_drawn(self) -> int:
        return sum(cursor.given for cursor in self.groups.training.tasks.values())

    def _launch(self, prompt: int, num_members: int) -> None:
        self._tail.groups[prompt] = self.groups.launch(*self._tail.rows[prompt], num_members)

    def _group(self, prompt: int) -> Group | None:
        return self.groups.live.get(self._tail.groups.get(prompt, ""))

    def settled(self, group: Group) -> None:
        """As `PolicyPlugin`: maybe a round's batch is complete."""
        for round_ in list(self._unbound()):
            if round_.number not in self._tail.state.closed:
                self._close(round_)

    def _close(self, round_: TailRound) -> None:
        """Where its batch is complete, put off its other prompts."""
        found = {prompt: self._group(prompt) for prompt in round_.prompts}
        done = [prompt for prompt, group in found.items() if group is not None and group.state == "ready"]
        if len(done) < round_.groups:
            return
        done = done[: round_.groups]
        ended = [prompt for prompt, group in found.items() if group is None]
        self._tail.state = close(self._tail.state, round_.number, done, ended)
        self._forget(ended)
        for prompt, group in found.items():
            if group is not None and prompt not in done:
                del self._tail.groups[prompt]
                self.groups.discard(group, "surplus", PUT_OFF)

    def _forget(self, prompts: Iterable[int]) -> None:
        """They are trained, or never will be."""
        for prompt in prompts:
            self._tail.rows.pop(prompt, None)
            self._tail.groups.pop(prompt, None)
        self.groups.changes.training = True

    # -- steps --------------------------------------------------------------------------------------------------

    def next_batch(self, view: SupplyView) -> HandOver:
        """The batch of the oldest round that may be trained."""
        oldest, ready = min_version(view.step, view.alpha), list(self.groups.ready())
        unbound = {round_.number: round_ for round_ in self._unbound()}
        for number in trainable(self._tail.state, self._rules):
            names = {self._tail.groups.get(prompt) for prompt in unbound[number].prompts} if number in unbound else ()
            chosen = sorted((view.ready[at], at) for at, group in enumerate(ready) if group.id in names)
            if chosen and len(chosen) == len(names):
                return HandOver(True, oldest, unbound[number].why, tuple(at for _, at in chosen))
        first = next(iter(unbound.values()), None)
        return HandOver(False, oldest, "no round is under way" if first is None else self._why_not(first))

    def _why_not(self, round_: TailRound) -> str:
        ready = sum(g is not None and g.state == "ready" for g in map(self._group, round_.prompts))
        return f"{ready} of {round_.groups} groups of the {round_.kind} round {round_.number}"

    def bound(self, step: int) -> None:
        """As `PolicyPlugin`; the groups are a round's batch."""
        names = {group.id for group in self.groups.steps[step]}
        for round_ in list(self._unbound()):
            if names == {self._tail.groups.get(prompt) for prompt in round_.prompts}:
                self._tail.steps[step] = (round_.number, round_.prompts)

    def trained(self, step: int) -> None:
        """As `PolicyPlugin`: the rounds of these steps are over."""
        self._tail.state = _trained(self._tail, step)
        version = self.groups.training.version
        if self._tail.state.trained != version:
            self._tail.state = self._tail.state._replace(trained=version)
            self.groups.changes.training = True

    def committed(self, step: int) -> None:
        """As `PolicyPlugin`: the prompts of these steps are done with."""
        self.trained(step)
        for each in [each for each in self._tail.steps if each <= step]:
            self._forget(self._tail.steps.pop(each)[1])

    def given_up(self, steps: Sequence[int]) -> None:
        """As `PolicyPlugin`: neither their rounds nor these prompts will train."""
        for step in steps:
            self._give_up(step)

    def _give_up(self, step: int) -> None:
        """The round of a step will not train."""
        if step in self._tail.steps:
            number, prompts = self._tail.steps.pop(step)
            if number in _numbers(self._tail.state):
                self._tail.state = drop(self._tail.state, number)
            self._forget(prompts)

    # -- what a restart and a checkpoint bring ------------------------------------------------------------------

    def state(self) -> Any:
        """As `PolicyPlugin`."""
        return self._tail

    @property
    def needed(self) -> str:
        """As `PolicyPlugin`. Where no prompt waits its rounds are over: those that it may have again begin from what is under way then."""
        if not (waiting := len(self._tail.state.waiting) + len(self._tail.state.again)):
            return ""
        return (
            f"tail_batching was on in this run, and {waiting} of its prompts wait for a long round: "
            "set tail_batching.enabled=true, or start another run"
        )

    def restored(self, state: msgspec.Raw | None) -> None:
        """As `PolicyPlugin`. What a run had under way that began without tail batching is launched anew."""
        if state is not None:
            self._tail = msgspec.msgpack.decode(state, type=Tail)
            return
        groups = self.groups
        under_way = sorted((*groups.open(), *groups.ready()), key=lambda group: group.id)
        fresh = self._num_drawn()
        again = range(fresh - len(under_way), fresh)
        rows = {prompt: (group.task, group.row) for prompt, group in zip(again, under_way, strict=True)}
        self._tail = Tail(TailState(fresh=fresh, again=tuple(again), trained=groups.training.version), rows)
        self._launch_anew(under_way)

    def forgotten(self, receipt: Receipt) -> None:
        """As `PolicyPlugin`: rounds are as they were when that step was handed out."""
        record = receipt.policies.get(self.key)
        tail = msgspec.msgpack.decode(record.state, type=Tail) if record else Tail(TailState(fresh=receipt.cursor))
        self._go_back(receipt.step, tail)

    def _go_back(self, newest: int, tail: Tail) -> None:
        """All that was under way when step `newest` was handed out, as `tail` says, and that no step up to it trains, is launched anew."""
        ours, groups = self._tail, self.groups
        bound = {step: kept for step, kept in ours.steps.items() if step > newest}
        state = _trained(tail, newest)
        for step, (number, prompts) in tail.steps.items():
            if step > newest and number not in _numbers(state):
                state = state._replace(again=prompts + state.again)
        state = resumed(state)
        later = sorted(prompt for prompt in ours.rows if prompt >= state.fresh)
        done = {prompt for _, prompts in bound.values() for prompt in prompts}
        again = tuple(prompt for prompt in (*state.again, *later) if prompt not in done)
        waiting = tuple(prompt for prompt in state.waiting if prompt not in done)
        steps = {step: kept for step, kept in tail.steps.items() if step <= newest} | bound
        rows = ours.rows | tail.rows
        kept = {*again, *waiting, *(prompt for _, prompts in steps.values() for prompt in prompts)}
        while self._num_drawn() < state.fresh:
            groups.limits.mixture.draw(groups.training.tasks)
        numbers = {number for number, _ in bound.values()}
        state = state._replace(
            fresh=self._num_drawn(), again=again, waiting=waiting, trained=groups.training.version,
            rounds=tuple(round_ for round_ in ours.state.rounds if round_.number in numbers),
            closed=ours.state.closed & numbers, begun=max(state.begun, ours.state.begun),
        )  # fmt: skip
        self._tail = Tail(state, {prompt: rows[prompt] for prompt in kept if prompt in rows}, {}, steps)
        self._launch_anew([*groups.open(), *groups.ready()])

    def _launch_anew(self, groups: Iterable[Group]) -> None:
        """They end; their prompts are in the state already."""
        self.groups.changes.training = True
        for group in groups:
            self.groups.discard(group, "surplus", FORGOTTEN)


def check_sections(staleness: StalenessSection, samples: SamplesSection) -> None:
    """Raises ValueError, a sentence, for sections that rounds can't go with."""
    if not isinstance(staleness.alpha, int) or not staleness.bounded:
        raise ValueError(
            "tail_batching plans rounds for one bound on age, and staleness has none: set staleness.alpha to a number, and bounded=true"
        )
    if samples.extra_rollouts:
        raise ValueError(
            f"samples.extra_rollouts={samples.extra_rollouts} has no effect beside tail_batching: eta_responses says how many more there are"
        )


def _numbers(state: TailState) -> set[int]:
    return {round_.number for round_ in state.rounds}


def _trained(tail: Tail, step: int) -> TailState:
    """Its state once every step up to `step` is trained."""
    state = tail.state
    for each, (number, _) in tail.steps.items():
        if each <= step and number in _numbers(state):
            state = train(state, number)
    return state
