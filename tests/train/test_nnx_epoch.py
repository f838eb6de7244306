"""An epoch of an nnx model as one program ends with the bits of the loop over its batches."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jax_ddp_weighting import (
    EpochPlan,
    NnxBatchNorm,
    batches,
    data_mesh,
    make_nnx_train_epoch,
    make_nnx_train_step,
    weighted_sum,
)

X = np.random.default_rng(0).normal(size=(23, 4)).astype(np.float32)
Y = np.sin(X.sum(1))


class Model(nnx.Module):
    def __init__(self, *, norm=False, rate=0.0):
        rngs = nnx.Rngs(0)
        self.inner = nnx.Linear(4, 4, rngs=rngs)
        self.norm = NnxBatchNorm(4, axis_name="data", rngs=rngs) if norm else None
        self.dropout = nnx.Dropout(rate, rngs=rngs) if rate else None
        self.outer = nnx.Linear(4, 1, rngs=rngs)

    def __call__(self, x, weights):
        x = jnp.tanh(self.inner(x))
        x = x if self.norm is None else self.norm(x, weights=weights)
        x = x if self.dropout is None else self.dropout(x)
        return self.outer(x)[:, 0]


def loss_fn(model, batch):
    x, y = batch.data
    return weighted_sum((model(x, batch.weights) - y) ** 2, batch.weights)


def noisy_loss(model, batch, keys):
    x, y = batch.data
    kept = jax.vmap(lambda key: jax.random.bernoulli(key, 0.7, (4,)))(keys)
    return weighted_sum((model(x * kept, batch.weights) - y) ** 2, batch.weights)


def with_penalty(model, batch, statistics):
    fit = loss_fn(model, batch)
    norm = jnp.sum(model.inner.kernel[...] ** 2) / statistics
    return {"fit": fit, "norm": fit.once(norm)}


def new_pair(**options):
    model = Model(**options)
    return model, nnx.Optimizer(model, optax.adamw(0.05), wrt=nnx.Param)


def arrays_of(*objects):
    leaves = jax.tree.leaves([nnx.state(each) for each in objects])
    keyed = [jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) for leaf in leaves]
    pairs = zip(leaves, keyed, strict=True)
    return [np.asarray(jax.random.key_data(leaf) if typed else leaf) for leaf, typed in pairs]


def same(ours, theirs):
    return all(np.array_equal(a, b) for a, b in zip(ours, theirs, strict=True))


CASES = {
    "batch statistics": (2, 3, loss_fn, {"norm": True}, {"microbatches": 1}),
    "dropout by example": (4, 4, noisy_loss, {}, {"microbatches": 2, "rng_per": "example"}),
    "streams of its own": (2, 4, loss_fn, {"rate": 0.5}, {"microbatches": 2}),
    "many options": (
        *(1, 5, with_penalty, {}),
        {
            "engine": "jit",
            "statistics": lambda model, batch: jnp.sum(batch.weights),
            "divisors": {"fit": lambda weight: jnp.maximum(weight, 4)},
            "coefficients": {"fit": 1.0, "norm": lambda step: 0.1 * step},
            "grad_norm": True,
        },
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_model_and_optimizer_are_those_of_the_loop(case):
    ranks, rows, loss, model_options, options = CASES[case]
    rng = jax.random.key(3) if loss is noisy_loss else None
    plan, mesh = EpochPlan(23, ranks, rows, seed=1), data_mesh(ranks)
    run_epoch = make_nnx_train_epoch(loss, mesh, plan, **options)
    ours, reports = new_pair(**model_options), []
    for epoch in range(2):
        reports.append(run_epoch(*ours, (X, Y), epoch, rng))
    assert not np.asarray(reports[0].skipped).any()

    step = make_nnx_train_step(loss, mesh, **options)
    theirs, wanted, first = new_pair(**model_options), [], None
    for epoch in range(2):
        for number, batch in enumerate(
            batches(plan, epoch, lambda ids: (X[ids], Y[ids]), mesh, prefetch=0)
        ):
            key = rng
            if rng is not None:
                key = jax.random.fold_in(jax.random.fold_in(rng, epoch), number)
            wanted.append(step(*theirs, batch, key))
        first = first or arrays_of(*theirs)
    assert same(arrays_of(*ours), arrays_of(*theirs))
    stacked = jax.tree.map(lambda *leaves: np.concatenate(leaves), *reports)
    for name in ("loss", "weight", "skipped", "stepped", "grad_norm"):
        each = [getattr(report, name) for report in wanted]
        loop = jax.tree.map(lambda *leaves: np.stack(leaves), *each) if each[0] is not None else []
        assert same(jax.tree.leaves(getattr(stacked, name)), jax.tree.leaves(loop))
    # the control: after the first epoch the loop was elsewhere
    assert not same(arrays_of(*ours), first)


def test_what_was_given_away_is_refused_and_what_is_not_a_pair():
    plan, mesh = EpochPlan(23, 2, 4), data_mesh(2)
    run_epoch = make_nnx_train_epoch(loss_fn, mesh, plan)
    model, optimizer = new_pair()
    run_epoch(model, optimizer, (X, Y), 0)
    kept = nnx.clone(model)
    kept.inner.kernel.set_value(model.inner.kernel[...])
    run_epoch(model, optimizer, (X, Y), 1)
    with pytest.raises(ValueError, match="got one that was given away"):
        run_epoch(kept, optimizer, (X, Y), 2)
    with pytest.raises(TypeError, match=r"model must be an nnx\.Module, got dict"):
        run_epoch({}, optimizer, (X, Y), 2)
    with pytest.raises(ValueError, match='make_nnx_train_epoch: engine must be "shard_map" or'):
        make_nnx_train_epoch(loss_fn, mesh, plan, engine="pmap")
