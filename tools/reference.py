"""Prints what docs/metrics.md or docs/config.md hold, from the code: `tools/reference.py metrics > docs/metrics.md`, and `config`.

A test compares the two.
"""

import json
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from rubato.actors.report.metrics import METRICS
from rubato.runtime.config.compose import load
from rubato.runtime.config.config import root_model
from rubato.runtime.config.explain import allowed, models

ROOT = Path(__file__).parents[1]
COLUMNS = 100

METRICS_HEAD = """\
# Metrics

`RUN/metrics.jsonl` has one object for each training step. `rubato monitor` shows the newest, `rubato compare` several runs' side by side.
A number that is not finite is left out.

`RUN/evals.jsonl` has one object for each evaluation: the names below without `eval/`, and `time_s` and `unix_s`. The next row of
`metrics.jsonl` carries it as `eval/…`. Evaluations are greedy unless `eval.samples` is above 1.

What stands in `<…>` differs: an actor's name, a reward function's, a key of the environment's `info`, a fate
([samples.md](samples.md)). π is the policy that learns, μ the one that sampled ([learning.md](learning.md)).

This page is made from [actors/report/metrics.py](../actors/report/metrics.py) by `tools/reference.py metrics`.
"""

CONFIG_HEAD = """\
# Config keys

A config is a YAML file; any key may be changed on the command line as `key.sub=value`. `rubato launch CONFIG --dry-run` prints all keys as
resolved. A key that is not known is refused, with the nearest one.

**Values are YAML 1.2's** (core schema): `no`, `12:30:00` and `2026-11-25` are text, `010` is 10, `0o17` is 15. A key that is true or false
takes these two words alone. Quotes make text of anything: `'010'`, `'[::1]:9108'`. A key that is given twice is refused. Merge keys
(`<<: *base`) work too. On the command line a value that begins with `[`, `{` or a quote is read so; all else is a number, true, false, null
(or nothing), or text as it stands, whatever is in it: `run.dir=a: b # c`. An IPv6 address needs no quotes there:
`logging.prometheus_listen=[::1]:9108`.

**`${NAME}` stands for a variable of the environment**, `${NAME:-word}` for `word` where that is not set or empty, and `$${NAME}` for the text
`${NAME}`. Within a list or mapping in brackets it is put in quotes. The value is text; a key that takes a number reads it as one. Each
process fills it in from its own environment: a host that joins, a cluster, and a resumed launch need the variable too. What is
written, logged and shown has `${NAME}` in its place, so a secret belongs there: `env.kwargs.api_key='${API_KEY}'`. What your own code
prints to a file of its own or returns as text is not looked at, nor is a value of less than four characters.

**Where relative paths start.** `model.path` and `train.reference` start at the run folder, or are names at the hub ([running.md](running.md#by-name)). Code, such as `path/to/file.py:Name`, starts at
the folder in which `rubato launch` is called; so do RUN, CONFIG, `run.dir`, data files of `tasks` (or names at the hub,
[tasks.md](tasks.md#by-name)), and paths that your own code opens. `~`
in `model.path`, `train.reference` and paths of data files is your home.

**Evaluation is greedy by default**: one rollout of each held-out task at temperature 0. `eval.samples` above 1 samples instead, at
`eval.temperature`. Training rollouts are sampled at `rollout.temperature`.

`actors` names the job's roles. The sections below are those of the runtime and of the actors that come with Rubato; an actor of your own
brings its own ([actors.md](actors.md)). This page is made from the code by `tools/reference.py config`.
"""


def metrics_page() -> str:
    """docs/metrics.md."""
    lines = [_wrapped(METRICS_HEAD)]
    for title, metrics in METRICS.items():
        lines += [f"## {title}", "", "| metric | unit | what it is | absent where |", "|---|---|---|---|"]
        lines += [_row(f"`{m.name}`", m.unit, m.meaning, m.absent) for m in metrics] + [""]
    return "\n".join(lines)


def config_page() -> str:
    """docs/config.md."""
    jobs = sorted((ROOT / "configs").glob("*.yaml"), key=lambda path: (path.stem != "quickstart", path.stem))
    found = [(path.stem, load(path)) for path in jobs]
    root = root_model({f"{name}/{role}": job.actor_class(role) for name, job in found for role in job.actors})
    lines = [_wrapped(CONFIG_HEAD)]
    for name, field in root.model_fields.items():
        inner = models(field.annotation)
        if not inner:
            lines += [f"## {name}", "", *TABLE, _key((name,), field), ""]
            continue
        ((section, starred),) = inner
        path = (name, "<role>" if name == "actors" else "<name>") if starred else (name,)
        lines += [f"## {name}", "", _wrapped(_first(section)), *TABLE, *_keys(section, path), ""]
    return "\n".join(lines)


TABLE = ("| key | value | default | what it does |", "|---|---|---|---|")


def _keys(section: type[BaseModel], above: tuple[str, ...]) -> Iterator[str]:
    # What it shares with other sections comes last.
    for name, field in sorted(section.model_fields.items(), key=lambda item: item[0] not in section.__annotations__):
        keys = (*above, field.alias or name)
        inner = models(field.annotation)
        if not inner:
            yield _key(keys, field)
        for model, starred in inner:
            if starred or _is_list(field):
                yield _key(keys, field)
            yield from _keys(model, (*keys, "<name>") if starred else keys)


def _is_list(field: FieldInfo) -> bool:
    return isinstance(field.get_default(call_default_factory=True), tuple)


def _key(keys: tuple[str, ...], field: FieldInfo) -> str:
    default = "required" if field.is_required() else _shown(field.get_default(call_default_factory=True))
    return _row(f"`{'.'.join(keys)}`", allowed(field), default, " ".join((field.description or "").split()))


def _shown(value: Any) -> str:
    text = "empty" if value in ("", (), {}) else value if isinstance(value, str) else json.dumps(value, default=str)
    return f"`{text}`" if text != "empty" else text


def _first(section: type[BaseModel]) -> str:
    return " ".join((section.__doc__ or "").split()) + "\n"


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _wrapped(text: str) -> str:
    parts = (textwrap.fill(part, COLUMNS, break_long_words=False, break_on_hyphens=False) for part in text.split("\n\n"))
    return "\n\n".join(parts) + "\n"


PAGES = {"metrics": metrics_page, "config": config_page}

if __name__ == "__main__":
    print(PAGES[sys.argv[1]](), end="")
