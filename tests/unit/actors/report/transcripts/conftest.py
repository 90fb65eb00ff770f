"""A run folder with a model's tokenizer, a ledger and some trajectories."""

import json
from array import array

import msgspec
import pytest
import yaml
from tokenizers import Tokenizer, models, pre_tokenizers

from rubato.actors.messages.generation import VersionSpan
from rubato.actors.messages.samples import Segment, Ticket, Trajectory

WORDS = ["<|end|>", "<|assistant|>", "two", "and", "is", "four", "five", "again", "\x1b[31m"]


def ids(text):
    return [WORDS.index(word) for word in text.split(" ")]


class RunFolderMaker:
    """Writes what `rubato samples` reads."""

    def __init__(self, path):
        self.path = path
        (path / "model").mkdir(parents=True)
        tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<|end|>"))
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        tokenizer.save(str(path / "model" / "tokenizer.json"))
        (path / "config.yaml").write_text(yaml.safe_dump({"model": {"path": "model"}}))
        (path / "trajectories").mkdir()

    def keep(self, name, *turns, reward=1.0, attempt=1, purpose="train", version=3, row=5, task="", scores=None, branches=(), **more):
        """Each turn is (shown, sampled, finish reason, [(version, tokens) …]); each branch (tokens of the first segment, shown, sampled)."""
        tokens, mask, spans = [], b"", []
        for shown, sampled, _, versions in turns:
            tokens += ids(shown)
            mask += bytes(len(ids(shown)))
            for number, count in versions:
                spans.append(VersionSpan(number, len(mask), len(mask) + count))
                mask += b"\1" * count
            tokens += ids(sampled)
        segment = Segment(array("i", tokens).tobytes(), mask, b"", tuple(spans))
        segments = (segment, *(self.branch(segment, *branch) for branch in branches))
        ticket = Ticket(name, name.rpartition(".")[0], attempt, row, 77, version, purpose, task=task)
        reasons = tuple(turn[2] for turn in turns)
        scores = {"env": reward} if scores is None else scores
        more = {"truncated": False, "finish_reasons": reasons, "scores": scores, **more}
        whole = Trajectory(ticket, segments, reward, len(turns), wall_s=0.5, **more)
        (self.path / "trajectories" / f"{name}.{attempt}").write_bytes(msgspec.msgpack.encode(whole))

    @staticmethod
    def branch(first, num, shown, sampled):
        """A segment that goes on behind so many tokens of another."""
        tokens = first.tokens[: 4 * num] + array("i", [*ids(shown), *ids(sampled)]).tobytes()
        begin, end = num + len(ids(shown)), len(tokens) // 4
        return Segment(tokens, bytes(begin) + b"\1" * (end - begin), b"", (VersionSpan(5, begin, end),))

    def end(self, name, fate="trained", *, attempt=1, step=4, reward=1.0, scores=None, row=5, task="", **more):
        """A line of samples.jsonl."""
        came = reward is not None
        line = {
            "trajectory_id": name, "group_id": name.rpartition(".")[0], "attempt": attempt, "task": task, "row": row, "fate": fate,
            "step": step, "epoch": 1, "reason": "", "version_first": 3 if came else None, "reward": reward, "tokens": 2,
            "turns": 1, "wall_s": 0.5, "finish_reasons": ["stop"], "cut": False, "scores": scores or {"env": reward},
            "purpose": "train", "seed": 77, "version_from": 3, "age": 0, **more,
        }  # fmt: skip
        with (self.path / "samples.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")


@pytest.fixture
def folder(tmp_path):
    return RunFolderMaker(tmp_path / "run")


@pytest.fixture
def asked():
    """One turn as `keep` takes it."""
    return ("two and two is <|assistant|>", "four <|end|>", "stop", [(3, 2)])
