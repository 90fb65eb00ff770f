"""Figures in the text format that Prometheus reads (version 0.0.4), and what metrics are called there."""

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Literal

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

ESCAPED = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})

Sample = tuple[Mapping[str, str], float]
"""Labels and value."""


def known_as(metric: str, taken: Collection[str]) -> str:
    """Name of `metric`, which none of `taken` is: `task/a-b/…` and `task/a_b/…` are two metrics."""
    name = "rubato_" + re.sub(r"\W", "_", metric, flags=re.ASCII)
    while name in taken:
        name += "_"
    return name


class Exposition:
    """The families of one scrape, each with the labels of all."""

    def __init__(self, **labels: str) -> None:
        self._labels = labels
        self._lines: list[str] = []
        self.names: set[str] = set()

    def add(self, name: str, kind: Literal["gauge", "counter"], text: str, samples: Iterable[Sample]) -> None:
        """One family; without samples it is left out."""
        lines = [self._line(name, *sample) for sample in samples]
        if lines:
            self.names.add(name)
            self._lines += [f"# HELP {name} {text}", f"# TYPE {name} {kind}", *lines]

    def _line(self, name: str, labels: Mapping[str, str], value: float) -> str:
        told = ",".join(f'{key}="{text.translate(ESCAPED)}"' for key, text in {**self._labels, **labels}.items())
        return f"{name}{{{told}}} {float(value)!r}"

    def text(self) -> bytes:
        return ("\n".join(self._lines) + "\n").encode()
