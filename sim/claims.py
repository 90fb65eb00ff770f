"""Holds a run's figures against what a paper states or what we ask for, and against what we expect of each comparison."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple, Self

from pydantic import Field, model_validator

from rubato.runtime.config import Section
from rubato.runtime.errors import ConfigError

Value = bool | float
"""What a figure may be; a bool states an ordering or a condition."""

Expectation = Literal["holds", "fails"]

Kind = Literal["published", "ours"]
"""Whose value a figure is held against: a source's, or one of our own, that no paper states."""

KIND_NAMES: Mapping[Kind, str] = {"published": "published", "ours": "of our own"}

FACTOR = "factor "

BOUNDS = {"at least": lambda ours, paper: ours >= paper, "at most": lambda ours, paper: ours <= paper}


class ClaimSpec(Section):
    """One statement, the band in which our figure counts as equal to it, and the reviewed expectation."""

    name: str
    """The figure of the run that it is about."""
    kind: Kind = "published"
    """A published statement has its value in `paper` and where it stands in `source`; one of ours has its value in `bar`."""
    paper: Value | None = None
    """What the source states: a number, or true and false for an ordering."""
    bar: Value | None = None
    """What no source states: a threshold that we ask for, or a figure that we measured live."""
    tolerance: str = "exact"
    """0.05 (absolute), 12% (of the value), factor 3 (either way), at least, at most, or exact."""
    expected: Expectation = "holds"
    """What a review of our run found; a run that differs from it exits with 3."""
    reason: str = ""
    """Why it is expected to fail, or what else a reader must know."""
    unit: str = ""
    source: str = Field(default="", description="Table, figure or section of the source.")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.kind == "published" and (self.paper is None or self.bar is not None or not self.source.strip()):
            raise ValueError("a published claim needs paper, what is stated, and source, where; a value of our own is kind: ours with bar")
        if self.kind == "ours" and (self.bar is None or self.paper is not None):
            raise ValueError("a claim of kind ours needs its value in bar, and none in paper: no paper states it")
        if self.tolerance not in (*BOUNDS, "exact"):
            _band(self.tolerance)
        if self.expected == "fails" and not self.reason:
            raise ValueError("a claim that is expected to fail needs a reason")
        return self

    @property
    def stated(self) -> Value:
        """What the figure is held against."""
        value = self.paper if self.kind == "published" else self.bar
        assert value is not None  # which _check refuses
        return value


class FigureClaim(NamedTuple):
    """A statement held against a run; `run.json` lists these."""

    name: str
    kind: Kind
    paper: Value | None
    """What the source states; None where the claim is ours."""
    bar: Value | None
    """What we ask for or measured; None where the claim is published."""
    ours: Value
    tolerance: str
    holds: bool
    expected: Expectation
    reason: str
    unit: str
    source: str

    @property
    def surprising(self) -> bool:
        """Whether the outcome differs from the expectation, in either direction."""
        return self.holds != (self.expected == "holds")


def judge(specs: Sequence[ClaimSpec], figures: Mapping[str, Value], *, optional: Collection[str] = ()) -> tuple[FigureClaim, ...]:
    """Every claim whose figure the run has.

    Claims named in `optional` are left out where an altered scenario has no figure for them. Any other claim without its figure, and
    a number held against true or false, raise ConfigError.
    """
    for spec in specs:
        if spec.name not in figures and spec.name not in optional:
            known = ", ".join(sorted(figures))
            raise ConfigError(f"The claim {spec.name} is about no figure of this run. Its figures: {known}.")
        ours = figures.get(spec.name, spec.stated)
        if isinstance(spec.stated, bool) != isinstance(ours, bool):
            key = "paper" if spec.kind == "published" else "bar"
            raise ConfigError(f"The claim {spec.name} can't be judged: {key} is {spec.stated}, and the run's figure {ours}.")
    return tuple(_judged(spec, figures[spec.name]) for spec in specs if spec.name in figures)


def _judged(spec: ClaimSpec, ours: Value) -> FigureClaim:
    shown = ours if isinstance(ours, bool) else float(f"{ours:.6g}")
    return FigureClaim(
        spec.name, spec.kind, spec.paper, spec.bar, shown, spec.tolerance, _holds(spec, ours),
        spec.expected, spec.reason, spec.unit, spec.source,
    )  # fmt: skip


def _holds(spec: ClaimSpec, ours: Value) -> bool:
    stated = spec.stated
    if bound := BOUNDS.get(spec.tolerance):
        return bool(bound(ours, stated))
    if spec.tolerance == "exact":
        return ours == stated
    kind, band = _band(spec.tolerance)
    if kind == FACTOR:
        return stated / band <= ours <= stated * band
    if kind == "%":
        band *= abs(stated) / 100
    return abs(ours - stated) <= band * (1 + 1e-12)  # 0.74 - 0.69 is 0.05 and a bit


def _band(tolerance: str) -> tuple[str, float]:
    """What a tolerance is of (a factor, %, or nothing) and how wide. Raises ValueError for what is none."""
    kind = FACTOR if tolerance.startswith(FACTOR) else "%" if tolerance.endswith("%") else ""
    try:
        band = float(tolerance.removeprefix(kind) if kind == FACTOR else tolerance.removesuffix(kind))
    except ValueError:
        band = -1.0
    if not (1 if kind == FACTOR else 0) <= band < float("inf"):
        raise ValueError("tolerance must be such as 0.05, 12%, factor 3 (1 or more), at least, at most or exact")
    return kind, band


def _counts(claims: Sequence[FigureClaim]) -> Iterator[str]:
    for kind, name in KIND_NAMES.items():
        if of_kind := [claim.holds for claim in claims if claim.kind == kind]:
            yield f"{sum(of_kind)} of {len(of_kind)} {name}"


def summary(claims: Sequence[FigureClaim]) -> str:
    """The last line a run prints."""
    if not claims:
        return "simulated; no claim is about this run"
    known = [claim.name for claim in claims if not claim.holds and not claim.surprising]
    text = f"simulated: {' and '.join(_counts(claims))} claims hold"
    if known:
        text += f"; {len(known)} expected to fail: {', '.join(known)}"
    for claim in claims:
        if claim.surprising:
            text += f"; {claim.name} {'holds' if claim.holds else 'fails'}, against the expectation"
    return text
