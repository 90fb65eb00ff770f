"""Layers of the built-in engine that are mixtures of experts: one expert after the other, each with the tokens that chose it.

X experts of intermediate size F, hidden size E, T tokens of a step.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from rubato.actors.checkpoints.hf_files import Experts


class MixtureLayer(NamedTuple):
    """What stands in a layer in place of its gate_up and down."""

    experts: Experts
    router: Tensor
    """[E, X]"""
    gate_ups: Tensor
    """[X, E, 2F]: gate first."""
    downs: Tensor
    """[X, F, E]"""

    @classmethod
    def taken(cls, take: Callable[..., Tensor], at: str, experts: Experts, hidden: int) -> "MixtureLayer":
        """As `model.Take` finds the tensors of the layer at `at`."""
        size, names = experts.size, [f"{at}mlp.experts.{i}." for i in range(experts.num)]
        router = take(f"{at}mlp.gate.weight", (experts.num, hidden)).t().contiguous()
        gate_ups = [take(f"{name}gate_proj.weight", (size, hidden), f"{name}up_proj.weight", (size, hidden)).t() for name in names]
        downs = [take(f"{name}down_proj.weight", (hidden, size)).t() for name in names]
        return cls(experts, router, torch.stack(gate_ups), torch.stack(downs))

    def stored(self, name: str) -> tuple[Tensor | None, int, bool]:
        """As `model._fused`, of what was taken."""
        if name == "mlp.gate.weight":
            return self.router, 0, False
        _, _, index, kind, _ = name.split(".") if name.startswith("mlp.experts.") and name.count(".") == 4 else ("",) * 5
        if not index.isdecimal() or int(index) >= self.experts.num:
            return None, 0, False
        of = {
            "gate_proj": (self.gate_ups[int(index)], 0, False),
            "up_proj": (self.gate_ups[int(index)], self.experts.size, False),
            "down_proj": (self.downs[int(index)], 0, False),
        }
        return of.get(kind, (None, 0, False))

    def mixed(self, x_TE: Tensor) -> Tensor:
        """What the chosen experts make of each token, weighed by the router, whose logits are float32 whatever its weights are."""
        experts = self.experts
        probs_TX = torch.mm(x_TE.float(), self.router.float()).softmax(-1)
        weights, chosen = probs_TX.topk(experts.per_token)
        if experts.normed:
            weights = weights / weights.sum(-1, keepdim=True)
        weights, flat = weights.to(x_TE.dtype).flatten(), chosen.flatten()
        found_TE = torch.zeros_like(x_TE)
        places = flat.argsort(stable=True).split(flat.bincount(minlength=experts.num).tolist())
        for expert, place in enumerate(places):
            if len(place):
                tokens = place // experts.per_token
                gate, up = torch.mm(x_TE[tokens], self.gate_ups[expert]).chunk(2, -1)
                made = torch.mm(F.silu(gate).mul_(up), self.downs[expert])
                found_TE.index_add_(0, tokens, made.mul_(weights[place].unsqueeze(1)))
        return found_TE
