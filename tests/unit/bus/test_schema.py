"""The digest that peers compare says what the wire is made of."""

from bus.link import SCHEMA, schema_of_the_wire


def test_the_schema_is_that_of_the_present_wire():
    assert schema_of_the_wire() == SCHEMA, (
        "envelope, greeting or kinds changed: set SCHEMA in bus/link.py and docs/bus.md to this"
    )
