"""Orders by a function over processes: the same ids everywhere, or each difference named."""

import processes

PROGRAM = r"""
import numpy as np
import jax_ddp_weighting as jdw

mesh = jdw.data_mesh()
manifest = jdw.manifest_hash(np.arange(6))

def told(case, order, epoch):
    plan = jdw.EpochPlan.from_order(order, 2, 2, num_examples=6, repeats=True)
    try:
        jdw.check_agreement(jdw.EpochRecord.of(plan, epoch, manifest), timeout_s=20)
        print(case, "agreed", flush=True)
    except jdw.DisagreementError as error:
        print(case, "order is" in str(error), flush=True)
    try:
        read = [
            np.asarray(shard.data).tolist()
            for batch in jdw.batches(plan, epoch, lambda ids: ids, mesh, timeout_s=20)
            for shard in batch.ids.addressable_shards
        ]
        right = order(epoch)[rank::2].tolist() if case != "differs" else None
        print(case, "read", sum(read, []) == right, flush=True)
    except ValueError as error:
        print(case, "order is" in str(error), "seed" in str(error), flush=True)

drawn = jdw.weighted_order([1, 2, 3, 4, 5, 6], 8)
told("drawn", drawn, 3)
told("own", lambda epoch: np.roll(np.arange(8) % 6, epoch), 3)
# alike at first, which is no proof
told("alike", lambda epoch: np.roll(np.arange(8) % 6, epoch * (1 + rank)), 0)
told("differs", lambda epoch: np.roll(np.arange(8) % 6, epoch * (1 + rank)), 3)
told("seeds", jdw.weighted_order([1, 2, 3, 4, 5, 6], 8, seed=rank), 3)
"""


def test_orders_are_compared_by_their_ids_in_the_epoch_that_is_read():
    for each in processes.launch(PROGRAM, 2, timeout_s=60):
        assert each.out.splitlines() == [
            "drawn agreed",
            "drawn read True",
            "own agreed",
            "own read True",
            "alike agreed",
            "alike read True",
            "differs True",
            "differs True False",
            "seeds True",
            "seeds True False",
        ], each
