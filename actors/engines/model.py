"""A decoder of the Llama, Qwen2, Qwen3 or Qwen3-MoE family: its weights as the forward pass wants them, the KV cache, and the pass over one packed batch.

A step's tokens are packed without padding; attention says where their keys and values lie.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from rubato.actors.checkpoints.hf_files import ModelConfig, Rope, read_header
from rubato.actors.checkpoints.model_folder import EMBED, HEAD, Slice
from rubato.actors.engines.engine import EngineDead, EngineError
from rubato.actors.engines.scheduler import Row
from rubato.actors.plugins import MIXTURE_LAYER
from rubato.actors.plugins import load as load_plugin

CALL_POSITIONS = 1000
"""A row that attends alone costs about as much more as reading this many KV positions of 64 floats (measured: 30 µs a layer)."""

SHORT = 64
"""Rows of up to this many tokens may attend together, padded to the longest."""

QUERIES = 8
"""This many queries on a KV position cost about as much as reading it."""


class RowGroup(NamedTuple):
    """Packed tokens [begin, end) of rows that attend together: a grid of B places with `width` queries each."""

    begin: int
    end: int
    width: int
    first: int
    last: int
    length: int
    slots: Tensor | None
    """[B] the slots to gather; None: B is the whole range [first, last), read in place."""
    places: Tensor | None
    """[end - begin] where each token stands in the flattened grid; None when they fill it in order."""
    mask: Tensor
    """[B, 1, width · queries per KV head, length] (or 1 for the third), 0 or -inf: hides what is not theirs."""


class Piece(NamedTuple):
    """Packed tokens [begin, end) of one slot, which attend over its first `length` positions."""

    begin: int
    end: int
    slot: int
    length: int
    causal: bool
    mask: Tensor | None
    """[end - begin, length], for a piece that continues a cached history."""


class PackedBatch(NamedTuple):
    """T packed tokens of one step."""

    ids: Tensor
    positions: Tensor
    rows: Tensor
    """[T] where each token's key and value go: slot · max_len + position."""
    groups: tuple[RowGroup, ...]
    """They come first, in order; then the pieces."""
    pieces: tuple[Piece, ...]
    last: Tensor | None
    """[R] the tokens after which one is sampled; None when that is all of them, in order."""


class AttentionShape(NamedTuple):
    """What decides how attention is split: the cache's slot length, KV floats per position (K·D), queries per KV head, threads."""

    max_len: int
    kv_width: int
    folded: int
    threads: int
    device: torch.device
    dtype: torch.dtype


def arrange(rows: Sequence[Row]) -> list[Row]:
    """The order in which a batch packs them: single tokens, short rows, long ones."""
    return sorted(rows, key=lambda row: (_kind(row.end - row.start), row.sequence.slot))


def _kind(num: int) -> int:
    return 0 if num == 1 else 1 if num <= SHORT else 2


def build(rows: Sequence[Row], shape: AttentionShape) -> PackedBatch:
    """Tensors for `rows`, which `arrange` ordered."""
    ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    last: list[int] = []
    for sequence, start, end in rows:
        if end - start == 1:
            ids.append(sequence.tokens[start])
            positions.append(start)
            slots.append(sequence.slot)
        else:
            ids += sequence.tokens[start:end]
            positions += range(start, end)
            slots += [sequence.slot] * (end - start)
        if end == len(sequence.tokens):
            last.append(len(ids) - 1)
    table = np.array((ids, positions, slots), np.int64)
    table[2] = table[2] * shape.max_len + table[1]
    on_device = torch.from_numpy(table).to(shape.device)
    everywhere = len(last) == len(ids)
    chosen = None if everywhere else torch.tensor(last, dtype=torch.int64, device=shape.device)
    groups, loose = _groups(rows, shape)
    pieces = _pieces(loose, groups[-1].end if groups else 0, shape)
    return PackedBatch(on_device[0], on_device[1], on_device[2], groups, pieces, chosen)


def _groups(rows: Sequence[Row], shape: AttentionShape) -> tuple[tuple[RowGroup, ...], Sequence[Row]]:
    """The groups that are worth it, and the rows that are left. Those come after every group, or the order would not hold."""
    groups: list[RowGroup] = []
    begin = 0
    kinds = [_kind(row.end - row.start) for row in rows]
    singles, shorts = kinds.count(0), kinds.count(1)
    for num in (singles, shorts) if singles > 1 else (singles + shorts,):
        group = _group(rows[:num], begin, shape) if num > 1 else None
        if group is not None:
            groups.append(group)
            begin, rows = group.end, rows[num:]
        elif num:
            break
    return tuple(groups), rows


def _group(rows: Sequence[Row], begin: int, shape: AttentionShape) -> RowGroup | None:
    """Attend together when that costs less than row by row would: gathered, or as a range of slots where few are idle."""
    starts, ends, slots = np.array([(start, end, sequence.slot) for sequence, start, end in rows], np.int64).T
    sizes = ends - starts
    num, width, length = len(rows), int(sizes.max()), int(ends.max())
    first, last = int(slots.min()), int(slots.max()) + 1
    gathered = last - first > 2 * num
    floats = shape.kv_width / 64
    apart = num * CALL_POSITIONS + floats * float((ends * (1 + sizes / QUERIES)).sum())
    reads = 2 * num if gathered else last - first
    together = floats * (reads + num * width / QUERIES) * length
    if shape.device.type == "cpu" and together / shape.threads > apart:
        return None
    grid = np.arange(num) if gathered else slots - first
    held = np.zeros(num if gathered else last - first, np.int64)
    held[grid] = starts
    places = None
    if width > 1 or len(held) > num:
        within = np.arange(int(sizes.sum())) - np.repeat(sizes.cumsum() - sizes, sizes)
        places = torch.from_numpy(np.repeat(grid * width, sizes) + within).to(shape.device)
    index = torch.from_numpy(slots).to(shape.device) if gathered else None
    end = begin + int(sizes.sum())
    return RowGroup(begin, end, width, first, last, length, index, places, _mask(held, width, length, shape))


def _mask(starts: np.ndarray, width: int, length: int, shape: AttentionShape) -> Tensor:
    """Query j of a place sees the positions up to its start + j. Each is repeated for the heads folded into the query length."""
    hidden = np.arange(length) > (starts[:, None] + np.arange(width))[..., None]
    if width > 1:
        hidden = hidden.repeat(shape.folded, 1)
    mask = torch.zeros(hidden.shape, dtype=shape.dtype).masked_fill_(torch.from_numpy(hidden), -torch.inf)
    return mask.unsqueeze(1).to(shape.device)


def _pieces(rows: Sequence[Row], begin: int, shape: AttentionShape) -> tuple[Piece, ...]:
    pieces: list[Piece] = []
    for sequence, start, end in rows:
        num = end - start
        mask = None
        if start and num > 1:
            mask = torch.full((num, end), -torch.inf, dtype=shape.dtype, device=shape.device).triu_(start + 1)
        pieces.append(Piece(begin, begin + num, sequence.slot, end, num > 1 and not start, mask))
        begin += num
    return tuple(pieces)


class KVCache:
    """Keys and values of `num_slots` slots of `max_len` positions. Which slot belongs to whom is the scheduler's business."""

    def __init__(self, config: ModelConfig, num_slots: int, max_len: int, device: torch.device, dtype: torch.dtype) -> None:
        heads, size = config.num_kv_heads, config.head_dim
        self._groups = (heads, config.num_heads // heads, size)
        width = heads * size
        try:
            # Zeros, not empty: a masked position is multiplied by 0, and 0 · NaN would be NaN.
            self._table = torch.zeros(2, config.num_layers, num_slots * max_len, width, device=device, dtype=dtype)
        except RuntimeError as error:
            size_gb = 2 * config.num_layers * num_slots * max_len * width * dtype.itemsize / 1e9
            # On a GPU another process may give its memory back in a moment.
            refused = EngineError if device.type == "cpu" else EngineDead
            raise refused(f"a KV cache of {size_gb:.1f} GB does not fit: lower engine.num_slots or engine.max_len ({error})") from None
        self._max_len = max_len
        self._shape = (num_slots, max_len, heads, size)
        self._view()

    def _view(self) -> None:
        self._keys = list(self._table[0])
        self._values = list(self._table[1])
        self._key_slots = [t.view(self._shape) for t in self._keys]
        self._value_slots = [t.view(self._shape) for t in self._values]

    def on(self, device: torch.device, *, kept: bool = True) -> None:
        """Be on `device`; what is not `kept` is zeros there."""
        self._table = self._table.to(device) if kept else torch.zeros(self._table.shape, device=device, dtype=self._table.dtype)
        self._view()

    def drop(self) -> None:
        """Hold no memory, until it is somewhere with nothing kept."""
        self._table = self._table.new_zeros(()).expand(self._table.shape)
        self._view()

    def shape_of(self, num_tokens: int) -> tuple[int, ...]:
        """[2, layers, tokens, K·D] of so many tokens."""
        return (2, self._table.shape[1], num_tokens, self._table.shape[3])

    def num_bytes(self, num_tokens: int) -> int:
        return math.prod(self.shape_of(num_tokens)) * self._table.itemsize

    def take(self, slot: int, num_tokens: int) -> Tensor:
        """A copy on the host of the slot's first tokens, shaped `shape_of`."""
        return self._rows(slot, num_tokens).to("cpu", copy=True).contiguous()

    def put(self, slot: int, taken: Tensor) -> None:
        """What `take` gave, from the slot's first position on."""
        self._rows(slot, taken.shape[2]).copy_(taken)

    def _rows(self, slot: int, num_tokens: int) -> Tensor:
        return self._table[:, :, slot * self._max_len : slot * self._max_len + num_tokens]

    def write(self, layer: int, rows: Tensor, keys: Tensor, values: Tensor) -> None:
        """Put `keys` and `values` [T, K·D] at `rows` (slot · max_len + position)."""
        self._keys[layer].index_copy_(0, rows, keys)
        self._values[layer].index_copy_(0, rows, values)

    def attend(self, layer: int, q_THD: Tensor, batch: PackedBatch) -> Tensor:
        """Attention of the batch's tokens over what their slots hold, themselves included: [T, H·D]."""
        keys, values = self._key_slots[layer], self._value_slots[layer]
        parts = [self._together(keys, values, q_THD, group) for group in batch.groups]
        parts += [_alone(keys, values, q_THD, piece) for piece in batch.pieces]
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def _together(self, keys: Tensor, values: Tensor, q_THD: Tensor, group: RowGroup) -> Tensor:
        """Heads that share a KV head are folded into the query length, so nothing is repeated."""
        heads, folded, size = self._groups
        num, width = group.mask.shape[0], group.width
        q = q_THD[group.begin : group.end]
        if group.places is not None:
            grid = q.new_zeros(num * width, heads * folded, size)
            q = grid.index_copy_(0, group.places, q)
        q = q.reshape(num, width, heads, folded, size).transpose(1, 2).reshape(num, heads, width * folded, size)
        k, v = _of(keys, group).transpose(1, 2), _of(values, group).transpose(1, 2)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=group.mask)
        out = out.unflatten(2, (width, folded)).transpose(1, 2).reshape(num * width, heads * folded * size)
        return out if group.places is None else out.index_select(0, group.places)


def _of(table: Tensor, group: RowGroup) -> Tensor:
    if group.slots is None:
        return table[group.first : group.last, : group.length]
    return table[:, : group.length].index_select(0, group.slots)


def _alone(keys: Tensor, values: Tensor, q_THD: Tensor, piece: Piece) -> Tensor:
    begin, end, slot, length, causal, mask = piece
    q = q_THD.narrow(0, begin, end - begin).transpose(0, 1).unsqueeze(0)
    k = keys.narrow(0, slot, 1).narrow(1, 0, length).transpose(1, 2)
    v = values.narrow(0, slot, 1).narrow(1, 0, length).transpose(1, 2)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=True)
    return out.transpose(1, 2).reshape(end - begin, -1)


DTYPES: Mapping[str, torch.dtype] = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class Layer(NamedTuple):
    """One decoder layer. H heads, K KV heads of size D; hidden size E, intermediate size F.

    Projections are stored transposed, [in, out]: at decode's batch sizes that multiplies 15 % faster on CPU.
    """

    input_norm: Tensor
    qkv: Tensor
    """[E, (H + 2K)·D]; each q and k head's columns reordered so that rotary pairs are neighbours."""
    qkv_bias: Tensor | None
    qk_norm: Tensor | None
    """[H + K, D], reordered alike."""
    out: Tensor
    out_bias: Tensor | None
    post_norm: Tensor
    gate_up: Tensor
    """[E, 2F]: gate first."""
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None
    mixture: Any = None
    """See engines/experts.py: it computes in place of gate_up and down, which are empty."""


Take = Callable[..., Tensor]
"""`take(name, shape, name, shape, …)`: these tensors, concatenated along the first axis into memory of our own."""


class Weights(NamedTuple):
    """A whole model. `head` is [E, vocab]."""

    embed: Tensor
    layers: tuple[Layer, ...]
    norm: Tensor
    head: Tensor


def tensors_of(image: memoryview, source: str) -> dict[str, Tensor]:
    """Views into a safetensors image, nothing copied: valid while `image` is mapped, and never to be written.

    Raises EngineError, naming `source`, when the image is malformed.
    """
    data = np.asarray(_Window(image))
    found: dict[str, Tensor] = {}
    for name, entry in read_header(image, source).items():
        raw = torch.from_numpy(data[entry.begin : entry.end])
        dtype = DTYPES[entry.dtype]
        if raw.numel() and raw.data_ptr() % dtype.itemsize:
            raw = raw.clone()
        found[name] = raw.view(dtype).view(entry.shape)
    return found


def expected(tensors: Mapping[str, Tensor], name: str, shape: tuple[int, ...], source: str) -> Tensor:
    """The tensor called `name`. Raises EngineError, naming `source`, when it is missing or has another shape."""
    tensor = tensors.get(name)
    if tensor is None:
        raise EngineError(f"{source} lacks {name}: it belongs to another model, or is incomplete")
    if tuple(tensor.shape) != shape:
        raise EngineError(f"{source}: {name} has shape {list(tensor.shape)}, but this model needs {list(shape)}")
    return tensor


def finite(tensor: Tensor, name: str, source: str) -> Tensor:
    """The tensor itself. Raises EngineError, naming `source`, when it holds NaN or infinity."""
    if not torch.isfinite(tensor.sum(dtype=torch.float32)) and not tensor.isfinite().all():  # a sum may overflow
        raise EngineError(f"{source}: {name} is not finite: the file is damaged")
    return tensor


def fuse(
    config: ModelConfig, tensors: Mapping[str, Tensor], source: str, device: torch.device, dtype: torch.dtype, *, published: bool = False
) -> Weights:
    """Copy HF tensors into fused ones. Raises EngineError, naming `source`, when one is missing, has another shape or isn't finite, which the
    trainer has seen to where it `published` them.
    """

    def take(*wanted: str | tuple[int, ...]) -> Tensor:
        parts = [expected(tensors, str(n), tuple(s), source) for n, s in zip(wanted[::2], wanted[1::2], strict=True)]  # type: ignore[arg-type]
        moved = [part.to(device, dtype) for part in parts]
        fused = moved[0].clone() if len(moved) == 1 else torch.cat(moved)
        return fused if published else finite(fused, str(wanted[0]), source)

    layers = tuple(_layer(config, take, f"model.layers.{i}.") for i in range(config.num_layers))
    vocab = (config.vocab_size, config.hidden_size)
    embed = take("model.embed_tokens.weight", vocab)
    head = embed if config.tied else take("lm_head.weight", vocab)
    return Weights(embed, layers, take("model.norm.weight", (config.hidden_size,)), head.t().contiguous())


def rotations(rope: Rope, head_dim: int, length: int, device: torch.device) -> Tensor:
    """[length, 1, D/2] complex64: what turns the neighbouring pairs of a head at each position."""
    inverse = rope.theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    if rope.kind == "linear":
        inverse = inverse / rope.factor
    elif rope.kind == "llama3":
        wavelength = 2 * math.pi / inverse
        span = rope.high_freq_factor - rope.low_freq_factor
        smooth = ((rope.original_length / wavelength - rope.low_freq_factor) / span).clamp(0.0, 1.0)
        inverse = inverse * (smooth + (1 - smooth) / rope.factor)
    angles = torch.outer(torch.arange(length, dtype=torch.float32), inverse)
    return torch.polar(torch.ones_like(angles), angles).unsqueeze(1).to(device)


def on_device(tensors: Any, device: torch.device) -> Any:
    """Weights, or a part of them, on `device`; what is there already is not copied."""
    if isinstance(tensors, Tensor):
        return tensors.to(device)
    if not isinstance(tensors, tuple):
        return tensors
    moved = [on_device(part, device) for part in tensors]
    make = getattr(tensors, "_make", tuple)  # NamedTuples have it
    return make(moved)


def array_of(data: memoryview, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    """A view into `data`, nothing copied and never to be written."""
    return torch.from_numpy(np.asarray(_Window(data))).view(dtype).view(*shape)


class _Window:
    """A read-only buffer shown to numpy as writable, since torch takes no other; nothing is written through it."""

    def __init__(self, image: memoryview) -> None:
        self._image = np.frombuffer(image, np.uint8)
        interface = dict(self._image.__array_interface__)
        interface["data"] = (interface["data"][0], False)
        self.__array_interface__ = interface


def _layer(config: ModelConfig, take: Take, at: str) -> Layer:
    e, f, d = config.hidden_size, config.intermediate_size, config.head_dim
    h, k = config.num_heads, config.num_kv_heads

    def qkv(kind: str, *tail: int) -> Tensor:
        names = [f"{at}self_attn.{x}_proj.{kind}" for x in "qkv"]
        fused = take(names[0], (h * d, *tail), names[1], (k * d, *tail), names[2], (k * d, *tail))
        turned = (h + k) * d
        return torch.cat((paired(fused[:turned], h + k), fused[turned:]))

    qk_norm = None
    if config.qk_norm:
        norms = [take(f"{at}self_attn.{x}_norm.weight", (d,)).expand(n, d) for x, n in (("q", h), ("k", k))]
        qk_norm = paired(torch.cat(norms).reshape(-1), h + k).view(h + k, d)
    mlp = [f"{at}mlp.{x}_proj." for x in ("gate", "up", "down")]
    mixture = None
    if config.experts:
        mixture = load_plugin(MIXTURE_LAYER).taken(take, at, config.experts, e)
        gate_up = down = torch.empty(0)
    else:
        gate_up = take(f"{mlp[0]}weight", (f, e), f"{mlp[1]}weight", (f, e)).t().contiguous()
        down = take(f"{mlp[2]}weight", (e, f)).t().contiguous()
    return Layer(
        take(f"{at}input_layernorm.weight", (e,)),
        qkv("weight", e).t().contiguous(),
        qkv("bias") if config.qkv_bias else None,
        qk_norm,
        take(f"{at}self_attn.o_proj.weight", (e, h * d)).t().contiguous(),
        take(f"{at}self_attn.o_proj.bias", (e,)) if config.out_bias else None,
        take(f"{at}post_attention_layernorm.weight", (e,)),
        gate_up,
        take(f"{mlp[0]}bias", (f,), f"{mlp[1]}bias", (f,)) if config.mlp_bias else None,
        down,
        take(f"{mlp[2]}bias", (e,)) if config.mlp_bias else None,
        mixture,
    )


def paired(rows: Tensor, heads: int) -> Tensor:
    """HF turns row i with row i + D/2 of a head; put such pairs next to each other. Dot products do not change."""
    split = rows.view(heads, 2, -1, *rows.shape[1:])
    return split.transpose(1, 2).reshape(rows.shape)


def stored_values(config: ModelConfig, weights: Weights, cut: Slice) -> Tensor | None:
    """A slice of the stored tensor `cut.name`, out of the fused ones. None for a tensor that nothing is computed with.

    A tied embedding is there twice: where the two differ, NaN is returned.
    """
    rows, columns = slice(cut.top, cut.bottom), slice(cut.left, cut.right)
    if cut.name == EMBED:
        values = weights.embed[rows, columns]
        if config.tied and not torch.equal(values, weights.head[columns, rows].t()):
            return torch.full_like(values, torch.nan)
        return values
    if cut.name == "model.norm.weight":
        return weights.norm[columns]
    if cut.name == HEAD:
        return None if config.tied else weights.head[columns, rows].t()
    _, _, index, name = cut.name.split(".", 3) if cut.name.startswith("model.layers.") else ("", "", "", "")
    if not index.isdecimal() or int(index) >= len(weights.layers):
        return None
    fused, offset, paired = _fused(config, weights.layers[int(index)], name)
    if fused is None:
        return None
    first, last = (cut.top, cut.bottom) if fused.ndim == 2 else (cut.left, cut.right)
    places: Any = slice(offset + first, offset + last)
    if paired:
        row, half = torch.arange(first, last, device=fused.device), config.head_dim // 2
        within = row % config.head_dim
        places = offset + row - within + within % half * 2 + within // half
    return fused[columns, places].t() if fused.ndim == 2 else fused[places]


def _fused(config: ModelConfig, layer: Layer, name: str) -> tuple[Tensor | None, int, bool]:
    """The tensor that holds `name` of a layer, transposed where it is a matrix; at which row it begins, and whether its rows are `paired`."""
    if layer.mixture is not None and name.startswith("mlp."):
        return layer.mixture.stored(name)
    parts, _, kind = name.rpartition(".")
    is_weight = kind == "weight"
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    norm = None if layer.qk_norm is None else layer.qk_norm.reshape(-1)
    tensors: dict[str, tuple[Tensor | None, int, bool]] = {
        "self_attn.q_proj": (layer.qkv if is_weight else layer.qkv_bias, 0, True),
        "self_attn.k_proj": (layer.qkv if is_weight else layer.qkv_bias, q, True),
        "self_attn.v_proj": (layer.qkv if is_weight else layer.qkv_bias, q + kv, False),
        "self_attn.o_proj": (layer.out if is_weight else layer.out_bias, 0, False),
        "mlp.gate_proj": (layer.gate_up if is_weight else layer.gate_up_bias, 0, False),
        "mlp.up_proj": (layer.gate_up if is_weight else layer.gate_up_bias, config.intermediate_size, False),
        "mlp.down_proj": (layer.down if is_weight else layer.down_bias, 0, False),
    }
    norms = {
        "input_layernorm": (layer.input_norm, 0, False),
        "post_attention_layernorm": (layer.post_norm, 0, False),
        "self_attn.q_norm": (norm, 0, True),
        "self_attn.k_norm": (norm, q, True),
    }
    return (tensors | norms if is_weight else tensors).get(parts, (None, 0, False))


Linear = Callable[[Tensor, Tensor, Tensor | None, int, str], Tensor]
"""`linear(x, weight, bias, layer, name)`: a product of the forward pass; `name` is that of the Layer's field with its weight."""


def plain(x: Tensor, weight: Tensor, bias: Tensor | None, layer: int, name: str) -> Tensor:
    """The product, whichever it is."""
    return torch.mm(x, weight) if bias is None else torch.addmm(bias, x, weight)


def forward(config: ModelConfig, weights: Weights, rotary: Tensor, cache: KVCache, batch: PackedBatch, linear: Linear = plain) -> Tensor:
    """Write the batch's keys and values into `cache`; returns float32 logits [R, vocab] of its `last` rows.

    `rotary` is `rotations(…)` for every position. T packed tokens, E hidden, H heads, K KV heads, D head size.
    """
    eps = torch.tensor(config.rms_eps, dtype=torch.float32)
    x_TE = F.embedding(batch.ids, weights.embed)
    turn = rotary.index_select(0, batch.positions)
    for i, layer in enumerate(weights.layers):
        qkv = linear(_norm(x_TE, layer.input_norm, eps), layer.qkv, layer.qkv_bias, i, "qkv")
        attended = _attention(config, layer, i, qkv, turn, cache, batch)
        if i == config.num_layers - 1 and batch.last is not None:
            # The last layer's output is only wanted where a token will be sampled.
            attended, x_TE = attended.index_select(0, batch.last), x_TE.index_select(0, batch.last)
        x_TE = x_TE + linear(attended, layer.out, layer.out_bias, i, "out")
        normed_TE = _norm(x_TE, layer.post_norm, eps)
        if layer.mixture is not None:
            x_TE = x_TE + layer.mixture.mixed(normed_TE)
            continue
        gate, up = linear(normed_TE, layer.gate_up, layer.gate_up_bias, i, "gate_up").chunk(2, -1)
        x_TE = x_TE + linear(F.silu(gate).mul_(up), layer.down, layer.down_bias, i, "down")
    return torch.mm(_norm(x_TE, weights.norm, eps), weights.head).float()


def _norm(x_TE: Tensor, weight: Tensor, eps: Tensor) -> Tensor:
    """On CPU in float32 these four kernels take 0.6 of the time of rms_norm, which is a chain of six there."""
    if x_TE.dtype != torch.float32 or x_TE.device.type != "cpu":
        return F.rms_norm(x_TE, weight.shape, weight, float(eps))
    norm = torch.linalg.vector_norm(x_TE, dim=-1, keepdim=True)
    return (x_TE * torch.addcmul(eps, norm, norm, value=1 / x_TE.shape[-1]).rsqrt_()).mul_(weight)


def _attention(config: ModelConfig, layer: Layer, i: int, qkv: Tensor, turn: Tensor, cache: KVCache, batch: PackedBatch) -> Tensor:
    heads, kv_heads, size = config.num_heads, config.num_kv_heads, config.head_dim
    num = qkv.shape[0]
    turned = (heads + kv_heads) * size
    qk = qkv[:, :turned].view(num, heads + kv_heads, size)
    if layer.qk_norm is not None:
        qk = F.rms_norm(qk, (size,), None, config.rms_eps) * layer.qk_norm
    pairs = torch.view_as_complex(qk.float().unflatten(-1, (-1, 2)))
    qk = torch.view_as_real(pairs * turn).flatten(-2).to(qkv.dtype)
    cache.write(i, batch.rows, qk[:, heads:].reshape(num, -1), qkv[:, turned:])
    return cache.attend(i, qk[:, :heads], batch)
