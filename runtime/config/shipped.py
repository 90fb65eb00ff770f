"""`rubato configs`: the configs that come with Rubato, which a command takes by name, from whatever folder."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from rubato.runtime.errors import LaunchError

FOLDER = Path(__file__).resolve().parents[2] / "configs"
EXAMPLES = FOLDER.parent / "examples"


def shipped(name: str) -> Path | None:
    """The config of ours called `name`, such as quickstart."""
    path = FOLDER / f"{name}.yaml"
    return path if name.isidentifier() and path.is_file() else None


def main(argv: Sequence[str]) -> int:
    """List them, or print one, to make it one's own."""
    parser = argparse.ArgumentParser(
        "rubato configs", description="List the configs that come with Rubato, or print one: rubato configs NAME > my_job.yaml"
    )
    parser.add_argument("name", nargs="?", help="print this one")
    name = parser.parse_args(list(argv)).name
    if name is not None:
        path = shipped(name)
        if path is None:
            raise LaunchError(f"no config is called {name}. See rubato configs.")
        print(path.read_text(encoding="utf-8"), end="")  # noqa: T201
        return 0
    for path in sorted(FOLDER.glob("*.yaml")):
        first = path.read_text(encoding="utf-8").partition("\n")[0]
        print(f"  {path.stem:<18}  {first.removeprefix('# ')}")  # noqa: T201
    print(f"rubato launch NAME runs one. They are in {FOLDER}, examples of code in {EXAMPLES}.")  # noqa: T201
    return 0
