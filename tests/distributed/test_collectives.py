"""What a function communicates, read off its jaxpr through loops, branches and calls."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from jax_ddp_weighting.distributed.collectives import trace


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
    # name: function, and of each collective its name, axes, parameters, and whether others join in
    "a sum of products": (lambda p, x: lax.psum(p[0] * x, "model"), {("psum", "model", "0", True)}),
    "a gathered parameter": (
        lambda p, x: lax.all_gather(2 * p[1], "data") * x,
        {("all_gather", "data", "1", False)},
    ),
    "no gradient": (
        lambda p, x: p[0] * lax.psum(lax.stop_gradient(p[0]), "data"),
        {("psum", "data", "", True)},
    ),
    "the rank's number": (lambda p, x: p[0] * lax.axis_index("data"), set()),
    "a derivative of its own": (lambda p, x: own_derivative(p[0]), set()),
    "in a scan": (
        in_scan,
        {("all_gather", "data", "1", False), ("all_gather", "data", "01", False)},
    ),
    "in a while loop": (in_while, {("psum", "data", "01", False)}),
    "in a branch": (in_cond, {("ppermute", "data", "0", False)}),
    "in calls": (in_calls, {("psum", "data model", "0", True)}),
}


def trace_mapped(fn):
    found = []

    def look(p, x):
        found.append(trace(fn, (p, p), x))
        return x

    over = jax.vmap(jax.vmap(look, axis_name="model"), axis_name="data")
    jax.eval_shape(over, jnp.ones((1, 1)), jnp.ones((1, 1)))
    return found[0]


@pytest.mark.parametrize("case", CASES)
def test_collectives_are_found_with_what_they_send(case):
    fn, expected = CASES[case]
    found, _ = trace_mapped(fn).find_collectives()
    assert expected == {
        (
            each.name,
            " ".join(sorted(each.axes)),
            "".join(map(str, sorted(each.leaves))),
            each.others,
        )
        for each in found
    }


@pytest.mark.parametrize(
    ("fn", "varying"),
    [
        (lambda p, x: p[0] * x, {"data"}),
        (lambda p, x: p[1] * x, {"model", "data"}),
        (lambda p, x: lax.psum(p[1], "model") * x, {"data"}),
        (lambda p, x: lax.psum(p[1] * x, ("data", "model")), set()),
        (lambda p, x: lax.psum(p[0], "model", axis_index_groups=[[0]]), {"model"}),
        (lambda p, x: lax.all_gather(p[1], "model"), set()),
        (lambda p, x: lax.axis_index("model") + p[0], {"model"}),
        (lambda p, x: lax.ppermute(p[0], "model", [(0, 0)]), {"model"}),
        (lambda p, x: own_derivative(p[1]), set()),
        (in_cond, {"data"}),
        (lambda p, x: lax.stop_gradient(p[1]), {"model"}),
    ],
)
def test_what_may_differ_from_rank_to_rank_is_known_of_results(fn, varying):
    # the second parameter differs over the model axis, the rows over the data axis
    program = trace_mapped(fn)
    _, found = program.find_collectives([frozenset(), frozenset({"model"})], frozenset({"data"}))
    assert found == varying


def test_an_axis_that_is_mapped_inside_is_not_seen():
    mesh = jax.make_mesh((1,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
    inner = jax.shard_map(
        lambda p: lax.psum(p, "model"), mesh=mesh, in_specs=P("model"), out_specs=P()
    )
    found, varying = trace(lambda p: jnp.sum(inner(p)), jnp.ones(2)).find_collectives()
    assert (found, varying) == ([], frozenset())
