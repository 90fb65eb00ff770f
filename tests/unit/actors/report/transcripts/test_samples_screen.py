"""The samples of a run within the live view."""

from textual.app import App
from textual.widgets import DataTable, Static

from rubato.actors.report.transcripts.screen import SamplesScreen


class Held(App):
    def __init__(self, folder):
        super().__init__()
        self.folder = folder

    def on_mount(self):
        self.push_screen(SamplesScreen(self.folder))


async def settled(app, pilot, *keys):
    await pilot.press(*keys)
    await app.workers.wait_for_complete()
    await pilot.pause()


def text_of(app, selector):
    return str(app.screen.query_one(selector, Static).content)


def listed(app):
    return [key.value for key in app.screen.query_one("#samples", DataTable).rows]


async def test_the_selected_trajectory_is_shown_turn_by_turn(folder, asked):
    folder.keep("g00000001.0", asked, reward=0.5)
    folder.keep("g00000002.0", asked, reward=0.25)
    folder.keep("eval-1.8.0.0", asked, purpose="eval", version=8)
    app = Held(folder.path)
    async with app.run_test(size=(80, 24)) as pilot:
        await settled(app, pilot)

        assert listed(app) == ["g00000002.0.1", "g00000001.0.1"]
        assert "▸ four <|end|>⏹" in text_of(app, "#sample")
        await settled(app, pilot, "down")
        assert text_of(app, "#sample").startswith("g00000001.0   no fate yet · reward 0.50")
        await settled(app, pilot, "o")
        assert listed(app) == ["g00000001.0.1", "g00000002.0.1"]
        await settled(app, pilot, "e")
        assert listed(app) == ["eval-1.8.0.0.1"]
        await settled(app, pilot, "escape")
        assert not isinstance(app.screen, SamplesScreen)


async def test_a_run_without_trajectories_says_so(folder):
    app = Held(folder.path)
    async with app.run_test() as pilot:
        await settled(app, pilot)

        assert "has no trajectory yet" in text_of(app, "#told")
