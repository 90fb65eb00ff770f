"""Marks of tests that start sandboxes."""

import pytest

from rubato.runtime.bubblewrap import Sandbox, flaw_of

needs_bwrap = pytest.mark.skipif(bool(flaw_of(Sandbox())), reason=f"no sandbox can be had here: {flaw_of(Sandbox())}")
