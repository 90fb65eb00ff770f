"""Weights on their way into vLLM, which can't undo a swap: checked first, then handed to its processes by path, never in a pickle or on a wire.

What runs of ours inside those processes is here too: weights are swapped there, and they end with the engine's owner.
"""

import contextlib
import importlib
import mmap
import os
import select
import signal
import tempfile
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Self

from rubato.actors.checkpoints.hf_files import folder_images, read_header
from rubato.actors.checkpoints.model_folder import DIGEST_BYTES, Slice, slice_digest
from rubato.actors.engines.engine import EngineError
from rubato.actors.engines.model import expected, tensors_of
from rubato.actors.messages.weights import WeightsDigest

_MOST = 1 << 30
"""Bytes per write: Linux takes at most 2 GiB at once."""


def shapes_of(folder: Path) -> dict[str, tuple[int, ...]]:
    """Shape by name of a model folder's tensors. Raises EngineError when it holds no weights or damaged ones."""
    images = folder_images(folder)
    return {name: entry.shape for source, image in images for name, entry in read_header(image, source).items()}


def check_tensors(shapes: Mapping[str, tuple[int, ...]], image: memoryview, source: str) -> None:
    """Raises EngineError, naming `source`, when a tensor is missing or has another shape. Others are ignored. Reads the header."""
    tensors = tensors_of(image, source)
    for name, shape in shapes.items():
        expected(tensors, name, shape, source)


class ImagePlace(NamedTuple):
    """Where a process of this host and user finds an image."""

    path: str
    size_bytes: int = 0
    """What lies there may be longer; 0: all of it."""


@contextmanager
def lent(image: memoryview) -> Iterator[ImagePlace]:
    """Where `image` is while the block runs: what is mapped from a file, as a blob of the host, is not copied."""
    if (fd := _mapped_from(image)) is None:
        with handed_over(image) as path:
            yield ImagePlace(path)
        return
    try:
        yield ImagePlace(f"/proc/{os.getpid()}/fd/{fd}", len(image))
    finally:
        os.close(fd)


def _mapped_from(image: memoryview) -> int | None:
    """A new file descriptor of the file that begins with `image` and is mapped there. None: there is none, or no /proc that would tell."""
    import numpy

    begin = numpy.frombuffer(image, numpy.uint8).ctypes.data if len(image) else 0
    try:
        for line in Path("/proc/self/maps").read_text().splitlines():
            span, _, offset, device, inode, *_ = line.split()
            first, end = (int(part, 16) for part in span.split("-"))
            if first == begin:
                return _opened(device, int(inode)) if int(offset, 16) == 0 and end - first >= len(image) else None
    except OSError:
        pass
    return None


def _opened(device: str, inode: int) -> int | None:
    """A mapping keeps a file descriptor of its file, by which it is opened anew."""

    def is_it(found: os.stat_result) -> bool:
        return found.st_ino == inode and f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}" == device

    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile
            if is_it(os.stat(f"/proc/self/fd/{name}")):
                fd = os.open(f"/proc/self/fd/{name}", os.O_RDONLY | os.O_CLOEXEC)
                if is_it(os.fstat(fd)):
                    return fd
                os.close(fd)
    return None


@contextmanager
def handed_over(image: memoryview) -> Iterator[str]:
    """A path that holds a copy of `image` while the block runs. Processes of the same user can open it; what they mapped stays.

    Raises OSError when there is no room for the copy.
    """
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("rubato-weights", os.MFD_CLOEXEC)
        path, temporary = f"/proc/{os.getpid()}/fd/{fd}", False
    else:
        fd, path = tempfile.mkstemp(prefix="rubato-weights-", suffix=".safetensors")
        temporary = True
    try:
        _write(fd, image)
        yield path
    finally:
        os.close(fd)
        if temporary:
            os.unlink(path)


def _write(fd: int, image: memoryview) -> None:
    rest = image.cast("B") if image.nbytes else memoryview(b"")
    while rest:
        rest = rest[os.write(fd, rest[:_MOST]) :]


OWNER = "RUBATO_VLLM_OWNER"
"""Environment variable with the process id of the engine worker that started vLLM."""

EXTENSION = "rubato.actors.engines.vllm_weights.WorkerExtension"
"""For vLLM's `worker_extension_cls`."""


BACKEND = "rubato"
"""Of vLLM's weight transfer: what `_register` adds to it."""

PROTOCOL = 2
"""Of what the extension and the backend are told; it grows where that changes."""

PROBE, READS, DIGESTS = "rubato_told", "rubato_reads", "rubato_digests"
"""Methods of the extension that an engine asks for."""


class WorkerExtension:
    """vLLM puts this class behind its own worker class; its methods are called by `collective_rpc`."""

    model_runner: Any
    vllm_config: Any

    def __new__(cls, *_: Any, **__: Any) -> Self:
        """The one place that runs in each of vLLM's workers before a model is loaded."""
        live_as_long_as_owner()
        _register()
        return super().__new__(cls)

    def rubato_told(self) -> dict[str, Any]:
        """What this vLLM is, as an engine has to know before it uses it."""
        config, model = self.vllm_config, self.vllm_config.model_config
        transfer = config.weight_transfer_config
        return {
            "protocol": PROTOCOL,
            "vllm": str(importlib.import_module("vllm").__version__),
            "logprobs_mode": str(model.logprobs_mode),
            "weight_transfer": "" if transfer is None else str(transfer.backend),
            "max_len": int(model.max_model_len),
            "num_slots": int(config.scheduler_config.max_num_seqs),
            "vocab_size": int(model.get_vocab_size()),
            "dtype": str(model.dtype).removeprefix("torch."),
            "degree": int(config.parallel_config.tensor_parallel_size),
            "updating": bool(getattr(self, "_weight_update_active", False)),
        }

    def rubato_digests(self, cuts: Sequence[Sequence[Any]]) -> dict[str, str]:
        """Of slices of what it computes with, see below; none where ranks share a layer out."""
        dtype = str(self.vllm_config.model_config.dtype).removeprefix("torch.")
        shared = self.vllm_config.parallel_config.world_size > 1 or dtype not in ("float32", "bfloat16")
        return {"dtype": dtype, "slices": "" if shared else digests(self.model_runner.get_model(), cuts, dtype)}

    def rubato_reads(self, path: str) -> dict[str, str]:
        """Why this process can't read `path`; empty where it can."""
        try:
            with open(path, "rb") as file:
                file.read(1)
        except OSError as error:
            return {"why": error.strerror or type(error).__name__}
        return {"why": ""}


def tensors_at(places: Sequence[ImagePlace], names: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Name and tensor of all that is called one of `names` in the images there, mapped and not copied, in the order in which they lie. Every
    header is read before the first tensor is given. Raises EngineError."""
    wanted, images = set(names), list[dict[str, Any]]()
    for path, size_bytes in places:
        with open(path, "rb") as file:
            image = memoryview(mmap.mmap(file.fileno(), size_bytes, access=mmap.ACCESS_READ))
        images.append(tensors_of(image, path))
    if missing := wanted.difference(*images):
        raise EngineError(f"{places[0].path} lacks {min(missing)}")
    return ((name, tensor) for tensors in images for name, tensor in tensors.items() if name in wanted)


def update_of(places: Sequence[ImagePlace], names: Iterable[str]) -> dict[str, Any]:
    """What the backend is told of an update."""
    return {"paths": [place.path for place in places], "sizes": [place.size_bytes for place in places], "names": sorted(names)}


def digest_in(results: Sequence[Any]) -> WeightsDigest | None:
    """What `rubato_digests` told in the workers; None where it can't tell."""
    if len(results) != 1 or not results[0]["slices"]:
        return None
    return WeightsDigest(results[0]["dtype"], bytes.fromhex(results[0]["slices"]))


@dataclass
class _Nothing:
    """What the backend is told before the first update."""


@dataclass
class _Update:
    """The same, as it comes there."""

    paths: list[str] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    """Tensors of the model; others in the images are not."""


def _register() -> None:
    """Add our backend to vLLM's weight transfer, where it is chosen by its name."""
    factory: Any = importlib.import_module("vllm.distributed.weight_transfer.factory").WeightTransferEngineFactory
    base: Any = importlib.import_module("vllm.distributed.weight_transfer.base").WeightTransferEngine
    if BACKEND in factory._registry:
        return

    class ImageTransfer(base):
        """Pulls a version out of the images that hold it. All of it happens in one call, so that an engine that ends meanwhile leaves no
        model half updated."""

        init_info_cls = _Nothing
        update_info_cls = _Update
        supports_draft_weight_update = False

        def init_transfer_engine(self, init_info: Any) -> None:
            """Nothing to connect to."""

        def start_weight_update(self) -> None:
            """Nothing before the images are known."""

        def update_weights(self, update_info: dict[str, Any]) -> None:
            self.receive_weights(self.parse_update_info(update_info))
            if self.device.type != "cpu":
                importlib.import_module("torch").accelerator.synchronize()

        def receive_weights(self, update_info: _Update) -> None:
            reload: Any = importlib.import_module("vllm.model_executor.model_loader.reload")
            tensors = tensors_at([*map(ImagePlace, update_info.paths, update_info.sizes)], update_info.names)
            if self.device.type == "cpu":
                _forget_kernels(self.model)
            reload.initialize_layerwise_reload(self.model)
            self.model.load_weights(tensors)
            reload.finalize_layerwise_reload(self.model, self.model_config)
            _repack(self.model)

        def finish_weight_update(self) -> None:
            """All is in place."""

        def shutdown(self) -> None:
            """Nothing is held."""

    factory.register_engine(BACKEND, ImageTransfer)


def _forget_kernels(model: Any) -> None:
    """Experts on CPU multiply by packed weights, and are packed only as their kernel is made (0.32): let a reload make it anew."""
    for module in model.modules():
        if getattr(getattr(module, "quant_method", None), "moe_kernel", None) is not None:
            module.quant_method.moe_kernel = None


def _repack(model: Any) -> None:
    """On CPU an output layer multiplies by a packed copy of its weights, which a reload forgets where they are the embedding's (0.32)."""
    for module in model.modules():
        if hasattr(module, "cpu_linear") and module.weight.numel():
            module.quant_method.process_weights_after_loading(module)


def live_as_long_as_owner() -> None:
    """Kill this process, and the vLLM process between it and the owner, once the owner is gone: neither notices by itself."""
    if OWNER not in os.environ or not hasattr(os, "pidfd_open"):
        return
    owner, parent = int(os.environ[OWNER]), os.getppid()
    doomed = [os.getpid()] if parent == owner else [parent, os.getpid()]
    try:
        fd = os.pidfd_open(owner)
    except ProcessLookupError:
        _kill(doomed)
    else:
        threading.Thread(target=_wait_and_kill, args=(fd, doomed), name="owner", daemon=True).start()


def _wait_and_kill(fd: int, doomed: list[int]) -> None:
    select.select([fd], [], [])
    _kill(doomed)


def _kill(doomed: list[int]) -> None:
    parent, *_ = doomed
    for pid in doomed:
        if pid == os.getpid() or (pid == parent == os.getppid()):
            os.kill(pid, signal.SIGKILL)


# -- what it computes with: vLLM fuses projections; on CPU it packs them too, and keeps nothing else ----------------------------------------

LINEAR, EMBEDDING = "UnquantizedLinearMethod", "UnquantizedEmbeddingMethod"
"""vLLM's ways to hold a matrix that are known here."""


def digests(model: Any, cuts: Sequence[Sequence[Any]], dtype: str) -> str:
    """In hex, one after another: of each slice's elements in `dtype`, and zeros where they can't be told."""
    torch: Any = importlib.import_module("torch")
    layers, found = dict(model.named_modules()), list[bytes]()
    with torch.inference_mode():
        for cut in cuts:
            values = _values(torch, model, layers, Slice(*cut))
            found.append(bytes(DIGEST_BYTES) if values is None else slice_digest(_bytes(torch, values.to(getattr(torch, dtype)))))
    return b"".join(found).hex()


def _bytes(torch: Any, values: Any) -> bytes:
    return values.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _values(torch: Any, model: Any, layers: Mapping[str, Any], cut: Slice) -> Any:
    """None where they can't be told; NaN where a tied head is not the embedding."""
    path, _, kind = cut.name.rpartition(".")
    layer, first = _place(layers, getattr(model, "packed_modules_mapping", {}), path)
    tensor = getattr(layer, kind, None) if kind in ("weight", "bias") else None
    if tensor is None:
        return None
    method = type(getattr(layer, "quant_method", None)).__name__
    if tensor.ndim == 1 and tensor.numel():
        return tensor[first + cut.left : first + cut.right]
    rows = slice(first + cut.top, first + cut.bottom)
    if kind == "bias" or method not in (LINEAR, EMBEDDING):
        return None
    if not tensor.numel():
        return _computed(torch, layer, rows, cut.left, cut.right)
    values, head = tensor[rows, cut.left : cut.right], getattr(model, "lm_head", None)
    if getattr(head, "weight", None) is tensor and hasattr(head, "cpu_linear"):  # packed beside `weight`
        seen = _computed(torch, head, rows, cut.left, cut.left + 1)
        if seen is not None and not torch.equal(seen, values[:, :1]):
            return torch.full_like(values, torch.nan)
    return values


def _place(layers: Mapping[str, Any], fused: Mapping[str, Sequence[str]], path: str) -> tuple[Any, int]:
    """The layer that computes with the tensors of `path`, if any, and the first of its rows that is theirs."""
    above, _, last = path.rpartition(".")
    for name, parts in fused.items():
        layer = layers.get(f"{above}.{name}")
        if last in parts and layer is not None:
            return layer, sum(layer.output_sizes[: parts.index(last)])
    return layers.get(path), 0


def _computed(torch: Any, layer: Any, rows: slice, left: int, right: int) -> Any:
    """A block of the matrix that `layer` multiplies by, read off what it makes of unit vectors. None where an element is 0, whose sign can't be told."""
    units = torch.zeros(right - left, layer.input_size, dtype=layer.weight.dtype)
    units[torch.arange(right - left), torch.arange(left, right)] = 1.0
    values = layer.quant_method.apply(layer, units, None)[:, rows].t()
    return None if bool((values == 0).any()) else values
