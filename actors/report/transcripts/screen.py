"""What the model wrote, within the live view: a table, and below it the selected trajectory turn by turn."""

from pathlib import Path
from typing import ClassVar, cast

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.screen import Screen
from textual.widgets import DataTable, Static

from rubato.actors.report.transcripts.command import choose
from rubato.actors.report.transcripts.reading import Decode, Filters, FoundSamples, SampleRow, decoder, find, sample_of
from rubato.actors.report.transcripts.writing import cells, columns, heads, summary, whole
from rubato.runtime.errors import RubatoError

SHOWN = 200
"""Rows of the table."""

ORDERS = ("newest", "best", "worst")


class SamplesScreen(Screen[None]):
    """Of the run in `folder`. Nothing is read again by itself: `r` does."""

    CSS = """
    SamplesScreen #told { height: auto; max-height: 3; padding: 0 1; background: $panel; }
    SamplesScreen #samples { height: 45%; border: round $primary; scrollbar-size: 1 1; }
    SamplesScreen #whole { height: 1fr; border: round $primary; padding: 0 1; scrollbar-size: 1 1; }
    SamplesScreen #sample { height: auto; }
    SamplesScreen #help { height: 1; padding: 0 1; background: $panel; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q,s", "dismiss", "back"),
        Binding("o", "order", "order"),
        Binding("e", "purpose", "held out"),
        Binding("r", "read", "read again"),
        Binding("tab", "app.focus_next", "other panel"),
    ]

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder
        self._order, self._purpose = ORDERS[0], "train"
        self._rows: dict[str, SampleRow] = {}
        self._decode: Decode | None = None

    def compose(self) -> ComposeResult:
        yield Static("reading what the run keeps", id="told", markup=False)
        yield DataTable[Text](id="samples", cursor_type="row", cell_padding=1)
        with VerticalScroll(id="whole"):
            yield Static("", id="sample", markup=False)
        yield Static("up/down select · tab other panel · o order · e training/held out · r read again · Esc back", id="help")

    def on_mount(self) -> None:
        self._table().focus()
        self.action_read()

    def action_read(self) -> None:
        """Read the run again."""
        self.run_worker(self._read, thread=True, exclusive=True, name="samples")

    def action_order(self) -> None:
        """The newest first, the best, or the worst."""
        self._order = ORDERS[(ORDERS.index(self._order) + 1) % len(ORDERS)]
        self.action_read()

    def action_purpose(self) -> None:
        """Training, or held-out tasks."""
        self._purpose = "eval" if self._purpose == "train" else "train"
        self.action_read()

    def _read(self) -> None:
        """In a thread of its own: a run may keep thousands."""
        try:
            found, decode = find(self._folder, Filters(purpose=self._purpose)), decoder(self._folder)
        except RubatoError as error:
            self.app.call_from_thread(self._show, None, None, str(error))
        else:
            self.app.call_from_thread(self._show, found, decode, summary(found))

    def _show(self, found: FoundSamples | None, decode: Decode | None, told: str) -> None:
        self._decode = decode
        rows = choose(found, SHOWN, best=self._order == "best", worst=self._order == "worst") if found else []
        rows = rows[::-1] if self._order == "newest" else rows
        self._rows = {f"{row.line['trajectory_id']}.{row.line['attempt']}": row for row in rows}
        self.query_one("#told", Static).update(Text(told))
        table = self._table()
        table.border_title = f"{'held out' if self._purpose == 'eval' else 'training'}, {self._order} first"
        table.clear(columns=True)
        samples = {key: sample_of(row, decode) for key, row in self._rows.items()} if decode else {}
        parts = columns(list(samples.values()), self.size.width)
        for name in heads(parts):
            table.add_column(Text(name))
        for key, sample in samples.items():
            table.add_row(*cells(sample, parts), key=key)
        if not samples:
            self.query_one("#sample", Static).update("")

    def on_data_table_row_highlighted(self, event: DataTable.RowHighlighted) -> None:
        """Show the one that is selected."""
        row = self._rows.get(event.row_key.value or "")
        if row is not None and self._decode is not None:
            self.query_one("#sample", Static).update(whole(sample_of(row, self._decode)))
            self.query_one("#whole").scroll_home(animate=False)

    def _table(self) -> DataTable[Text]:
        return cast("DataTable[Text]", self.query_one("#samples", DataTable))
