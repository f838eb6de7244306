"""One plan through three loaders: the same ids on every rank, each example once an epoch.

Plain numpy always; torch's DataLoader and grain's where they are installed (extras `torch` and
`grain`). Beside each stands what the loader's own sharding reads of the same data. Then orders that
are drawn anew in every epoch, by weight and as a mixture, feed a training step.
"""

import importlib.util

import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState

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


DRAWN = {
    "weighted draw": jdw.weighted_order(np.arange(1, EXAMPLES + 1), EXAMPLES, seed=5),
    "mixture": jdw.mixture_order([90, EXAMPLES - 90], [0.8, 0.2], EXAMPLES, seed=5),
}


def drawn_batches(rank, epoch, order, rows):
    """A rank's batches of an epoch's own order, by torch's loader where it is installed."""
    sampler = jdw.DistributedSampler(DATA, RANKS, rank, order=order, tail="mask")
    sampler.set_epoch(epoch)
    if importlib.util.find_spec("torch"):
        from torch.utils.data import DataLoader

        read = [batch.numpy() for batch in DataLoader(DATA, batch_size=rows, sampler=sampler)]
    else:
        ids = sampler.indices()
        read = [DATA[ids[start : start + rows]] for start in range(0, len(ids), rows)]
    # a rank whose last round is padding has a row less: `join_batches` fills it up
    return [jdw.Batch.of(numbers / np.float32(10), ids=numbers // 10) for numbers in read]


def train_on(order):
    """The mean of what was drawn, learned by a step from ranks' own loaders."""
    mesh = jdw.data_mesh(RANKS)

    def loss_fn(params, batch):
        return jdw.weighted_sum((params["mean"] - batch.data) ** 2, batch.weights)

    step = jdw.make_train_step(loss_fn, mesh)
    params = {"mean": jnp.float32(50)}
    state = TrainState.create(apply_fn=None, params=params, tx=optax.sgd(0.05))
    weights = []
    for epoch in range(EPOCHS):
        streams = [drawn_batches(rank, epoch, order, BATCH) for rank in range(RANKS)]
        read = [[] for _ in range(RANKS)]
        for batch in jdw.join_batches(streams, mesh, name=f"epoch {epoch}"):
            state, report = step(state, batch)
            weights.append(float(report.weight))
            ids, counts = (np.asarray(x).reshape(RANKS, -1) for x in (batch.ids, batch.weights))
            for rank in range(RANKS):
                read[rank] += ids[rank][counts[rank] > 0].tolist()
        drawn = order(epoch)
        assert read == [drawn[rank::RANKS].tolist() for rank in range(RANKS)]
    return float(state.params["mean"]), sum(weights)


def ids_read(batches, epoch):
    """The ids that each rank's batches held, in order."""
    return [np.concatenate(batches(rank, epoch)) // 10 for rank in range(RANKS)]


def main():
    jdw.force_cpu_devices(RANKS)
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

    for name, order in DRAWN.items():
        mean, rows = train_on(order)
        drawn = np.mean([order(epoch).mean() for epoch in range(EPOCHS)])
        print(
            f"{name}: {rows:.0f} rows of {EPOCHS} epochs, new in each, mean {drawn:.1f}, learned"
            f" {mean:.1f}; of all examples {np.mean(DATA / 10):.1f}"
        )


if __name__ == "__main__":
    main()
