"""Tinker's messages in Protocol Buffers: what a client sends to forward_backward, and what it reads of that and of samples.

The schema is written out below, since it is published in no other form than the SDK's descriptor, of package tinker_public.
"""

import math
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from rubato.actors.gateway.session import Refused
from rubato.actors.messages.tinker import Computed, Datum, ForwardBackward, Tensor

PROTOBUF = "application/x-protobuf"

PACKAGE = "tinker_public"

MESSAGES: Mapping[str, str] = {
    "SampleResponse": "1* SampledSequence sequences, 2? bytes prompt_logprobs, 3? TopkLogprobs topk_prompt_logprobs, 4 int32 prompt_cache_hit_tokens",
    "SampledSequence": "1 int32 stop_reason, 2 bytes tokens, 3? bytes logprobs, 4? TopkLogprobs topk_sampled_logprobs",
    "TopkLogprobs": "1 bytes token_ids, 2 bytes logprobs, 3 uint32 k, 4 uint32 length",
    "SparseCsr": "1 bytes values, 2 bytes crow_indices, 3 bytes col_indices",
    "Tensor": "1? bytes dense, 2? SparseCsr sparse_csr, 3 int32 dtype, 4* int64 shape",
    "BatchedTensor": "1 bytes data, 2 bytes offsets, 3 int32 dtype, 4* int64 trailing_shape",
    "ArrayRecord": "1 string type_tag, 2* Field fields, 3 int64 num_datums",
    "Field": "1 string key, 2 BatchedTensor value",
    "ForwardBackwardOutput": "1 string loss_fn_output_type, 2* ArrayRecord loss_fn_outputs, 3* Metric metrics",
    "Metric": "1 string key, 2 double value",
    "ForwardBackwardRequest": "1 string model_id, 2 int32 seq_id, 3* Datum data, 4 string loss_fn, 5* Metric loss_fn_config, 6 bool forward_only, "
    "7* Setting loss_fn_config_v2",
    "Setting": "1 string key, 2 LossConfigValue value",
    "LossConfigValue": "1? double number, 2? string text",
    "Datum": "1* Chunk model_input, 2* Input loss_fn_inputs, 3* ProvenanceSpan model_input_spans, 4* ProvenanceSpan loss_fn_input_spans",
    "Input": "1 string key, 2 Tensor value",
    "ProvenanceSpan": "1? Span prompt_tokens, 2? Span sampled_tokens",
    "Span": "1 string sequence_id, 2 int64 offset, 3 int64 length",
    "Chunk": "1? EncodedTextChunk encoded_text, 2? Opaque image, 3? Opaque dmel",
    "EncodedTextChunk": "1 bytes tokens",
    "Opaque": "",
}
"""Fields as `NUMBER[*|?] TYPE NAME`: * repeated, ? with presence. On the wire a map is repeated entries of key and value, an enum an int32, a
member of a oneof a field with presence."""

STOP, LENGTH = 0, 1
"""Of `stop_reason`."""

FLOAT32, INT64, INT32 = 1, 2, 3
"""Of `dtype`."""

MOST_DIMENSIONS = 8

MOST_DATA = 4096
"""Sequences of one request; the SDK sends up to 1024."""


@cache
def message(name: str) -> Any:
    """The class of one of MESSAGES."""
    return _classes()[name]


@cache
def _classes() -> Mapping[str, Any]:
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    kinds = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="rubato/tinker.proto", package=PACKAGE, syntax="proto3")
    for name, fields in MESSAGES.items():
        described = file.message_type.add(name=name)
        for each in filter(None, fields.split(", ")):
            number, kind, title = each.split(" ")
            field = described.field.add(name=title, number=int(number.rstrip("*?")))
            field.label = kinds.LABEL_REPEATED if number.endswith("*") else kinds.LABEL_OPTIONAL
            if kind in MESSAGES:
                field.type, field.type_name = kinds.TYPE_MESSAGE, f".{PACKAGE}.{kind}"
                continue
            field.type = getattr(kinds, f"TYPE_{kind.upper()}")
            if number.endswith("?"):
                field.proto3_optional, field.oneof_index = True, len(described.oneof_decl)
                described.oneof_decl.add(name=f"_{title}")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{PACKAGE}.{name}")) for name in MESSAGES}


class Asked(NamedTuple):
    """One request to forward_backward."""

    model_id: str
    seq_id: int
    operation: ForwardBackward | None
    """None: it can't be carried out."""
    flaw: str = ""
    """Why, one sentence."""
    sequences: tuple[tuple[str, ...], ...] = ()
    """Of each datum, ids of the sampled sequences that its client says it is made of."""


class Flawed(Exception):
    """What a client sent can't be worked on: one sentence."""


def asked_in(body: bytes) -> Asked:
    """Raises Refused for a body that is no such request, or names no model."""
    from google.protobuf.message import DecodeError

    try:
        request = message("ForwardBackwardRequest").FromString(body)
    except (DecodeError, UnicodeDecodeError):
        raise Refused(400, "invalid_request_error", "the body is no ForwardBackwardRequest in Protocol Buffers") from None
    if not request.model_id or request.seq_id < 1:
        raise Refused(400, "invalid_request_error", "the body has no model_id, or no seq_id from 1 on")
    try:
        if not 0 < len(request.data) <= MOST_DATA:
            raise Flawed(f"data has {len(request.data):,} sequences; 1 to {MOST_DATA} can be computed in one request")
        data = tuple(_datum(each, number) for number, each in enumerate(request.data))
        operation = ForwardBackward(request.loss_fn, data, _config(request), request.forward_only)
    except Flawed as flaw:
        return Asked(request.model_id, request.seq_id, None, str(flaw))
    sequences = tuple(tuple(dict.fromkeys(_sequences(each))) for each in request.data)
    return Asked(request.model_id, request.seq_id, operation, sequences=sequences)


def named_in(start: bytes) -> tuple[str, int] | None:
    """(model_id, seq_id) by the first bytes of a request whose end is not there; None where they don't say."""
    if len(start) < 2 or start[0] != 0x0A:
        return None
    size, at = _varint(start, 1)
    name, at = start[at : at + size], at + size
    if start[at : at + 1] != b"\x10":
        return None
    seq_id, _ = _varint(start, at + 1)
    return name.decode(errors="replace"), seq_id


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """The number at that place, and where it ends."""
    value = shift = 0
    while at < len(data) and shift < 35:
        value |= (data[at] & 0x7F) << shift
        shift, at = shift + 7, at + 1
        if not data[at - 1] & 0x80:
            break
    return value, at


def _config(request: Any) -> dict[str, float]:
    config = {each.key: each.value for each in request.loss_fn_config}
    for each in request.loss_fn_config_v2:
        if each.value.HasField("text"):
            raise Flawed(f"loss_fn_config.{each.key[:64]} is a text, and no loss here takes one")
        config[each.key] = each.value.number
    return config


def _datum(datum: Any, number: int) -> Datum:
    tokens = bytearray()
    for chunk in datum.model_input:
        if not chunk.HasField("encoded_text"):
            kind = "image" if chunk.HasField("image") else "audio" if chunk.HasField("dmel") else "unknown"
            raise Flawed(f"data[{number}].model_input has a chunk of kind {kind}: models here read text alone")
        tokens += chunk.encoded_text.tokens
    if not tokens or len(tokens) % 4:
        raise Flawed(f"data[{number}].model_input has {len(tokens)} bytes of tokens, and each has 4")
    inputs = {each.key: _tensor(each.value, f"data[{number}].loss_fn_inputs.{each.key[:64]}") for each in datum.loss_fn_inputs}
    return Datum(bytes(tokens), inputs)


def _tensor(tensor: Any, where: str) -> Tensor:
    if tensor.HasField("sparse_csr"):
        raise Flawed(f"{where} is sparse, which can't be had here: send it dense")
    if tensor.dtype not in (FLOAT32, INT64, INT32):
        raise Flawed(f"{where} has dtype {tensor.dtype}; float32 and int64 can be had here")
    data, item = tensor.dense, 8 if tensor.dtype == INT64 else 4
    if len(tensor.shape) > MOST_DIMENSIONS:
        raise Flawed(f"{where} has {len(tensor.shape):,} dimensions; up to {MOST_DIMENSIONS} can be had here")
    shape = tuple(tensor.shape) or (len(data) // item,)
    count = math.prod(shape)
    if min(shape) < 0 or count * item != len(data):
        raise Flawed(f"{where} has shape {list(shape)} and {len(data):,} bytes, which is not {item} bytes for each element")
    if tensor.dtype == INT32:
        data = np.frombuffer(data, np.int32).astype(np.int64).tobytes()
    return Tensor("float32" if tensor.dtype == FLOAT32 else "int64", shape, data)


def _sequences(datum: Any) -> list[str]:
    spans = (*datum.model_input_spans, *datum.loss_fn_input_spans)
    return [span.sampled_tokens.sequence_id for span in spans if span.HasField("sampled_tokens")]


def computed(outcome: Computed, data: Sequence[Datum], metrics: Mapping[str, float]) -> bytes:
    """A ForwardBackwardOutput. Targets of different width are records of their own."""
    told = message("ForwardBackwardOutput")(loss_fn_output_type="ArrayRecord")
    begin = 0
    while begin < len(data):
        trailing, end = _trailing(data[begin]), begin + 1
        while end < len(data) and _trailing(data[end]) == trailing:
            end += 1
        record = told.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=end - begin)
        for name, parts in (("logprobs", outcome.logprobs), ("elementwise_loss", outcome.losses)):
            own = parts[begin:end]
            offsets = np.array([0, *accumulate(map(len, own))], np.int64)  # of bytes
            value = record.fields.add(key=name).value
            value.data, value.offsets, value.dtype = b"".join(own), offsets.tobytes(), FLOAT32
            value.trailing_shape.extend(trailing)
        begin = end
    for key, value in {**outcome.metrics, **metrics}.items():
        told.metrics.add(key=key, value=value)
    return told.SerializeToString()


def metrics_in(body: bytes) -> tuple[int, dict[str, float]]:
    """Of a ForwardBackwardOutput: its number of sequences, and its metrics."""
    told = message("ForwardBackwardOutput").FromString(body)
    return sum(each.num_datums for each in told.loss_fn_outputs), {each.key: each.value for each in told.metrics}


def _trailing(datum: Datum) -> tuple[int, ...]:
    return datum.inputs["target_tokens"].shape[1:] if "target_tokens" in datum.inputs else ()


class Sampled(NamedTuple):
    """One completion: int32 ids and float32 log-probabilities."""

    tokens: bytes
    logprobs: bytes
    stopped: bool


class PromptScores(NamedTuple):
    """float32 of each token of a prompt, of which all but the newest `last` are left out; the likeliest `top` at each place."""

    logprobs: bytes
    last: int | None = None
    top: int = 0
    top_ids: bytes = b""
    top_logprobs: bytes = b""


def sampled(sequences: Sequence[Sampled], prompt: PromptScores | None) -> bytes:
    """A SampleResponse."""
    told = message("SampleResponse")()
    for each in sequences:
        told.sequences.add(stop_reason=STOP if each.stopped else LENGTH, tokens=each.tokens, logprobs=each.logprobs)
    if prompt is not None:
        scores = np.frombuffer(prompt.logprobs, np.float32).copy()
        if prompt.last is not None:
            scores[: len(scores) - prompt.last] = np.nan
        told.prompt_logprobs = scores.tobytes()
        if prompt.top:
            top = told.topk_prompt_logprobs
            top.k, top.length, top.token_ids, top.logprobs = prompt.top, len(scores), prompt.top_ids, prompt.top_logprobs
    return told.SerializeToString()


def last_of(tensor: Tensor) -> bytes:
    """Of its last element, an int64, the low half: all of it where that is a token."""
    return tensor.data[-8:-4]
