"""Where the rows of metrics.jsonl go besides: TensorBoard, Weights & Biases, a Prometheus endpoint, or a class of one's own.

metrics.jsonl stays the master: a logger that raises, hangs or is slow costs its own rows and never a training step.
"""

import asyncio
import importlib.util
import math
import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

from rubato.actors.config import LOGGERS, LoggingSection
from rubato.actors.training.hooks import StepHook
from rubato.bus.address import host_port
from rubato.runtime.actor import RunInfo
from rubato.runtime.config.yaml_core import read_yaml
from rubato.runtime.errors import ConfigError
from rubato.runtime.importer import check_module, load_configured
from rubato.runtime.observe.log import without_passwords
from rubato.runtime.observe.prometheus import known_as

KEY = "logging.loggers"
WAITING = 256
"""Rows that may wait for a logger; more are left out."""
START_S = 60.0
"""Longest that the end of a run waits for a logger that is still starting: its packages take seconds of two busy cores to load."""
CLOSE_S = 10.0
"""Longest that the end of a run waits for a logger that has started."""


class LoggedRun(NamedTuple):
    """What a logger is told about its run."""

    name: str
    id: str
    """Never another run's; one that goes on keeps it."""
    folder: Path
    """Of the run; files of the logger belong into a folder of their own in it."""
    config: Mapping[str, Any]
    """As RUN/config.yaml has it."""
    step: int
    """The newest step that was trained already; rows after it may be logged anew by a run that goes on."""


class MetricsLogger(Protocol):
    """What takes the rows. All calls come from one thread of the trainer's process that no other logger shares."""

    def start(self, run: LoggedRun) -> None:
        """Once, before the first row; what it or `log` raises is told to the user, and only `close` follows."""
        ...

    def log(self, row: Mapping[str, float]) -> None:
        """One training step, with its number as `step`: names and numbers as in metrics.jsonl."""
        ...

    def close(self) -> None:
        """Once, after the last row or a failure; the run waits ten seconds for it, and a minute for a `start` that is not through."""
        ...


class TensorBoardLogger:
    """Event files in RUN/tensorboard."""

    def start(self, run: LoggedRun) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(run.folder / "tensorboard"), purge_step=run.step + 1)

    def log(self, row: Mapping[str, float]) -> None:
        for name, value in row.items():
            self._writer.add_scalar(name, value, int(row["step"]))
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandbLogger:
    """A run at Weights & Biases under this run's name; one that goes on, goes on there."""

    def __init__(self, project: str, mode: Literal["online", "offline"]) -> None:
        self._project = project
        self._mode: Literal["online", "offline"] = mode

    def start(self, run: LoggedRun) -> None:
        import wandb

        self._run = wandb.init(
            project=self._project,
            name=run.name,
            id=run.id,
            resume="allow",
            dir=run.folder,
            mode=self._mode,
            config=dict(run.config),
            settings=wandb.Settings(silent=True),
        )

    def log(self, row: Mapping[str, float]) -> None:
        self._run.log(dict(row), step=int(row["step"]))

    def close(self) -> None:
        self._run.finish()


class PrometheusLogger:
    """The newest row as gauges at http://HOST:PORT/metrics: `reward/mean` is rubato_reward_mean{run="…"}."""

    def __init__(self, listen: str) -> None:
        host, port = host_port(listen)
        self._address = (host or "127.0.0.1", port)
        self._gauges: dict[str, Any] = {}
        self._names: set[str] = set()

    def start(self, run: LoggedRun) -> None:
        from prometheus_client import CollectorRegistry, start_http_server

        self._run, self._registry = run.name, CollectorRegistry()
        host, port = self._address
        self._server, self._thread = start_http_server(port, addr=host, registry=self._registry)
        self.port = self._server.server_port

    def log(self, row: Mapping[str, float]) -> None:
        from prometheus_client import Gauge

        for name, value in row.items():
            if name not in self._gauges:
                gauge = known_as(name, self._names)
                self._names.add(gauge)
                self._gauges[name] = Gauge(gauge, name, ["run"], registry=self._registry)
            self._gauges[name].labels(self._run).set(value)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def check_loggers(section: LoggingSection) -> None:
    """Raises ConfigError where a logger's package is not installed, or no module lies where one of the user's own should."""
    for name in section.loggers:
        if name not in LOGGERS:
            check_module(name, key=KEY)
        elif importlib.util.find_spec(LOGGERS[name]) is None:
            raise ConfigError(f"{KEY} has {name}, but {LOGGERS[name]} is not installed. Install it with: pip install -e '.[{name}]'")


def start_loggers(section: LoggingSection, run: RunInfo, step: int, told: Callable[[str], object]) -> "Loggers":
    """Those of `section`, each started in a thread of its own, for a run that has trained `step` steps.

    `told` gets a sentence where one fails, from that thread. Raises ConfigError where one of the user's own can't be made. Blocks.
    """
    loggers = {name: _loaded(name, section) for name in section.loggers}
    config = without_passwords(read_yaml((run.folder / "config.yaml").read_text()))
    logged = LoggedRun(run.folder.name, run.id, run.folder, config, step)
    return Loggers([_LoggerThread(name, logger, logged, told) for name, logger in loggers.items()])


class Logging(StepHook):
    """Gives each row to the loggers of the config."""

    _loggers: "Loggers | None" = None

    @classmethod
    def check_host(cls, config: Any) -> None:
        """Their packages, or files."""
        check_loggers(config.logging)

    async def begin(self, step: int, rows: Callable[[], Iterator[Mapping[str, float]]]) -> None:
        trainer = self.trainer
        told = partial(asyncio.get_running_loop().call_soon_threadsafe, trainer.notice)
        self._loggers = await trainer.offload(start_loggers, trainer.config.logging, trainer.run, step, told)

    async def after_row(self, row: Mapping[str, float]) -> None:
        if self._loggers is not None:
            self._loggers.log({name: value for name, value in row.items() if math.isfinite(value)})

    async def close(self) -> None:
        if self._loggers is not None:
            await self.trainer.offload(self._loggers.close)


class Loggers:
    """Those of a run: `log` never waits."""

    def __init__(self, threads: Sequence["_LoggerThread"]) -> None:
        self._threads = threads

    def log(self, row: Mapping[str, float]) -> None:
        for thread in self._threads:
            thread.log(row)

    def close(self) -> None:
        """Wait until every row is out, at most START_S for each to start and CLOSE_S for it to end. Blocks."""
        for thread in self._threads:
            thread.close()


class _LoggerThread:
    def __init__(self, name: str, logger: MetricsLogger, run: LoggedRun, told: Callable[[str], object]) -> None:
        self._name, self._logger, self._told = name, logger, told
        self._rows: queue.Queue[Mapping[str, float] | None] = queue.Queue(WAITING)
        self._failed = self._late = False
        self._started = threading.Event()
        # A daemon: one that hangs must not keep the process.
        self._thread = threading.Thread(target=self._work, args=(run,), name=f"logger {name}", daemon=True)
        self._thread.start()

    def log(self, row: Mapping[str, float]) -> None:
        if self._failed:
            return
        try:
            self._rows.put_nowait(row)
        except queue.Full:
            if not self._late:
                self._late = True
                self._told(f"the logger {self._name} is {WAITING} rows behind: rows are left out until it catches up")

    def close(self) -> None:
        self._started.wait(START_S)
        try:
            self._rows.put(None, timeout=CLOSE_S)
        except queue.Full:
            pass
        else:
            self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            self._told(f"the logger {self._name} did not end within {CLOSE_S:g} s: its last rows may be missing")

    def _work(self, run: LoggedRun) -> None:
        try:
            try:
                self._logger.start(run)
            finally:
                self._started.set()
            while (row := self._rows.get()) is not None:
                self._logger.log(row)
        except Exception as error:  # noqa: BLE001 - whatever it raises, training goes on
            self._fail(error)
        try:
            self._logger.close()
        except Exception as error:  # noqa: BLE001
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        if not self._failed:
            self._failed = True
            why = f"{type(error).__name__}: {error}"
            self._told(f"the logger {self._name} failed and gets no more rows: {why}. metrics.jsonl has them all")


def _loaded(name: str, section: LoggingSection) -> MetricsLogger:
    if name == "tensorboard":
        return TensorBoardLogger()
    if name == "wandb":
        return WandbLogger(section.wandb_project, section.wandb_mode)
    if name == "prometheus":
        return PrometheusLogger(section.prometheus_listen)
    own = load_configured(name, key=KEY)
    missing: Sequence[str] = [verb for verb in ("start", "log", "close") if not callable(getattr(own, verb, None))]
    if missing:
        raise ConfigError(f"{KEY}: {name} has no {' and no '.join(missing)}: a logger has start, log and close.")
    try:
        return own(**section.kwargs)
    except Exception as error:
        raise ConfigError(f"{KEY}: {name} can't be made: {type(error).__name__}: {error}") from error
