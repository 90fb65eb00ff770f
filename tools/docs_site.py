"""MkDocs hooks that make one site of README, docs/ and the sources they link to, so that no link leaves it or leads nowhere.

README.md becomes the first page. A link from a page to anything else of the repository leads to a page made for it: a document as it is,
source text in a code block, a folder as the list of what it holds. A link to nothing keeps its target, of which `mkdocs build --strict`
complains. The same links lead to the files themselves where the pages are read in the repository.
"""

# pyright: reportMissingImports=false
# MkDocs is in the extra `docs`, which only the site needs.
import posixpath
import re
import subprocess
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
DOCS = "docs/"
TARGET = re.compile(r"(?<=\]\()(?!\w+:|#|/)([^)#\s]+)(?=[)#])")
"""The path of a link within the repository, without its anchor."""

LANGUAGES = {".py": "python", ".yaml": "yaml", ".lua": "lua", ".json": "json", ".toml": "toml", ".sh": "bash"}
CODE_BYTES = 200_000
"""Longer files are named, not shown."""


def page_of(path: str) -> str:
    """Place in the site of the file or folder at `path`, relative to the repository."""
    if path.startswith(DOCS) and (ROOT / path).is_file():
        return path.removeprefix(DOCS)
    if path == "README.md":
        return "index.md"
    if path.endswith(".md"):
        return posixpath.join("source", path) if "/" in path else path
    return posixpath.join("source", path, "index.md") if (ROOT / path).is_dir() else posixpath.join("source", path + ".md")


def targets(path: str, text: str) -> list[str]:
    """What the page at `path` links to in the repository, each once, as paths relative to it."""
    beside = [posixpath.normpath(posixpath.join(posixpath.dirname(path), found)) for found in TARGET.findall(text)]
    return sorted({found for found in beside if not found.startswith("..") and (ROOT / found).exists()})


def led_to_pages(path: str, text: str) -> str:
    """The page's text with every link to the repository leading to a page of the site."""
    here = posixpath.dirname(page_of(path))

    def moved(match: re.Match[str]) -> str:
        found = posixpath.normpath(posixpath.join(posixpath.dirname(path), match[1]))
        known = not found.startswith("..") and (ROOT / found).exists()
        return posixpath.relpath(page_of(found), here or ".") if known else match[1]

    return TARGET.sub(moved, text)


def content_of(path: str) -> str:
    """The page that stands for a file or a folder outside of docs/."""
    place = ROOT / path
    if place.is_dir():
        listed = subprocess.run(["git", "ls-files", path], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        here, rows = posixpath.dirname(page_of(path)), ""
        for name in listed.splitlines():
            shown = f"`{name.removeprefix(path + '/')}`"
            rows += f"- [{shown}]({posixpath.relpath(page_of(name), here)})\n" if name.startswith(DOCS) else f"- {shown}\n"
        return f"# {path}\n\n{rows}"
    if path.endswith(".md"):
        return led_to_pages(path, place.read_text())
    if place.stat().st_size > CODE_BYTES:
        return f"# {path}\n\nToo long to be shown here.\n"
    return f"# {path}\n\n`````{LANGUAGES.get(place.suffix, 'text')}\n{place.read_text()}\n`````\n"


def on_files(files: Files, config: Any) -> Files:
    """Add a page for README.md and for all that it, and pages reached from it, link to outside of docs/."""
    waiting = ["README.md", *(DOCS + file.src_uri for file in files.documentation_pages())]
    seen = set(waiting)
    while waiting:
        path = waiting.pop()
        if not path.startswith(DOCS) or not (ROOT / path).is_file():
            files.append(File.generated(config, page_of(path), content=content_of(path)))
        if path.endswith(".md"):
            new = [found for found in targets(path, (ROOT / path).read_text()) if found not in seen]
            seen.update(new)
            waiting += [found for found in new if not (found.startswith(DOCS) and (ROOT / found).is_file())]
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Lead the links of a page of docs/ to the site; pages that were made have theirs."""
    made = page.file.generated_by is not None
    return markdown if made else led_to_pages(DOCS + page.file.src_uri, markdown)
