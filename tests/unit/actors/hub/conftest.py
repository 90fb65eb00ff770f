"""A hub on loopback for each test of names."""

from pathlib import Path

import pytest

from tests.hub import hub, use


@pytest.fixture
def there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """A hub that this process uses, with an empty cache."""
    with hub() as found:
        use(found, monkeypatch, tmp_path)
        yield found
