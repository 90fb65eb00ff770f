"""The fingerprint changes with what is on the wire and with nothing else."""

import sys
from typing import ClassVar

import msgspec
import pytest

from rubato.bus.message import Ack, Message, Request
from rubato.runtime.actor import Actor, Handles, handler
from rubato.runtime.blobs.blob_messages import GetPiece
from rubato.runtime.config.compose import from_mapping
from rubato.runtime.config.schema import fingerprint, schema_of
from rubato.runtime.launch import card
from rubato.runtime.launch.agent_messages import StopJob
from rubato.runtime.messages import Drain


def test_defaults_and_documentation_do_not_count_and_fields_do():
    def made(**fields: type) -> type[Message]:
        return msgspec.defstruct("Score", list(fields.items()), bases=(Message,), frozen=True)

    plain = made(run=str, reward=float)
    with_default = msgspec.defstruct("Score", [("run", str, "x"), ("reward", float, 1.0)], bases=(Message,), frozen=True)

    assert fingerprint([plain]) != fingerprint([made(run=str)])
    assert fingerprint([plain]) != fingerprint([made(run=str, reward=int)])
    assert fingerprint([plain]) != fingerprint([made(reward=float, run=str)])
    assert fingerprint([plain]) != fingerprint([with_default])  # a field that may be missing is another wire
    assert fingerprint([plain]) == fingerprint([made(run=str, reward=float)])


class Tree(msgspec.Struct, frozen=True):
    below: "list[Tree]" = []


class Plant(Request[Ack], frozen=True):
    idempotent: ClassVar[bool] = True
    tree: Tree


def test_a_type_inside_itself_is_described_once():
    assert fingerprint([Plant]) == fingerprint([Plant])


def test_a_job_has_one_fingerprint_whatever_its_numbers_are():
    roles = {"sample_buffer": {"class": "rubato.actors.samples.buffer:SampleBuffer"}}

    assert schema_of(from_mapping({"actors": roles})) == schema_of(from_mapping({"actors": roles, "run": {"steps": 7}}))


@pytest.mark.parametrize("message", [Drain, StopJob, GetPiece])
def test_what_hosts_say_to_each_other_counts_in_every_job(message, monkeypatch):
    config = from_mapping({"actors": {"sample_buffer": {"class": "rubato.actors.samples.buffer:SampleBuffer"}}})
    before = schema_of(config)
    changed = msgspec.defstruct(message.__name__, [("changed", int, 0)], bases=(message,), frozen=True)
    monkeypatch.setattr(sys.modules[message.__module__], message.__name__, changed)

    assert schema_of(config) != before


class Gardener(Handles):
    @handler
    async def plant(self, request: Plant) -> Ack:
        return Ack()


class Garden(Actor):
    @classmethod
    def plugin_classes(cls, job):
        return (Gardener,) if job.run.seed else ()


def test_messages_of_plug_ins_count_where_the_job_has_them():
    def schema(seed):
        return schema_of(from_mapping({"actors": {"garden": {"class": f"{__name__}:Garden"}}, "run": {"seed": seed}}))

    assert schema(1) == schema(2) != schema(0)


def test_a_file_of_ours_that_changed_is_seen_without_importing_it(tmp_path, monkeypatch):
    monkeypatch.setattr(card, "OURS", tmp_path)
    monkeypatch.setattr(card, "PACKAGES", ("bus", "actors"))
    (tmp_path / "actors").mkdir()
    file = tmp_path / "actors" / "messages.py"
    file.write_text("raise SystemExit")

    before = card.sources()
    same = card.sources()
    file.write_text("raise SystemExit(1)")

    assert before == same
    assert card.sources() != before
