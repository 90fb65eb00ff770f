"""The page of messages for clients in other languages is that of the code, and complete."""

import json
import runpy
from pathlib import Path

from rubato.actors.messages.generation import Completion, Generate

ROOT = Path(__file__).parents[2]
RECORD = json.loads((ROOT / "docs" / "messages.json").read_text())


def test_the_messages_on_record_are_those_of_the_code():
    described = runpy.run_path(str(ROOT / "tools" / "messages.py"))["described"]

    now = json.loads(json.dumps(described()))

    changed = sorted(name for part in now for name in now[part].keys() | RECORD[part] if now[part].get(name) != RECORD[part].get(name))
    assert changed == [], "messages changed: record them with tools/messages.py > docs/messages.json"


def test_a_request_names_its_fields_in_order_its_replies_and_whether_it_may_be_sent_again():
    generate, completion = RECORD["messages"]["Generate"], RECORD["messages"]["Completion"]

    assert [field["name"] for field in generate["fields"]] == list(Generate.__struct_fields__)
    assert (generate["replies"], generate["idempotent"]) == (["Aborted", "Completion", "HandedBack", "HandedOver", "NotItsTurn"], True)
    assert [field["name"] for field in completion["fields"]] == list(Completion.__struct_fields__)
    assert "replies" not in completion


def test_every_struct_that_a_field_names_is_there():
    known = {
        *RECORD["messages"],
        *RECORD["structs"],
        "str",
        "int",
        "float",
        "bool",
        "bytes",
        "nil",
        "tuple",
        "dict",
        "Buffer",
        "Array",
        "list",
        "frozenset",
    }
    fields = [field for part in RECORD.values() for each in part.values() for field in each["fields"]]

    words = {
        word for field in fields if "'" not in field["type"] for word in field["type"].translate(str.maketrans("[],|…", "     ")).split()
    }
    assert words <= known
