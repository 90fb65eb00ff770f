"""Who waits for an engine, lane by lane."""

from rubato.actors.proxy.placement import EXACT, PASSED, USUAL, Lane, Line

A, B = Lane(USUAL, "a"), Lane(USUAL, "b")


def drained(line):
    found = []
    while lanes := line.lanes():
        found.append(line.take(lanes[0]))
    return found


def test_lanes_that_nothing_holds_up_are_served_as_a_single_line():
    line = Line()
    for number, lane in enumerate((A, B, B, A, B)):
        line.add(lane, number)

    assert drained(line) == [0, 1, 2, 3, 4]
    assert len(line) == 0


def test_ranks_go_one_after_another():
    line = Line()
    line.add(A, "usual")
    line.add(Lane(PASSED, "a"), "passed")
    line.add(Lane(EXACT, ""), "exact")

    assert drained(line) == ["exact", "passed", "usual"]


def test_who_goes_first_is_before_all_of_its_rank():
    line = Line()
    line.add(A, "early")
    line.add(B, "late")
    line.add(B, "ahead", first=True)

    assert drained(line) == ["ahead", "early", "late"]


def test_a_lane_is_there_while_somebody_stands_in_it():
    line = Line()
    one, other = object(), object()
    line.add(A, one)
    assert (A in line, B in line) == (True, False)

    assert not line.remove(other)
    assert line.remove(one)
    assert A not in line
    assert line.lanes() == []
