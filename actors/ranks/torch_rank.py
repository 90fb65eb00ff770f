"""One rank of several that train together: the weights lie in shares over all of them, and each computes its part of every batch."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, cast

import msgspec
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, Store, TCPStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from rubato.actors.checkpoints import checkpoint as checkpoints
from rubato.actors.checkpoints import model_folder
from rubato.actors.config import ModelSection, TrainSection
from rubato.actors.ranks.meeting import Meeting
from rubato.actors.ranks.rows import RowsImage, TakenRows, cut_share, read_share
from rubato.actors.training import experts, forward
from rubato.actors.training.losses import Figures, Policies
from rubato.actors.training.torch_train import OPTIMIZER, PROGRESS, MicroBatch, TorchTrainEngine, micro_batch, sampled
from rubato.actors.training.train_engine import TrainError
from rubato.planning.shares import shares

SUMS = (
    "n", "loss", "entropy", "clip_frac", "clip_high_frac", "kl_ref", "weighed", "is_mean", "is_capped_frac",
    "router_imbalance", "known", "ratio_mean", "kl", "fresh_frac", "mismatch_kl", "weights", "squares",
)  # fmt: skip
"""The sums of a step's Figures, in the order in which ranks add theirs up."""

LOST = ("gloo", "nccl", "connection closed by peer", "connection reset", "process group", "timed out waiting")

FILE_BYTES = 5 * 10**9
"""Most bytes of one file of weights: more is written as several with an index, as Hugging Face has them."""


class Saved(NamedTuple):
    """One rank's part of a checkpoint: its rows of each file, and from the first rank the files that have no rows."""

    rows: Mapping[str, TakenRows]
    files: Mapping[str, bytes]

    def write(self, folder: Path) -> None:
        """Write the rows into the files of `folder`, on disk when this returns. Blocks; raises OSError."""
        for name, taken in self.rows.items():
            taken.write(folder / name)


class Sizes(NamedTuple):
    """Bytes of a model as ranks exchange it: all of it, its layers alone, and its gradients."""

    all: int
    layers: int
    grads: int


class TorchRank(TorchTrainEngine):
    """All ranks make the same calls in the same order, with the same arguments; those that compute wait for each other."""

    def __init__(self, model: ModelSection, train: TrainSection, *, steps: int, seed: int, rank: int, meet: Meeting) -> None:
        """Returns once all ranks of the term are there."""
        super().__init__(model, train, steps=steps, seed=seed)
        self._rank, mesh = rank, train.mesh
        self.num_ranks = mesh.size
        backend = "cpu:gloo,cuda:nccl" if self._device.type == "cuda" else "gloo"
        patience = timedelta(seconds=train.rank_timeout_s)
        store = _store(meet, mesh.size, patience)
        dist.init_process_group(backend, store=store, rank=rank, world_size=mesh.size, timeout=patience)
        shape, names = ((mesh.replicate, mesh.shard), ("replicate", "shard")) if mesh.replicate > 1 else ((mesh.shard,), ("shard",))
        self._mesh = init_device_mesh(self._device.type, shape, mesh_dim_names=names)
        self._sharded: dict[int, _Policy] = {}
        """What computes with each model, by the model's id."""
        self._weighs: dict[int, Sizes] = {}
        self._gathered = self._reduced = 0
        """Bytes of whole tensors since `exchanged` was asked."""
        self._unread: dict[int, Mapping[str, model_folder.StoredTensor]] = {}
        """Where the weights of a model lie that has none yet."""

    @property
    def device(self) -> str:
        return str(self._device)

    def leave(self) -> None:
        """End the process group. A collective that waits for a rank in vain fails."""
        with suppress(RuntimeError):
            dist.destroy_process_group()

    def is_lost(self, error: Exception) -> bool:
        """A collective tells so by the words of its library alone."""
        said = str(error).lower()
        return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and any(word in said for word in LOST))

    def exchanged(self) -> tuple[int, int]:
        """Bytes that this rank sent the next one since the last call, around the ring of its shares and around that of its copies.

        Of a ring of n each sends (n - 1) / n of what is gathered, or reduced and scattered, and twice that of what is reduced to all.
        """
        replicate, shard = self._mesh.size() // self._mesh["shard"].size(), self._mesh["shard"].size()
        gathered, reduced, self._gathered, self._reduced = self._gathered, self._reduced, 0, 0
        return (gathered + reduced) * (shard - 1) // shard, 2 * reduced // shard * (replicate - 1) // replicate

    def saved(self, term: int) -> Saved:
        """What is to be written of the present state; `term` stands in the manifest."""
        kept = {name: tensor.detach() for name, tensor in self._kept().items()}
        rows, index = dict[str, TakenRows](), dict[str, str]()
        files = _files(kept)
        for file, names in files.items():
            part = {name: kept[name] for name in names}
            rows[file] = RowsImage(part, leads=self._leads).taken(part)
            index |= dict.fromkeys(names, file)
        states = self._optimizer_tensors()
        rows[OPTIMIZER] = RowsImage(states, leads=self._leads).taken(states)
        beside = self._described | {PROGRESS: self._progress()}
        if len(files) > 1:
            size = sum(tensor.numel() * tensor.itemsize for tensor in kept.values())
            beside[model_folder.INDEX] = msgspec.json.encode({"metadata": {"total_size": size}, "weight_map": index})
        return Saved(rows, beside if self._leads else {})

    def logprobs(self, sequences: Sequence[Sequence[int]], temperature: float = 1.0) -> list[list[float]]:
        """Of the sequences that are this rank's to compute; empty lists for the others."""
        lengths = [len(tokens) for tokens in sequences]
        found: list[list[float]] = [[] for _ in sequences]
        with torch.no_grad():
            for run in self._runs(lengths):
                batch = micro_batch([sampled(list(sequences[i]), temperature or 1.0) for i in run], self._device)
                logprobs_N = self._forward(self._model, batch).logprobs_N
                for i in run:
                    found[i] = [0.0]
                for row, logprob in zip(batch.rows_N.tolist(), logprobs_N.tolist(), strict=True):
                    found[run[row]].append(logprob)
        return found

    def export(self, memory: memoryview) -> Callable[[], None]:
        """This rank's rows alone."""
        self._rows_image.write(self._state(), memory)
        return _nothing

    def pieces(self) -> list[tuple[int, int]]:
        return self._rows_image.pieces(self._state())

    def pack(self, memory: memoryview) -> None:
        self._rows_image.pack(self._state(), memory)

    def image_bytes(self) -> int:
        return self._rows_image.size_bytes

    # -- where it differs from one rank ---------------------------------------------------------------------------------

    def _named(self, held: dict[str, torch.Tensor]) -> dict[str, Any]:
        return experts.apart(held, cut_share)

    @property
    def _leads(self) -> bool:
        return self._rank == 0

    def _manifest(self, checkpoint: Path) -> checkpoints.Manifest:
        """The trainer has checked the whole of it."""
        return checkpoints.manifest_of(checkpoint)

    def _read(self, folder: Path, dtype: str) -> Any:
        found = empty_model(folder, dtype)
        if found is None:
            return super()._read(folder, dtype)
        model, self._unread[id(model)] = found
        return model

    def _placed(self, *, narrow: bool) -> dict[str, torch.nn.Parameter]:
        kept = next(self._model.parameters()).dtype
        self._shard(
            self._model, MixedPrecisionPolicy(torch.bfloat16 if narrow else None, kept if narrow else None, cast_forward_inputs=False)
        )
        self._rows_image = RowsImage(self._state(), getattr(torch, self._section.dtype), leads=self._leads)
        return dict(self._model.named_parameters())

    def _place_reference(self) -> None:
        self._shard(self._reference, MixedPrecisionPolicy(cast_forward_inputs=False))

    def _shard(self, model: Any, precision: MixedPrecisionPolicy) -> None:
        """Layer by layer, and what is no layer's as the last."""
        whole = _Policy(model)
        offload = CPUOffloadPolicy(pin_memory=self._device.type == "cuda") if self._train_section.mesh.offload else OffloadPolicy()
        layers = [module for module in model.modules() if type(module).__name__ in set(model._no_split_modules or ())]
        for module in (*layers, whole):
            placed = cast("FSDPModule", fully_shard(module, mesh=self._mesh, mp_policy=precision, offload_policy=offload))
            # A token's weight is of the whole minibatch, so gradients are added up and divided by nothing.
            placed.set_gradient_divide_factor(1.0)
            placed.set_force_sum_reduction_for_comms(True)
        self._sharded[id(model)] = whole
        inner = {id(each) for layer in layers for each in layer.parameters()}
        sizes = [(each, each.numel() * (precision.param_dtype or each.dtype).itemsize) for each in model.parameters()]
        reduced = sum(each.numel() * (precision.reduce_dtype or precision.param_dtype or each.dtype).itemsize for each, _ in sizes)
        self._weighs[id(model)] = Sizes(sum(size for _, size in sizes), sum(size for each, size in sizes if id(each) in inner), reduced)
        if (stored := self._unread.pop(id(model), None)) is not None:
            fill(model, stored, leads=self._leads)
            with torch.no_grad():
                is_plain = cast("bool", whole(None))
            cast("FSDPModule", whole).reshard()
            if not is_plain:
                raise TrainError(f"{type(model).__name__} scales or caps its logits, which is not built in")

    def _forward(self, model: Any, batch: MicroBatch) -> forward.Computed:
        whole = self._sharded[id(model)]
        found = whole(batch)
        self._gathered += self._weighs[id(model)].all
        if torch.is_grad_enabled():  # the backward pass gathers each layer once more, and scatters the gradients
            self._gathered, self._reduced = self._gathered + self._weighs[id(model)].layers, self._reduced + self._weighs[id(model)].grads
        if not torch.is_grad_enabled():  # else the backward pass takes the last gathered weights apart again
            cast("FSDPModule", whole).reshard()
        return found

    def _runs(self, lengths: Sequence[int]) -> list[list[int]]:
        """As many of them on each rank, for each takes part in every gathering: what has less to do computes nothing in the last."""
        parts = shares(lengths, self.num_ranks)
        runs = [[[part[i] for i in run] for run in self._packed([lengths[i] for i in part])] for part in parts]
        own = runs[self._rank]
        return own + [[]] * (max(map(len, runs)) - len(own))

    def _loss(self, batch: MicroBatch, policies: Policies, figures: Figures) -> torch.Tensor:
        return super()._loss(batch, policies, figures) if len(batch.rows_N) else policies.now_N.sum()

    def _whole(self, figures: Figures) -> Figures:
        known = [float(name in figures.sums) for name in SUMS]
        sums = torch.tensor([[figures.sums.get(name, 0.0) for name in SUMS], known], dtype=torch.float64, device=self._device)
        if unknown := figures.sums.keys() - set(SUMS):
            raise KeyError(f"figures that ranks don't add up: {', '.join(sorted(unknown))}")
        dist.all_reduce(sums)
        figures.sums = {name: value for name, value, there in zip(SUMS, *sums.tolist(), strict=True) if there}
        return figures

    def _clip(self) -> torch.Tensor:
        grads = [grad.to_local() for master in self._masters.values() if (grad := cast("Any", master.grad)) is not None]
        square = torch.stack([grad.double().square().sum() for grad in grads]).sum().to(self._device)
        dist.all_reduce(square, group=self._mesh.get_group("shard"))
        norm = square.sqrt()
        scale = (self._train_section.max_grad_norm / (norm + 1e-6)).clamp(max=1.0)
        for grad in grads:
            grad.mul_(scale.to(grad.device, grad.dtype))
        return norm

    def _moved(self) -> None:
        """The model computes with what it gathers of the masters themselves."""

    def _move(self, device: torch.device) -> None:
        """Shares stay where they are: the config refuses leases that would ask for more."""

    def _restore_optimizer(self, path: Path) -> None:
        image = model_folder.map_file(path)
        header = model_folder.read_header(image, str(path))
        masters = list(self._masters.values())
        for key, place in header.items():
            index, name = key.split(".", 1)
            master = masters[int(index)]
            value = torch.zeros((), device=master.device) if name == "step" else torch.zeros_like(master.detach())
            read_share(image, place, value, leads=self._leads)
            self._optimizer.state[master][name] = value


class _Policy(torch.nn.Module):
    """The log-probabilities that a model gives, as the outermost module, whose weights are gathered for the head too."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: MicroBatch | None) -> Any:
        """Without a batch: whether the model's logits are its head's output. It is asked once, and from then on takes rows if it can."""
        if batch is not None:
            return forward.policy_logprobs(self.model, batch)
        forward.let_pack(self.model)
        return forward.has_plain_logits(self.model)


def _store(meet: Meeting, size: int, patience: timedelta) -> Store:
    if not meet.port:
        return FileStore(meet.place, size)
    meet.name_interface()
    if meet.listener is None:
        return TCPStore(meet.place, meet.port, size, wait_for_workers=False, timeout=patience)
    # The socket is handed over: the port that the others know stays this rank's from the moment it was named.
    handed = meet.listener.detach()
    return TCPStore(meet.place, meet.port, size, is_master=True, wait_for_workers=False, timeout=patience, master_listen_fd=handed)


def _files(tensors: Mapping[str, torch.Tensor]) -> dict[str, list[str]]:
    """The names of the tensors in each file of weights."""
    files: list[list[str]] = [[]]
    size = 0
    for name, tensor in tensors.items():
        num = tensor.numel() * tensor.itemsize
        if files[-1] and size + num > FILE_BYTES:
            files.append([])
            size = 0
        files[-1].append(name)
        size += num
    if len(files) == 1:
        return {model_folder.WEIGHTS: files[0]}
    return {f"model-{number:05}-of-{len(files):05}.safetensors": names for number, names in enumerate(files, 1)}


def _nothing() -> None:
    pass


def empty_model(folder: Path, dtype: str) -> tuple[Any, Mapping[str, model_folder.StoredTensor]] | None:
    """The model of a folder, whose weights have no values and so far no memory, and where their values lie.

    None where its tensors are not those of the folder, by name and shape: then it has to be read as a whole.
    """
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    try:
        stored = model_folder.read_tensors(folder)
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        with no_init_weights():
            model: Any = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype), attn_implementation="sdpa")
    except (OSError, ValueError):  # told by who reads it as a whole
        return None
    model.tie_weights()
    forward.prepare(model)
    held = model.state_dict()
    kept = [name for name, _ in model.named_parameters()] + [name for name, _ in model.named_buffers() if name in held]
    saved = experts.apart({name: held[name] for name in kept})
    wanted = list(saved)
    if any(name not in stored or stored[name].place.shape != tuple(saved[name].shape) for name in wanted):
        return None
    return model.eval(), {name: stored[name] for name in wanted}


def fill(model: Any, stored: Mapping[str, model_folder.StoredTensor], *, leads: bool) -> None:
    """Read this rank's rows of each tensor. Blocks."""
    images = {file: model_folder.map_file(file) for file in {tensor.file for tensor in stored.values()}}
    state = experts.apart(model.state_dict(), cut_share)
    for name, (file, place) in stored.items():
        read_share(images[file], place, state[name], leads=leads)
