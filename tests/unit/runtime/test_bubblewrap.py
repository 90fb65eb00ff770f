"""What a sandbox's command line says, without starting one."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from rubato.runtime import bubblewrap
from rubato.runtime.bubblewrap import Bounds, Sandbox, SandboxWall, exit_code, flaw_of, sandboxed
from rubato.runtime.doctor import check_sandbox
from rubato.runtime.errors import ConfigError


def pairs(argv):
    """Of each mount, what is shown."""
    return [argv[at + 1] for at, word in enumerate(argv) if word == "--ro-bind"]


def test_values_of_variables_are_not_on_the_command_line(monkeypatch):
    monkeypatch.setenv("MY_KEY", "my-secret")

    argv, env = sandboxed(["true"], Sandbox(env=("MY_KEY",)), {"OTHER": "other-secret"})

    assert not [word for word in argv if "secret" in word]
    assert (env["MY_KEY"], env["OTHER"]) == ("my-secret", "other-secret")


def test_only_named_variables_are_kept(monkeypatch):
    monkeypatch.setenv("MY_KEY", "my-secret")

    _, env = sandboxed(["true"], Sandbox())

    assert "MY_KEY" not in env
    assert env["PATH"] == os.environ["PATH"]
    assert env["HOME"] == "/tmp"


def test_there_is_no_network_unless_it_is_asked_for():
    assert "--unshare-net" in sandboxed(["true"], Sandbox()).argv
    assert "--unshare-net" not in sandboxed(["true"], Sandbox(network=True)).argv


def test_code_that_the_run_keeps_is_shown_where_there_is_some(tmp_path, monkeypatch):
    kept = [tmp_path, tmp_path / "no-code"]
    monkeypatch.setattr(bubblewrap, "in_use", lambda: [SimpleNamespace(folder=folder) for folder in kept])

    shown = pairs(sandboxed(["true"], Sandbox()).argv)

    assert [folder for folder in kept if str(folder) in shown] == [tmp_path]


def test_neither_home_nor_the_working_folder_nor_the_checkout_is_shown(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(Path.home()), str(tmp_path), "/"])

    shown = [Path(place) for place in pairs(sandboxed(["true"], Sandbox()).argv)]

    for hidden in (Path.home(), tmp_path, bubblewrap.OURS, Path("/")):
        assert not [place for place in shown if hidden.is_relative_to(place)]


def test_what_is_to_be_read_is_shown_with_the_file_that_a_link_leads_to(tmp_path):
    (tmp_path / "rows").mkdir()
    (tmp_path / "link").symlink_to("rows")

    shown = pairs(sandboxed(["true"], Sandbox(read=(str(tmp_path / "link"),))).argv)

    assert {str(tmp_path / "link"), str(tmp_path / "rows")} <= {*shown}


def test_memory_is_always_bounded():
    assert f"--as={8192 << 20}" in sandboxed(["true"], Sandbox()).argv
    assert f"--as={64 << 20}" in sandboxed(["true"], Sandbox(bounds=Bounds(memory_mb=64))).argv


def test_a_worker_keeps_the_variables_that_a_sandbox_has():
    argv, env = SandboxWall(Sandbox()).around(["python", "worker.py"], {"PATH": "/bin", "SECRET": "x", "PYTHONSAFEPATH": "1"})

    assert argv[-2:] == ("python", "worker.py")
    assert env == {"PATH": "/bin", "PYTHONSAFEPATH": "1", "HOME": "/tmp", "TMPDIR": "/tmp"}


@pytest.mark.parametrize(("code", "meant"), [(0, 0), (7, 7), (128, 128), (128 + 9, -9), (128 + 11, -11), (255, 255), (-15, -15)])
def test_an_exit_code_of_a_sandbox_is_that_of_what_ran_in_it(code, meant):
    assert exit_code(code) == meant


def test_a_missing_tool_is_one_sentence_with_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))

    with pytest.raises(ConfigError) as refused:
        bubblewrap.check(Sandbox(), "env.sandbox")

    assert str(refused.value) == (
        "env.sandbox=bwrap can't be had on this host: bwrap is not installed: apt install bubblewrap. "
        "See docs/security.md, or go without by env.sandbox=none."
    )
    assert check_sandbox() == ("warn", "sandbox: bwrap can't be had: bwrap is not installed: apt install bubblewrap")


def test_the_whole_file_system_is_not_shown():
    assert flaw_of(Sandbox(read=("/",))) in ("it can't be shown /, only folders below", flaw_of(Sandbox()))


def test_what_would_run_as_root_is_not_started(monkeypatch):
    monkeypatch.setattr(bubblewrap, "shortcoming", lambda: "The number of processes is not limited.")

    with pytest.raises(PermissionError, match="is not limited"):
        sandboxed(["true"], Sandbox())
    assert flaw_of(Sandbox())


def test_a_job_without_the_key_does_not_load_it():
    code = (
        "import sys\n"
        "from rubato.actors.config import RewardSection\n"
        "from rubato.actors.envs.section import EnvSection\n"
        "from rubato.actors.envs.manager import EnvManager\n"
        "from rubato.actors.envs.pooled import EnvWorkers\n"
        "from rubato.actors.rewards.service import RewardService\n"
        "from rubato.actors.rewards.scorer import Scorer\n"
        "Scorer(RewardSection(functions=('math:sqrt',))); EnvWorkers(EnvSection(), None, None)\n"
        "RewardService.check_host(RewardService.Config()); EnvManager.check_host(EnvManager.Config())\n"
        "print([name for name in sys.modules if 'bubblewrap' in name or name.endswith('.actors.sandbox')])"
    )

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)

    assert done.stdout.strip() == "[]", done.stderr
