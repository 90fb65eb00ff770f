"""RollPacker's tail batching in the sample buffer: groups are opened by rounds, and a round's batch is trained (planning/tail.py decides).

A group plays one prompt in one round. One that a short round puts off ends as `surplus`, with all that was sampled for it, and its prompt
gets another group in a long round. Where things stand is a part of `Training`: a restart goes on with the rounds under way. The receipt of
a step has it too: where the Store forgot a step that a checkpoint covers, what that step's moment had under way is launched anew.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from actors.config import SamplesSection, StalenessSection, TailBatchingSection
from actors.messages.samples import Ticket
from actors.samples.group import Group, GroupLimits, Member, Receipt, Tail, Training
from actors.samples.groups import Groups
from actors.samples.sample import group_id
from planning.staleness import Admission, HandOver, min_version
from planning.tail import (
    TailRound,
    TailRules,
    TailState,
    begin,
    close,
    drop,
    reopen,
    replace,
    resumed,
    train,
    trainable,
)
from runtime.errors import ConfigError

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger

PUT_OFF = "other prompts of its round were complete before; it waits for a long round"
FORGOTTEN = "the Store forgot its round, and its prompt is launched anew"

GIVEN_UP = ("group_too_small", "filtered")
"""Fates of groups whose prompt is the cause: as without tail batching it trains no more, and another prompt takes its place."""


class TailGroups(Groups):
    """As `Groups`, but what is opened and what is trained goes by rounds."""

    def __init__(
        self,
        limits: GroupLimits,
        alpha: int,
        etas: tuple[float, float],
        on_round: Callable[[TailRound], None] = lambda round_: None,
    ) -> None:
        """`etas` are of prompts and of responses. Raises ValueError for rules that can't be."""
        super().__init__(limits, alpha)
        self._rules = TailRules(limits.batch_groups, limits.group_size, *etas, alpha).checked()
        self._on_round = on_round
        self.training.tail = Tail()

    # -- rounds -------------------------------------------------------------------------------------------------

    @property
    def _tail(self) -> Tail:
        assert self.training.tail is not None
        return self.training.tail

    def admission(self) -> Admission:
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
        steps = self.limits.steps - self.training.committed - len(self.steps)
        return state._replace(total=state.fresh + max(0, steps * self._rules.prompts - held))

    def _unbound(self) -> Iterator[TailRound]:
        """Rounds of which no step has the batch yet."""
        bound = {number for number, _ in self._tail.steps.values()}
        return (round_ for round_ in self._tail.state.rounds if round_.number not in bound)

    def _more(self) -> bool:
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
            ended = self._ended.get(self._tail.groups.get(prompt, ""))
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
            self._tail.rows[number] = self.limits.mixture.draw(self.training.tasks)
            self.changes.training = True

    def _num_drawn(self) -> int:
        return sum(cursor.given for cursor in self.training.tasks.values())

    def _launch(self, prompt: int, num_members: int) -> None:
        training, (task, row) = self.training, self._tail.rows[prompt]
        while (name := group_id(training.cursor)) in self.live or name in self.trained:
            training.cursor += 1
        training.cursor += 1
        self._tail.groups[prompt] = name
        self.changes.training = True
        self._add(Group(name, row, [Member() for _ in range(num_members)], begun=training.version, task=task))

    def _group(self, prompt: int) -> Group | None:
        return self.live.get(self._tail.groups.get(prompt, ""))

    def _settle(self, group: Group) -> None:
        super()._settle(group)
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
        self.changes.training = True
        for prompt, group in found.items():
            if group is not None and prompt not in done:
                del self._tail.groups[prompt]
                self._put_off(group, PUT_OFF)

    def _put_off(self, group: Group, why: str) -> None:
        for member in group.members:
            member.reason = member.reason or why
        self._end(group, group.discard("surplus"))

    def _forget(self, prompts: Iterable[int]) -> None:
        """They are trained, or never will be."""
        for prompt in prompts:
            self._tail.rows.pop(prompt, None)
            self._tail.groups.pop(prompt, None)
        self.changes.training = True

    # -- tickets ------------------------------------------------------------------------------------------------

    def settled_fate(self, ticket: Ticket) -> str | None:
        """As `Groups`. Where the Store forgot a group, another prompt's may have its name."""
        group, _ = self._look_up(ticket.trajectory_id) or (None, 0)
        if group is not None and group.purpose == "train" and (group.task, group.row) != (ticket.task, ticket.row):
            return "superseded"
        return super().settled_fate(ticket)

    # -- steps --------------------------------------------------------------------------------------------------

    def _hand_over(self, step: int, num_groups: int) -> HandOver:
        """The batch of the oldest round that may be trained."""
        oldest, now, ready = min_version(step, self.alpha), self.training.version, list(self.ready())
        unbound = {round_.number: round_ for round_ in self._unbound()}
        for number in trainable(self._tail.state, self._rules):
            names = {self._tail.groups.get(prompt) for prompt in unbound[number].prompts} if number in unbound else ()
            chosen = sorted((group.version(now), at) for at, group in enumerate(ready) if group.id in names)
            if chosen and len(chosen) == len(names):
                return HandOver(True, oldest, unbound[number].why, tuple(at for _, at in chosen))
        first = next(iter(unbound.values()), None)
        return HandOver(False, oldest, "no round is under way" if first is None else self._why_not(first))

    def _why_not(self, round_: TailRound) -> str:
        ready = sum(g is not None and g.state == "ready" for g in map(self._group, round_.prompts))
        return f"{ready} of {round_.groups} groups of the {round_.kind} round {round_.number}"

    def bind(self, step: int, groups: list[Group]) -> None:
        """As `Groups`; the groups are a round's batch."""
        names = {group.id for group in groups}
        for round_ in list(self._unbound()):
            if names == {self._tail.groups.get(prompt) for prompt in round_.prompts}:
                self._tail.steps[step] = (round_.number, round_.prompts)
        super().bind(step, groups)

    def advance(self, step: int) -> None:
        """As `Groups`; rounds of steps up to `step` are trained."""
        super().advance(step)
        self._trained(step)

    def commit(self, step: int, epoch: int) -> None:
        """As `Groups`; prompts of steps up to `step` are done with."""
        super().commit(step, epoch)
        self._trained(step)
        for each in [each for each in self._tail.steps if each <= step]:
            self._forget(self._tail.steps.pop(each)[1])

    def _trained(self, step: int) -> None:
        tail = self._tail
        tail.state = _trained(tail, step)
        if tail.state.trained != self.training.version:
            tail.state = tail.state._replace(trained=self.training.version)
            self.changes.training = True

    def raised(self, step: int, epoch: int) -> list[Group]:
        """As `Groups`; prompts of groups that end as `poisoned` are done with."""
        poisoned = super().raised(step, epoch)
        if step not in self.steps:
            self._give_up(step)
        return poisoned

    def drop_bound(self, alpha: int) -> list[int]:
        """As `Groups`; prompts of these steps are done with."""
        dropped = super().drop_bound(alpha)
        for step in dropped:
            self._give_up(step)
        return dropped

    def _give_up(self, step: int) -> None:
        """The round of a step will not train."""
        if step in self._tail.steps:
            number, prompts = self._tail.steps.pop(step)
            if number in _numbers(self._tail.state):
                self._tail.state = drop(self._tail.state, number)
            self._forget(prompts)

    # -- what a restart and a checkpoint bring ------------------------------------------------------------------

    def restore(self, training: Training, groups: Iterable[Group], now: float) -> None:
        """As `Groups`. What a run had under way that began without tail batching is launched anew."""
        before, training.tail = training.tail, training.tail or Tail()
        super().restore(training, groups, now)
        if before is None:
            under_way = sorted((*self.open(), *self.ready()), key=lambda group: group.id)
            fresh = self._num_drawn()
            again = range(fresh - len(under_way), fresh)
            self._tail.rows = {prompt: (group.task, group.row) for prompt, group in zip(again, under_way, strict=True)}
            self._tail.state = TailState(fresh=fresh, again=tuple(again), trained=self.training.version)
            self._launch_anew(under_way)

    def _skip(self) -> None:
        self.training.cursor += 1

    def _open(self) -> None:
        self._skip()

    def cover(self, receipts: Iterable[Receipt]) -> None:
        """As `Groups`. Where it says what the Store forgot, rounds are as they were when that step was handed out."""
        given = [receipt for receipt in receipts if receipt.step > self.training.committed]
        forgot = [
            receipt for receipt in given if {end.group_id for end in receipt.ends} != self._bound_to(receipt.step)
        ]
        super().cover(given)
        if forgot:
            self._go_back(max(given, key=lambda receipt: receipt.step))

    def _bound_to(self, step: int) -> set[str]:
        return {group.id for group in self.steps.get(step, ())}

    def _go_back(self, newest: Receipt) -> None:
        """All that was under way when the step of `newest` was handed out, and that no step up to it trains, is launched anew."""
        ours, tail = self._tail, newest.tail or Tail(TailState(fresh=newest.cursor))
        bound = {step: kept for step, kept in ours.steps.items() if step > newest.step}
        state = _trained(tail, newest.step)
        for step, (number, prompts) in tail.steps.items():
            if step > newest.step and number not in _numbers(state):
                state = state._replace(again=prompts + state.again)
        state = resumed(state)
        later = sorted(prompt for prompt in ours.rows if prompt >= state.fresh)
        done = {prompt for _, prompts in bound.values() for prompt in prompts}
        again = tuple(prompt for prompt in (*state.again, *later) if prompt not in done)
        waiting = tuple(prompt for prompt in state.waiting if prompt not in done)
        steps = {step: kept for step, kept in tail.steps.items() if step <= newest.step} | bound
        rows = ours.rows | tail.rows
        kept = {*again, *waiting, *(prompt for _, prompts in steps.values() for prompt in prompts)}
        while self._num_drawn() < state.fresh:
            self.limits.mixture.draw(self.training.tasks)
        numbers = {number for number, _ in bound.values()}
        state = state._replace(
            fresh=self._num_drawn(), again=again, waiting=waiting, trained=self.training.version,
            rounds=tuple(round_ for round_ in ours.state.rounds if round_.number in numbers),
            closed=ours.state.closed & numbers, begun=max(state.begun, ours.state.begun),
        )  # fmt: skip
        self.training.tail = Tail(state, {prompt: rows[prompt] for prompt in kept if prompt in rows}, {}, steps)
        self._launch_anew([*self.open(), *self.ready()])

    def _launch_anew(self, groups: Iterable[Group]) -> None:
        """They end; their prompts are in the state already."""
        self.changes.training = True
        for group in groups:
            self._put_off(group, FORGOTTEN)


def groups_of(section: TailBatchingSection, limits: GroupLimits, alpha: int, log: "FilteringBoundLogger") -> Groups:
    """A run's groups, as `tail_batching` has them; rounds are logged as they begin, with their reason."""
    if not section.enabled:
        return Groups(limits, alpha)

    def tell(round_: TailRound) -> None:
        log.info("round", number=round_.number, kind=round_.kind, prompts=len(round_.prompts), why=round_.why)

    return TailGroups(limits, alpha, (section.eta_prompts, section.eta_responses), tell)


def check_rounds(tail: TailBatchingSection, staleness: StalenessSection, samples: SamplesSection) -> None:
    """Raises ValueError, a sentence, for sections that rounds can't go with."""
    if not tail.enabled:
        return
    if not isinstance(staleness.alpha, int) or not staleness.bounded:
        raise ValueError(
            "tail_batching plans rounds for one bound on age, and staleness has none: set staleness.alpha to a number, and bounded=true"
        )
    if samples.extra_rollouts:
        raise ValueError(
            f"samples.extra_rollouts={samples.extra_rollouts} has no effect beside tail_batching: eta_responses says how many more there are"
        )


def check_put_off(groups: Groups) -> None:
    """Raises ConfigError where a run had tail batching, has it no more, and prompts wait for a round that would never come.

    Where none waits, its rounds are over: those that it may have again begin from what is under way then.
    """
    tail = groups.training.tail
    if tail is None or isinstance(groups, TailGroups):
        return
    if waiting := len(tail.state.waiting) + len(tail.state.again):
        raise ConfigError(
            f"tail_batching was on in this run, and {waiting} of its prompts wait for a long round: set tail_batching.enabled=true, or start another run"
        )
    groups.training.tail, groups.changes.training = None, True


def _numbers(state: TailState) -> set[int]:
    return {round_.number for round_ in state.rounds}


def _trained(tail: Tail, step: int) -> TailState:
    """Its state once every step up to `step` is trained."""
    state = tail.state
    for each, (number, _) in tail.steps.items():
        if each <= step and number in _numbers(state):
            state = train(state, number)
    return state
