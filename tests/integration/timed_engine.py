"""A scripted engine that keeps when it computed each token, in `computed` beside its model."""

from pathlib import Path

from rubato.actors.scripted.engine import ScriptedEngine
from rubato.runtime.observe.trace import wall_s


class TimedEngine(ScriptedEngine):
    def __init__(self, folder, model, section):
        super().__init__(folder, model, section)
        self._computed = Path(folder, "computed")

    def _token(self, sequence):
        with self._computed.open("a") as file:
            file.write(f"{wall_s()}\n")
        return super()._token(sequence)
