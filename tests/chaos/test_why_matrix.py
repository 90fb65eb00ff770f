"""Faults drawn by seed from role and kind, alone and in pairs, each inflicted on a whole job on virtual time."""

import pytest

from tests.why_cases import case_name, cases, check

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("case", cases(), ids=case_name)
def test_a_fault_is_named_with_its_holder_and_kind_within_five_seconds(case, tmp_path):
    check(case, tmp_path)
