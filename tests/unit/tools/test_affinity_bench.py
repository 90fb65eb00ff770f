"""The bench of hardware affinity: what it compares, and the figures that it writes."""

import json

import pytest

from rubato.runtime.config.compose import from_mapping
from tools.bench import affinity as bench
from tools.bench.peers.changing_places import LONG, SHORT, ChangingPlaces


def test_all_arms_cost_the_same_within_a_few_percent():
    prices = [bench.price(arm.engines) for arm in bench.arms()]

    assert max(prices) <= 1.06 * min(prices)


def test_every_map_of_the_tasks_is_tried():
    maps = [tuple(arm.affinity.values()) for arm in bench.arms() if isinstance(arm.affinity, dict) and arm.affinity]

    assert sorted(maps) == [("h20", "h20"), ("h20", "h800"), ("h800", "h20"), ("h800", "h800")]


def test_the_figures_are_those_of_the_arms():
    arms = bench.arms()
    found = {arm.name: bench.Measured(float(at), 0.0) for at, arm in enumerate(arms, 1)}

    summary = bench.summed_up(found, arms)

    assert (summary["learned"], summary["best"], summary["uniform"]) == (1.0, 5.0, {"h800": 6.0, "h20": 7.0})
    assert summary["paced"]


def test_a_swap_asks_of_each_task_what_it_asked_of_the_other(tmp_path):
    flag = tmp_path / "swapped"
    shown = {name: ChangingPlaces(tokens=tokens, flag=str(flag)) for name, tokens in (("read", LONG), ("write", SHORT))}
    before = {name: each.reset(seed=1)[0] for name, each in shown.items()}

    flag.touch()
    after = {name: each.reset(seed=1)[0] for name, each in shown.items()}

    assert len(before["read"]) > 10 * len(before["write"])
    assert after == {"read": before["write"], "write": before["read"]}


def test_a_swap_is_of_the_job_that_learns(tmp_path):
    job = from_mapping(bench.swapped_job(tmp_path / "model", tmp_path / "swapped"))

    assert job.section("affinity") == "learned"
    assert {name: task.max_new_tokens for name, task in job.section("tasks").items()} == {"read": 256, "write": 256}


def test_the_map_is_the_class_that_has_most_of_each_task(tmp_path):
    plan = {"why": "so", "shares": {"read": {"h800": 0.2, "h20": 0.8}, "write": {"h800": 1.0}}}
    (tmp_path / "logs").mkdir()
    lines = [json.dumps({"event": "started"}), json.dumps({"event": "affinity_planned", **plan})]
    (tmp_path / "logs" / "llm_proxy-1.jsonl").write_text("\n".join(lines) + "\n")

    (found,) = bench.plans(tmp_path)

    assert found.map() == {"read": "h20", "write": "h800"}
    assert bench.exchanged(found.map()) == {"read": "h800", "write": "h20"}


def test_tasks_of_one_class_can_not_show_a_swap():
    with pytest.raises(SystemExit, match="a change of places would not show"):
        bench.exchanged({"read": "h20", "write": "h20"})


@pytest.mark.parametrize(("steps", "outlasted", "code"), [(3, 0.02, 0), (4, 0.0, 1), (None, 0.0, 1), (1, 0.03, 1)])
def test_a_swap_fails_where_the_map_follows_late_or_the_pace_was_outlasted(monkeypatch, tmp_path, steps, outlasted, code):
    async def follow(after, overrides):
        return bench.Followed(after, steps, [1.0], ["so"], outlasted)

    monkeypatch.setattr(bench, "follow", follow)
    file = tmp_path / "found.json"

    assert bench.main(["--swap", "5", "--json", str(file)]) == code
    assert (json.loads(file.read_text())["before"], json.loads(file.read_text())["steps"]) == (5, steps)
