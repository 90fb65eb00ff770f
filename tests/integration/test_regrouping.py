"""Jobs of a live cluster that departures left half alone: they move together, and are promised what they keep."""

import asyncio

import pytest

from rubato.actors.cluster.board import read_board
from tests.jobs import left_behind
from tests.shared_jobs import CLUSTER, Lab, until, write_jobs

pytestmark = pytest.mark.slow


@pytest.mark.nightly
def test_jobs_that_departures_left_alone_move_together(tmp_path):
    write_jobs(tmp_path, "a", "b", "c")
    (tmp_path / "cluster.yaml").write_text(CLUSTER.replace("nodes: 1", "nodes: 2") + "\n")
    lab = Lab(tmp_path)
    lab.start()
    try:
        said = lab.submit("a", "run.steps=5000")
        lab.submit("b", "run.steps=5000")
        until(lambda: [group for group in groups(lab) if group == ["a", "b"]], "a and b together")
        lab.submit("c", "run.steps=5000", "--slo", "1.3")
        until(lambda: groups(lab) == [["a", "b"], ["c"]], "c beside them")
        until(lambda: len(lab.steps("c")) > 3, "steps of c")
        lab.ok("cancel", "C", "b")

        until(lambda: [sorted(group) for group in groups(lab)] == [["a", "c"]], "a and c together")
        jobs = asyncio.run(read_board(lab.folder)).book.jobs
    finally:
        lab.ok("cluster", "stop", "C")

    assert "on trial: nothing is promised until 2 of its steps are profiled" in said
    assert "is dissolved" in (lab.folder / "cluster.log").read_text()
    assert [jobs[name].promise.split(" its time")[0] for name in "ac"] == ["promised: at most 5 times", "promised: at most 1.3 times"]
    assert left_behind(tmp_path) == []


def groups(lab):
    """Names by group, of jobs that run."""
    book = asyncio.run(read_board(lab.folder)).book
    return [
        [each.job.name for each in group.jobs]
        for group in book.groups()
        if all(book.jobs[p.job.name].state == "running" for p in group.jobs)
    ]
