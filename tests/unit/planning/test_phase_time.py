"""The predicted time of a phase, by hand, and the circuits that it chooses."""

import pytest

from rubato.planning.demand import per_link
from rubato.planning.phase_time import SHARES, LinkRates, Operation, choose_links, phase_s, run_s, shared
from rubato.planning.topology import direct

RATES = LinkRates(100.0, hop_s=0.25)


def by_bytes(directed, ports):
    return direct(per_link(directed), ports)


def test_a_run_takes_the_farthest_transfers_hops_and_what_the_fullest_link_carries():
    line = ((0, 1), (1, 2), (1, 2))

    assert run_s(Operation({(0, 1): 200}), line, 3, RATES) == 0.25 + 2
    assert run_s(Operation({(0, 2): 200, (1, 2): 100}), line, 3, RATES) == 2 * 0.25 + 2, "300 bytes have two links of the second hop"
    assert run_s(Operation({(0, 1): 100}, floor_s=9), line, 3, RATES) == 9
    assert run_s(Operation({}), line, 3, RATES) == 0


def test_where_nobody_forwards_what_has_no_circuit_trickles():
    assert run_s(Operation({(0, 2): 100}), ((0, 1), (1, 2)), 3, RATES._replace(trickle=0.1)) == 0.25 + 10


def test_operations_take_turns_but_for_those_beside():
    both = [Operation({(0, 1): 100}, times=3), Operation({(0, 1): 500}, beside=True)]

    assert phase_s(both, ((0, 1),), 2, RATES) == 3 * 1.25


def test_a_path_that_is_not_there_is_an_error():
    with pytest.raises(ValueError, match="no path leads from endpoint 0"):
        run_s(Operation({(0, 2): 1}), ((0, 1),), 3, RATES)


TURNS = [Operation({(0, 1): 100}, times=64), Operation({(0, 2): 100})]


def test_by_the_square_root_of_their_bytes_operations_in_turn_are_through_soonest():
    """64 and 1 runs on nine ports: eight to one. By bytes it would be the same here, by runs alike it would not."""
    assert shared(TURNS, 1.0) == {(0, 1): 6400, (0, 2): 100}
    assert shared(TURNS, 0.5) == {(0, 1): 6400, (0, 2): 800}
    assert shared(TURNS, 0.0) == {(0, 1): 6400, (0, 2): 6400}

    ports = [90, 90, 90]
    split = {share: choose_links(TURNS, ports, by_bytes, RATES._replace(hop_s=0), (share,)).count((0, 2)) for share in (1.0, 0.5)}
    assert split == {1.0: 2, 0.5: 10}


def test_the_share_that_is_predicted_to_be_fastest_is_taken():
    ports, rates = [90, 90, 90], RATES._replace(hop_s=0)
    found = choose_links(TURNS, ports, by_bytes, rates)
    times = {share: phase_s(TURNS, choose_links(TURNS, ports, by_bytes, rates, (share,)), 3, rates) for share in SHARES}

    assert phase_s(TURNS, found, 3, rates) == min(times.values()) == times[0.5]
    assert times[0.5] < 0.75 * times[1.0]


def test_one_operation_needs_no_choice():
    asked = []

    def planner(directed, ports):
        asked.append(directed)
        return by_bytes(directed, ports)

    choose_links([Operation({(0, 1): 7}), Operation({(0, 1): 9}, beside=True)], [2, 2], planner, RATES)

    assert asked == [{(0, 1): 16}]
