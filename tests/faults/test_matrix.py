"""The fault matrix: `make test-faults` runs all of it, `pytest -m quick` the part that CI runs."""

import pytest
from faults import matrix

QUICK = {
    "stopped start, process 1",
    "killed in a step, process 1",
    "stopped in a join, process 0",
    "late while gathering, process 1",
    "raises in a step, process 1",
    "raises in evaluation, process 1",
    "raises inside a checkpoint, process 0",
    "has a full disk after a checkpoint, process 1",
    "killed in a ledger, process 0",
}


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case.name, marks=[pytest.mark.quick] if case.name in QUICK else [])
        for case in matrix.CASES
    ],
)
def test_whoever_is_left_is_told_in_time(case):
    matrix.run(case)


def test_the_part_that_ci_runs_is_of_the_matrix():
    assert {case.name for case in matrix.CASES} >= QUICK
