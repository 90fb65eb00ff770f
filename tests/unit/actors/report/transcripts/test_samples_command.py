"""`rubato samples RUN`: what the model wrote, joined with what became of it."""

import json

import pytest

from rubato.actors.report.transcripts.command import main
from rubato.actors.report.transcripts.reading import Filters, decoder, find, sample_of
from rubato.runtime.errors import LaunchError

AGAIN = ("<|end|> again <|assistant|>", "five five", "length", [(3, 1), (4, 1)])


def shown(capsys, *argv):
    main([*map(str, argv)])
    return capsys.readouterr().out


def test_a_trajectory_is_told_turn_by_turn_with_its_versions_fate_and_scores(folder, asked):
    folder.keep("g00000001.0", asked, AGAIN, scores={"env": 1.5, "format": -0.5}, cut=True, info={"moves": 2.0})
    folder.end("g00000001.0", scores={"env": 1.5, "format": -0.5}, cut=True)

    (row,) = find(folder.path, Filters()).kept
    sample = sample_of(row, decoder(folder.path))

    assert (sample.fate, sample.step, sample.age, sample.reward) == ("trained", 4, 0, 1.0)
    assert (sample.scores, sample.info) == ({"env": 1.5, "format": -0.5}, {"moves": 2.0})
    assert sample.versions == {3: 3, 4: 1}
    first, second = sample.turns
    assert (first.prompt, first.completion) == ("two and two is <|assistant|>", "four <|end|>")
    assert (second.finish_reason, second.versions, second.tokens) == ("length", {3: 1, 4: 1}, 2)


def test_the_table_says_how_many_there_are_how_they_end_and_what_was_written(folder, asked, capsys):
    folder.keep("g00000001.0", asked)
    folder.end("g00000001.0")
    folder.keep("g00000002.1", asked, reward=0.0)
    folder.end("g00000003.0", "stale", reward=0.5, step=None)

    text = shown(capsys, folder.path)

    head, _, first, second, hint = text.splitlines()
    assert head.startswith("3 trajectories, 2 kept · 1 trained, 1 stale, 1 without a fate yet · reward 0.50 (env 0.50)")
    assert first.split()[:6] == ["g00000001.0", "1.00", "done", "4", "trained", "v3"]
    assert "four⏹   ◂ two and two is" in first
    assert "none yet" in second
    assert hint.endswith(f"rubato samples {folder.path} g00000002.1")


def test_a_whole_trajectory_shows_each_prompt_and_answer(folder, asked, capsys):
    folder.keep("g00000012.3", asked, AGAIN, truncated=True, task="maths")

    text = shown(capsys, folder.path, "g12.3")

    assert "g00000012.3   no fate yet · reward 1.00 (env 1.00) · task maths, row 5, seed 77 · attempt 1 · 2 turns, 4 tokens" in text
    assert "ended at a limit of turns or tokens" in text
    assert "turn 1 · 2 tokens · v3\ntwo and two is <|assistant|>\n▸ four <|end|>⏹\n" in text
    assert "turn 2 · 2 tokens · 1 by v3, 1 by v4 · cut at its limit\n" in text


def test_a_session_is_shown_as_branches_with_what_they_share_and_by_which_weights(folder, asked, capsys):
    other, own = (7, "<|end|> and <|assistant|>", "two <|end|>"), (0, "again <|assistant|>", "is")
    folder.keep("g00000012.3", asked, AGAIN, branches=[other, own])

    text = shown(capsys, folder.path, "g12.3")
    (sample,) = [json.loads(line) for line in shown(capsys, folder.path, "g12.3", "--json").splitlines()]

    assert "4 turns, 7 tokens · 3 branches, each carries the reward" in " ".join(text.splitlines())
    assert "branch 1 · 12 tokens, a context of its own\n\nturn 1 · 2 tokens · v3\ntwo and two is <|assistant|>\n▸ four <|end|>" in text
    assert "branch 2 · 12 tokens, 7 of them up to turn 1, which it goes on from\n\nturn 3 · 2 tokens · v5\n" in text
    assert "branch 3 · 3 tokens, a context of its own\n\nturn 4 · 1 token · v5\nagain <|assistant|>\n▸ is\n" in text
    assert [turn["branch"] for turn in sample["turns"]] == [1, 1, 2, 3]
    assert [branch["after"] for branch in sample["branches"]] == [None, 1, None]


def test_an_engine_of_ones_own_may_end_a_turn_for_reasons_of_its_own(folder, capsys):
    folder.keep("g00000001.0", ("two", "four <|end|>", "tool_calls", [(3, 2)]))

    assert "turn 1 · 2 tokens · v3\n" in shown(capsys, folder.path, "g1.0")


def test_a_ledger_from_before_tasks_had_names_is_read(folder, capsys):
    line = {"trajectory_id": "g00000001.0", "group_id": "g00000001", "attempt": 1, "task": 5, "fate": "failed"}
    line |= {"step": None, "reason": "env_timeout", "version_first": None, "reward": None, "tokens": 0, "wall_s": 0.5}
    (folder.path / "samples.jsonl").write_text(json.dumps(line | {"age": None}) + "\n")

    (sample,) = [json.loads(line) for line in shown(capsys, folder.path, "--json").splitlines()]

    assert (sample["task"], sample["row"], sample["reason"]) == ("", 5, "env_timeout")


def test_a_group_is_shown_whole(folder, asked, capsys):
    for member in range(3):
        folder.keep(f"g00000012.{member}", asked)
    folder.keep("g00000013.0", asked)

    assert shown(capsys, folder.path, "g12").count("turn 1") == 3


def test_what_a_model_wrote_never_commands_the_terminal(folder, capsys):
    folder.keep("g00000001.0", ("two", "\x1b[31m four", "stop", [(3, 2)]))

    assert "\x1b" not in shown(capsys, folder.path) + shown(capsys, folder.path, "g1.0")


def test_json_has_one_object_a_line_for_all_that_is_kept(folder, asked, capsys):
    for member in range(30):
        folder.keep(f"g00000012.{member}", asked)

    rows = [json.loads(line) for line in shown(capsys, folder.path, "--json").splitlines()]

    assert [row["trajectory_id"] for row in rows] == [f"g00000012.{member}" for member in range(30)]
    assert rows[0]["turns"][0] == {
        "prompt": "two and two is <|assistant|>",
        "completion": "four <|end|>",
        "tokens": 2,
        "finish_reason": "stop",
        "versions": {"3": 2},
        "branch": 1,
    }


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--step", "4"], ["g00000001.0"]),
        (["--fate", "stale"], ["g00000002.0"]),
        (["--row", "9"], ["g00000003.0"]),
        (["--purpose", "eval"], ["eval-1.8.0.0"]),
        (["--fate", "eval"], ["eval-1.8.0.0"]),
        (["--best", "-n", "2"], ["g00000003.0", "g00000001.0"]),
        (["--worst", "-n", "1"], ["g00000002.0"]),
        (["-n", "1"], ["g00000003.0"]),
        ([], ["g00000001.0", "g00000002.0", "g00000003.0"]),
        (["--fate", "failed"], ["g00000004.0"]),
    ],
)
def test_filters_take_the_samples_that_were_asked_for(folder, asked, capsys, arguments, expected):
    folder.keep("g00000001.0", asked)
    folder.end("g00000001.0")
    folder.keep("g00000002.0", asked, reward=0.25)
    folder.end("g00000002.0", "stale", step=None, reward=0.25)
    folder.keep("g00000003.0", asked, row=9, reward=2.0)
    folder.keep("eval-1.8.0.0", asked, purpose="eval", version=8, row=9)
    if "failed" in arguments:
        folder.end("g00000004.0", "failed", reward=None, step=None, reason="env_timeout")

    rows = [json.loads(line) for line in shown(capsys, folder.path, "--json", *arguments).splitlines()]

    assert [row["trajectory_id"] for row in rows] == expected


def test_a_rollout_that_failed_left_no_text_and_says_why(folder, capsys):
    folder.end("g00000004.0", "failed", reward=None, step=None, reason="env_timeout")

    assert "env_timeout" in shown(capsys, folder.path)


def test_a_rollout_that_failed_is_shown_with_its_text_and_the_whole_reason(folder, asked, capsys):
    why = "reward_failed: raised: KeyError('unit') at my_verifier.py:3 in f"
    folder.keep("g00000004.0", asked, reward=0.0, reason=why)
    folder.end("g00000004.0", "failed", reward=None, step=None, reason="reward_failed", scores={})
    folder.keep("g00000005.1", asked, reward=0.0, reason="env_step_failed")
    folder.keep("g00000006.0", asked)
    folder.end("g00000006.0")

    listed = shown(capsys, folder.path, "--fate", "failed")
    whole = shown(capsys, folder.path, "g4.0")
    first, second = map(json.loads, shown(capsys, folder.path, "--fate", "failed", "--json").splitlines())
    best = shown(capsys, folder.path, "--best")

    assert [line.split()[0] for line in listed.splitlines()[2:4]] == ["g00000004.0", "g00000005.1"]
    assert "four" in listed
    assert why in whole
    assert "▸ four" in whole
    assert (first["reason"], first["reward"], first["fate"]) == (why, None, "failed")
    assert [turn["completion"] for turn in first["turns"]] == ["four <|end|>"]
    assert (second["fate"], second["reward"], second["reason"]) == ("failed", None, "env_step_failed")
    assert "g00000004.0" not in best


def test_those_that_failed_without_text_take_no_room_from_those_with_one(folder, asked, capsys):
    for at in range(6):
        folder.end(f"g0000000{at}.0", "failed", reward=None, step=None, reason="env_timeout", scores={})
    for at in (2, 4):
        folder.keep(f"g0000000{at}.0", asked, reward=0.0, reason="env_timeout: no answer")

    two, three = (shown(capsys, folder.path, "--fate", "failed", "-n", num).splitlines()[2:-1] for num in (2, 3))

    assert [line.split()[0] for line in two] == ["g00000002.0", "g00000004.0"]
    assert [line.split()[0] for line in three] == ["g00000002.0", "g00000004.0", "g00000005.0"]


def test_of_a_sample_that_was_played_twice_only_the_attempt_that_counts_is_shown(folder, asked):
    folder.keep("g00000001.0", asked, attempt=1)
    folder.keep("g00000001.0", asked, attempt=2)
    folder.end("g00000001.0", attempt=2)

    assert [row.line["attempt"] for row in find(folder.path, Filters()).kept] == [2]


def test_a_ledger_that_a_kill_tore_is_read_as_far_as_it_goes(folder, asked):
    folder.keep("g00000001.0", asked)
    folder.end("g00000001.0")
    with (folder.path / "samples.jsonl").open("a") as file:
        file.write('{"trajectory_id": "g0000')

    assert find(folder.path, Filters()).fates == {"trained": 1}


def test_without_the_runs_model_the_newest_checkpoint_decodes_and_without_both_ids_are_shown(folder, asked):
    folder.keep("g00000001.0", asked)
    checkpoint = folder.path / "checkpoints" / "step_5"
    checkpoint.mkdir(parents=True)
    (folder.path / "model" / "tokenizer.json").rename(checkpoint / "tokenizer.json")

    assert decoder(folder.path)([2, 3]) == "two and"

    (checkpoint / "tokenizer.json").unlink()
    assert decoder(folder.path)([2, 3]) == "[2] [3]"


def test_what_is_not_there_is_told_with_what_is(folder, asked):
    with pytest.raises(LaunchError, match=r"has no trajectory yet: none has ended, or samples.keep is 0"):
        find(folder.path, Filters())

    folder.keep("g00000001.0", asked)
    folder.end("g00000001.0")

    with pytest.raises(LaunchError, match=r"no trajectory is --fate traned. It has trained 1. Did you mean --fate trained?"):
        find(folder.path, Filters(fate="traned"))
    folder.end("g00000002.0", task="sums")
    with pytest.raises(LaunchError, match=r"no trajectory is --task sum\. It has .*Did you mean --task sums\?"):
        find(folder.path, Filters(task="sum"))
    with pytest.raises(LaunchError, match=r"no trajectory is g00000009.0"):
        find(folder.path, Filters(name="g00000009.0"))
    with pytest.raises(LaunchError, match=r"holds no run: there is no config.yaml in it"):
        find(folder.path / "model", Filters())
