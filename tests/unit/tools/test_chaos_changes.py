"""Which hits fell into a switch, by what orchestrators logged."""

import json
from datetime import UTC, datetime

from tools.chaos_changes import changes, under_way


def test_a_switch_lasts_until_it_is_over_or_the_next_orchestrator_begins(tmp_path):
    rows = [(10, 1, "switching"), (12, 1, "switched"), (20, 1, "switching"), (25, 2, "ready"), (30, 2, "switching")]
    (tmp_path / "logs").mkdir()
    with (tmp_path / "logs" / "orchestrator-1.jsonl").open("w") as log:
        for at, incarnation, event in rows:
            row = {"t": datetime.fromtimestamp(at, UTC).isoformat(), "event": event, "incarnation": incarnation}
            log.write(json.dumps(row | {"switch": "merge a + b"}) + "\n")
        log.write('{"t": "half a li')

    found = changes(tmp_path, [11.0, 13.0, 24.0, 26.0, 31.0])

    assert found == {"switches": 3, "moves": 0, "failed": 2, "in_switch": 3, "in_move": 0}
    assert under_way(tmp_path)
