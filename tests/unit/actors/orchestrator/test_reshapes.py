"""What planned degrees mean for engines: who stays, who sleeps, who has which requests."""

from rubato.actors.messages.orchestration import RequestSeen
from rubato.actors.orchestrator.fleet import GpuGroup, expected
from rubato.actors.orchestrator.switches import Shape, as_merge, as_split, as_step
from rubato.planning.engine_info import EngineInfo, EngineProfile
from rubato.planning.parallelism import Change, StepPlan

MODELLED = EngineProfile("h800", "qwen2.5-14b", 1)


def server(*degrees):
    """Engines a, b, c … of these degrees; 0 is one that sleeps."""
    engines = [EngineInfo(name, 64, asleep=not degree, degree=degree or 1) for name, degree in zip("abcdefgh", degrees, strict=False)]
    return GpuGroup("here pool", MODELLED, tuple(engines))


def step(degrees, *assigned):
    return StepPlan(degrees, assigned, 1.0, True, "because")


def gpus(server, reshape):
    """Those that engines have together afterwards, as `GpuGroup.adds_up` counts them."""
    before = {each.name: Shape(each.degree, each.asleep) for each in server.engines}
    return sum(each.degree for each in {**before, **reshape.wanted}.values() if not each.asleep)


def test_a_merge_keeps_the_engine_with_the_largest_cache_and_the_others_sleep_as_they_were_started():
    mixed = server(1, 2, 1, 0)
    reshape = as_merge(mixed, Change(("a", "b", "c"), 4, (("r1", "r2"),), 9.0, 3.0, "because"))

    assert reshape.wanted == {"a": Shape(1, True), "b": Shape(4), "c": Shape(1, True)}
    assert reshape.requests == {"r1": "b", "r2": "b"}
    assert (reshape.name, reshape.why, gpus(mixed, reshape)) == ("merge a + b + c", "because", 4)


def test_a_split_wakes_engines_for_its_parts_and_is_none_where_too_few_sleep():
    change = Change(("a",), 1, (("r1",), ("r2",)), 9.0, 3.0, "because")
    reshape = as_split(server(2, 0), change)

    assert reshape is not None
    assert reshape.wanted == {"a": Shape(1), "b": Shape(1)}
    assert reshape.requests == {"r1": "a", "r2": "b"}
    assert as_split(server(2, 1, 1), change) is None


def test_a_step_that_needs_one_large_engine_takes_one_and_all_others_sleep():
    alike = server(1, 1, 1, 1)
    reshape = as_step(alike, step((4,), ("r1", "r2")), {"r1", "r2"})

    assert reshape.wanted == {"a": Shape(4)} | dict.fromkeys("bcd", Shape(1, True))
    assert reshape.requests == {"r1": "a", "r2": "a"}
    assert gpus(alike, reshape) == alike.gpus


def test_a_step_s_engines_keep_their_degree_where_it_is_planned_and_those_that_sleep_wake_last():
    mixed = server(0, 1, 1, 2)
    reshape = as_step(mixed, step((1, 1, 1, 1), ("r1",), ("r2",), ("r3",), ()), {"r1", "r2", "r3"})

    assert reshape.wanted == dict.fromkeys("abcd", Shape(1))
    assert reshape.requests == {"r1": "b", "r2": "c", "r3": "d"}

    kept = as_step(mixed, step((2, 2), ("r1",), ("r2",)), {"r1", "r2"})
    assert kept.wanted == {"d": Shape(2), "b": Shape(2), "a": Shape(1, True), "c": Shape(1, True)}
    assert kept.requests["r2"] in ("b", "d")
    assert gpus(mixed, kept) == mixed.gpus


def test_requests_that_wait_at_a_proxy_are_expected_by_gpus_and_moved_nowhere():
    large = server(1, 1, 1)
    small = GpuGroup("there pool", MODELLED, (EngineInfo("z", 64),))
    seen = [RequestSeen(f"r{n}", engine, "", n, 10, 0, 10, 0) for n, engine in enumerate(["a", "z", "", "", "", ""])]
    found = expected([large, small], seen)
    reshape = as_step(large, step((1, 2), ("r0", "r2"), ("r3",)), {"r0"})

    assert [len(requests) for requests in found.values()] == [1 + 3, 1 + 1]
    assert sorted(each.request_id for requests in found.values() for each in requests) == [f"r{n}" for n in range(6)]
    assert set(reshape.requests) == {"r0"}
