"""`rubato serve-rewards` and jobs that ask it, as processes; and what a job says of a URL that is no reward function."""

import json
import signal
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest

from tests.jobs import ACTING, SMALL, clean_environment, left_behind, rubato, write_model
from tests.sandboxes import needs_bwrap

pytestmark = pytest.mark.slow

BAD_ENVS = Path(__file__).parent / "bad_envs.py"
SERVICE = "actors.reward_service={class: 'rubato.actors.rewards.service:RewardService'}"
MINE = """
def length(completions, **columns):
    return [float(len(text)) for text in completions]
"""

PEEK = """
import os

def peek(completions, path, **columns):
    return [float(os.path.exists(each)) for each in path]
"""


@pytest.fixture
def place(tmp_path, tmp_path_factory):
    model = write_model(tmp_path / "model")
    config = SMALL.replace("env: {", f"env: {{class: '{BAD_ENVS}:Uneven', ") + f"model: {{path: {model}}}\n"
    (tmp_path / "small.yaml").write_text(config)
    (tmp_path / "acting.yaml").write_text(ACTING + f"\nmodel: {{path: {model}}}\n")
    (tmp_path / "mine.py").write_text(MINE)
    return tmp_path


@contextmanager
def served(place, *arguments):
    """A `rubato serve-rewards` process, and its URL."""
    command = [sys.executable, "-m", "rubato.runtime.cli", "serve-rewards", *arguments, "--port", "0"]
    server = subprocess.Popen(command, cwd=place, env=clean_environment(), stdout=subprocess.PIPE, text=True)
    try:
        yield server, server.stdout.readline().split()[-1]
    finally:
        server.kill()
        server.wait(30)
        server.stdout.close()


@contextmanager
def answering(answer):
    """The URL of a server that gives the next POST `answer(number)`: a body."""

    class Handler(BaseHTTPRequestHandler):
        num = 0

        def do_POST(self):
            body = answer(Handler.num).encode()
            Handler.num += 1
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/score"
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_job_is_scored_by_a_function_that_another_process_serves(place):
    with served(place, "mine.py:length", "--workers", "2", "--min-workers", "0") as (server, url):
        ended = rubato("launch", "small.yaml", "--run-dir", "run", SERVICE, f"reward.url={url}", cwd=place)
        server.send_signal(signal.SIGTERM)

        assert server.wait(30) == 0
    assert ended.code == 0, ended.err
    rows = [json.loads(line) for line in (place / "run" / "metrics.jsonl").read_text().splitlines()]
    assert all("reward/url" in row for row in rows)
    assert not left_behind(place)


@needs_bwrap
def test_a_function_is_served_out_of_a_sandbox_that_shows_its_file_alone(place):
    (place / "answers.txt").write_text("secret")
    (place / "peek.py").write_text(PEEK)
    with served(place, "peek.py:peek", "--sandbox", "bwrap") as (_, url):
        alone = httpx.post(url, json={"completions": ["a"], "columns": {"path": [str(place / "answers.txt")]}}).json()
    with served(place, "peek.py:peek", "--sandbox", "bwrap", "--sandbox-read", "answers.txt") as (_, url):
        shown = httpx.post(url, json={"completions": ["a"], "columns": {"path": [str(place / "answers.txt")]}}).json()

    assert (alone["scores"], shown["scores"]) == ([0.0], [1.0])


@pytest.mark.parametrize("launch", ["small.yaml", "acting.yaml"])
def test_a_url_that_nobody_answers_at_ends_the_launch_with_one_sentence(launch, place):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/score"

    ended = rubato("launch", launch, "--run-dir", "run", SERVICE, f"reward.url={url}", cwd=place)

    assert ended.code == 1
    sentence = f"reward function {url} can't be reached: All connection attempts failed. Is this its URL, and does its server run?"
    assert sentence in ended.err.splitlines()
    assert "Traceback" not in ended.err
    assert not left_behind(place)


def test_a_url_that_answers_nonsense_at_the_start_ends_the_launch(place):
    with answering(lambda number: "<html>Welcome!") as url:
        ended = rubato("launch", "small.yaml", "--run-dir", "run", SERVICE, f"reward.url={url}", cwd=place)

    assert ended.code == 1
    assert f"reward function {url} answered no JSON: <html>Welcome!. Is this its URL" in ended.err


def test_a_url_that_answers_nonsense_during_the_run_ends_it_as_a_failing_function_does(place):
    with answering(lambda number: '{"scores": []}' if number == 0 else "Gone fishing") as url:
        command = ("launch", "acting.yaml", "--run-dir", "run", SERVICE, f"reward.url={url}")
        ended = rubato(*command, "env.concurrency=64", "train.batch_groups=32", cwd=place)

    assert ended.code == 1
    assert f"reward function {url} answered no JSON: Gone fishing. 32 of the last 32 trajectories got no reward" in ended.err


REFUSED = [
    (("mine.py:lenght",), "serve-rewards: mine.py:lenght does not exist: mine.py defines no lenght. Did you mean length?"),
    (("nope.py:f",), "serve-rewards: nope.py:f does not exist: there is no file"),
    (("mine.py:length", "--workers", "0"), "serve-rewards: workers"),
    (("mine.py:length", "--min-workers", "2"), "min_workers=2 is more than workers=1"),
    (("mine.py:length", "--port", "99999"), "can't listen at 127.0.0.1:99999"),
]


@pytest.mark.parametrize(("arguments", "words"), REFUSED, ids=[" ".join(row[0]) for row in REFUSED])
def test_what_can_not_be_served_is_told_in_one_sentence(arguments, words, place):
    ended = rubato("serve-rewards", *arguments, cwd=place)

    assert ended.code == 2
    assert words in ended.err
    assert len(ended.err.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("reward.url=nowhere", "'nowhere' is no URL of a server. Give one such as http://127.0.0.1:8000/"),
        ("reward.functions=['ftp://host/f']", "'ftp://host/f' is no URL of a server"),
        ("reward.min_workers=3", "min_workers=3 is more than workers=1. Raise workers"),
    ],
)
def test_a_wrong_key_is_told_at_launch(override, words, place):
    ended = rubato("launch", "small.yaml", "--run-dir", "run", SERVICE, override, cwd=place)

    assert (ended.code, words in ended.err) == (2, True), ended.err


def test_a_url_without_a_reward_service_is_told_at_launch(place):
    ended = rubato("launch", "small.yaml", "--run-dir", "run", "reward.url=http://127.0.0.1:9/", cwd=place)

    assert ended.code == 2
    assert "reward.url names http://127.0.0.1:9/, but actors has no reward_service to call it." in ended.err
