"""A transformers model as it is trained: reading it, log-probabilities from its hidden states, and its weights as a safetensors image.

Shapes: B sequences of T tokens, N tokens that are asked for, C of them at a time, D hidden size, V vocabulary entries.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from torch.nn.functional import linear

from actors.training.engine import TrainError

LOGITS_AT_ONCE = 2**26
"""Float32 logits that exist at once, 256 MiB: 441 tokens of a vocabulary of 152,000, enough to keep a matrix product busy."""


def token_logprobs(hidden_ND: Tensor, head: Any, tokens_N: Tensor, temperatures_N: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities of `tokens_N`, and the entropy of each distribution (nats, without a gradient); both [N] float32.

    The distribution is softmax(logits / temperature) with logits from `head`, a Linear of the model: what the tokens were sampled from.
    Logits exist for a chunk of tokens at a time, forward and backward, which computes them again.
    """
    return _HeadLogprobs.apply(hidden_ND, head.weight, head.bias, tokens_N, temperatures_N)  # type: ignore[return-value]


def policy_logprobs(model: Any, batch: Any) -> tuple[Tensor, Tensor]:
    """`token_logprobs` of the targets of a MicroBatch under a model for causal language modelling."""
    hidden_BTD = model.base_model(batch.tokens_BT, use_cache=False).last_hidden_state
    hidden_ND = hidden_BTD[batch.rows_N, batch.cols_N]
    return token_logprobs(hidden_ND, model.get_output_embeddings(), batch.targets_N, batch.temperatures_N)


def read_model(folder: Path, dtype: str, device: torch.device) -> Any:
    """A model from an HF folder, without dropout, whose noise no engine samples with.

    Raises TrainError, one sentence, where it can't be loaded, or where its logits are not its head's output (Gemma 2 caps them).
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=getattr(torch, dtype),
            attn_implementation="sdpa",
            local_files_only=True,
            output_loading_info=True,
        )
        model, told = loaded[0].to(device).eval(), loaded[1]
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise TrainError(f"model folder {folder} can't be loaded: {str(error).splitlines()[0]}") from error
    if made_up := sorted(told["missing_keys"]):
        more = f" and {len(made_up) - 1} more" if len(made_up) > 1 else ""
        raise TrainError(
            f"model folder {folder} lacks {made_up[0]}{more}, which would be made up: save the whole model again"
        )
    ids_BT = torch.arange(4, device=device).unsqueeze(0)
    with torch.no_grad():
        hidden_BTD = model.base_model(ids_BT, use_cache=False).last_hidden_state
        expected_BTV = model.get_output_embeddings()(hidden_BTD)
        if not torch.allclose(model(ids_BT, use_cache=False).logits, expected_BTV, rtol=1e-3, atol=1e-6):
            raise TrainError(
                f"model folder {folder}: {type(model).__name__} scales or caps its logits, which is not built in"
            )
    return model


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
    """The weights by HF name, each once, as an optimiser moves them; from here on the model computes in `dtype`.

    Where theirs is another type, the model computes with copies, and gradients add up in the weights' type, micro-batch by micro-batch.
    """
    masters: dict[str, torch.nn.Parameter] = {}
    for name, parameter in model.named_parameters():
        masters[name] = master = parameter if parameter.dtype == dtype else torch.nn.Parameter(parameter.detach())
        if master is not parameter:
            parameter.data = parameter.data.to(dtype)
            parameter.register_post_accumulate_grad_hook(partial(_hand_over, master))
    return masters


def take_masters(model: Any, masters: Mapping[str, torch.nn.Parameter]) -> None:
    """Round what an optimiser has moved to the type that the model computes in."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter is not masters[name]:
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
        logprobs_N, entropy_N = torch.empty((2, len(tokens_N)), device=hidden_ND.device).unbind()
        for part in _chunks(hidden_ND, weight_VD):
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
        by_weight_VD = torch.zeros_like(weight_VD, dtype=torch.float32)
        by_bias_V = None if bias_V is None else torch.zeros_like(bias_V, dtype=torch.float32)
        for part in _chunks(hidden_ND, weight_VD):
            scale_C1 = (grad_N[part] / temperatures_N[part]).unsqueeze(-1)
            by_logits_CV = _log_softmax(hidden_ND[part], weight_VD, bias_V, temperatures_N[part]).exp_().mul_(-scale_C1)
            by_logits_CV = by_logits_CV.scatter_add_(-1, tokens_N[part].unsqueeze(-1), scale_C1).to(hidden_ND.dtype)
            by_hidden_ND[part] = by_logits_CV @ weight_VD
            by_weight_VD += by_logits_CV.t() @ hidden_ND[part]
            if by_bias_V is not None:
                by_bias_V += by_logits_CV.sum(0, dtype=torch.float32)
        by_bias_V = None if by_bias_V is None else by_bias_V.to(weight_VD.dtype)
        return by_hidden_ND, by_weight_VD.to(weight_VD.dtype), by_bias_V, None, None


def _chunks(hidden_ND: Tensor, weight_VD: Tensor) -> Iterator[slice]:
    size = max(1, LOGITS_AT_ONCE // len(weight_VD))
    return (slice(at, at + size) for at in range(0, len(hidden_ND), size))


def _log_softmax(hidden_CD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, temperatures_C: Tensor) -> Tensor:
    """[C, V] float32. In place, since this is what memory goes to."""
    logits_CV = linear(hidden_CD, weight_VD, bias_V).float().div_(temperatures_C.unsqueeze(-1))
    return logits_CV.sub_(logits_CV.logsumexp(-1, keepdim=True))


# -- weights as an image ------------------------------------------------------------------------------------------------

TYPES: Mapping[torch.dtype, str] = {torch.bfloat16: "BF16", torch.float32: "F32"}
"""Names of the types that a model computes in, as a safetensors header has them."""


class WeightsImage:
    """The place of each of a model's tensors, all of type `dtype`. Format: https://github.com/huggingface/safetensors#format.

    One image is written at a time: on a GPU its tensors pass through pinned memory that the next one uses again.
    """

    def __init__(self, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> None:
        self._dtype = dtype
        places: dict[str, object] = {}
        at = 0
        for name, tensor in tensors.items():
            begin, at = at, at + tensor.numel() * dtype.itemsize
            places[name] = {"dtype": TYPES[dtype], "shape": list(tensor.shape), "data_offsets": [begin, at]}
        header = json.dumps(places).encode()
        header += b" " * (-len(header) % 8)
        self._head = len(header).to_bytes(8, "little") + header
        self._pinned: Tensor | None = None
        self.size_bytes = len(self._head) + at

    def write(self, tensors: Mapping[str, Tensor], memory: memoryview) -> Callable[[], None]:
        """Write the present values, rounded to `dtype`, into `memory`, `size_bytes` long; they may change once this returns.

        The image is whole when what is returned was called, from any thread: on a GPU it waits for the copies, which are under way.
        """
        memory[: len(self._head)] = self._head
        body = torch.frombuffer(memory, dtype=self._dtype, offset=len(self._head))
        values = [tensor.detach() for tensor in tensors.values()]
        if not values[0].is_cuda:
            self._copy(values, body)
            return _nothing
        if self._pinned is None:
            self._pinned = torch.empty_like(body, pin_memory=True)
        self._copy(values, self._pinned)
        landed = torch.cuda.Event()
        # Later kernels of this stream, those of the next update among them, run after the copies.
        landed.record(torch.cuda.current_stream(values[0].device))
        return partial(_land, landed, self._pinned, body)

    def _copy(self, values: list[Tensor], to: Tensor) -> None:
        for value, place in zip(values, to.split([value.numel() for value in values]), strict=True):
            place.view(value.shape).copy_(value, non_blocking=True)


def _land(landed: torch.cuda.Event, pinned: Tensor, body: Tensor) -> None:
    landed.synchronize()
    body.copy_(pinned)


def _nothing() -> None:
    pass
