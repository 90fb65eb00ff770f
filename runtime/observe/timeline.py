"""One trace.json of all actors' spans, which opens in ui.perfetto.dev."""

from collections.abc import Iterator
from pathlib import Path

import msgspec


def merge_traces(run_folder: Path) -> Path | None:
    """Write `trace.json` in the run folder from all actors' spans, as Chrome's JSON format; None where there are none.

    Blocking. Lines that a killed actor left half written are skipped. Replaces an earlier trace.json at once.
    """
    files = sorted((run_folder / "trace").glob("*.jsonl"))
    if not files:
        return None
    made, final = run_folder / "trace.json.tmp", run_folder / "trace.json"
    with made.open("wb") as out:
        out.write(b'{"displayTimeUnit":"ms","traceEvents":[\n')
        for number, file in enumerate(files, 1):
            name = {"ph": "M", "name": "process_name", "pid": number, "tid": 0, "args": {"name": file.stem}}
            out.write((b",\n" if number > 1 else b"") + msgspec.json.encode(name))
            for line in _complete_lines(file):
                out.write(b',\n{"pid":%d,' % number + line[1:])
        out.write(b"\n]}\n")
    made.replace(final)
    return final


def _complete_lines(file: Path) -> Iterator[bytes]:
    with file.open("rb") as lines:
        for raw in lines:
            line = raw.strip()
            try:
                whole = isinstance(msgspec.json.decode(line), dict)
            except msgspec.DecodeError:
                continue
            if whole:
                yield line
