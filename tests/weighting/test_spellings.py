"""The README's and `rank_share`'s tables of what each spelling gives, measured cell by cell."""

import re
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from jax_ddp_weighting import (
    average_gradients,
    data_mesh,
    rank_share,
    value_and_grad,
    weighted_sum,
)

VALUES = np.float32([[1, 0, 0], [3, 3, 3]])  # rank 0 holds one row of gradient 1
WEIGHTS = np.int32([[1, 0, 0], [1, 1, 1]])


def local_sum(w, batch):
    values, weights = batch
    return weighted_sum(w * values, weights)


def total(w, batch):
    return local_sum(w, batch).total


def weight(batch):
    return local_sum(0.0, batch).weight


def psum(x):
    return lax.psum(x, "data")


def pmean(x):
    return lax.pmean(x, "data")


def global_weight(batch):
    return psum(weight(batch))


def vary(w):
    try:
        return lax.pcast(w, "data", to="varying")
    except (AssertionError, ValueError):  # vmap refuses it, under jit and not
        return w


def textbook(w, batch):
    return total(w, batch) * 2 / global_weight(batch)


def reduced_mean(w, batch):
    return psum(total(w, batch)) / global_weight(batch)


def share(w, batch):
    return rank_share(local_sum(w, batch), "data")


SPELLINGS = {
    '`value_and_grad(loss_fn, axis_name="data")`': lambda w, b: value_and_grad(
        local_sum, axis_name="data"
    )(w, b)[1],
    '`pmean(grad(rank_share(sum, "data")))`': lambda w, b: pmean(jax.grad(share)(w, b)),
    '`average_gradients(grad(rank_share(sum, "data")), "data")`': lambda w, b: average_gradients(
        jax.grad(share)(w, b), "data"
    ),
    '`psum(grad(rank_share(sum, "data")))`': lambda w, b: psum(jax.grad(share)(w, b)),
    "`pmean(grad(S * W / psum(D)))`, the textbook rule": lambda w, b: pmean(
        jax.grad(textbook)(w, b)
    ),
    "`psum(grad(S)) / psum(D)`": lambda w, b: psum(jax.grad(total)(w, b)) / global_weight(b),
    "`pmean(grad(psum(S) / psum(D)))`": lambda w, b: pmean(jax.grad(reduced_mean)(w, b)),
    "`grad(psum(S) / psum(D))`, nothing after": lambda w, b: jax.grad(reduced_mean)(w, b),
    "`pmean(grad(S / D))`, the mean of local means": lambda w, b: pmean(
        jax.grad(lambda w: local_sum(w, b).mean())(w)
    ),
    "`vary`, then `psum(grad(S / psum(D)))`": lambda w, b: psum(
        jax.grad(lambda w: total(w, b) / global_weight(b))(vary(w))
    ),
    '`vary`, then `pmean(grad(rank_share(sum, "data")))`': lambda w, b: pmean(
        jax.grad(share)(vary(w), b)
    ),
}


def in_shard_map(check):
    def run(spelling):
        def fn(w, batch):
            rank = jax.tree.map(lambda x: x[0], batch)
            return jnp.reshape(spelling(w, rank), (1,))

        mapped = jax.shard_map(
            fn,
            mesh=data_mesh(2),
            in_specs=(P(), P("data")),
            out_specs=P("data"),
            check_vma=check,
        )
        return jax.jit(mapped)(jnp.float32(2), (VALUES, WEIGHTS))

    return run


def in_pmap(spelling):
    mapped = jax.pmap(spelling, "data", in_axes=(None, 0), devices=jax.devices()[:2])
    return mapped(jnp.float32(2), (VALUES, WEIGHTS))


def in_vmap(spelling):
    mapped = jax.vmap(spelling, in_axes=(None, 0), axis_name="data")
    return jax.jit(mapped)(jnp.float32(2), (VALUES, WEIGHTS))


COLUMNS = {
    "`shard_map`": [in_shard_map(check=True)],
    "`shard_map(check_vma=False)`": [in_shard_map(check=False)],
    "`pmap`, `vmap`": [in_pmap, in_vmap],
}


def tables():
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    for name, text in (("README", readme), ("rank_share", rank_share.__doc__)):
        lines = [re.findall(r"[^|]+", line.strip()) for line in text.splitlines()]
        rows = [[cell.strip().replace("**", "") for cell in line] for line in lines if line]
        head = next(i for i, row in enumerate(rows) if row[0] == "inside the mapped function")
        for row in rows[head + 2 :]:
            if len(row) != len(rows[head]):
                break
            for column, cell in zip(rows[head][1:], row[1:], strict=True):
                yield pytest.param(row[0], column, cell, id=f"{name}-{row[0]}-{column}")


CELLS = list(tables())


@cache
def gradients(spelling, column):
    return [np.asarray(run(SPELLINGS[spelling])) for run in COLUMNS[column]]


@pytest.mark.parametrize(("spelling", "column", "cell"), CELLS)
def test_a_cell_says_what_the_spelling_gives(spelling, column, cell):
    expected = [float(number) for number in cell.split(" and ")]
    for found in gradients(spelling, column):
        np.testing.assert_allclose(found, np.broadcast_to(expected, (2,)), rtol=1e-6)


def test_both_tables_were_read_whole():
    assert len([cell for cell in CELLS if cell.id.startswith("rank_share")]) == 10 * 3
    assert len([cell for cell in CELLS if cell.id.startswith("README")]) == 6 * 3
