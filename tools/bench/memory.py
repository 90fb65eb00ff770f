"""Peak memory of the trainer's forward and backward pass at Qwen3-0.6B's sizes: log-probs in chunks of tokens, and in one matrix.

python tools/bench/memory.py [--tokens 2048 8192] [--layers 0 4] [--dtype float32 bfloat16] [--rows 1024] [--threads 2] [--json FILE]
python tools/bench/memory.py --short

Each figure is of a process of its own: its largest resident size, or on CUDA what torch held at most, less what it held before the pass
(weights, and their fp32 masters in bfloat16). 0 layers are the embedding and the output head alone, with the vocabulary of 151,936; the
published model has 28. A process that would need more than 90 % of the host's free memory is refused it, and says so.
"""

import argparse
import itertools
import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tools.bench.short import NO_RESULT  # noqa: E402

SHAPE: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
}
SHAPE |= {"head_dim": 128, "vocab_size": 151_936, "tie_word_embeddings": True}
WAYS = ("matrix", "chunks", "chunks+checkpointing")
SHORT = {"tokens": [64], "layers": [0], "dtype": ["float32"], "ways": ["chunks"], "rows": 32}


def in_one_matrix(hidden_ND: Any, head: Any, tokens_N: Any, temperatures_N: Any) -> tuple[Any, Any]:
    """The same figures as `token_logprobs`, by torch's own functions on all tokens at once."""
    import torch

    all_NV = torch.log_softmax(head(hidden_ND).float() / temperatures_N[:, None], dim=-1)
    with torch.no_grad():
        entropy_N = -(all_NV.exp() * all_NV).sum(-1)
    return all_NV.gather(-1, tokens_N[:, None]).squeeze(-1), entropy_N


def measure(way: str, tokens: int, layers: int, dtype: str, row: int) -> dict[str, float]:
    """One forward and backward pass over `tokens` tokens in sequences of `row`; GB and seconds."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from actors.training import forward

    cuda = torch.cuda.is_available()
    torch.manual_seed(0)
    with torch.device("cuda" if cuda else "cpu"):
        model = Qwen3ForCausalLM(Qwen3Config(**SHAPE, num_hidden_layers=layers))
        tokens_BT = torch.randint(SHAPE["vocab_size"], (max(1, tokens // row), min(row, tokens) + 1))
        cells = torch.cartesian_prod(torch.arange(tokens_BT.shape[0]), torch.arange(tokens_BT.shape[1] - 1)).unbind(1)
        batch = SimpleNamespace(
            tokens_BT=tokens_BT,
            rows_N=cells[0],
            cols_N=cells[1],
            targets_N=tokens_BT[cells[0], cells[1] + 1],
            temperatures_N=torch.ones(len(cells[0])),
        )
    masters = forward.masters_of(model, getattr(torch, dtype))
    if way.endswith("checkpointing"):
        forward.checkpoint_layers(model.eval())
    if way == "matrix":
        forward.token_logprobs = in_one_matrix
    before, began = _held(cuda), time.perf_counter()
    logprobs_N, _ = forward.policy_logprobs(model, batch)
    (-logprobs_N.mean()).backward()
    norm = torch.nn.utils.clip_grad_norm_(masters.values(), 1e9)
    seconds = time.perf_counter() - began
    peak = torch.cuda.max_memory_allocated() if cuda else _status("VmHWM")
    mean = logprobs_N.mean().item()
    return {"gb": (peak - before) / 1e9, "before_gb": before / 1e9, "s": seconds, "logprob": mean, "norm": norm.item()}


def _held(cuda: bool) -> int:
    """Bytes held now; the peak counts from here on."""
    if cuda:
        import torch

        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _status(name: str, path: str = "/proc/self/status") -> int:
    """A figure in bytes of a file in /proc that gives it in kB."""
    lines = Path(path).read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1]) * 1024


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", nargs="+", type=int, default=[2048, 8192])
    parser.add_argument("--layers", nargs="+", type=int, default=[0, 4])
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--rows", type=int, default=1024, help="tokens of a sequence")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--short", action="store_true", help="64 tokens, one way: it starts, its figures say nothing")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.short:
        print(NO_RESULT)
        vars(given).update(SHORT)
    if given.child:
        import torch

        torch.set_num_threads(given.threads)
        if not torch.cuda.is_available():
            limit = _status("MemAvailable", "/proc/meminfo") * 9 // 10
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        way, tokens, layers, dtype = given.child.split(",")
        print(json.dumps(measure(way, int(tokens), int(layers), dtype, given.rows)))
        return 0
    found = {}
    for tokens, layers, dtype, way in itertools.product(given.tokens, given.layers, given.dtype, given.ways):
        if way.endswith("checkpointing") and not layers:
            continue
        name = f"{way},{tokens},{layers},{dtype}"
        again = [sys.executable, __file__, "--child", name, "--rows", f"{given.rows}", "--threads", f"{given.threads}"]
        ran = subprocess.run(again, capture_output=True, text=True, check=False)
        if ran.returncode:
            print(f"{name}: {(ran.stderr.strip().splitlines() or ['killed'])[-1][:120]}")
            continue
        found[name] = figures = json.loads(ran.stdout.splitlines()[-1])
        print(
            f"{name}: {figures['gb']:.2f} GB beyond {figures['before_gb']:.2f}, {figures['s']:.0f} s, "
            f"mean log-prob {figures['logprob']:.5f}, gradient's norm {figures['norm']:.6f}",
            flush=True,
        )
    if given.json:
        given.json.write_text(json.dumps(found, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
