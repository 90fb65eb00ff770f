"""Traces: what ends up in trace.json."""

import asyncio
import json

import pytest

from rubato.runtime.observe.timeline import merge_traces
from rubato.runtime.observe.trace import Trace, trace_path
from rubato.sim.virtual import run_virtual


def events(folder):
    return json.loads(merge_traces(folder).read_text())["traceEvents"]


def test_a_span_tells_when_it_began_and_how_long_it_took(tmp_path):
    async def main():
        trace = Trace(trace_path(tmp_path, "trainer-1"))
        await asyncio.sleep(1.0)
        with trace.span("train_step", "train", step=3):
            await asyncio.sleep(0.5)
        trace.close()

    run_virtual(main)

    process, step = events(tmp_path)
    assert process["args"]["name"] == "trainer-1"
    assert (step["name"], step["cat"], step["ph"], step["ts"], step["dur"]) == ("train_step", "train", "X", 1e6, 5e5)
    assert (step["pid"], step["args"]) == (process["pid"], {"step": 3})


def test_spans_of_one_task_share_a_lane_and_overlapping_tasks_do_not(tmp_path):
    async def main():
        trace = Trace(trace_path(tmp_path, "env_manager-1"))

        async def rollout(name):
            with trace.span(name), trace.span(f"{name}.step"):
                await asyncio.sleep(1.0)

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(rollout("a"))
            tasks.create_task(rollout("b"))
        with trace.span("later"):
            pass
        trace.close()

    run_virtual(main)

    lanes = {event["name"]: event["tid"] for event in events(tmp_path) if event["ph"] == "X"}
    assert lanes["a"] == lanes["a.step"] != lanes["b"] == lanes["b.step"]
    assert lanes["later"] == 0


def test_a_span_that_raised_says_so(tmp_path):
    async def main():
        trace = Trace(trace_path(tmp_path, "a-1"))
        with pytest.raises(ValueError, match="no"), trace.span("work"):
            raise ValueError("no")
        trace.close()

    run_virtual(main)

    assert events(tmp_path)[-1]["args"] == {"raised": "ValueError"}


def test_a_long_trace_is_sampled_then_cut_and_says_how_much_is_missing(tmp_path):
    path = trace_path(tmp_path, "a-1")

    async def main():
        trace = Trace(path, max_bytes=20_000)
        for _ in range(5000):
            with trace.span("work"):
                await asyncio.sleep(0.001)
        trace.close()

    run_virtual(main)

    shown = [event for event in events(tmp_path) if event["ph"] == "X"]
    (note,) = [event for event in events(tmp_path) if event["ph"] == "i"]
    assert path.stat().st_size <= 21_024
    assert note["name"] == f"{5000 - len(shown)} spans are not shown"


def test_a_trace_without_a_file_keeps_nothing():
    async def main():
        trace = Trace(None)
        with trace.span("work"):
            await asyncio.sleep(1.0)
        trace.close()

    run_virtual(main)


def test_a_line_half_written_by_a_killed_actor_spoils_nothing(tmp_path):
    path = trace_path(tmp_path, "a-1")
    path.parent.mkdir()
    path.write_bytes(b'{"ph":"X","name":"fi')

    async def main():
        trace = Trace(path)
        with trace.span("second"):
            pass
        trace.close()

    run_virtual(main)

    assert [event["name"] for event in events(tmp_path)] == ["process_name", "second"]


def test_a_run_without_spans_gets_no_trace(tmp_path):
    assert merge_traces(tmp_path) is None
