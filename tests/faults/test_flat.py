"""Five thousand steps, two thousand agreements, a thousand iterators: memory and the rest flat."""

import flat


def test_long_runs_leave_nothing_behind():
    for curves in flat.measure(steps=5_000, agreements=2_000, iterators=1_000, timeout_s=900):
        flat.check_flat(curves)
