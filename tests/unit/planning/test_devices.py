"""Which GPUs and cores of a host a process gets."""

from hypothesis import given
from hypothesis import strategies as st

from rubato.planning.devices import HostResources, ProcessNeeds, ProcessPlace, place

HOST = HostResources(frozenset({"h20"}), tuple("01234567"), tuple(range(16)))


def test_each_process_gets_the_next_free_devices_and_cores():
    first = place(HOST, [], ProcessNeeds(gpus=2, cores=4))
    second = place(HOST, [first], ProcessNeeds(gpus=1, cores=2))

    assert first == ProcessPlace(("0", "1"), (0, 1, 2, 3))
    assert second == ProcessPlace(("2",), (4, 5))
    assert place(HOST, [second], ProcessNeeds(gpus=3)).devices == ("0", "1", "3")


def test_what_takes_nothing_of_its_own_always_has_a_place():
    assert place(HostResources(frozenset(), (), ()), [], ProcessNeeds()) == ProcessPlace()


def test_why_there_is_no_place_is_told():
    full = [place(HOST, [], ProcessNeeds(gpus=7, cores=15))]

    assert place(HOST, full, ProcessNeeds(gpus=2)).why_not == "has 1 of 8 GPUs free, and each process takes 2"
    assert place(HOST, full, ProcessNeeds(cores=2)).why_not == "has 1 of 16 cores free, and each process takes 2"
    assert place(HOST, [], ProcessNeeds(labels=("h20", "nvlink"))).why_not == "does not have the label nvlink"


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 6)), max_size=20))
def test_nobody_shares_and_nothing_free_is_refused(wanted):
    taken: list[ProcessPlace] = []
    for gpus, cores in wanted:
        given_now = place(HOST, taken, ProcessNeeds(gpus=gpus, cores=cores))
        free = 8 - sum(len(each.devices) for each in taken), 16 - sum(len(each.cores) for each in taken)
        assert bool(given_now.why_not) == (gpus > free[0] or cores > free[1])
        taken += [] if given_now.why_not else [given_now]
    devices = [device for each in taken for device in each.devices]
    cores_given = [core for each in taken for core in each.cores]
    assert len(set(devices)) == len(devices)
    assert len(set(cores_given)) == len(cores_given)
