"""A batch that training can't compute, in a job of real processes: its groups end, the user is told, and the run goes on."""

import json

import pytest

from tests.jobs import SMALL, rubato, write_model

pytestmark = pytest.mark.slow

PICKY = """
import json
from pathlib import Path

from rubato.actors.scripted.train_engine import ScriptedTrainEngine
from rubato.actors.training.trainer import Trainer


class Picky(ScriptedTrainEngine):
    \"\"\"Never gets through the first batch that it is given for step 2, whatever starts anew in between.\"\"\"

    folder: Path

    def train(self, step, groups):
        seen = self.folder / "seen.json"
        names = sorted(sample.ticket.trajectory_id for group in groups for sample in group)
        if step == 2 and not seen.exists():
            seen.write_text(json.dumps(names))
        if step == 2 and json.loads(seen.read_text()) == names:
            raise IndexError("token 99 has no row in the embedding")
        return super().train(step, groups)


class PickyTrainer(Trainer):
    def _build(self):
        Picky.folder = Path("FOLDER")
        return Picky(self.config.model, self.config.train, steps=self.run.steps, seed=self.run.seed)
"""


def test_a_batch_that_training_raises_on_twice_ends_as_poisoned_and_the_run_reaches_its_end(tmp_path):
    (tmp_path / "picky.py").write_text(PICKY.replace("FOLDER", str(tmp_path)))
    config = SMALL.replace("steps: 2", "steps: 4").replace("rubato.actors.training.trainer:Trainer", "picky.py:PickyTrainer")
    (tmp_path / "job.yaml").write_text(config)

    model = write_model(tmp_path / "model")

    ended = rubato("launch", "job.yaml", "--run-dir", "run", f"model.path={model}", cwd=tmp_path)

    assert ended.code == 0, ended.out + ended.err
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    told = "training on step 2 raised twice (IndexError: token 99 has no row in the embedding): its 2 groups end as poisoned"
    assert told in ended.out + ended.err
    samples = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    poisoned = {sample["trajectory_id"] for sample in samples if sample["fate"] == "poisoned"}
    assert poisoned == set(json.loads((tmp_path / "seen.json").read_text()))
