"""The scripted engine as a player of FrozenLake: each turn is one of the four words, drawn at once."""

from rubato.actors.scripted.engine import ScriptedEngine, ScriptedSequence
from rubato.actors.training.base_model import ACTIONS, make_tokenizer


class Walker(ScriptedEngine):
    """Samples direction words alone, so that episodes are as long as a random walk's."""

    async def start(self) -> None:
        await super().start()
        tokenizer = make_tokenizer()
        self._vocab_size = tokenizer.get_vocab_size()
        self._words = [tokenizer.token_to_id(word) for word in ACTIONS]

    def _token(self, sequence: ScriptedSequence) -> tuple[int, float]:
        number, logprob = super()._token(sequence)
        return self._words[number % len(self._words)], logprob
