"""The rubato command: what it lists, what it imports, and how errors leave it."""

import subprocess
import sys
from pathlib import Path

import pytest

from rubato.runtime.cli import COMMANDS, guarded, main
from rubato.runtime.errors import LaunchError, RubatoError

QUICKSTART = Path(__file__).parents[3] / "configs" / "quickstart.yaml"


def test_help_lists_every_command(capsys):
    assert main(["--help"]) == 0

    said = capsys.readouterr().out
    assert all(f"  {name} " in said for name in COMMANDS)


def test_help_imports_nothing_heavy():
    code = (
        "import sys; from rubato.runtime.cli import main; main(['--help']);"
        "sys.exit(sum(name in sys.modules for name in ('pydantic', 'structlog', 'zmq', 'numpy', 'torch', 'asyncio')))"
    )

    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL, check=False).returncode == 0


def test_a_mistyped_command_is_answered_with_the_nearest(capsys):
    assert main(["monitr"]) == 2

    assert capsys.readouterr().err == "monitr is not a command. Did you mean rubato monitor?\n"


def test_an_error_for_the_user_is_one_sentence_and_exit_2(capsys):
    def run(argv):
        raise LaunchError("runs/a already holds a run.")

    assert guarded(run, []) == 2

    assert capsys.readouterr().err == "runs/a already holds a run.\n"


def test_an_error_inside_task_groups_is_still_one_sentence(capsys):
    def run(argv):
        raise ExceptionGroup("tasks", [ExceptionGroup("inner", [RubatoError("no redis.")]), RubatoError("no redis.")])

    assert guarded(run, []) == 2

    assert capsys.readouterr().err == "no redis.\n"


def test_a_mistake_of_ours_keeps_its_traceback():
    def run(argv):
        raise ExceptionGroup("tasks", [RubatoError("no redis."), KeyError("ours")])

    with pytest.raises(ExceptionGroup):
        guarded(run, [])


def test_ctrl_c_is_exit_130():
    def run(argv):
        raise KeyboardInterrupt

    assert guarded(run, []) == 130


def test_a_missing_config_is_refused_by_launch(capsys):
    assert main(["launch", "configs/none.yaml"]) == 2

    assert "configs/none.yaml does not exist" in capsys.readouterr().err


@pytest.mark.parametrize("shell", ["exec {command} >&-", "exec {command} >/dev/full", "PYTHONIOENCODING=ascii exec {command}"])
@pytest.mark.parametrize("arguments", ["--help", f"launch {QUICKSTART} --dry-run"])
def test_an_output_that_can_not_be_written_is_no_traceback(shell, arguments):
    command = f"{sys.executable} -m rubato.runtime.cli {arguments}"

    ended = subprocess.run(["sh", "-c", shell.format(command=command)], capture_output=True, text=True, check=False)

    full = "could not be written: No space left on device." in ended.stderr
    assert ended.returncode == (1 if full else 0)
    assert full == ("/dev/full" in shell)
    assert "Traceback" not in ended.stderr
    assert "Exception ignored" not in ended.stderr


@pytest.mark.parametrize("command", ["launch", "add", "drain", "stop", "monitor", "keys", "doctor", "sim"])
def test_usage_shows_the_command_as_it_is_typed(command, capsys):
    with pytest.raises(SystemExit):
        main([command, "--help"])

    assert capsys.readouterr().out.startswith(f"usage: rubato {command}")


def test_a_launch_without_arguments_asks_for_the_config_alone(capsys):
    assert main(["launch"]) == 2

    assert capsys.readouterr().err.startswith("launch needs a config, e.g. rubato launch configs/quickstart.yaml")
