"""Whatever comes in which order: a pool has one holder at most, terms only rise, and nobody overtakes."""

from hypothesis import given
from hypothesis import strategies as st

from rubato.planning.permits import PermitLine, Stand, granted, joined, kept, narrowed

OPERATIONS = st.lists(st.tuples(st.sampled_from(("join", "gone", "narrow")), st.integers(1, 8)), max_size=60)


def _play(operations):
    """(line, grants in order, joins in order) after each operation, which is followed by a grant as in a compare-and-set."""
    line, grants, joins = PermitLine(), [], []
    for term, (what, ticket) in enumerate(operations, 1):
        before = line
        if what == "join":
            line = joined(line, Stand(f"job{ticket}", "rollout", ticket, float(term)))
            if ticket not in before.tickets:
                joins.append(ticket)
        elif what == "narrow":
            line = narrowed(line, ticket, (ticket % 3,))
        else:
            line = kept(line, line.tickets - {ticket})
        line = granted(line, term, float(term))
        if line.holder is not None and line.holder != before.holder:
            grants.append(line.holder)
        yield before, line, grants, joins


@given(OPERATIONS)
def test_terms_of_grants_only_rise_and_a_free_pool_has_no_queue(operations):
    for _, line, grants, _ in _play(operations):
        terms = [stand.term for stand in grants]
        assert terms == sorted(set(terms))
        assert line.holder is not None or not line.queue
        assert all(stand.term == 0 for stand in line.queue)


@given(OPERATIONS)
def test_a_holder_stays_until_it_leaves_and_nobody_is_in_a_line_twice(operations):
    for before, line, _, _ in _play(operations):
        if before.holder is not None and before.holder.ticket in line.tickets:
            assert line.held(before.holder.ticket) is not None
        everyone = [stand.ticket for stand in (line.holder, line.tail, *line.queue) if stand is not None]
        assert len(everyone) == len(set(everyone))


@given(OPERATIONS, st.integers(1, 8))
def test_a_job_that_asks_again_has_the_place_that_it_had(operations, ticket):
    for number, (_, line, _, _) in enumerate(_play(operations)):
        again = joined(line, Stand(f"job{ticket}", "rollout", 100, 0.0))
        line_up = [stand.job for stand in (line.tail, line.holder, *line.queue) if stand is not None]
        after = granted(again, 1000 + number, 0.0)
        now = [stand.job for stand in (after.tail, after.holder, *after.queue) if stand is not None]
        assert now == (line_up if f"job{ticket}" in line_up else [*line_up, f"job{ticket}"])
        assert 100 in after.tickets


@given(OPERATIONS)
def test_no_place_of_a_pool_is_ever_two_jobs(operations):
    for _, line, _, _ in _play(operations):
        terms = [stand.term for stand in (line.holder, line.tail) if stand is not None]
        for place in range(3):
            assert sum(line.may_use(term, place) is not None for term in terms) <= 1
        if line.tail is not None:
            assert [place for place in range(3) if line.may_use(line.tail.term, place)] == list(line.tail.places)


@given(st.lists(st.integers(1, 30), unique=True), st.sets(st.integers(1, 30)))
def test_whoever_stays_is_served_in_the_order_of_coming(tickets, leaving):
    line = PermitLine()
    for ticket in tickets:
        line = granted(joined(line, Stand(str(ticket), "rollout", ticket, 0.0)), ticket, 0.0)
    served = []
    line = granted(kept(line, line.tickets - leaving), 100, 0.0)
    while line.holder is not None:
        served.append(line.holder.ticket)
        line = granted(kept(line, line.tickets - {line.holder.ticket}), 100 + len(served), 0.0)

    assert served == [ticket for ticket in tickets if ticket not in leaving]
