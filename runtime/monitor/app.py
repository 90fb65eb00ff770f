"""The live view: everything of a run on one screen, read-only unless actions were allowed."""

import asyncio
import os
import signal
import socket
from collections import deque
from pathlib import Path
from typing import Any, ClassVar, cast

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.css.query import NoMatches
from textual.screen import ModalScreen
from textual.widgets import ContentSwitcher, DataTable, Static

from rubato.bus.message import Request
from rubato.runtime.errors import LaunchError, RubatoError
from rubato.runtime.importer import load_object
from rubato.runtime.launch.agent_messages import AddActors, Added, DrainActors, Drained, RestartActors
from rubato.runtime.launch.card import read_card
from rubato.runtime.monitor.crews import COLUMNS, WIDTHS, actor_row
from rubato.runtime.monitor.source import RunSource, View
from rubato.runtime.monitor.text import (
    HELP,
    cells,
    failure_lines,
    failures,
    flow_page,
    flow_panel,
    head,
    in_flight_page,
    metrics_page,
    render,
    trend,
    waits_panel,
)
from rubato.runtime.monitor.views import ActorView
from rubato.runtime.registry import NODE

NODE_ROLE = "node"
"""The launcher's own actor: it is stopped with `rubato stop`, never killed from here."""


QUESTIONS = {
    "drain": "Drain {name}? It is not restarted.",
    "restart": "Restart {name}? It drains first.",
    "kill": "Kill {name} (process {pid} on {host})?",
    "add": "Add one more {role}?",
}
"""By what the live view may do to a run, with the actor that is selected."""


class RunActions:
    """Acts on the run in `folder` through its node agent, or by a signal to a process of this host."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    async def act(self, what: str, actor: ActorView) -> str:
        """One of QUESTIONS; returns what was done, once the process to be ended has ended.

        What drains is not restarted, and what is added comes to the host of this folder.
        """
        from rubato.runtime.guest import ask_node

        if what == "kill":
            return self._kill(actor)
        request, told, node = DrainActors((actor["name"],)), "drained", NODE
        if what == "restart":
            request, told = RestartActors((actor["name"],)), "restarted"
        elif what == "add":
            request, told, node = AddActors(actor["role"], 1, pool=actor["pool"]), "added", read_card(self._folder).node
        reply = await ask_node(self._folder, cast("Request[Any]", request), node=node, name=f"monitor-{os.getpid()}")
        assert isinstance(reply, Added | Drained), "what was not added was raised"
        return f"{', '.join(reply.names)} {told}"

    def _kill(self, actor: ActorView) -> str:
        """SIGKILL, as a crash would be; the job's supervisor restarts it. Only processes of this host, never the launcher."""
        if actor["role"] == NODE_ROLE or actor["pid"] == os.getpid():
            raise LaunchError(f"{actor['name']} is not killed from here. Stop the job with: rubato stop --run {self._folder}")
        if actor["host"] != socket.gethostname():
            raise LaunchError(f"{actor['name']} runs on {actor['host']}; only processes of this host can be killed from here.")
        try:
            os.kill(actor["pid"], signal.SIGKILL)
        except OSError as error:
            raise LaunchError(f"{actor['name']} (process {actor['pid']}) can't be killed: {error.strerror}.") from error
        return f"{actor['name']} killed (signal 9, process {actor['pid']})"


REFRESH_S = 1.0
"""Actors publish their figures once a second."""

RATE_LOOKS = 10
"""Rates of failures are over the last so many looks."""

LOG_LINES = 4
PAGE_LOG_LINES = 200

JOB_LOG = "node-1"
"""The node agent's log tells of deaths, restarts and the end: what is shown until another is asked for."""

STYLES = {"ready": "green", "draining": "yellow", "starting": "yellow", "stopped": "red"}

PAGES = {"f": "flow", "w": "waits", "m": "metrics", "i": "in flight", "l": "log", "question_mark": "help"}
ACTS = {"d": "drain", "r": "restart", "k": "kill", "plus": "add"}
KEYS = "q quit a actors s samples f flow w waits m metrics i in flight l log d drain r restart k kill + ?"

SAMPLES = "rubato.actors.report.transcripts.screen:SamplesScreen"
"""Made with the run's folder: the runtime itself knows no word of what a job samples."""


class ConfirmScreen(ModalScreen[bool]):
    """Asks one question; y answers yes, anything else that closes it no."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("y", "answer(True)", "yes"), Binding("n,escape,q", "answer(False)", "no")]
    CSS = (
        "ConfirmScreen { align: center middle; } ConfirmScreen Static { width: auto; max-width: 76; border: round $warning; padding: 1 2; }"
    )

    def __init__(self, question: str) -> None:
        super().__init__()
        self._question = question

    def compose(self) -> ComposeResult:
        yield Static(f"{self._question}\n\ny yes   n no", markup=False)

    def action_answer(self, yes: bool) -> None:
        self.dismiss(yes)


class MonitorApp(App[None]):
    """Shows what `source` reads, once a second. `actions` is None for a view that only watches."""

    CSS_PATH = "app.tcss"
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "quit"),
        Binding("a,escape", "overview", "actors"),
        *(Binding(key, f"page('{page}')", page) for key, page in PAGES.items()),
        *(Binding(key, f"act('{what}')", what) for key, what in ACTS.items()),
        Binding("s", "samples", "samples"),
    ]

    def __init__(self, source: RunSource, actions: RunActions | None = None) -> None:
        super().__init__()
        self._source, self._actions = source, actions
        self._view: View | None = None
        self._failed: deque[tuple[float, dict[str, float]]] = deque(maxlen=RATE_LOOKS)
        self._page = ""
        self._reading = False
        self._log_of = JOB_LOG
        self.has_read = asyncio.Event()
        """Set once there is something to see."""

    def compose(self) -> ComposeResult:
        yield Static("reading the run", id="head", markup=False)
        yield Static("", id="trend", markup=False)
        with ContentSwitcher(initial="overview", id="body"):
            with Horizontal(id="overview"):
                yield DataTable[Text](id="actors", cursor_type="row", cell_padding=0)
                with Vertical(id="side"):
                    yield Static("", id="flow", markup=False)
                    yield Static("", id="waits", markup=False)
            with VerticalScroll(id="page"):
                yield Static("", id="text", markup=False)
        yield Static("", id="log", markup=False)
        yield Static(KEYS, id="keys", markup=False)

    def on_mount(self) -> None:
        table = self._table()
        for column, width in zip(cells(COLUMNS), WIDTHS, strict=True):
            table.add_column(Text(column), width=width + 1)
        for panel, title in (("#actors", "actors"), ("#flow", "flow"), ("#waits", "waits"), ("#log", "log")):
            self.query_one(panel).border_title = title
        table.focus()
        self.set_interval(REFRESH_S, self.look)
        self.look()

    def look(self) -> None:
        """Read the run again, unless the last reading still goes on."""
        if not self._reading:
            self._reading = True
            self.run_worker(self._read(), name="read")

    async def _read(self) -> None:
        try:
            view = await self._source.read()
        finally:
            self._reading = False
        last = self._view
        if view.shown["state"] != "running" and not view.shown["actors"] and last is not None:
            stopped = {"state": "stopped"} if view.shown["state"] == "ended" else {}
            view.shown["actors"] = [cast("ActorView", {**actor, **stopped}) for actor in last.shown["actors"]]
        self._view = view
        self._failed.append((asyncio.get_running_loop().time(), failures(view.shown)))
        self._show(view)
        self.has_read.set()

    # -- what is on the screen ----------------------------------------------------------------------------------

    def _show(self, view: View) -> None:
        try:
            self._write("#head", head(view.shown, view.rows))
        except NoMatches:  # a dialog is up, or the view is closing: the next look shows it
            return
        self._write("#trend", trend(view.shown, view.rows, self.size.width - 2))
        self._show_actors(view.shown["actors"])
        self._write("#flow", flow_panel(view.shown, self._failures(view)))
        self._write("#waits", waits_panel(view.shown))
        self._write("#log", "\n".join(self._source.log(self._log_of, LOG_LINES)) or "nothing logged yet")
        self.query_one("#log").border_title = f"log of {self._log_of}"
        if self._page:
            self._write("#text", self._page_text(view))

    def _show_actors(self, actors: list[ActorView]) -> None:
        table = self._table()
        names = [actor["name"] for actor in actors]
        if names != [key.value for key in table.rows]:
            chosen = self._selected_name()
            table.clear()
            for actor in actors:
                table.add_row(*self._cells(actor), key=actor["name"])
            if chosen in names:
                table.move_cursor(row=names.index(chosen))
            return
        for index, actor in enumerate(actors):
            for column, text in enumerate(self._cells(actor)):
                table.update_cell_at((index, column), text)  # type: ignore[arg-type]

    def _cells(self, actor: ActorView) -> list[Text]:
        texts = [Text(text) for text in cells(actor_row(actor))]
        texts[1].stylize(STYLES.get(actor["state"], ""))
        return texts

    def _failures(self, view: View) -> list[str]:
        then, before = self._failed[0]
        counted = failure_lines(view.shown, before, asyncio.get_running_loop().time() - then)
        return [*counted, *(f"! {notice}" for notice in view.shown["notices"])]

    def _page_text(self, view: View) -> str:
        match self._page:
            case "flow":
                return flow_page(view.shown, self._failures(view))
            case "in flight":
                return in_flight_page(view.shown, self._selected_name())
            case "waits":
                return render(view.shown, max(40, self.size.width - 4))
            case "metrics":
                return metrics_page(view.shown, self._selected_name())
            case "log":
                return "\n".join(self._source.log(self._log_of, PAGE_LOG_LINES)) or "nothing logged yet"
            case _:
                return HELP

    def action_page(self, page: str) -> None:
        """Show one page over the overview; the same key again goes back."""
        if page == self._page:
            self.action_overview()
            return
        if page == "log":
            self._log_of = self._selected_name() or JOB_LOG
        self._page = page
        self.query_one("#body", ContentSwitcher).current = "page"
        self.query_one("#page").border_title = f"{page} of {self._log_of}" if page == "log" else page
        self.query_one("#page").focus()
        if self._view is not None:
            self._show(self._view)
        elif page == "help":
            self._write("#text", HELP)

    def action_samples(self) -> None:
        """What the model wrote, over everything else."""
        self.push_screen(load_object(SAMPLES)(self._source.folder))

    def action_overview(self) -> None:
        self._page = ""
        self.query_one("#body", ContentSwitcher).current = "overview"
        self._table().focus()

    # -- what it does to the run --------------------------------------------------------------------------------

    def action_act(self, what: str) -> None:
        """One of QUESTIONS with the selected actor, after a yes."""
        shown = self._view.shown if self._view is not None else None
        name = self._selected_name()
        chosen = next((actor for actor in shown["actors"] if actor["name"] == name), None) if shown else None
        if shown is None or chosen is None:
            return
        if shown["state"] == "ended":
            self.notify("the run has ended", severity="warning")
        elif (actions := self._actions) is None:
            self.notify("This view only watches. Start it with --allow-actions to act.", severity="warning")
        else:

            def answered(yes: bool | None) -> None:
                if yes:
                    self.run_worker(self._carry_out(actions, what, chosen), name="act")

            self.push_screen(ConfirmScreen(QUESTIONS[what].format(**chosen)), answered)

    async def _carry_out(self, actions: RunActions, what: str, actor: ActorView) -> None:
        try:
            self.notify(await actions.act(what, actor), markup=False)
        except RubatoError as error:
            self.notify(str(error), severity="error", markup=False)

    # -- parts --------------------------------------------------------------------------------------------------

    def _selected_name(self) -> str:
        table = self._table()
        names = [key.value or "" for key in table.rows]
        return names[table.cursor_row] if 0 <= table.cursor_row < len(names) else ""

    def _table(self) -> DataTable[Text]:
        return cast("DataTable[Text]", self.query_one("#actors", DataTable))

    def _write(self, selector: str, text: str) -> None:
        self.query_one(selector, Static).update(Text(text))
