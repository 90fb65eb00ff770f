"""A mixture of experts as it is trained: routers compute in float32, a loss keeps experts in balance, and each expert has its own name.

transformers holds the experts of a layer in two tensors; checkpoints, and what engines read, have every matrix apart.

Shapes: X experts, L tokens of S sequences.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor

from rubato.actors.training.forward import Row
from rubato.actors.training.train_engine import TrainError

GATE_UP, DOWN = ".experts.gate_up_proj", ".experts.down_proj"
"""How the names of fused tensors end: [X, 2 * intermediate size, hidden size], gate first, and [X, hidden size, intermediate size]."""

T = TypeVar("T")


def cut(fused: Tensor, expert: int, begin: int, end: int) -> Tensor:
    """Rows [begin, end) of one expert's matrix, a view."""
    return fused[expert, begin:end]


def apart(tensors: Mapping[str, Tensor], cut: Callable[[Tensor, int, int, int], T] = cut) -> "dict[str, Tensor | T]":
    """`tensors` by the names of a checkpoint: fused experts one by one, made by `cut`, and all others as they are."""
    found: dict[str, Tensor | T] = {}
    for name, tensor in tensors.items():
        if not name.endswith((GATE_UP, DOWN)):
            found[name] = tensor
            continue
        before, _, kind = name.rpartition(".")
        kinds = ("gate", "up") if kind == "gate_up_proj" else ("down",)
        size = tensor.shape[1] // len(kinds)
        for expert in range(tensor.shape[0]):
            for at, part in enumerate(kinds):
                found[f"{before}.{expert}.{part}_proj.weight"] = cut(tensor, expert, at * size, (at + 1) * size)
    return found


class Mixture:
    """A model some of whose layers are mixtures. Made once of each model that is read: from then on its routers compute in float32."""

    apart = staticmethod(apart)

    def __init__(self, model: Any) -> None:
        """Raises TrainError, one sentence, for a model whose files name experts in other ways."""
        from transformers.core_model_loading import revert_weight_conversion

        empty = {name: torch.empty_like(value, device="meta") for name, value in model.state_dict().items()}
        theirs = revert_weight_conversion(model, empty)
        if other := sorted(theirs.keys() - apart(empty).keys()):
            raise TrainError(f"{type(model).__name__} stores its experts by names like {other[0]}, which is not built in")
        self._model = model
        self._router = _router_class(model)
        for module in model.modules():
            if self._router is not None and isinstance(module, self._router):
                module.__class__ = _in_float32(type(module))

    def watch_routers(self) -> None:
        """Have the model's calls tell what its routers say, for `imbalance`."""
        self._model.config.output_router_logits = self._router is not None

    def imbalance(self, routed: Sequence[Tensor], row: Row, shares_S: Tensor) -> Tensor:
        """What its routers said of a row."""
        return imbalance(routed, row, shares_S, self._model.config.num_experts_per_tok)


def imbalance(routed: Sequence[Tensor], row: Row, shares_S: Tensor, top_k: int) -> Tensor:
    """How unevenly experts are used within each sequence: 1 where all are used alike, X / top_k where a sequence has the same ones throughout.

    The mean over layers, and over sequences by `shares_S`. What is of one sequence alone is the same however a batch is cut. Source:
    DeepSeek-V3 (arXiv 2412.19437), section 2.1.2, equations 17 to 20. `routed` are router logits [L, X] of each layer.
    """
    lengths_S1 = torch.tensor(row.lengths, device=shares_S.device).unsqueeze(1)
    total = shares_S.new_zeros(())
    for logits_LX in routed:
        probs_LX = logits_LX.float().softmax(-1)
        chosen_LX = torch.zeros_like(probs_LX).scatter_(-1, probs_LX.topk(top_k).indices, 1.0 / top_k)
        empty_SX = probs_LX.new_zeros(len(row.lengths), probs_LX.shape[1])
        used_SX, wanted_SX = (empty_SX.index_add(0, row.rows_L, each) / lengths_S1 for each in (chosen_LX, probs_LX))
        total = total + probs_LX.shape[1] * ((used_SX * wanted_SX).sum(-1) * shares_S).sum()
    return total / len(routed)


def _router_class(model: Any) -> type | None:
    """Of modules whose first output is the router's logits, as transformers records them."""
    recorder = (getattr(model.base_model, "_can_record_outputs", None) or {}).get("router_logits")
    found = getattr(recorder, "target_class", recorder)
    return found if isinstance(found, type) and found is not torch.nn.Linear else None


@cache
def _in_float32(router: type) -> type:
    return router if issubclass(router, _InFloat32) else type(router.__name__, (_InFloat32, router), {})


class _InFloat32:
    """Goes before the class of a router."""

    weight: Tensor

    def forward(self, hidden: Tensor) -> Any:
        if hidden.dtype not in (torch.bfloat16, torch.float16):
            return super().forward(hidden)  # type: ignore[misc]
        vars(self)["weight"] = self.weight.float()  # seen before the parameter, which gets its gradient
        try:
            logits, *rest = super().forward(hidden.float())  # type: ignore[misc]
        finally:
            del vars(self)["weight"]
        return logits, *(each.to(hidden.dtype) if each.is_floating_point() else each for each in rest)
