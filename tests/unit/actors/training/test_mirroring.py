"""The mirror beside a trainer: the newest is copied, what stays too, and what fails there is told once and ends nothing."""

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest

from rubato.actors.checkpoints import checkpoint
from rubato.actors.checkpoints.mirror import COMPLETE, Claim, Mirror, bring
from rubato.actors.training import mirroring
from rubato.actors.training.mirroring import Mirroring


class Log:
    def info(self, event, **fields):
        pass

    warning = info


class Waits:
    def on(self, *_, **__):
        from contextlib import nullcontext

        return nullcontext()


class FakeTrainer:
    """What of a trainer the hook uses."""

    name, term = "trainer-1", 1

    def __init__(self, folder: Path, url: str, tasks: asyncio.TaskGroup, *, keep=2, stay=()) -> None:
        self.config = SimpleNamespace(run=SimpleNamespace(seed=7), checkpoint=SimpleNamespace(mirror=url, keep=keep))
        self.run = SimpleNamespace(folder=folder)
        self.notices: list[str] = []
        self.log, self.waits, self.leaving = Log(), Waits(), asyncio.Event()
        self._tasks, self._stay = tasks, set(stay)
        self.spawned: list[asyncio.Task] = []

    def spawn(self, work, name):
        self.spawned.append(self._tasks.create_task(work, name=name))

    def notice(self, text, *, good=False):
        self.notices.append(text)

    def stays(self, steps):
        return self._stay & set(steps)

    def save(self, *steps):
        for step in steps:
            checkpoint.write(self.run.folder / "checkpoints" / f"step_{step}", {"weights": bytes([step])}, step=step, term=1)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "mirror"


async def play(tmp_path, url, scene, **options):
    async with asyncio.TaskGroup() as tasks:
        trainer = FakeTrainer(tmp_path / "run", str(url), tasks, **options)
        hook = Mirroring(trainer)
        try:
            await scene(trainer, hook)
        finally:
            for task in trainer.spawned:
                task.cancel()
    return trainer


def there(place):
    return sorted(path.parent.name.split(".")[0] for path in place.glob(f"step_*/{COMPLETE}"))


async def test_the_newest_is_copied_and_old_copies_go_as_old_checkpoints_do(tmp_path, place):
    async def scene(trainer, hook):
        await hook.begin(0, list)
        for step in (1, 2, 3):
            trainer.save(step)
            await hook.after_checkpoint(step)
            await hook.before_end()
        assert await hook.after_publish(3, {}) == {"checkpoint/mirror_behind": 0.0, "checkpoint/mirror_failures": 0.0}
        await hook.close()

    trainer = await play(tmp_path, place, scene)

    assert there(place) == ["step_2", "step_3"]
    assert trainer.notices == []


async def test_what_was_overtaken_is_not_copied_but_what_stays_is(tmp_path, place):
    async def scene(trainer, hook):
        trainer.save(1, 2, 3, 4)
        await hook.begin(4, list)
        await hook.before_end()

    await play(tmp_path, place, scene, stay=[2])

    assert there(place) == ["step_2", "step_4"]


async def test_a_mirror_that_fails_is_told_once_and_so_is_that_it_works_again(tmp_path, place):
    place.write_text("a file where a folder should be")

    async def scene(trainer, hook):
        await hook.begin(0, list)
        for step in (1, 2):
            trainer.save(step)
            await hook.after_checkpoint(step)
            await hook.before_end()
        assert len(trainer.notices) == 1
        figures = await hook.after_publish(2, {})
        assert figures["checkpoint/mirror_behind"] == 2.0
        assert figures["checkpoint/mirror_failures"] >= 2.0
        place.unlink()
        trainer.save(3)
        await hook.after_checkpoint(3)
        await hook.before_end()
        await hook.close()

    trainer = await play(tmp_path, place, scene)

    assert "Training goes on" in trainer.notices[0]
    assert trainer.notices[1:] == ["checkpoint.mirror has step 3: copies are made again"]
    assert there(place) == ["step_3"]


async def test_a_stopped_run_says_what_is_not_in_the_mirror(tmp_path, place):
    place.write_text("")

    async def scene(trainer, hook):
        trainer.save(1)
        await hook.begin(1, list)
        await hook.close()

    trainer = await play(tmp_path, place, scene)

    assert "step 1 is not in checkpoint.mirror" in trainer.notices[-1]


async def test_a_copy_that_stalls_is_given_up_and_its_thread_ends_at_its_next_byte(tmp_path, place, monkeypatch):
    import threading

    release, ended = threading.Event(), threading.Event()
    original = Mirror.put

    def stalls(self, *args, **more):
        release.wait(20)
        try:
            original(self, *args, **more)
        finally:
            ended.set()

    monkeypatch.setattr(Mirror, "put", stalls)
    monkeypatch.setattr(mirroring, "STALL_S", 0.1)

    async def scene(trainer, hook):
        trainer.save(1)
        await hook.begin(1, list)
        await hook.before_end()
        assert "stalls: no byte went through" in trainer.notices[0]
        release.set()
        await asyncio.to_thread(ended.wait, 20)

    await play(tmp_path, place, scene)

    assert there(place) == []


async def test_a_trainer_whose_run_was_brought_back_elsewhere_copies_no_more(tmp_path, place):
    async def scene(trainer, hook):
        trainer.save(1)
        await hook.begin(1, list)
        await hook.before_end()
        (tmp_path / "new").mkdir()
        bring(str(place), tmp_path / "new")
        Mirror(str(place)).claim(Claim(checkpoint.newest_term(tmp_path / "new" / "checkpoints") + 1, "00000000"))  # as its trainer does
        trainer.save(2)
        await hook.after_checkpoint(2)
        await hook.before_end()
        await hook.close()
        trainer.save(3)
        await hook.after_checkpoint(3)
        await hook.before_end()

    trainer = await play(tmp_path, place, scene)

    assert [notice for notice in trainer.notices if "took over" in notice] == trainer.notices
    assert len(trainer.notices) == 1
    assert there(place) == ["step_1"]


async def test_a_checkpoint_that_is_being_copied_stays(tmp_path, place):
    async def scene(trainer, hook):
        hook._copying = 4
        assert set(hook.keep([3, 4, 5])) == {4}

    await play(tmp_path, place, scene)


async def test_copies_of_steps_that_are_trained_anew_go(tmp_path, place):
    async def first(trainer, hook):
        trainer.save(1, 5)
        await hook.begin(5, list)
        await hook.before_end()

    await play(tmp_path, place, first)
    assert there(place) == ["step_5"]

    async def second(trainer, hook):
        trainer.term = 2
        checkpoint.prune(trainer.run.folder / "checkpoints", 1, 9)
        (trainer.run.folder / "checkpoints" / "step_5").rename(tmp_path / "gone")
        trainer.save(2)
        await hook.begin(2, list)
        await hook.before_end()

    await play(tmp_path, place, second)

    assert there(place) == ["step_2"]
    assert [claim.term for claim in Mirror(str(place)).claims()] == [2]
    assert Claim(1, "z") < Mirror(str(place)).claims()[0]
