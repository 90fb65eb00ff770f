"""What an agent's text means: a function's place, or a command."""

import os
import subprocess
import sys

import pytest

from rubato.actors.gateway.command import PLACES, AgentEnded, clear_places, run_command, words_of


@pytest.mark.parametrize("agent", ["my.agents:play", "mine.py:play", "/home/my files/mine.py:play", "../up/mine.py:Class.method"])
def test_a_function_is_none_of_the_commands_unless_it_is_to_run_in_a_process(agent):
    assert words_of(agent) == []
    assert words_of(agent, is_process=True)[-1] == agent


@pytest.mark.parametrize(
    ("agent", "words"),
    [
        ("python agent.py", ["python", "agent.py"]),
        ("pi -p 'say hi'", ["pi", "-p", "say hi"]),
        ("./agent", ["./agent"]),
        ("codex", ["codex"]),
    ],
)
def test_all_else_is_a_command_as_a_shell_splits_it(agent, words):
    assert words_of(agent) == words


async def said(code: str):
    return await run_command([sys.executable, "-c", code], {"NAME": "value"}, {"prompt": "p"})


async def test_its_result_is_in_the_last_line_of_json_that_has_one():
    assert await said("print('noise'); print('{\"reward\": 0.5}'); print('{\"other\": 1}'); print('[1]'); print('{broken')") == {
        "reward": 0.5
    }
    assert await said('print(\'{"reward": 0.5}\'); print(\'{"answer": "seven"}\')') == {"answer": "seven"}
    assert await said('print(\'{"reward": null, "answer": "42"}\')') == {"answer": "42"}
    assert await said("pass") == {}


async def test_a_last_line_that_is_too_long_to_be_kept_is_told():
    with pytest.raises(AgentEnded, match="printed a last line of more than 65,536 bytes"):
        await said("print('{\"answer\": \"' + 'x' * 100_000 + '\"}')")


@pytest.mark.parametrize(
    ("function", "result"),
    [
        ("import sys\ndef play(task):\n    sys.stdout.write('no end of line')\n    return 0.75\n", {"reward": 0.75}),
        ("async def play(task):\n    return task.prompt\n", {"answer": "p"}),
        ("def play(task): ...\n", {}),
    ],
)
async def test_a_function_s_result_is_read_whatever_it_printed(function, result, tmp_path):
    (tmp_path / "mine.py").write_text(function)

    assert await run_command(words_of(f"{tmp_path}/mine.py:play", is_process=True), {}, {"prompt": "p"}) == result


async def test_a_function_s_answer_that_is_too_long_is_told(tmp_path):
    (tmp_path / "mine.py").write_text("def play(task):\n    return 'x' * 100_000\n")

    with pytest.raises(AgentEnded, match="it returned 100,014 bytes, and an answer may have 65,536"):
        await run_command(words_of(f"{tmp_path}/mine.py:play", is_process=True), {}, {})


def test_what_was_shown_to_agents_of_a_process_that_was_killed_is_removed(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    gone = subprocess.Popen(["true"])
    gone.wait()
    for name in (f"{PLACES}{gone.pid}-abc", f"{PLACES}{os.getpid()}-abc", f"{PLACES}else"):
        (tmp_path / name).mkdir()

    clear_places()

    assert {path.name for path in tmp_path.iterdir()} == {f"{PLACES}{os.getpid()}-abc", f"{PLACES}else"}


async def test_it_is_given_its_variables_and_its_task():
    code = "import json, os; print(json.dumps({'answer': os.environ['NAME'] + json.load(open(os.environ['RUBATO_TASK_FILE']))['prompt']}))"

    assert await said(code) == {"answer": "valuep"}


async def test_a_flood_of_output_is_read_to_its_end_and_only_its_end_is_kept():
    assert await said("print('x' * 5_000_000); print('{\"reward\": 2}')") == {"reward": 2}


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("raise SystemExit(3)", "ended with 3: it said nothing"),
        ("import os; os.kill(os.getpid(), 9)", "ended with -9"),
        ("raise SystemExit('\\x1b[2Jgone')", r"ended with 1: \\x1b\[2Jgone"),
    ],
)
async def test_one_that_fails_ends_with_how(code, why):
    with pytest.raises(AgentEnded, match=why):
        await said(code)


async def test_a_child_that_holds_its_output_open_is_not_waited_for():
    assert await said("import subprocess; subprocess.Popen(['sleep', '3600']); print('{\"reward\": 1}')") == {"reward": 1}
