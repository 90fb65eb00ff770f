"""docs/metrics.md and docs/config.md say what the code says."""

import runpy
from pathlib import Path

import pytest

from rubato.actors.report.metrics import METRICS, described
from rubato.runtime.config.compose import load
from rubato.runtime.config.config import root_model

ROOT = Path(__file__).parents[2]
PAGES = runpy.run_path(str(ROOT / "tools" / "reference.py"))["PAGES"]


@pytest.mark.parametrize("name", PAGES)
def test_the_page_on_record_is_that_of_the_code(name):
    recorded = (ROOT / "docs" / f"{name}.md").read_text()

    assert PAGES[name]() == recorded, f"record it: tools/reference.py {name} > docs/{name}.md"


def test_every_key_has_a_line_that_says_what_it_does():
    rows = [line for line in PAGES["config"]().splitlines() if line.startswith("| `")]

    assert len(rows) > 150
    assert [row for row in rows if len(row.split(" | ")[-1].strip("| ")) < 8] == []


def test_the_page_has_every_section_of_the_configs_that_come_along():
    text = PAGES["config"]()

    for path in (ROOT / "configs").glob("*.yaml"):
        config = load(path)
        sections = root_model({role: config.actor_class(role) for role in config.actors}).model_fields
        assert [name for name in sections if f"\n## {name}\n" not in text] == [], path.name


def test_a_key_below_a_name_of_the_users_says_whose_name_that_is():
    text = PAGES["config"]()

    assert "| `actors.<role>.class` |" in text
    assert "| `tasks.<name>.weight` |" in text


def test_each_metric_is_described_once():
    names = [metric.name for section in METRICS.values() for metric in section]

    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("reward/mean", "reward/mean"),
        ("reward/exact", "reward/<function>"),
        ("eval/reward", "eval/reward"),
        ("eval/reward/exact", "eval/reward/<function>"),
        ("eval/env/won", "eval/env/<key>"),
        ("env/a/b", "env/<key>"),
        ("idle/engine-2", "idle/<actor>"),
        ("cpu/host", "cpu/host"),
        ("tokens/generated", "tokens/generated"),
        ("tokens/stale", "tokens/<fate>"),
        ("length/16/trained_frac", "length/<N>/trained_frac"),
        ("task/sums/reward", "task/<name>/reward"),
        ("task/sums/ended", "task/<name>/ended"),
        ("eval/task/sums/reward", "eval/task/<name>/reward"),
        ("eval/task/sums/pass@4", "eval/task/<name>/pass@<k>"),
    ],
)
def test_a_name_finds_its_own_line(name, expected):
    assert described(name).name == expected


def test_what_nobody_described_is_not_taken_for_something_else():
    assert described("reward") is None
    assert described("policy/unheard_of") is None
