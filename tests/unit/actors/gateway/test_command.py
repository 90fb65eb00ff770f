"""What an agent's text means: a function's place, or a command."""

import sys

import pytest

from rubato.actors.gateway.command import AgentEnded, run_command, words_of


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
    assert await said("print('noise'); print('{\"reward\": 0.5}'); print('{\"other\": 1}'); print('[1]'); print('{broken')") == 0.5
    assert await said('print(\'{"reward": 0.5}\'); print(\'{"answer": "seven"}\')') == "seven"
    assert await said("pass") is None


async def test_it_is_given_its_variables_and_its_task():
    code = "import json, os; print(json.dumps({'answer': os.environ['NAME'] + json.load(open(os.environ['RUBATO_TASK_FILE']))['prompt']}))"

    assert await said(code) == "valuep"


async def test_a_flood_of_output_is_read_to_its_end_and_only_its_end_is_kept():
    assert await said("print('x' * 5_000_000); print('{\"reward\": 2}')") == 2


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
    assert await said("import subprocess; subprocess.Popen(['sleep', '3600']); print('{\"reward\": 1}')") == 1
