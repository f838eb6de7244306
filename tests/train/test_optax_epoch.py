"""An epoch of parameters and an optax state as one program ends with the bits of its loop."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fitting import X, Y, fetch, loss_fn, new_state

from jax_ddp_weighting import (
    EpochPlan,
    batches,
    data_mesh,
    make_optax_epoch,
    make_optax_step,
    make_train_epoch,
    weighted_sum,
)

TX = optax.adamw(0.1)


def start():
    params = {"w": jnp.zeros(3), "b": jnp.zeros(())}
    return params, TX.init(params)


def moving_mean(params, batch, *, state):
    total = weighted_sum(batch.data[1], batch.weights).psum("data")
    return loss_fn(params, batch), {"mean": 0.5 * state["mean"] + 0.5 * total.mean()}


def two_terms(params, batch, keys, *, replicated):
    x, y = batch.data
    kept = jax.vmap(lambda key: jax.random.bernoulli(key, 0.7, (3,)))(keys)
    fit = weighted_sum(((x * kept) @ params["w"] + params["b"] - y) ** 2, batch.weights)
    return {"fit": fit, "norm": fit.once(replicated * jnp.sum(params["w"] ** 2))}


SCHEDULED = {
    "coefficients": {"fit": 1.0, "norm": lambda count: 0.1 * count},
    "rng_per": "example",
    "grad_norm": True,
}


def same(ours, theirs):
    pairs = zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True)
    return all(np.array_equal(a, b) and a.dtype == b.dtype for a, b in pairs)


def loop(step, plan, carried, epochs, rng=None, state=None, count=None, **given):
    reports = []
    for epoch in epochs:
        for number, batch in enumerate(batches(plan, epoch, fetch, step.compiled._mesh)):
            key = rng
            if rng is not None:
                key = jax.random.fold_in(jax.random.fold_in(rng, epoch), number)
            named = {name: v for name, v in (("state", state), ("count", count)) if v is not None}
            *carried, report = step(*carried, batch, key, **named, **given)
            if state is not None:
                *carried, state = carried
            if count is not None:
                count += not report.skipped
            reports.append(report)
    return (*carried, state), reports


def test_parameters_and_the_models_state_are_those_of_the_loop():
    plan, mesh = EpochPlan(47, 2, 6), data_mesh(2)
    run_epoch = make_optax_epoch(moving_mean, TX, mesh, plan, has_state=True, donate=False)
    kept = {"mean": jnp.float32(0)}
    *ours, reports = run_epoch(*start(), (X, Y), epochs=2, state=kept)
    step = make_optax_step(moving_mean, TX, mesh, has_state=True)
    wanted, of_loop = loop(step, plan, start(), range(2), state=kept)
    assert same(ours, wanted)
    assert same(list(reports.loss.value.ravel()), [each.loss.value for each in of_loop])
    # the control: the first epoch alone ends elsewhere
    *other, _ = run_epoch(*start(), (X, Y), 0, state={"mean": jnp.float32(0)})
    assert not same(other, wanted)


def test_the_count_goes_on_within_as_that_of_a_train_state():
    plan, mesh = EpochPlan(47, 2, 6), data_mesh(2)
    given = {"rng": jax.random.key(1), "replicated": 3.0}
    run_epoch = make_optax_epoch(two_terms, TX, mesh, plan, **SCHEDULED)
    carried, count = start(), 0
    for epoch in range(2):
        *carried, reports = run_epoch(*carried, (X, Y), epoch, count=count, **given)
        count += int(np.sum(~reports.skipped))
    step = make_optax_step(two_terms, TX, mesh, **SCHEDULED)
    (*wanted, _), of_loop = loop(step, plan, start(), range(2), count=0, **given)
    assert same(carried, wanted)
    last = of_loop[plan.steps_per_epoch :]
    assert same(list(reports.grad_norm), [each.grad_norm for each in last])
    of_state = make_train_epoch(two_terms, mesh, plan, **SCHEDULED)
    state, _ = of_state(new_state(TX), (X, Y), epochs=2, **given)
    assert same(carried, (state.params, state.opt_state))
    # the control: another count is found
    *_, reports = run_epoch(*start(), (X, Y), 0, count=5, **given)
    assert not same(list(reports.grad_norm), [each.grad_norm for each in of_loop[:4]])


def test_it_lowers_for_shapes_and_says_what_is_missing():
    plan, mesh = EpochPlan(47, 2, 6), data_mesh(2)
    run_epoch = make_optax_epoch(loss_fn, TX, mesh, plan)
    text = run_epoch.lower(*jax.eval_shape(start), (X, Y), 0).as_text()
    assert "while" in text
    assert "all_reduce" in text
    with pytest.raises(TypeError, match="optimizer must be one of optax, got float"):
        make_optax_epoch(loss_fn, 0.1, mesh, plan)
    with pytest.raises(TypeError, match="state must be left out where the step was made without"):
        run_epoch(*start(), (X, Y), 0, state=1)
    scheduled = make_optax_epoch(two_terms, TX, mesh, plan, **SCHEDULED)
    with pytest.raises(TypeError, match=r"count must be given where coefficients\['norm'\] is a"):
        scheduled(*start(), (X, Y), 0, jax.random.key(0), replicated=1.0)
