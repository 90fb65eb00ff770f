"""Graders that come with Rubato, and the signature that yours have.

    def my_grader(completion: str, answer: Any, **columns) -> float | tuple[float, str]

`completion` is the model's turn, `answer` the row's answer. Of the row's columns, and of `task`, `row`, `purpose`, `trajectory`,
`version` and `turn` (from 1), a grader is given those that its signature names; `**columns` takes all. It returns what the turn is
worth, a finite number, and may add a reply: the model answers that, and the trajectory goes on to `max_turns`. Without one it is over.
Worth of turns adds up.
"""

import re
from decimal import Decimal, InvalidOperation
from typing import Any

NUMBER = re.compile(r"(?:(?<!\d)-)?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)")
"""A minus behind a digit is none of a number's own, as in 5-10; commas group thousands, as in 1,042, or part numbers."""


def exact(completion: str, answer: Any) -> float:
    """1 where the completion is the answer, white space around them aside."""
    return float(completion.strip() == str(answer).strip())


def number(completion: str, answer: Any) -> float:
    """1 where the last number of the completion is the last one of the answer: 42, 42.0 and $1,042 are read. For GSM8K as it is."""
    found, wanted = _last_number(completion), _last_number(str(answer))
    return float(found is not None and found == wanted)


def places(completion: str, answer: Any) -> float:
    """The share of characters that are right, place by place, of the longer of the two: graded, from 0 to 1."""
    found, wanted = completion.strip(), str(answer).strip()
    right = sum(one == other for one, other in zip(found, wanted, strict=False))
    return right / max(len(found), len(wanted), 1)


def math(completion: str, answer: Any) -> float:
    r"""1 where math-verify finds the completion's last expression equal to the answer: LaTeX in \boxed{} or $…$, or plain."""
    from math_verify import parse, verify

    # Its own limits are signals, which would cut into the worker's; the deadline of the whole step is env.step_timeout_s.
    limits: Any = {"parsing_timeout": None}
    gold = parse(f"${answer}$", **limits) or parse(str(answer), **limits)
    return float(verify(gold, parse(completion, **limits), timeout_seconds=None))


def _last_number(text: str) -> Decimal | None:
    found = NUMBER.findall(text)
    try:
        return Decimal(found[-1].replace(",", "")) if found else None
    except InvalidOperation:
        return None
