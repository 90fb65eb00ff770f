"""What the audit of a finished run must find. Each test breaks one promise of a run that kept them all."""

import json

import pytest

from rubato.sim.audit import AuditLimits, audit

EXPECTED = AuditLimits(steps=2, batch_groups=1, group_size=2, alpha=1)


def line(group, member, step, fate="trained", age=0):
    name = f"g{group:08d}"
    return {"trajectory_id": f"{name}.{member}", "group_id": name, "fate": fate, "step": step, "epoch": step, "age": age}


@pytest.fixture
def ledger():
    trained = [line(group, member, step=group + 1) for group in range(2) for member in range(2)]
    return [*trained, line(2, 0, None, "unused"), line(2, 1, None, "failed")]


@pytest.fixture
def problems(tmp_path):
    def found(ledger, steps=(1, 2), *, lost=(), durable=False):
        (tmp_path / "metrics.jsonl").write_text("".join(json.dumps({"step": s}) + "\n" for s in steps))
        (tmp_path / "samples.jsonl").write_text("".join(json.dumps(x) + "\n" for x in ledger))
        if lost:
            (tmp_path / "samples.lost.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lost))
        return audit(tmp_path, EXPECTED._replace(durable=durable)).problems

    return found


def test_a_run_that_kept_its_promises_has_no_problems(problems, ledger):
    assert problems(ledger) == []


def test_a_missing_a_repeated_and_a_surplus_row_are_found(problems, ledger):
    for steps in [(2,), (1, 1, 2), (1, 2, 3)]:
        assert "rows for 2 steps" in problems(ledger, steps)[0]


def test_a_sample_without_a_fate_is_found(problems, ledger):
    assert problems(ledger[:-1]) == ["1 samples have no fate (g00000002.1)"]


def test_a_sample_that_ended_twice_is_found(problems, ledger):
    assert "1 samples have two fates (g00000000.0)" in problems([*ledger, ledger[0]])


def test_a_group_trained_in_two_steps_is_found(problems, ledger):
    ledger[1]["step"] = 2

    assert "1 groups are spread over several steps (g00000000)" in problems(ledger)


def test_a_step_that_trained_too_few_groups_is_found(problems, ledger):
    for sample in ledger[2:4]:
        sample["step"] = None

    assert problems(ledger) == ["1 steps did not train 1 groups (2)"]


def test_a_sample_beyond_the_bound_is_found(problems, ledger):
    ledger[3]["age"] = 2

    assert problems(ledger) == ["1 samples were trained beyond the bound of 1 (g00000001.1)"]


def test_a_trained_sample_that_the_store_forgot_is_found(problems, ledger):
    lost = [line(1, 0, step=2), line(0, 1, step=2)]

    assert problems(ledger, lost=lost) == ["1 trained samples were forgotten by the Store (g00000000.1)"]


def test_what_was_forgotten_and_made_again_is_no_problem_unless_nothing_may_be_forgotten(problems, ledger):
    lost = [ledger[1], line(2, 0, None, "failed")]

    assert problems(ledger, lost=lost) == []
    assert problems(ledger, lost=lost, durable=True) == ["2 ends were forgotten by a Store that keeps everything"]


def test_a_lost_sample_is_a_problem_where_nothing_may_be_lost(problems, ledger):
    ledger[-1]["fate"] = "lost"

    assert problems(ledger) == []
    assert "1 samples were lost" in problems(ledger, durable=True)[0]


@pytest.mark.parametrize("what", ["step", "epoch"])
def test_a_counter_that_goes_backwards_is_found(problems, ledger, what):
    ledger[0][what] = ledger[1][what] = 3

    assert any(f"the {what} goes backwards in samples.jsonl (first at g00000001.0)" in p for p in problems(ledger))


def test_rows_whose_tokens_do_not_balance_are_found(tmp_path, ledger):
    (tmp_path / "samples.jsonl").write_text("".join(json.dumps(x | {"tokens": 10}) + "\n" for x in ledger))

    def found(*rows):
        lines = [json.dumps({"step": 1 + n, **{f"tokens/{k}": v for k, v in row.items()}}) for n, row in enumerate(rows)]
        (tmp_path / "metrics.jsonl").write_text("".join(line + "\n" for line in lines))
        return audit(tmp_path, EXPECTED).problems

    assert found({"generated": 50, "held": 30, "retried": 20}, {"generated": 90, "trained": 40, "held": 30, "retried": 20}) == []
    assert found({"generated": 50, "held": 30}, {}) == ["the tokens of 1 rows don't balance (steps 1)"]
    assert found({}, {"generated": 41, "trained": 41}) == ["metrics.jsonl says that 41 tokens ended as trained, samples.jsonl knows of 40"]
