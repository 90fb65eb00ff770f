"""Messages become tokens by a renderer of the package `renderers`: code for one family of models, where a chat template would be guessed at."""

import difflib
from array import array
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, get_args

from actors.envs.chat import CACHED, Transcript, as_messages, observation_key, read_tokenizer
from actors.envs.environment import Observation

NOT_ONE_MODEL = frozenset({"auto", "custom", "default"})
"""Names of the package that stand for no family of models."""


class NamedRenderer:
    """Renders as ChatRenderer does, by the package's renderer `name`. Raises ValueError, one sentence, where that can't be."""

    def __init__(
        self,
        name: str,
        folder: Path,
        *,
        system_prompt: str = "",
        variables: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        from renderers import create_renderer

        config = renderer_config(name, variables or {})
        tokenizer, settings = read_tokenizer(folder)
        self._tokenizer = tokenizer
        try:
            self._renderer: Any = create_renderer(_Tokenizer(folder, tokenizer, settings), config)
        except Exception as error:  # it checks by assertions too
            raise ValueError(f"rollout.renderer {name} does not fit model folder {folder}: {error}") from error
        self._system = [{"role": "system", "content": system_prompt}] if system_prompt else []
        self._tools = [*tools] or None
        self._name = name
        self.stop_token_ids: tuple[int, ...] = tuple(self._renderer.get_stop_token_ids())
        self._opening = lru_cache(CACHED)(self._render_opening)

    def opening(self, observation: Observation) -> bytes:
        """As ChatRenderer.opening."""
        return self._opening(observation_key(observation))

    def next_turn(self, observation: Observation, transcript: Transcript) -> bytes:
        """As ChatRenderer.next_turn; reasoning that the turn was cut in is closed too, as the model's family has it."""
        messages = as_messages(observation_key(observation))
        before, sampled = (array("i", part).tolist() for part in transcript.last_turn)
        found = self._bridge(before, sampled, messages)
        if found is None:  # it ended inside its reasoning, which can't be told again without touching what was sampled
            before, sampled = array("i", self.opening("?")).tolist(), sampled[-1:]
            found = self._bridge(before, sampled, messages)
        if found is None:
            roles = ", ".join(sorted({message["role"] for message in messages}))
            raise ValueError(f"rollout.renderer {self._name} can't append messages of these roles: {roles}")
        return array("i", found).tobytes()

    def decode(self, ids: bytes) -> str:
        """The text of sampled tokens, without special ones."""
        return self._tokenizer.decode(array("i", ids).tolist(), skip_special_tokens=True)

    def _bridge(self, before: list[int], sampled: list[int], messages: list[dict[str, str]]) -> list[int] | None:
        rendered = self._renderer.bridge_to_next_turn(before, sampled, messages, tools=self._tools)
        return None if rendered is None else rendered.token_ids[len(before) + len(sampled) :]

    def _render_opening(self, observation: str) -> bytes:
        messages = [*self._system, *as_messages(observation)]
        return array("i", self._renderer.render_ids(messages, tools=self._tools, add_generation_prompt=True)).tobytes()


def renderer_config(name: str, variables: Mapping[str, Any]) -> Any:
    """The package's config of renderer `name`. Raises ValueError, one sentence: not installed, no such name, or a variable that it does not have."""
    try:
        from renderers import RendererConfig, merge_chat_template_kwargs
    except ImportError as error:
        raise ValueError(
            f"rollout.renderer is {name}, but the package renderers is not installed. "
            "Install it with: pip install -e '.[renderers]'"
        ) from error
    kinds = {
        kind.model_fields["name"].default: kind
        for kind in get_args(get_args(RendererConfig)[0])
        if kind.model_fields["name"].default not in NOT_ONE_MODEL
    }
    if name not in kinds:
        near = difflib.get_close_matches(name, kinds, n=1)
        guess = f"Did you mean {near[0]}?" if near else f"There are {', '.join(sorted(kinds))}"
        raise ValueError(f"rollout.renderer {name} is not known to the package renderers. {guess}")
    try:
        # What was sampled stays as it is, reasoning included: transcripts only grow.
        return merge_chat_template_kwargs(kinds[name](thinking_retention="all"), variables)
    except ValueError as error:
        said = "; ".join(str(error).splitlines()[:1])
        raise ValueError(f"rollout.chat_template_kwargs do not fit rollout.renderer {name}: {said}") from error


class _Tokenizer:
    """What the package asks of a tokenizer."""

    def __init__(self, folder: Path, tokenizer: Any, settings: Mapping[str, str]) -> None:
        self.name_or_path = str(folder)
        self._tokenizer = tokenizer
        self.unk_token_id: int | None = self.convert_tokens_to_ids(settings.get("unk_token", ""))
        self.eos_token_id: int | None = self.convert_tokens_to_ids(settings.get("eos_token", ""))

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, token_ids: Any, *, skip_special_tokens: bool = False) -> str:
        ids = [token_ids] if isinstance(token_ids, int) else [*token_ids]
        return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        if isinstance(tokens, str):
            return self._tokenizer.token_to_id(tokens)
        return [self._tokenizer.token_to_id(token) for token in tokens]
