"""Documents lead somewhere and fit a screen: links meet files, prose ends at column 100, the glossary is one page of one-liners, and the README
is short."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md")])
COLUMNS = 100
TARGET = re.compile(r"\]\(([^)\s]+)\)")


def prose(page: Path) -> Iterator[tuple[int, str]]:
    """Lines with their numbers, without tables and fenced code; of links their text only."""
    fenced = False
    for number, line in enumerate(page.read_text().splitlines(), 1):
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif not fenced and not line.lstrip().startswith("|"):
            yield number, TARGET.sub("]()", line)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_link_meets_a_file(page):
    targets = [target.partition("#")[0] for target in TARGET.findall(page.read_text()) if "://" not in target]

    assert [target for target in targets if not (page.parent / target).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_prose_ends_at_column_100(page):
    long = [number for number, line in prose(page) if len(line) > COLUMNS]

    assert long == [], f"wrap lines {long} of {page.relative_to(ROOT)}"


def test_the_glossary_gives_every_word_one_line_and_the_file_that_defines_it():
    rows = [line.strip("| ").split(" | ") for line in (ROOT / "docs" / "glossary.md").read_text().splitlines() if line.startswith("| ")]
    words = [row for row in rows if row[0] != "word"]

    assert len(words) > 50
    assert [row for row in words if len(row) != 3 or not TARGET.search(row[2])] == []
    assert len({row[0] for row in words}) == len(words)


@pytest.mark.parametrize("page", ["README.md", "docs/architecture.md"])
def test_a_reader_finds_the_glossary(page):
    assert "glossary.md" in (ROOT / page).read_text()


def test_the_readme_is_read_in_a_few_minutes():
    assert len((ROOT / "README.md").read_text().split()) <= 900


def test_ci_finds_the_readmes_two_commands():
    lines = (ROOT / "README.md").read_text().splitlines()
    commands = [line for line in lines if line.startswith("python3 -m venv ")]
    patterns = re.findall(r"pattern='(.*)'", (ROOT / ".ci" / "readme").read_text())

    assert [[line for line in lines if re.search(pattern, line)] for pattern in patterns] == [[each] for each in commands]


def test_every_page_is_in_the_navigation_of_the_site():
    nav = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    listed = set(re.findall(r"[\w/]+\.md", nav))

    assert [page.name for page in (ROOT / "docs").glob("*.md") if page.name not in listed] == []
