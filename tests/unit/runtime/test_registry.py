from runtime.registry import ActorRecord, Directory


def record(name: str, incarnation: int, *, beat: int = 0, role: str = "engine") -> ActorRecord:
    return ActorRecord(name, role, f"mem://{name}.{incarnation}", incarnation, 1, "here", "ready", beat=beat)


async def test_a_newer_incarnation_replaces_an_older_one_and_is_reported_in_both_lists():
    directory = Directory()
    directory.add(record("engine-1", 3))

    joined, left = directory.add(record("engine-1", 5))

    assert (joined, left) == ({"engine-1"}, {"engine-1"})
    assert directory.find("engine-1").incarnation == 5


async def test_an_older_incarnation_changes_nothing():
    directory = Directory()
    directory.add(record("engine-1", 5))

    assert directory.add(record("engine-1", 3)) == (set(), set())
    assert directory.remove("engine-1", 3) == set()
    assert directory.ready("engine") == ("engine-1",)


async def test_a_suspect_returns_only_when_it_is_seen_to_beat_again():
    directory = Directory()
    directory.add(record("engine-1", 5))

    left = directory.suspect("mem://engine-1.5", {5: 7, 4: 900})

    assert left == {"engine-1"}
    assert directory.add(record("engine-1", 5, beat=8)) == (set(), set())
    assert directory.add(record("engine-1", 5, beat=9)) == ({"engine-1"}, set())


async def test_ready_lists_one_role_sorted():
    directory = Directory()
    for name, role in [("engine-2", "engine"), ("trainer-1", "trainer"), ("engine-1", "engine")]:
        directory.add(record(name, 1, role=role))

    assert directory.ready("engine") == ("engine-1", "engine-2")
