"""A transformers model as it is trained: reading it, log-probabilities from its hidden states, and its weights as a safetensors image.

Sequences stand end to end in one row, without padding: each attends to itself alone, and its positions begin at 0. All of a model that
looks at one token at a time computes on the row as it is. Attention takes it apart again: on a GPU in half precision by a kernel for
sequences of any lengths, else in buckets of sequences of nearly one length, padded to the longest. No mask of tokens by tokens exists, so a
row may be as long as memory allows.

Shapes: B sequences of at most T tokens, L tokens of a row, N tokens that are asked for, C of them at a time, D hidden size, H heads, V
vocabulary entries.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from torch import Tensor
from torch.nn.functional import linear

from rubato.actors.plugins import MIXTURE, VARLEN
from rubato.actors.plugins import load as load_plugin
from rubato.actors.training.train_engine import TrainError

LOGITS_AT_ONCE = 2**26
"""Float32 logits that exist at once, 256 MiB: 441 tokens of a vocabulary of 152,000, enough to keep a matrix product busy."""


def token_logprobs(hidden_ND: Tensor, head: Any, tokens_N: Tensor, temperatures_N: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities of `tokens_N`, and the entropy of each distribution (nats, without a gradient); both [N] float32.

    The distribution is softmax(logits / temperature) with logits from `head`, a Linear of the model: what the tokens were sampled from.
    Logits exist for a chunk of tokens at a time, forward and backward, which computes them again.
    """
    return _HeadLogprobs.apply(hidden_ND, head.weight, head.bias, tokens_N, temperatures_N)  # type: ignore[return-value]


class Computed(NamedTuple):
    """What a model says of a MicroBatch."""

    logprobs_N: Tensor
    entropy_N: Tensor
    imbalance: Tensor | None
    """Of its experts, where it has any and its routers are watched."""


def policy_logprobs(model: Any, batch: Any) -> Computed:
    """`token_logprobs` of the targets of a MicroBatch under a model for causal language modelling."""
    found = computed(model, batch.tokens_L, batch.row)
    hidden_ND = found.hidden_LD[batch.places_N]
    logprobs_N, entropy_N = token_logprobs(hidden_ND, model.get_output_embeddings(), batch.targets_N, batch.temperatures_N)
    uneven = None
    if found.routed and torch.is_grad_enabled():
        uneven = mixture_of(model).imbalance(found.routed, batch.row, batch.shares_S)
    return Computed(logprobs_N, entropy_N, uneven)


def read_model(folder: Path, dtype: str, device: torch.device) -> Any:
    """A model from an HF folder, without dropout, whose noise no engine samples with.

    Raises TrainError, one sentence, where it can't be loaded, or where its logits are not its head's output (Gemma 2 caps them).
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=getattr(torch, dtype), attn_implementation="sdpa", local_files_only=True, output_loading_info=True
        )
        model, told = loaded[0].to(device).eval(), loaded[1]
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise TrainError(f"model folder {folder} can't be loaded: {str(error).splitlines()[0]}") from error
    if made_up := sorted(told["missing_keys"]):
        more = f" and {len(made_up) - 1} more" if len(made_up) > 1 else ""
        raise TrainError(f"model folder {folder} lacks {made_up[0]}{more}, which would be made up: save the whole model again")
    prepare(model)
    with torch.no_grad():
        if not has_plain_logits(model):
            raise TrainError(f"model folder {folder}: {type(model).__name__} scales or caps its logits, which is not built in")
        let_pack(model)
    return model


def prepare(model: Any) -> None:
    """What a model that was read needs before it is called: its `mixture_of`. Raises TrainError."""
    mixed = any(name.endswith(".experts.gate_up_proj") for name, _ in model.named_parameters())
    model.rubato_mixture = load_plugin(MIXTURE)(model) if mixed else None


def mixture_of(model: Any) -> Any:
    """What knows of a model's experts, see actors/training/experts.py; None where it has none."""
    return getattr(model, "rubato_mixture", None)


def has_plain_logits(model: Any) -> bool:
    """Whether a model's logits are its head's output."""
    head = model.get_output_embeddings()
    ids_BT = torch.arange(4, device=head.weight.device).unsqueeze(0)
    expected_BTV = head(model.base_model(ids_BT, use_cache=False).last_hidden_state)
    return torch.allclose(model(ids_BT, use_cache=False).logits, expected_BTV, rtol=1e-3, atol=1e-6)


def checkpoint_layers(model: Any) -> None:
    """Keep no activations within layers; backward computes them again. Raises TrainError for a model that can't."""
    try:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    except ValueError as error:
        raise TrainError(f"train.gradient_checkpointing: {error}") from error
    for module in model.modules():
        if getattr(module, "gradient_checkpointing", False):
            module.training = True  # of the layer alone, which asks for it: its parts stay without dropout


def masters_of(model: Any, dtype: torch.dtype) -> dict[str, torch.nn.Parameter]:
    """The weights that have a gradient by name, each once, as an optimiser moves them; from here on the model computes with them in `dtype`.

    Where theirs is another type, the model computes with copies, and gradients add up in the weights' type, micro-batch by micro-batch.
    """
    masters: dict[str, torch.nn.Parameter] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        masters[name] = master = parameter if parameter.dtype == dtype else torch.nn.Parameter(parameter.detach())
        if master is not parameter:
            parameter.data = parameter.data.to(dtype)
            parameter.register_post_accumulate_grad_hook(partial(_hand_over, master))
    return masters


def take_masters(model: Any, masters: Mapping[str, torch.nn.Parameter]) -> None:
    """Round what an optimiser has moved to the type that the model computes in."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in masters and parameter is not masters[name]:
                parameter.copy_(masters[name])


def _hand_over(master: torch.nn.Parameter, parameter: Tensor) -> None:
    assert parameter.grad is not None
    grad = parameter.grad.to(master.dtype)
    master.grad = grad if master.grad is None else master.grad.add_(grad)
    parameter.grad = None


class _HeadLogprobs(torch.autograd.Function):
    """Gradient of log p_t by the logits is (onehot(t) - p) / temperature. Sums over chunks are float32, whatever the weights are."""

    @staticmethod
    def forward(
        ctx: Any, hidden_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None, tokens_N: Tensor, temperatures_N: Tensor
    ) -> tuple[Tensor, Tensor]:
        logprobs_N, entropy_N = (torch.empty(len(tokens_N), dtype=_wide(hidden_ND), device=hidden_ND.device) for _ in range(2))
        for part in chunks(hidden_ND, weight_VD):
            all_CV = _log_softmax(hidden_ND[part], weight_VD, bias_V, temperatures_N[part])
            logprobs_N[part] = all_CV.gather(-1, tokens_N[part].unsqueeze(-1)).squeeze(-1)
            entropy_N[part] = -torch.linalg.vecdot(all_CV.exp(), all_CV)
        ctx.save_for_backward(hidden_ND, weight_VD, bias_V, tokens_N, temperatures_N)
        ctx.mark_non_differentiable(entropy_N)
        return logprobs_N, entropy_N

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_N: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        hidden_ND, weight_VD, bias_V, tokens_N, temperatures_N = ctx.saved_tensors
        by_hidden_ND = torch.empty_like(hidden_ND)
        by_weight_VD = torch.zeros_like(weight_VD, dtype=_wide(hidden_ND)) if ctx.needs_input_grad[1] else None
        by_bias_V = torch.zeros_like(bias_V, dtype=_wide(hidden_ND)) if bias_V is not None and ctx.needs_input_grad[2] else None
        for part in chunks(hidden_ND, weight_VD):
            scale_C1 = (grad_N[part] / temperatures_N[part]).unsqueeze(-1)
            by_logits_CV = _log_softmax(hidden_ND[part], weight_VD, bias_V, temperatures_N[part]).exp_().mul_(-scale_C1)
            by_logits_CV = by_logits_CV.scatter_add_(-1, tokens_N[part].unsqueeze(-1), scale_C1).to(hidden_ND.dtype)
            by_hidden_ND[part] = by_logits_CV @ weight_VD
            if by_weight_VD is not None:
                by_weight_VD += by_logits_CV.t() @ hidden_ND[part]
            if by_bias_V is not None:
                by_bias_V += by_logits_CV.sum(0, dtype=by_bias_V.dtype)
        by_weight_VD, by_bias_V = (None if by is None else by.to(weight_VD.dtype) for by in (by_weight_VD, by_bias_V))
        return by_hidden_ND, by_weight_VD, by_bias_V, None, None


def likeliest(hidden_CD: Tensor, head: Any, num: int) -> tuple[Tensor, Tensor]:
    """The tokens that come next most likely, and their log-probabilities; both [C, num]."""
    ones_C = torch.ones(len(hidden_CD), device=hidden_CD.device)
    values, ids = _log_softmax(hidden_CD, head.weight, head.bias, ones_C).topk(num)
    return ids, values


def chunks(hidden_ND: Tensor, weight_VD: Tensor) -> Iterator[slice]:
    """Of as many hidden states as logits may exist of at once."""
    size = max(1, LOGITS_AT_ONCE // len(weight_VD))
    return (slice(at, at + size) for at in range(0, len(hidden_ND), size))


def _wide(tensor: Tensor) -> torch.dtype:
    """At least float32, whatever its type is."""
    return torch.promote_types(tensor.dtype, torch.float32)


def _log_softmax(hidden_CD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, temperatures_C: Tensor) -> Tensor:
    """[C, V], at least float32. In place, since this is what memory goes to."""
    logits_CV = linear(hidden_CD, weight_VD, bias_V).to(_wide(hidden_CD)).div_(temperatures_C.unsqueeze(-1))
    return logits_CV.sub_(logits_CV.logsumexp(-1, keepdim=True))


# -- sequences in a row -----------------------------------------------------------------------------------------------

ATTENTION = "rubato_packed"
"""The name under which transformers knows the attention of this module."""

NEAR = 0.75
"""The shortest sequence of a bucket is at least this share of its longest, so that attention computes on less than 4/3 of a row's tokens."""


class Bucket(NamedTuple):
    """Sequences that lie side by side in a row, from `begin` to `end`, and attend as a padded batch of `num` by `longest`."""

    begin: int
    end: int
    num: int
    longest: int
    places_L: Tensor | None
    """Where in the padded batch each token stands; None where they are equally long, and the batch is the row itself."""


class Row(NamedTuple):
    """Where the sequences of a row begin and end."""

    lengths: tuple[int, ...]
    rows_L: Tensor
    """The number of each token's sequence."""
    positions_L: Tensor
    """Of each token in its sequence."""
    ends: Tensor
    """[B + 1] int32: 0, and where each sequence ends."""
    buckets: tuple[Bucket, ...]

    @property
    def longest(self) -> int:
        return max(self.lengths)


def row_of(lengths: Sequence[int], device: torch.device) -> Row:
    """Of sequences of these lengths, of which those of like length should be neighbours."""
    counts = torch.tensor(lengths)
    ends = torch.cat([torch.zeros(1, dtype=counts.dtype), counts.cumsum(0)])
    rows_L = torch.repeat_interleave(torch.arange(len(lengths)), counts)
    positions_L = torch.arange(len(rows_L)) - ends[rows_L]
    buckets: list[Bucket] = []
    first = 0
    for last in range(1, len(lengths) + 1):
        if last < len(lengths) and min(lengths[first : last + 1]) >= NEAR * max(lengths[first : last + 1]):
            continue
        begin, end, longest = int(ends[first]), int(ends[last]), max(lengths[first:last])
        places_L = None
        if end - begin < (last - first) * longest:
            places_L = ((rows_L[begin:end] - first) * longest + positions_L[begin:end]).to(device)
        buckets.append(Bucket(begin, end, last - first, longest, places_L))
        first = last
    return Row(tuple(lengths), rows_L.to(device), positions_L.to(device), ends.to(device, torch.int32), tuple(buckets))


class Called(NamedTuple):
    """What a model makes of each token of a row."""

    hidden_LD: Tensor
    routed: tuple[Tensor, ...] = ()
    """Router logits of each layer that is a mixture of experts, where the model tells them."""


def computed(model: Any, tokens_L: Tensor, row: Row) -> Called:
    """Call a model. One that can't take rows gets its sequences padded."""
    if packs(model):
        found = model.base_model(tokens_L.unsqueeze(0), position_ids=row.positions_L.unsqueeze(0), use_cache=False, packed_row=row)
        return Called(found.last_hidden_state[0], tuple(getattr(found, "router_logits", None) or ()))
    tokens_BT = tokens_L.new_zeros(len(row.lengths), row.longest)
    tokens_BT[row.rows_L, row.positions_L] = tokens_L
    found = model.base_model(tokens_BT, use_cache=False)
    routed = getattr(found, "router_logits", None) or ()
    places_L = row.rows_L * row.longest + row.positions_L
    return Called(found.last_hidden_state.flatten(0, 1)[places_L], tuple(logits[places_L] for logits in routed))


def packs(model: Any) -> bool:
    """Whether a model takes rows."""
    return model.config._attn_implementation == ATTENTION


def let_pack(model: Any) -> bool:
    """Have a model take rows where it can, which is tried out; returns whether it does. Call it where nothing has a gradient.

    It can't where attention is not called by name, where layers look back in other ways (convolutions, recurrences), or where they attend
    in chunks.
    """
    before, config = model.config._attn_implementation, model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ())
    if not getattr(model, "_supports_attention_backend", False) or not kinds <= {"full_attention", "sliding_attention"}:
        return False
    _register()
    tokens_L = torch.arange(12, device=model.get_output_embeddings().weight.device) % config.vocab_size
    row = row_of([7, 5], tokens_L.device)
    expected_LD = computed(model, tokens_L, row).hidden_LD
    model.set_attn_implementation(ATTENTION)
    try:
        found_LD = computed(model, tokens_L, row).hidden_LD
    except (TypeError, ValueError, NotImplementedError):
        found_LD = torch.full_like(expected_LD, torch.nan)
    # What a neighbour adds to attention is orders of magnitude larger than what another order of sums does.
    most = 1e-4 if expected_LD.dtype == torch.float32 else 3e-2
    if not (found_LD - expected_LD).norm() <= most * expected_LD.norm():
        model.set_attn_implementation(before)
    return packs(model)


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packed_row: Row | None = None,
    sliding_window: int | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """[1, L, H, D], from [1, H, L, D] each, as transformers calls it. Without a row it is that of a batch without padding."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if packed_row is None:
        mask = _window_mask(query.shape[2], sliding_window, query.device)
        return sdpa_attention_forward(module, query, key, value, mask, **options)
    if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16):
        found = load_plugin(VARLEN)(query[0], key[0], value[0], packed_row, options.get("scaling"), sliding_window)
        if found is not None:
            return found.unsqueeze(0), None
    found_LHD: list[Tensor] = []
    for bucket in packed_row.buckets:
        q, k, v = (_padded(each[0].transpose(0, 1)[bucket.begin : bucket.end], bucket) for each in (query, key, value))
        mask = _window_mask(bucket.longest, sliding_window, query.device)
        found_BTHD, _ = sdpa_attention_forward(module, q, k, v, mask, **options)
        flat = found_BTHD.reshape(-1, *found_BTHD.shape[2:])
        found_LHD.append(flat if bucket.places_L is None else flat.index_select(0, bucket.places_L))
    return torch.cat(found_LHD).unsqueeze(0), None


def _padded(part_LHD: Tensor, bucket: Bucket) -> Tensor:
    """[B, H, T, D]."""
    if bucket.places_L is not None:
        empty = part_LHD.new_zeros(bucket.num * bucket.longest, *part_LHD.shape[1:])
        part_LHD = empty.index_copy(0, bucket.places_L, part_LHD)
    return part_LHD.unflatten(0, (bucket.num, bucket.longest)).transpose(1, 2)


def _window_mask(size: int, window: int | None, device: torch.device) -> Tensor | None:
    """[1, 1, T, T], true where a token looks; None where it looks at all before it."""
    if window is None or size <= window:
        return None
    return torch.ones(size, size, dtype=torch.bool, device=device).tril().triu(1 - window)[None, None]


@cache
def _register() -> None:
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, attention)


# -- weights as an image ------------------------------------------------------------------------------------------------

TYPES: Mapping[torch.dtype, str] = {torch.bfloat16: "BF16", torch.float32: "F32"}
"""Names of the types that a model computes in, as a safetensors header has them."""


class WeightsImage:
    """The place of each of a model's tensors, all of type `dtype`. Format: https://github.com/huggingface/safetensors#format.

    One image is written at a time: on a GPU its tensors pass through pinned memory that the next one uses again. A tensor that holds NaN or
    infinity raises TrainError as the image is written, or becomes whole.
    """

    def __init__(self, tensors: Mapping[str, Tensor], dtype: torch.dtype, told: Mapping[str, str] | None = None) -> None:
        """`told` is what the header says of the whole."""
        self._dtype = dtype
        places: dict[str, object] = {"__metadata__": told} if told else {}
        at = 0
        for name, tensor in tensors.items():
            begin, at = at, at + tensor.numel() * dtype.itemsize
            places[name] = {"dtype": TYPES[dtype], "shape": list(tensor.shape), "data_offsets": [begin, at]}
        header = json.dumps(places).encode()
        header += b" " * (-len(header) % 8)
        self._head = len(header).to_bytes(8, "little") + header
        self._pinned: Tensor | None = None
        self.check: Callable[[], None] = _nothing
        """Blocks until what was written last has left the GPU. Raises TrainError where a tensor of it isn't finite."""
        self.size_bytes = len(self._head) + at

    def write(self, tensors: Mapping[str, Tensor], memory: memoryview) -> Callable[[], None]:
        """Write the present values, rounded to `dtype`, into `memory`, `size_bytes` long; they may change once this returns.

        The image is whole when what is returned was called, from any thread: on a GPU it waits for the copies, which are under way.
        """
        memory[: len(self._head)] = self._head
        body = torch.frombuffer(memory, dtype=self._dtype, offset=len(self._head))
        device = next(iter(tensors.values())).device
        if device.type != "cuda":
            self._copy(tensors, body)
            return _nothing
        if self._pinned is None:
            self._pinned = torch.empty_like(body, pin_memory=True)
        copies = self._copy(tensors, self._pinned)
        landed = torch.cuda.Event()
        # Later kernels of this stream, those of the next update among them, run after the copies.
        landed.record(torch.cuda.current_stream(device))
        self.check = partial(_check, landed, copies)
        return partial(_land, self.check, self._pinned, body)

    def _copy(self, tensors: Mapping[str, Tensor], to: Tensor) -> "Copies":
        copies = Copies()
        places = to.split([tensor.numel() for tensor in tensors.values()])
        for (name, tensor), place in zip(tensors.items(), places, strict=True):
            copies.add(name, tensor.detach(), place)
        return copies


class Copies:
    """Copies of weights into an image, looked at in the pass that makes them: a sum is finite where all that it adds up is.

    A sum may overflow too, so what has none that is finite is looked at once more. Tensors of a CPU are checked as they are copied; on a GPU
    sums stay on the stream until `check`.
    """

    def __init__(self) -> None:
        self._unread: list[tuple[str, Tensor, Tensor]] = []
        """Name, copy and sum."""

    def add(self, name: str, values: Tensor, to: Tensor) -> None:
        """Copy `values` into `to`, as long and of one dimension, rounded to its type. Raises TrainError where the tensor `name` isn't finite."""
        values = values.reshape(-1)
        if values.is_cuda:
            rounded = values.to(to.dtype)
            to.copy_(rounded, non_blocking=to.is_pinned())
            self._unread.append((name, to, rounded.sum(dtype=torch.float32)))
            return
        for begin in range(0, len(values), PIECE):  # the sum reads what the cache still has
            piece = to[begin : begin + PIECE]
            piece.copy_(values[begin : begin + PIECE])
            _require_finite(name, piece, piece.sum().item())

    def check(self) -> None:
        """Read the sums of a GPU, whose copies must have landed. Raises TrainError as `add`."""
        sums = torch.stack([each[2] for each in self._unread]).tolist() if self._unread else []
        for (name, copy, _), total in zip(self._unread, sums, strict=True):
            _require_finite(name, copy, total)


PIECE = 1 << 18
"""Numbers copied at once: they stay in a core's cache."""


def _require_finite(name: str, values: Tensor, total: float) -> None:
    if not math.isfinite(total) and not values.isfinite().all():
        raise TrainError(
            f"{name} is not finite, so this version of the weights is not published: training diverged, or the model that it began with is "
            "damaged. Go on from an earlier checkpoint with a lower train.lr"
        )


def _check(landed: torch.cuda.Event, copies: Copies) -> None:
    landed.synchronize()
    copies.check()


def _land(check: Callable[[], None], pinned: Tensor, body: Tensor) -> None:
    check()
    body.copy_(pinned)


def _nothing() -> None:
    pass
