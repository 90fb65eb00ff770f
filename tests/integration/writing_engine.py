"""An engine that writes what `says.json` in its model folder has for each turn, letter by letter, and keeps what it was asked and wrote."""

import json
from pathlib import Path

from tokenizers import Tokenizer

from rubato.actors.scripted.engine import ScriptedEngine

ASSISTANT = "<|im_start|>assistant\n"
"""By which the template begins a turn of the model."""


class WritingEngine(ScriptedEngine):
    """The last of `says` has two forms, of which every second member of a group gets the other."""

    def __init__(self, folder, model, section):
        super().__init__(folder, model, section)
        self._kept = Path(folder, "wrote.jsonl")
        self._tokenizer = Tokenizer.from_file(str(Path(folder, "tokenizer.json")))
        *self._says, self._ends = json.loads(Path(folder, "says.json").read_text())
        self._texts = {}

    def _token(self, sequence):
        work, num = sequence.work, len(sequence.tokens) - len(sequence.work.prompt)
        if num == 0:
            member = int(work.session.rpartition(".")[2])
            turn = self._tokenizer.decode(work.prompt, skip_special_tokens=False).count(ASSISTANT) - 1
            said = self._says[turn] if turn < len(self._says) else self._ends[member % len(self._ends)]
            self._texts[work.request_id] = [*spelled(self._tokenizer, said), self._tokenizer.token_to_id("<|im_end|>")]
        text = self._texts[work.request_id]
        if num == len(text) - 1:
            with self._kept.open("a") as file:
                file.write(json.dumps([list(work.prompt), text]) + "\n")
        return text[num], -0.5


def spelled(tokenizer, text):
    """By its letters, which is not how the tokenizer would have it."""
    return [token for letter in text for token in tokenizer.encode(letter, add_special_tokens=False).ids]
