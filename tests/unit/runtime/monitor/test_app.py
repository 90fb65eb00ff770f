import pytest
from textual.widgets import ContentSwitcher, DataTable, Static

from rubato.runtime.errors import LaunchError
from rubato.runtime.monitor.app import ConfirmScreen, MonitorApp
from rubato.runtime.monitor.snapshot import snapshot
from rubato.runtime.monitor.source import View

SIZE = (80, 24)


class FakeSource:
    """Shows what it was told to; counts how often it was read."""

    def __init__(self, shown, rows) -> None:
        self.shown, self.rows = shown, rows
        self.num_reads = 0

    async def read(self):
        self.num_reads += 1
        return View({**self.shown}, self.rows)

    def log(self, actor, lines):
        return [f"00:00:31 a line of {actor}"]


class FakeActions:
    def __init__(self, error=None) -> None:
        self.done = []
        self._error = error

    async def act(self, what, actor):
        if self._error:
            raise self._error
        self.done.append((what, actor["name"]))
        return f"{actor['name']}: {what} done"


@pytest.fixture
def source(waiting_run, rows):
    return FakeSource(waiting_run, rows)


def text_of(app, selector):
    return str(app.query_one(selector, Static).content)


async def begun(app, pilot):
    await app.has_read.wait()
    await pilot.pause()


async def press(app, pilot, *keys):
    await pilot.press(*keys)
    await app.workers.wait_for_complete()
    await pilot.pause()


async def test_the_overview_shows_run_actors_flow_waits_and_log_at_80_by_24(source):
    app = MonitorApp(source)
    async with app.run_test(size=SIZE) as pilot:
        await begun(app, pilot)

        assert text_of(app, "#head").startswith("quickstart-0421 ── step 41/60")
        assert text_of(app, "#trend").startswith("reward ▁█ 0.83")
        table = app.query_one("#actors", DataTable)
        assert [key.value for key in table.rows] == ["engine-1", "engine-2", "env_manager-1", "sample_buffer-1", "trainer-1"]
        assert not table.show_horizontal_scrollbar
        assert "ready 88" in text_of(app, "#flow")
        assert "env_manager-1 stalled: batch 42" in text_of(app, "#waits")
        assert text_of(app, "#log") == "00:00:31 a line of node-1"


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("f", "queues"),
        ("w", "└ sample_buffer-1 waits"),
        ("m", "reward/mean"),
        ("l", "a line of engine-2"),
        ("i", "engine-2 has nothing in hand"),
        ("question_mark", "--allow-actions"),
    ],
)
async def test_each_page_key_opens_its_page_and_a_goes_back(source, key, expected):
    app = MonitorApp(source)
    async with app.run_test(size=SIZE) as pilot:
        await begun(app, pilot)
        await press(app, pilot, "down", key)

        assert expected in text_of(app, "#text")
        assert app.query_one("#body", ContentSwitcher).current == "page"

        await press(app, pilot, "a")
        assert app.query_one("#body", ContentSwitcher).current == "overview"


async def test_failures_are_shown_with_their_rate(source, make_record, rows, config):
    app = MonitorApp(source)
    async with app.run_test(size=SIZE) as pilot:
        await begun(app, pilot)
        source.shown = snapshot("r", [make_record("reward_service-1", reward__failed__timeout=12.0)], rows, config)
        app.look()
        await app.workers.wait_for_complete()
        await pilot.pause()

        (line,) = [line for line in text_of(app, "#flow").splitlines() if "failed" in line]
        assert line.startswith("reward/failed/timeout 12 (")
        assert line.endswith("/s)")


async def test_a_view_that_only_watches_asks_nothing_and_does_nothing(source):
    app = MonitorApp(source)
    async with app.run_test(size=SIZE, notifications=True) as pilot:
        await begun(app, pilot)
        await press(app, pilot, "k")

        assert not isinstance(app.screen, ConfirmScreen)
        assert any("--allow-actions" in note.message for note in app._notifications)


@pytest.mark.parametrize(
    ("key", "done"),
    [("d", ("drain", "engine-2")), ("k", ("kill", "engine-2")), ("plus", ("add", "engine-2")), ("r", ("restart", "engine-2"))],
)
async def test_an_allowed_action_is_done_after_yes_to_the_selected_actor(source, key, done):
    actions = FakeActions()
    app = MonitorApp(source, actions)
    async with app.run_test(size=SIZE) as pilot:
        await begun(app, pilot)
        await press(app, pilot, "down", key)
        assert isinstance(app.screen, ConfirmScreen)
        assert actions.done == []

        await press(app, pilot, "y")

    assert actions.done == [done]


async def test_no_to_the_question_does_nothing(source):
    actions = FakeActions()
    app = MonitorApp(source, actions)
    async with app.run_test(size=SIZE) as pilot:
        await begun(app, pilot)
        await press(app, pilot, "k")
        await press(app, pilot, "n")

        assert not isinstance(app.screen, ConfirmScreen)
    assert actions.done == []


async def test_an_action_that_is_refused_is_told_and_the_view_goes_on(source):
    app = MonitorApp(source, FakeActions(LaunchError("the run did not answer")))
    async with app.run_test(size=SIZE, notifications=True) as pilot:
        await begun(app, pilot)
        await press(app, pilot, "d")
        await press(app, pilot, "y")

        assert any("did not answer" in note.message for note in app._notifications)


async def test_after_the_end_the_last_state_stays_on_the_screen(source, rows, config):
    app = MonitorApp(source, FakeActions())
    async with app.run_test(size=SIZE) as pilot:
        await begun(app, pilot)
        source.shown = snapshot("quickstart-0421", [], rows, config, state="ended")
        app.look()
        await app.workers.wait_for_complete()
        await pilot.pause()

        assert text_of(app, "#head").endswith("run ended")
        table = app.query_one("#actors", DataTable)
        assert table.row_count == 5
        assert "stopped" in str(table.get_cell_at((0, 1)))

        await press(app, pilot, "k")
        assert not isinstance(app.screen, ConfirmScreen)


async def test_the_selection_follows_its_actor_when_others_come(source, make_record, rows, config):
    app = MonitorApp(source)
    async with app.run_test(size=SIZE) as pilot:
        await begun(app, pilot)
        await press(app, pilot, "down")
        source.shown = snapshot("r", [make_record("a-1"), make_record("engine-1"), make_record("engine-2")], rows, config)
        app.look()
        await app.workers.wait_for_complete()
        await pilot.pause()

        table = app.query_one("#actors", DataTable)
        assert table.cursor_row == 2


async def test_the_view_reads_again_every_second(source):
    app = MonitorApp(source)
    async with app.run_test(size=SIZE) as pilot:
        await begun(app, pilot)
        app.has_read.clear()
        await app.has_read.wait()

    assert source.num_reads >= 2


async def test_what_the_model_wrote_is_one_key_away(source, tmp_path):
    source.folder = tmp_path
    app = MonitorApp(source)
    async with app.run_test(size=SIZE) as pilot:
        await begun(app, pilot)
        await press(app, pilot, "s")

        assert "holds no run" in str(app.screen.query_one("#told", Static).content)
        await press(app, pilot, "s")
        assert text_of(app, "#head")
