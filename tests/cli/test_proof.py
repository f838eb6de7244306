"""The proof of `parity` for whatever `check_gradients` takes, each with a control that fails."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from jax_ddp_weighting import Batch, check_gradients, weighted_sum
from jax_ddp_weighting.cli.proof import check_case, prove

PARAMS = {"w": np.linspace(1, 2, 4, dtype=np.float32)}
ROWS = np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32)
BATCH = Batch.of(ROWS, np.float32([1, 0.5, 2, 0, 1, 1]))


def sums(params, batch, scale=1.0):
    return weighted_sum((batch.data @ params["w"] - 1) ** 2 * scale, batch.weights)


def with_aux(params, batch):
    return sums(params, batch), {"rows": batch.weights}


def with_state(params, batch, state):
    return sums(params, batch, state["scale"]), {"scale": state["scale"] * 1}


def with_both(params, batch, state):
    return *with_state(params, batch, state), batch.ids


def with_rng(params, batch, rng):
    keys = jax.vmap(jax.random.fold_in, (None, 0))(rng, batch.ids)
    return sums(params, batch, jax.vmap(jax.random.uniform)(keys))


def with_statistics(params, batch, state, statistics):
    return sums(params, batch, state / statistics), state


def with_terms(params, batch):
    return {"fit": sums(params, batch), "seen": weighted_sum(batch.data[:, 0], batch.weights)}


def of_own_part(params, batch):
    size = params["w"].shape[0]
    own = lax.dynamic_slice_in_dim(batch.data, lax.axis_index("model") * size, size, axis=1)
    return weighted_sum((lax.psum(own @ params["w"], "model") - 1) ** 2, batch.weights)


def gathered(params, batch):
    return sums({"w": lax.all_gather(params["w"], "data", tiled=True)}, batch)


STATE = {"scale": np.float32(3)}
CASES = {
    "aux": (with_aux, {"has_aux": True}),
    "state": (with_state, {"state": STATE}),
    "state and aux": (with_both, {"state": STATE, "has_aux": True, "microbatches": 2}),
    "key": (with_rng, {"rng": jax.random.key(0)}),
    "statistics that name a state": (
        with_statistics,
        {
            "state": np.float32(2),
            "statistics": lambda params, batch, *, state: state * batch.weights.sum(),
        },
    ),
    "terms": (
        with_terms,
        {"coefficients": {"fit": 1.0, "seen": 0.0}, "divisors": {"fit": 4.0}, "microbatches": 3},
    ),
    "an axis beside the data's": (sums, {"axes": {"model": 2}}),
    "shards over a further axis": (
        of_own_part,
        {"param_specs": {"w": P("model")}, "axes": {"model": 2}, "reference": sums},
    ),
    "shards over the data's axis": (
        gathered,
        {"param_specs": {"w": P("data")}, "reference": sums, "splits": [(4, 2), (6, 0)]},
    ),
    "more ranks than devices": (
        of_own_part,
        {
            "param_specs": {"w": P("model")},
            "axes": {"model": 4},
            "reference": sums,
            "engines": ["vmap"],
        },
    ),
    "the global view alone": (sums, {"engines": ["jit"]}),
    "ranks that are faked": (with_aux, {"has_aux": True, "engines": ["fake_pmap"]}),
}


@pytest.mark.parametrize("name", CASES)
def test_whatever_check_gradients_takes_is_proved_and_has_a_control(name):
    loss_fn, options = CASES[name]
    case = {"splits": [(4, 2)], "engines": ["shard_map_unchecked"], **options}
    proof = prove(check_case({"loss_fn": loss_fn, "params": PARAMS, "batch": BATCH, **case}))
    assert proof.failure is None
    assert proof.control is not None
    gradients = [each for each in proof.control.differences if each.leaf != "loss"]
    assert min(each.difference for each in gradients) > 0.01


def test_where_there_is_no_control_it_is_said():
    """The loss is a scalar that only the user's own gradient knows how to take."""

    def mean_over_all(params, batch):
        total = lax.psum(jnp.sum((batch.data @ params["w"] - 1) ** 2 * batch.weights), "data")
        return total / lax.psum(batch.weights.sum(), "data")

    def own(loss_fn, **_):
        def gradient(params, batch):
            return jax.value_and_grad(loss_fn)(params, batch)

        return gradient

    case = {
        "loss_fn": mean_over_all,
        "params": PARAMS,
        "batch": BATCH,
        "gradient": own,
        "reference": lambda params, batch: sums(params, batch),
        "splits": [(4, 2)],
        "engines": ["shard_map"],
        "axes": {},
    }
    assert check_gradients(**case).worst.equal
    proof = prove(case)
    assert (proof.failure, proof.control) == (None, None)
    assert "loss_fn must return" in proof.no_control
    assert proof.as_dict()["control"] == []
