"""The StepHook seam: what is done around the trainer's steps beside training itself.

The check of log-probabilities, the concerns, held-out evaluation, loggers and the fabric's intents are hooks; `train.hooks` names more.
"""

from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic import Field

from rubato.actors.config import CheckSection, ClusterSection, EvalSection, LoggingSection, RolloutSection
from rubato.actors.messages.samples import Trajectory
from rubato.actors.plugins import STEP_HOOKS_OF_PEERS, step_hooks
from rubato.actors.training.train_engine import TrainError
from rubato.runtime.config import ActorConfig
from rubato.runtime.errors import ConfigError
from rubato.runtime.importer import check_module, load_class

if TYPE_CHECKING:
    from rubato.actors.training.trainer import Trainer

KEY = "train.hooks"


class HookSections(ActorConfig):
    """The sections that the trainer reads for its hooks alone."""

    check: CheckSection = Field(default_factory=CheckSection)
    eval: EvalSection = Field(default_factory=EvalSection)
    logging: LoggingSection = LoggingSection()
    rollout: RolloutSection = Field(default_factory=RolloutSection)
    cluster: ClusterSection = ClusterSection()


class TrainedStep(NamedTuple):
    """A step that was just trained."""

    step: int
    groups: Sequence[Sequence[Trajectory]]
    metrics: Mapping[str, float]
    """Metrics of the training itself, by their names in metrics.jsonl."""


class StepHook:
    """Subclass it and override what you need; the methods here do nothing. Name your class in `train.hooks`.

    The trainer builds one of each at its start and calls them one after the other, on its event loop: each call delays the next step by as
    long as it takes, so that blocking work belongs into `await self.trainer.offload(fn, …)` and long work into
    `self.trainer.spawn(work, name=…)`. `self.trainer` has `config`, `run`, `log`, `metrics`, `notice(sentence)`, `engine` (the
    TrainEngine), `out.version` (the version of the weights that was published last) and `leaving` (an event: the trainer is to stop).

    TrainError, with one sentence, ends the run as failed, and so does anything else that a hook raises. A trainer that is started again
    calls `begin` and goes on after its newest checkpoint: steps after that are seen twice.
    """

    def __init__(self, trainer: "Trainer") -> None:
        self.trainer = trainer

    @classmethod
    def check_host(cls, config: Any) -> None:
        """As `Actor.check_host`, for what only this hook needs. Raises ConfigError before anything is started."""

    async def begin(self, step: int, rows: Callable[[], Iterator[Mapping[str, float]]]) -> None:
        """The model is loaded as `step` left it. `rows()` reads the rows of metrics.jsonl so far; it blocks."""

    async def before_step(self, step: int) -> None:
        """The batch of `step` is there, and training on it begins."""

    async def after_step(self, trained: TrainedStep) -> None:
        """The model is that of `trained.step`; its weights are not published yet."""

    async def before_publish(self, version: int) -> None:
        """Weights go out as `version` once this returns."""

    async def after_publish(self, version: int, metrics: Mapping[str, float]) -> Mapping[str, float]:
        """The trainer gave out version `version`, unless `out.version` says that engines have a newer one. `metrics` are those of the step
        before it, empty at the start of the trainer. Returns figures for the step's row of metrics.jsonl.
        """
        return {}

    async def after_row(self, row: Mapping[str, float]) -> None:
        """The row of the step stands in metrics.jsonl."""

    async def after_checkpoint(self, step: int) -> None:
        """The checkpoint of `step` counts, in checkpoints/step_N of the run folder. The next one may be taken down meanwhile."""

    async def after_swap(self, version: int) -> None:
        """All engines sample under `version`."""

    async def before_end(self) -> None:
        """The last step is trained, published and saved: a TrainError still fails the run."""

    async def on_peers(self, joined: Sequence[str], left: Sequence[str]) -> None:
        """As `Actor.on_peers`."""

    def keep(self, steps: Collection[int]) -> Collection[int]:
        """Which of `steps` are to have a checkpoint that stays, beside those that `checkpoint` in the config says. Called off the loop."""
        return ()

    async def close(self) -> None:
        """The trainer leaves; everything is saved."""


class Hooks:
    """Hooks of one trainer, in the order in which they are called."""

    def __init__(self, trainer: "Trainer") -> None:
        self._trainer = trainer
        self._hooks: list[StepHook] = []
        self._named: dict[StepHook, str] = {}
        """The user's own, by what `train.hooks` calls them."""
        self._of_peers = dict(STEP_HOOKS_OF_PEERS)

    def load(self) -> None:
        """Make those that the config names. Blocks; raises TrainError, one sentence, where one can't be made."""
        for path, key in step_hooks(self._trainer.config):
            try:
                made = load_class(path, StepHook, key=key)(self._trainer)
            except ConfigError as error:
                raise TrainError(str(error)) from error
            except Exception as error:
                raise TrainError(f"{key}: {path} can't be made: {type(error).__name__}: {error}") from error
            self._hooks.append(made)
            if key == KEY:
                self._named[made] = path
        self._meet({role for role in self._of_peers if self._trainer.peers(role)})

    def _meet(self, roles: Collection[str]) -> None:
        """Make the hooks that come with actors of these roles, once."""
        for role in self._of_peers.keys() & roles:
            self._hooks.append(load_class(self._of_peers.pop(role), StepHook)(self._trainer))

    async def call(self, event: Callable[..., Awaitable[Any]], *args: Any) -> list[Any]:
        """Await the method of StepHook that `event` is on each hook; returns what they gave. Raises TrainError where one of a user fails."""
        return [await self._call(hook, event.__name__, *args) for hook in self._hooks]

    async def call_beside(self, event: Callable[..., Awaitable[Any]], *args: Any) -> None:
        """`call` where no step waits for it: a TrainError ends the run."""
        try:
            await self.call(event, *args)
        except TrainError as error:
            self._trainer.finish(str(error), failed=True)
            self._trainer.leaving.set()

    async def figures(self, version: int, metrics: Mapping[str, float]) -> dict[str, float]:
        """Metrics of the hooks for a row once `version` is published, own figures last. Raises TrainError for what is no figure."""
        found: dict[str, float] = {}
        for hook in reversed(self._hooks):
            given = await self._call(hook, StepHook.after_publish.__name__, version, metrics)
            if hook in self._named and not _are_figures(given):
                said = "returned what is no mapping from names with a slash, such as mine/depth, to numbers"
                raise TrainError(f"{KEY}: {self._named[hook]} {said}, in after_publish: {given!r:.100}")
            found |= given
        return found

    async def _call(self, hook: StepHook, event: str, *args: Any) -> Any:
        try:
            return await getattr(hook, event)(*args)
        except TrainError:
            raise
        except Exception as error:
            if hook not in self._named:
                raise
            said = f"{type(error).__name__}: {error}"
            raise TrainError(f"{KEY}: {self._named[hook]} raised {said} in {event}") from error

    async def close(self) -> None:
        """Call `close` of each. Where one fails the user sees a notice, and the others are closed nevertheless."""
        for hook in self._hooks:
            try:
                await self._call(hook, StepHook.close.__name__)
            except TrainError as error:
                self._trainer.notice(str(error))

    def keep(self, steps: Collection[int]) -> set[int]:
        """The steps that any of them wants a checkpoint of. Blocks."""
        return {step for hook in self._hooks for step in hook.keep(steps)}

    async def on_peers(self, joined: Sequence[str], left: Sequence[str]) -> None:
        self._meet({name.rpartition("-")[0] for name in joined})
        await self.call_beside(StepHook.on_peers, joined, left)


def _are_figures(given: object) -> bool:
    return isinstance(given, Mapping) and all(
        isinstance(name, str) and "/" in name and isinstance(value, int | float) for name, value in given.items()
    )


def check_hooks(config: Any) -> None:
    """Raises ConfigError for what a hook or the lease needs and this host lacks; imports nothing of the user's own."""
    if config.cluster.lease:
        check_module(config.cluster.lease, key="cluster.lease")
    for path, key in step_hooks(config):
        if key == KEY:
            check_module(path, key=key)
        else:
            load_class(path, StepHook).check_host(config)
