"""The Redis user may do what the scripts do."""

import re
from pathlib import Path

import runtime.store
from runtime.store.embedded import COMMANDS


def test_every_command_of_a_script_is_allowed() -> None:
    folder = Path(runtime.store.__file__).parent / "scripts"
    called = {
        name.lower()
        for script in folder.glob("*.lua")
        for name in re.findall(r"redis\.call\('(\w+)'", script.read_text())
    }
    assert "xtrim" in called
    assert called <= set(COMMANDS), f"not allowed by runtime/store/embedded.py: {sorted(called - set(COMMANDS))}"
