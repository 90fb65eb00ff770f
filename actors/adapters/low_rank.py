"""Adapters over the built-in engine's weights: beside each product x·W stands x·A·B, and W is never written.

Several are held side by side: their As stand next to each other, so that one product serves a step whose rows have different adapters; what
is not a row's own is multiplied by 0. T rows, E inputs, R ranks of all adapters of one matrix together.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rubato.actors.adapters import shapes
from rubato.actors.checkpoints.hf_files import ModelConfig
from rubato.actors.checkpoints.model_folder import Slice
from rubato.actors.engines.engine import EngineError
from rubato.actors.engines.model import Linear, expected, paired, plain, tensors_of

Key = tuple[int, str]
"""A layer's number, and the name of one of its fused matrices."""


class Part(NamedTuple):
    """Where a module of the model lies in a fused matrix: its outputs from `begin` on, `paired` where they are `heads` of q or k."""

    key: Key
    begin: int
    outputs: int
    inputs: int
    heads: int = 0


def parts_of(config: ModelConfig) -> dict[str, Part]:
    """By name, the modules that can have an adapter."""
    e, f, d = config.hidden_size, config.intermediate_size, config.head_dim
    q, kv = config.num_heads * d, config.num_kv_heads * d
    found: dict[str, Part] = {}
    for i in range(config.num_layers):
        attention, mlp = f"model.layers.{i}.self_attn.", f"model.layers.{i}.mlp."
        found[f"{attention}q_proj"] = Part((i, "qkv"), 0, q, e, config.num_heads)
        found[f"{attention}k_proj"] = Part((i, "qkv"), q, kv, e, config.num_kv_heads)
        found[f"{attention}v_proj"] = Part((i, "qkv"), q + kv, kv, e)
        found[f"{attention}o_proj"] = Part((i, "out"), 0, e, q)
        if config.experts:  # which have no adapters
            continue
        found[f"{mlp}gate_proj"] = Part((i, "gate_up"), 0, f, e)
        found[f"{mlp}up_proj"] = Part((i, "gate_up"), f, f, e)
        found[f"{mlp}down_proj"] = Part((i, "down"), 0, e, f)
    return found


def widths_of(config: ModelConfig) -> dict[str, int]:
    """Outputs of the fused matrices, by name."""
    qkv = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    return {"qkv": qkv, "out": config.hidden_size, "gate_up": 2 * config.intermediate_size, "down": config.hidden_size}


class Adapter(NamedTuple):
    """One, laid out: of each fused matrix that it changes, A as [E, r·modules], and B as [r·modules, outputs] with 0 where a module has none."""

    factor: float
    downs: Mapping[Key, Tensor]
    ups: Mapping[Key, Tensor]
    columns: Mapping[str, int]
    """Module → the first of its ranks."""
    rank: int

    def to(self, device: torch.device) -> "Adapter":
        """On `device`; what is there already is not copied."""
        downs = {key: tensor.to(device) for key, tensor in self.downs.items()}
        return self._replace(downs=downs, ups={key: tensor.to(device) for key, tensor in self.ups.items()})


def lay_out(config: ModelConfig, image: memoryview, source: str, base: str, device: torch.device, dtype: torch.dtype) -> Adapter:
    """Copy an adapter out of its image. Raises EngineError, naming `source`, where it is none of this model, or incomplete."""
    try:
        scaled = shapes.scaled_by(image, source)
        shapes.require_base(shapes.told_of(image), base, source)
    except shapes.AdapterError as error:
        raise EngineError(str(error)) from None
    tensors, parts, widths = tensors_of(image, source), parts_of(config), widths_of(config)
    modules = _modules(tensors, parts, source)
    downs: dict[Key, Tensor] = {}
    ups: dict[Key, Tensor] = {}
    columns: dict[str, int] = {}

    def take(name: str, shape: tuple[int, int]) -> Tensor:
        return expected(tensors, name, shape, source).to(device, dtype)

    for key in dict.fromkeys(parts[module].key for module in modules):
        there = [module for module in modules if parts[module].key == key]
        down = [take(f"{shapes.PREFIX}{module}{shapes.DOWN}", (scaled.rank, parts[module].inputs)) for module in there]
        downs[key] = torch.cat(down).t().contiguous()
        ups[key] = torch.zeros(scaled.rank * len(there), widths[key[1]], device=device, dtype=dtype)
        for number, module in enumerate(there):
            part, columns[module] = parts[module], number * scaled.rank
            up = take(f"{shapes.PREFIX}{module}{shapes.UP}", (part.outputs, scaled.rank))
            rows = slice(columns[module], columns[module] + scaled.rank)
            ups[key][rows, part.begin : part.begin + part.outputs] = (paired(up, part.heads) if part.heads else up).t()
    return Adapter(scaled.factor, downs, ups, columns, scaled.rank)


def _modules(tensors: Mapping[str, Tensor], parts: Mapping[str, Part], source: str) -> list[str]:
    """Those that the image has tensors for, in the model's order."""
    found = {name: shapes.module_of(name) for name in tensors}
    for name, told in found.items():
        if told is None or told[0] not in parts:
            raise EngineError(f"{source} has {name}, for which this model has no place: it is an adapter of another base model")
    named = {told[0] for told in found.values() if told is not None}
    return [module for module in parts if module in named]


class Stack:
    """Adapters by name, as steps compute with them. Never changed: one more, or a newer one, makes another stack."""

    def __init__(self, adapters: Mapping[str, Adapter]) -> None:
        self.adapters = adapters
        self._all: dict[Key, tuple[Tensor, Tensor, tuple[int, ...]]] = {}
        """As and Bs of all adapters, and for each rank of them the number of its adapter."""
        self._own: dict[str, dict[Key, tuple[Tensor, Tensor]]] = {name: {} for name in adapters}
        """What of it is one adapter's."""
        for key in dict.fromkeys(key for adapter in adapters.values() for key in adapter.downs):
            there = {name: adapter for name, adapter in adapters.items() if key in adapter.downs}
            downs, ups = [each.downs[key] for each in there.values()], [each.ups[key] for each in there.values()]
            down = downs[0] if len(downs) == 1 else torch.cat(downs, 1)
            up = ups[0] if len(ups) == 1 else torch.cat(ups)
            owners: list[int] = []
            for (name, adapter), number in zip(there.items(), [[*adapters].index(name) for name in there], strict=True):
                begin, end = len(owners), len(owners) + adapter.downs[key].shape[1]
                owners += [number] * (end - begin)
                self._own[name][key] = (down[:, begin:end], up[begin:end])
            self._all[key] = (down, up, tuple(owners))

    def to(self, device: torch.device) -> "Stack":
        """On `device`: itself, where all of it is there already."""
        if all(down.device == device for down, _, _ in self._all.values()):
            return self
        return Stack({name: adapter.to(device) for name, adapter in self.adapters.items()})

    def without(self, adapter: str) -> "Stack":
        return Stack({name: held for name, held in self.adapters.items() if name != adapter})

    def of_one(self, adapter: str) -> Linear:
        """The products of a step all of whose rows have that adapter; plain ones where it is not held."""
        if adapter not in self.adapters:
            return plain
        own, factor = self._own[adapter], self.adapters[adapter].factor

        def linear(x: Tensor, weight: Tensor, bias: Tensor | None, layer: int, name: str) -> Tensor:
            out, pair = plain(x, weight, bias, layer, name), own.get((layer, name))
            return out if pair is None else out.addmm_(torch.mm(x, pair[0]), pair[1], alpha=factor)

        return linear

    def of_rows(self, names: Sequence[str], last: Tensor | None) -> Linear:
        """The products of a step whose rows have the adapters `names`, one that is not held for none; some are of the rows `last` alone."""
        numbers = {name: number for number, name in enumerate(self.adapters)}
        device = next(iter(self._all.values()))[0].device
        rows_T = torch.tensor([numbers.get(name, -1) for name in names], device=device)
        masks: dict[tuple[int, tuple[int, ...]], Tensor] = {}

        def linear(x: Tensor, weight: Tensor, bias: Tensor | None, layer: int, name: str) -> Tensor:
            out, found = plain(x, weight, bias, layer, name), self._all.get((layer, name))
            if found is None:
                return out
            down, up, owners = found
            mask = masks.get((len(x), owners))
            if mask is None:
                mask = masks[len(x), owners] = self._mask(rows_T if len(x) == len(rows_T) else rows_T[last], owners)
            return out.addmm_((torch.mm(x, down) * mask).to(x.dtype), up)

        return linear

    def _mask(self, rows_T: Tensor, owners: tuple[int, ...]) -> Tensor:
        """[T, R] the factor where a column is the row's own, else 0."""
        factors = torch.tensor([adapter.factor for adapter in self.adapters.values()], device=rows_T.device)
        owners_R = torch.tensor(owners, device=rows_T.device)
        return (rows_T.unsqueeze(1) == owners_R) * factors[owners_R]

    def stored(self, config: ModelConfig, adapter: str, cut: Slice) -> Tensor | None:
        """A slice of the tensor of `adapter` that its files call `cut.name`, out of what steps compute with. None where there is none."""
        module, is_up = shapes.module_of(cut.name) or ("", False)
        part, own = parts_of(config).get(module), self.adapters.get(adapter)
        if part is None or own is None or module not in own.columns:
            return None
        rows, columns = slice(cut.top, cut.bottom), slice(cut.left, cut.right)
        down, up = self._own[adapter][part.key]
        ranks = slice(own.columns[module], own.columns[module] + own.rank)
        if not is_up:
            return down[:, ranks].t()[rows, columns]
        up = up[ranks, part.begin : part.begin + part.outputs].t()
        return (_unpaired(up, part.heads) if part.heads else up)[rows, columns]


def _unpaired(rows: Tensor, heads: int) -> Tensor:
    """What `paired` was given."""
    return rows.view(heads, -1, 2, rows.shape[1]).transpose(1, 2).reshape(rows.shape)
