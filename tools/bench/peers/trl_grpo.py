"""TRL's synchronous GRPO trainer on the quickstart's task: one side of tools/bench/vs_trl.py, which starts it.

python trl_grpo.py SETTINGS, with SETTINGS a JSON file that vs_trl.py writes. A line of JSON per batch goes to its `rows`.
The environment goes in by `rollout_func`: with `environment_factory` the model would have to answer in tool calls, and environments would
step one after the other.
"""

import asyncio
import json
import random
import sys
from array import array
from collections.abc import Sequence
from copy import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

import torch  # noqa: E402
from datasets import Dataset  # noqa: E402  # pyright: ignore[reportMissingImports] - of the peer
from latent_lake import LatentLake  # noqa: E402
from torch.optim.lr_scheduler import LambdaLR  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback  # noqa: E402
from trl import GRPOConfig, GRPOTrainer  # noqa: E402  # pyright: ignore[reportMissingImports] - of the peer

from rubato.actors.envs.chat import ChatRenderer  # noqa: E402
from rubato.actors.rewards.functions import malformed_penalty  # noqa: E402
from rubato.bus.message import unpack_i32  # noqa: E402
from rubato.runtime.observe.trace import wall_s  # noqa: E402


class Rollouts:
    """`rollout_func` of GRPOTrainer: the episodes of a batch turn by turn, generated in one call, stepped concurrently."""

    def __init__(self, model: Path, latency: str, max_turns: int) -> None:
        self._renderer = ChatRenderer(model)
        self._latency = latency
        self._max_turns = max_turns
        self._envs: list[LatentLake] = []

    def __call__(self, prompts: Sequence[str], trainer: Any) -> dict[str, Any]:
        """Token ids and rewards of one episode per prompt, which is the seed of its map."""
        return asyncio.run(self._play([int(prompt) for prompt in prompts], trainer))

    async def _play(self, seeds: Sequence[int], trainer: Any) -> dict[str, Any]:
        self._envs += [LatentLake(latency=self._latency) for _ in range(len(seeds) - len(self._envs))]
        episodes = [Episode(env, self._renderer) for env in self._envs[: len(seeds)]]
        await asyncio.gather(*(e.begin(seed) for e, seed in zip(episodes, seeds, strict=True)))
        live, context = list(episodes), Context(trainer)
        for turn in range(1, self._max_turns + 1):
            sampled = context.sample([episode.unread for episode in live])
            last = turn == self._max_turns
            going = await asyncio.gather(*(e.step(ids, last=last) for e, ids in zip(live, sampled, strict=True)))
            kept = [at for at, goes_on in enumerate(going) if goes_on]
            if not kept:
                break
            if len(kept) < len(live):
                context.keep(kept)
                live = [live[at] for at in kept]
        return {
            "prompt_ids": [e.prompt for e in episodes],
            "completion_ids": [e.completion for e in episodes],
            "env_mask": [e.mask for e in episodes],
            "logprobs": None,
            "env_reward": [e.reward for e in episodes],
            "turns": [e.turns for e in episodes],
            "invalid_turns": [e.invalid for e in episodes],
        }


class Episode:
    """One conversation, by the model's chat template, appended token by token."""

    def __init__(self, env: LatentLake, renderer: ChatRenderer) -> None:
        self._env, self._renderer = env, renderer
        self.prompt: list[int] = []
        self.completion: list[int] = []
        self.mask: list[int] = []
        self.unread: list[int] = []
        """What the model has not read yet."""
        self.reward, self.turns, self.invalid = 0.0, 0, 0

    async def begin(self, seed: int) -> None:
        """Start on the map of `seed`."""
        observation, _ = await self._env.reset(seed=seed)
        self.prompt = self.unread = unpack_i32(self._renderer.opening(observation))

    async def step(self, sampled: list[int], *, last: bool) -> bool:
        """Whether the episode goes on."""
        answer = self._renderer.decode(array("i", sampled).tobytes())
        observation, reward, terminated, _, info = await self._env.step(answer)
        self.turns += 1
        self.reward += reward
        self.invalid += bool(info.get("invalid"))
        over = terminated or last
        shown = [] if over else unpack_i32(self._renderer.follow_up(observation, sampled[-1]))
        self.unread = sampled + shown
        self.completion += self.unread
        self.mask += [1] * len(sampled) + [0] * len(shown)
        return not over


class Context:
    """What the model has read of each live episode, left-padded turn by turn, and its KV cache, which lasts over turns.

    TRL's own multi-turn loop reads the whole conversation again at each turn, which takes longer. Answers are of one token.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._pad = trainer.processing_class.pad_token_id
        self._config = copy(trainer.generation_config)
        self._config.use_cache = self._config.return_dict_in_generate = True
        self._ids_BT = self._mask_BT = torch.empty((0, 0), dtype=torch.long)
        self._cache: Any = None

    def sample(self, unread: Sequence[list[int]]) -> list[list[int]]:
        """The next tokens of each episode after it has read its `unread` ones."""
        longest = max(map(len, unread))
        ids_BT = torch.tensor([[self._pad] * (longest - len(ids)) + ids for ids in unread])
        mask_BT = torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids in unread])
        first = self._cache is None
        self._ids_BT = ids_BT if first else torch.cat([self._ids_BT, ids_BT], dim=1)
        self._mask_BT = mask_BT if first else torch.cat([self._mask_BT, mask_BT], dim=1)
        with torch.no_grad():
            found = self._trainer.model.generate(
                self._ids_BT, attention_mask=self._mask_BT, past_key_values=self._cache, generation_config=self._config
            )
        self._cache = found.past_key_values
        return found.sequences[:, self._ids_BT.shape[1] :].tolist()

    def keep(self, rows: Sequence[int]) -> None:
        """Forget the episodes that ended."""
        index = torch.tensor(rows)
        self._ids_BT, self._mask_BT = self._ids_BT[index], self._mask_BT[index]
        self._cache.batch_select_indices(index)


def score(completions: list[str], env_reward: list[float], turns: list[int], invalid_turns: list[int], **_: Any) -> list[float]:
    """Reward function of GRPOTrainer: what the quickstart's adds up to."""
    found = malformed_penalty(completions, turns, invalid_turns)
    Row.turns = sum(turns) / len(turns)
    return [given + penalty for given, penalty in zip(env_reward, found, strict=True)]


class Row(TrainerCallback):
    """Writes a line for each batch, once its last update is done."""

    turns = 0.0

    def __init__(self, file: Path, *, updates: int, batch: int) -> None:
        self._file, self._updates, self._batch = file.open("w"), updates, batch
        self._reward = 0.0

    def on_log(self, args: Any, state: Any, control: Any, **told: Any) -> None:
        logs: dict[str, float] = told["logs"]
        self._reward = logs.get("reward", self._reward)  # told with the first update of a batch
        if "loss" in logs and state.global_step % self._updates == 0:
            samples = state.global_step // self._updates * self._batch
            row = {"samples": samples, "reward": self._reward, "turns": Row.turns, "unix_s": wall_s()}
            print(json.dumps(row), file=self._file, flush=True)


def config_of(given: SimpleNamespace) -> GRPOConfig:
    """The quickstart's batch and loss in TRL's names: its minibatches are updates on parts of one generated batch."""
    train, rollout = given.train, given.rollout
    return GRPOConfig(
        output_dir=given.out,
        use_cpu=True,
        bf16=False,
        seed=given.seed,
        max_steps=given.steps * train.minibatches,
        per_device_train_batch_size=train.batch_groups * train.group_size // train.minibatches,
        steps_per_generation=train.minibatches,
        num_generations=train.group_size,
        max_completion_length=rollout.max_new_tokens,
        temperature=rollout.temperature,
        loss_type=train.loss,
        beta=train.kl_coef,
        epsilon=train.clip_low,
        epsilon_high=train.clip_high,
        max_grad_norm=train.max_grad_norm,
        gradient_checkpointing=False,
        shuffle_dataset=False,
        dataloader_pin_memory=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


def trainer_of(given: SimpleNamespace) -> GRPOTrainer:
    """On the quickstart's model, with its optimiser and schedule; each prompt is the seed of a map."""
    train = given.train
    model = AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.float32, attn_implementation="sdpa")
    optimizer = torch.optim.AdamW(model.parameters(), lr=train.lr, betas=tuple(train.betas), weight_decay=train.weight_decay, fused=True)

    def share(update: int) -> float:
        step = update // train.minibatches + 1
        warm = min(1.0, step / train.warmup_steps) if train.warmup_steps else 1.0
        return warm * (1.0 - (1.0 - train.lr_final) * min(1.0, (step - 1) / (train.lr_steps - 1)))

    chance = random.Random(given.seed)
    seeds = [str(chance.randrange(1 << 31)) for _ in range(train.batch_groups * given.steps)]
    rows = Path(given.out) / "rows.jsonl"
    return GRPOTrainer(
        model=model,
        processing_class=AutoTokenizer.from_pretrained(given.model, padding_side="left"),
        reward_funcs=score,
        args=config_of(given),
        train_dataset=Dataset.from_dict({"prompt": seeds}),
        optimizers=(optimizer, LambdaLR(optimizer, share)),
        rollout_func=Rollouts(Path(given.model), given.latency, given.rollout.max_turns),
        callbacks=[Row(rows, updates=train.minibatches, batch=train.batch_groups * train.group_size)],
    )


if __name__ == "__main__":
    settings = json.loads(Path(sys.argv[1]).read_text(), object_hook=lambda found: SimpleNamespace(**found))
    torch.set_num_threads(settings.threads)
    trainer_of(settings).train()
