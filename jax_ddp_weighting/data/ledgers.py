"""What all processes together have consumed of an epoch."""

import numpy as np

from jax_ddp_weighting.distributed.allgather import Columns, allgather_rows, together
from jax_ddp_weighting.distributed.coordination import WAIT_S, check_timeout
from jax_ddp_weighting.distributed.waiting import Waiting
from jax_ddp_weighting.sampling.ledger import Ledger


def gather_ledger(ledger: Ledger, *, timeout_s: float = WAIT_S) -> Ledger:
    """The ledgers of all processes as one, on every process; a copy.

    The rule: each process enters what it holds itself, as `Ledger.add` does with global arrays, and
    each row is counted once here. After a restart one process, the first, holds what was consumed
    before, and the others begin anew, as `restore_run` has it.

    Every process must call it. An eighth of a byte per example travels from each.

    Args:
        ledger: this process's.
        timeout_s: how many seconds to wait for other processes.

    Raises:
        TypeError: it is no ledger, or `timeout_s` no number.
        ValueError: ledgers are of other epochs or data sets on other processes.
        RuntimeError: another process failed, or is absent; it names it.

    Example:
        >>> ledger = Ledger(4, epoch=0)
        >>> ledger.add([2, 3])
        >>> gather_ledger(ledger).due().tolist()
        [0, 1]
    """
    waiting = Waiting("gather_ledger", check_timeout("gather_ledger: timeout_s", timeout_s))
    with together(waiting) as looked:
        if not isinstance(ledger, Ledger):
            kind = type(ledger).__name__
            raise TypeError(f"gather_ledger: ledger must be a Ledger, got {kind}.")
        held = np.frombuffer(ledger.to_bytes(), np.uint8)
        looked.tell(len(held))
    counts = looked.heard
    with together(waiting):
        everything = np.empty(sum(counts), np.uint8)

    def put(first: int, columns: Columns) -> None:
        everything[first : first + len(columns[0])] = columns[0]

    with together(waiting):
        allgather_rows([[held]], counts, [(np.dtype(np.uint8), ())], put, waiting)
        merged: Ledger | None = None
        for data in np.split(everything, np.cumsum(counts)[:-1]):
            other = Ledger.from_bytes(data.tobytes())
            if merged is None:
                merged = other
            else:
                merged.merge(other)
    assert merged is not None
    return merged
