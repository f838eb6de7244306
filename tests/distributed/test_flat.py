"""Steps, agreements and iterators leave no memory, descriptors, threads and keys behind."""

import flat
import pytest

# `make test-faults` does ten times as many


def test_what_is_opened_again_and_again_leaves_nothing_behind():
    for curves in flat.measure(steps=500, agreements=200, iterators=100, timeout_s=100):
        assert list(curves) == ["agreements", "iterators", "steps"]
        flat.check_flat(curves)


@pytest.mark.parametrize(("what", "each"), [("keys", 1), ("descriptors", 1), ("MiB", 4)])
def test_what_grows_is_seen(what, each):
    level = {"MiB": 300.0, "descriptors": 30, "threads": 5, "keys": 0}
    flat.check_flat({"steps": [dict(level) for _ in range(11)]})
    grown = [level | {what: level[what] + each * part} for part in range(11)]
    with pytest.raises(AssertionError, match="steps"):
        flat.check_flat({"steps": grown})
