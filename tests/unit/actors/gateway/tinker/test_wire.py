"""Tinker's messages in Protocol Buffers."""

from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rubato.actors.gateway.session import Refused
from rubato.actors.gateway.tinker.wire import asked_in, computed, message, named_in
from rubato.actors.messages.tinker import Computed, Datum, Tensor
from tests.tinker_job import datum, output_of, request_of


@given(st.binary(max_size=200))
def test_bytes_of_any_kind_are_read_or_refused(body):
    named_in(body)
    with suppress(Refused):
        asked_in(body)


@given(st.integers(0, 300), st.binary(max_size=4))
def test_a_request_that_is_damaged_is_read_or_refused(at, put):
    whole = request_of("sess-1:train:0", 5, [datum(), datum(logprobs=[0.0] * 3, advantages=[1.0] * 3)], loss="ppo")
    with suppress(Refused):
        asked_in(whole[:at] + put + whole[at + len(put) :])


def test_a_request_says_in_its_first_bytes_whose_it_is():
    body = request_of("sess-1:train:0", 300, [datum()])
    assert named_in(body[:24]) == ("sess-1:train:0", 300)
    asked = asked_in(body)
    assert (asked.model_id, asked.seq_id, asked.flaw) == ("sess-1:train:0", 300, "")
    assert np.frombuffer(asked.operation.data[0].tokens, np.int32).tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda request: request.data[0].model_input.add().image.SetInParent(), "chunk of kind image"),
        (lambda request: request.data[0].loss_fn_inputs[0].value.sparse_csr.SetInParent(), "is sparse"),
        (lambda request: setattr(request.data[0].loss_fn_inputs[0].value, "dtype", 4), "dtype 4"),
        (lambda request: request.data[0].loss_fn_inputs[0].value.shape.append(-1), "shape"),
        (lambda request: request.data[0].loss_fn_inputs[0].value.shape.extend([2**62] * 100_000), "100,001 dimensions"),
        (lambda request: setattr(request.data[0].model_input[0].encoded_text, "tokens", b"123"), "3 bytes of tokens"),
        (lambda request: setattr(request.loss_fn_config_v2.add(key="kind").value, "text", "x"), "is a text"),
        (lambda request: request.ClearField("data"), "0 sequences"),
    ],
)
def test_what_cant_be_computed_is_named(change, why):
    request = message("ForwardBackwardRequest").FromString(request_of("m", 1, [datum()]))
    change(request)
    asked = asked_in(request.SerializeToString())
    assert asked.operation is None
    assert why in asked.flaw


def test_targets_of_different_width_are_told_in_their_order():
    shapes = [(2,), (2, 3), (1, 3), (1,)]
    data = [Datum(b"", {"target_tokens": Tensor("int64", shape, b"")}) for shape in shapes]
    parts = tuple(np.full(shape, number, np.float32).tobytes() for number, shape in enumerate(shapes))
    logprobs, metrics = output_of(computed(Computed(parts, parts, {"loss:sum": 2.0}), data, {"rubato/unknown_frac:mean": 1.0}))
    assert logprobs == [[0.0] * 2, [1.0] * 6, [2.0] * 3, [3.0]]
    assert metrics == {"loss:sum": 2.0, "rubato/unknown_frac:mean": 1.0}
