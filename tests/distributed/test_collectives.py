"""What a function communicates, read off its jaxpr through loops, branches and calls."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from jax_ddp_weighting.distributed.collectives import OTHERS, find_collectives


@jax.custom_vjp
def own_derivative(x):
    return lax.psum(x, "model")


own_derivative.defvjp(lambda x: (lax.psum(x, "model"), None), lambda _, g: (g,))


def in_scan(p, x):
    # the first parameter reaches what is gathered in the second round only
    def body(carry, _):
        a, b = carry
        return (p[0], a), lax.all_gather(b, "data")

    return lax.scan(body, (p[1], p[1]), None, length=3)


def in_while(p, x):
    return lax.while_loop(lambda c: c[0] < 3.0, lambda c: (c[0] + 1, lax.psum(c[1], "data")), p)


def in_cond(p, x):
    return lax.cond(x > 0, lambda a: lax.ppermute(a, "data", [(0, 0)]), lambda a: a, p[0])


def in_calls(p, x):
    return jax.checkpoint(jax.jit(lambda a: lax.psum(a * x, ("data", "model"))))(p[0])


CASES = {
    "a sum of products": (
        lambda p, x: lax.psum(p[0] * x, "model"),
        {("psum", "model", frozenset({0, OTHERS}))},
    ),
    "a gathered parameter": (
        lambda p, x: lax.all_gather(2 * p[1], "data") * x,
        {("all_gather", "data", frozenset({1}))},
    ),
    "no gradient": (
        lambda p, x: p[0] * lax.psum(lax.stop_gradient(p[0]), "data"),
        {("psum", "data", frozenset({OTHERS}))},
    ),
    "the rank's number": (lambda p, x: p[0] * lax.axis_index("data"), set()),
    "a derivative of its own": (lambda p, x: own_derivative(p[0]), set()),
    "in a scan": (
        in_scan,
        {("all_gather", "data", frozenset({1})), ("all_gather", "data", frozenset({0, 1}))},
    ),
    "in a while loop": (in_while, {("psum", "data", frozenset({0, 1}))}),
    "in a branch": (in_cond, {("ppermute", "data", frozenset({0}))}),
    "in calls": (in_calls, {("psum", "data model", frozenset({0, OTHERS}))}),
}


@pytest.mark.parametrize("case", CASES)
def test_collectives_are_found_with_what_they_send(case):
    fn, expected = CASES[case]
    found = []

    def look(p, x):
        found.extend(find_collectives(fn, (p, p), x))
        return x

    over = jax.vmap(jax.vmap(look, axis_name="model"), axis_name="data")
    jax.eval_shape(over, jnp.ones((1, 1)), jnp.ones((1, 1)))
    seen = {(each.name, " ".join(sorted(each.axes)), each.origins) for each in found}
    assert seen == expected


def test_an_axis_that_is_mapped_inside_is_not_seen():
    mesh = jax.make_mesh((1,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
    inner = jax.shard_map(
        lambda p: lax.psum(p, "model"), mesh=mesh, in_specs=P("model"), out_specs=P()
    )
    assert find_collectives(lambda p: jnp.sum(inner(p)), jnp.ones(2)) == []
