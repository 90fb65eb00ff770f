"""What changed between two images, put on the old one, makes the new one, whatever they are."""

from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rubato.runtime.blobs.delta import NUM_BYTES, apply, changes, num_changed

SIZES = st.integers(0, 5000)


def images(data, size):
    """An old image, and a new one that differs in as many places as is drawn, some of them far apart."""
    old = np.frombuffer(data.draw(st.binary(min_size=size, max_size=size)), np.uint8)
    new = old.copy()
    for at in data.draw(st.lists(st.integers(0, max(0, size - 1)), max_size=40)) if size else ():
        new[at] = data.draw(st.integers(0, 255))
    return old.tobytes(), new.tobytes()


@given(st.data(), SIZES)
def test_the_old_image_and_its_changes_make_the_new_one_bit_by_bit(data, size):
    old, new = images(data, size)
    memory = bytearray(old)

    apply(changes(memoryview(old), memoryview(new)), memoryview(memory))

    assert memory == new


@given(st.binary(min_size=1, max_size=600), st.binary(min_size=1, max_size=600))
def test_images_that_have_nothing_in_common_come_out_whole(old, new):
    size = min(len(old), len(new))
    memory = bytearray(old[:size])

    apply(changes(memoryview(old)[:size], memoryview(new)[:size]), memoryview(memory))

    assert memory == new[:size]


@given(st.data(), SIZES)
def test_words_are_counted_and_nothing_is_told_of_the_same_image_twice(data, size):
    old, new = images(data, size)
    padded = [np.frombuffer(image + bytes(size % 2), np.uint16) for image in (old, new)]

    assert num_changed(memoryview(old), memoryview(new)) == np.count_nonzero(padded[0] != padded[1])
    assert len(changes(memoryview(old), memoryview(old))) < 20


@given(st.binary(max_size=200), st.integers(0, 300))
def test_what_are_no_changes_is_refused_and_writes_nowhere_else(found, size):
    memory = bytearray(size + 8)

    with suppress(ValueError):
        apply(found, memoryview(memory)[:size])

    assert not any(memory[size:])


def test_changes_of_a_longer_image_are_refused():
    old, new = bytes(1000), bytes(998) + b"ab"

    with pytest.raises(ValueError, match="no changes of a piece of 500 bytes"):
        apply(changes(memoryview(old), memoryview(new)), memoryview(bytearray(500)))


def test_one_word_in_a_hundred_that_moves_by_one_takes_less_than_a_hundredth_of_the_bytes():
    rng = np.random.default_rng(1)
    old = rng.integers(0, 1 << 16, 1 << 20, np.uint16)
    new = old.copy()
    new[rng.random(len(new)) < 0.01] += 1

    assert NUM_BYTES < len(changes(memoryview(old).cast("B"), memoryview(new).cast("B"))) < 0.01 * old.nbytes
