"""One plan through three loaders: the same ids on every rank, each example once an epoch.

Plain numpy always; torch's DataLoader and grain's where they are installed (extras `torch` and
`grain`). Beside each stands what the loader's own sharding reads of the same data.
"""

import importlib.util

import numpy as np

import jax_ddp_weighting as jdw

EXAMPLES, RANKS, BATCH, EPOCHS = 103, 4, 8, 3
DATA = np.arange(EXAMPLES) * 10  # example i is the number 10 i: what was read tells its id


def sampler_of(rank, epoch):
    sampler = jdw.DistributedSampler(DATA, RANKS, rank, seed=5, tail="mask")
    sampler.set_epoch(epoch)
    return sampler


def numpy_batches(rank, epoch):
    """No loader at all: a rank's ids, cut into batches."""
    ids = sampler_of(rank, epoch).indices()
    return [DATA[ids[start : start + BATCH]] for start in range(0, len(ids), BATCH)]


def torch_batches(rank, epoch):
    from torch.utils.data import DataLoader

    loader = DataLoader(DATA, batch_size=BATCH, sampler=sampler_of(rank, epoch))
    return [batch.numpy() for batch in loader]


def grain_batches(rank, epoch):
    import grain

    loader = grain.DataLoader(
        data_source=DATA,
        sampler=sampler_of(rank, epoch).grain_sampler(),
        operations=[grain.transforms.Batch(batch_size=BATCH)],
        worker_count=0,
    )
    return list(loader)


def torchs_own(rank, epoch):
    from torch.utils.data import DataLoader, DistributedSampler

    sampler = DistributedSampler(DATA, RANKS, rank, seed=5)
    sampler.set_epoch(epoch)
    return [batch.numpy() for batch in DataLoader(DATA, batch_size=BATCH, sampler=sampler)]


def grains_own(rank, epoch):
    import grain
    from grain.python import IndexSampler
    from grain.sharding import ShardOptions

    sampler = IndexSampler(
        EXAMPLES, ShardOptions(rank, RANKS), shuffle=True, num_epochs=1, seed=5 + epoch
    )
    loader = grain.DataLoader(
        data_source=DATA,
        sampler=sampler,
        operations=[grain.transforms.Batch(batch_size=BATCH)],
        worker_count=0,
    )
    return list(loader)


LOADERS = {
    "numpy": (numpy_batches, None),
    "torch": (torch_batches, torchs_own),
    "grain": (grain_batches, grains_own),
}


def ids_read(batches, epoch):
    """The ids that each rank's batches held, in order."""
    return [np.concatenate(batches(rank, epoch)) // 10 for rank in range(RANKS)]


def main():
    here = [name for name in LOADERS if importlib.util.find_spec(name)]
    missing = [name for name in LOADERS if name not in here]
    if "grain" in here:
        from absl import flags  # grain reads absl's flags, which only an absl program parses

        flags.FLAGS.mark_as_parsed()
    print(f"{EXAMPLES} examples over {RANKS} ranks; compared: {', '.join(here)}")
    if missing:
        print(f"not installed, so not compared: {', '.join(missing)}")

    for epoch in range(EPOCHS):
        expected = ids_read(numpy_batches, epoch)
        jdw.audit_ids(expected, EXAMPLES, epoch=epoch).check_exactly_once()
        for name in here:
            ours, own = LOADERS[name]
            ids = ids_read(ours, epoch)
            for rank in range(RANKS):
                np.testing.assert_array_equal(ids[rank], expected[rank])
            line = f"epoch {epoch}, {name}: the same ids, {len(np.concatenate(ids))} of {EXAMPLES}"
            if own is not None:
                audit = jdw.audit_ids(ids_read(own, epoch), EXAMPLES)
                line += (
                    f"; its own sharding reads {audit.accepted},"
                    f" {audit.num_duplicated} twice and {audit.num_omitted} never"
                )
            print(line)


if __name__ == "__main__":
    main()
