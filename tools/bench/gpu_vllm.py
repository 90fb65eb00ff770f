"""Tokens per second of vLLM alone: `python tools/bench/gpu_vllm.py MODEL_FOLDER PROMPT NEW_TOKENS CONCURRENCY…` prints one line of JSON."""

import importlib
import json
import os
import random
import sys
import time


def main(folder: str, prompt: int, new: int, concurrency: list[int]) -> dict[int, float]:
    """Prompts and completions of these lengths; each figure is of a pass after a short one."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    vllm = importlib.import_module("vllm")
    llm = vllm.LLM(
        model=folder, dtype="bfloat16", skip_tokenizer_init=True, max_model_len=prompt + new,
        max_num_seqs=max(concurrency), enable_prefix_caching=False, gpu_memory_utilization=0.7,
    )  # fmt: skip
    found: dict[int, float] = {}
    for num in concurrency:
        for tokens in (8, new):
            chance = random.Random(f"{num}.{tokens}")
            prompts = [{"prompt_token_ids": [chance.randrange(512) for _ in range(prompt)]} for _ in range(num)]
            sampling = vllm.SamplingParams(max_tokens=tokens, ignore_eos=True, detokenize=False, logprobs=0)
            began = time.perf_counter()
            llm.generate(prompts, sampling, use_tqdm=False)
            found[num] = num * tokens / (time.perf_counter() - began)
    return found


if __name__ == "__main__":
    sizes = [int(each) for each in sys.argv[2:]]
    print(json.dumps(main(sys.argv[1], sizes[0], sizes[1], sizes[2:])))
