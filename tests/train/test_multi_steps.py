"""weighted_multi_steps beside optax.MultiSteps, feature by feature."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp  # flax brings it
import pytest
from flax import serialization
from jax.sharding import PartitionSpec

from jax_ddp_weighting import data_mesh, weighted_multi_steps

ONE = optax.sgd(-1.0)  # updates are the gradient itself
GRADIENTS = [1.0, 3.0, 2.0, 5.0, 0.0, 4.0]


def run(tx, gradients, weights=None, params=0.0, **extra):
    """Updates and states of each microbatch, under jit."""
    params = jnp.float32(params)
    state, update = tx.init(params), jax.jit(tx.update)
    updates, states = [], []
    for i, gradient in enumerate(gradients):
        given = {} if weights is None else {"weight": weights[i]}
        given |= {name: values[i] for name, values in extra.items()}
        each, state = update(jnp.float32(gradient), state, params, **given)
        updates.append(float(each))
        states.append(state)
    return updates, states


def fields(states, *names):
    return [[float(getattr(state, name)) for name in names] for state in states]


@pytest.mark.parametrize("weight", [1, 7, 0.25])
@pytest.mark.parametrize("use_grad_mean", [True, False])
@pytest.mark.parametrize("k", [1, 3, lambda step: jnp.where(step < 1, 2, 3)])
def test_fields_of_one_name_mean_one_thing(k, use_grad_mean, weight):
    theirs = optax.MultiSteps(ONE, k, use_grad_mean=use_grad_mean)
    expected, right = run(theirs, GRADIENTS)
    ours = weighted_multi_steps(ONE, k, use_grad_mean=use_grad_mean)
    updates, states = run(ours, GRADIENTS, [weight] * 6)
    factor = 1 if use_grad_mean else weight  # of a total, the weight is a part
    np.testing.assert_allclose(updates, np.array(expected) * factor, rtol=1e-6)
    for name in ("mini_step", "gradient_step"):
        assert fields(states, name) == fields(right, name)
    np.testing.assert_allclose(
        fields(states, "acc_grads"), np.array(fields(right, "acc_grads")) * factor, rtol=1e-6
    )
    asked = [bool(ours.has_updated(state)) for state in states]
    assert asked == [bool(theirs.has_updated(state)) for state in right]


def test_a_logger_of_acc_grads_reads_the_weighted_mean_so_far():
    weights = [5, 33, 14]
    _, states = run(weighted_multi_steps(ONE, 4), GRADIENTS[:3], weights)
    means = [np.average(GRADIENTS[: i + 1], weights=weights[: i + 1]) for i in range(3)]
    np.testing.assert_allclose([float(s.acc_grads) for s in states], means, rtol=1e-6)
    updates, _ = run(weighted_multi_steps(ONE, 3), GRADIENTS[:3], weights)
    assert updates[2] == pytest.approx(132 / 52, rel=1e-6)
    # the sum of weight times gradient, in a field of that name, would be fifty times as much
    assert np.dot(weights, GRADIENTS[:3]) / means[2] == pytest.approx(52)


def test_the_mean_of_totals_is_read_too():
    totals = [w * g for w, g in zip([5, 33, 14], GRADIENTS, strict=False)]
    tx = weighted_multi_steps(ONE, 3, gradients_of="total")
    updates, states = run(tx, totals, [5, 33, 14])
    assert float(states[1].acc_grads) == pytest.approx(104 / 38)
    assert updates[2] == pytest.approx(132 / 52)
    tx = weighted_multi_steps(ONE, 3, gradients_of="total", use_grad_mean=False)
    assert run(tx, totals, [5, 33, 14])[0][2] == 132.0


def test_a_window_without_weight_has_not_updated():
    tx = weighted_multi_steps(ONE, 2)
    _, states = run(tx, [1.0, 1.0, 1.0, 1.0], [1, 1, 0, 0])
    assert [bool(tx.has_updated(state)) for state in states] == [False, True, False, False]
    empty = states[-1]
    assert (int(empty.mini_step), int(empty.gradient_step)) == (0, 1)  # MultiSteps would say yes


def test_a_microbatch_that_is_not_finite_is_left_out_whole():
    gradients = [1.0, np.nan, 3.0, 5.0, np.inf, 7.0]
    theirs = optax.MultiSteps(ONE, 2, should_skip_update_fn=optax.skip_not_finite)
    expected, right = run(theirs, gradients)
    ours = weighted_multi_steps(ONE, 2, should_skip_update_fn=optax.skip_not_finite)
    updates, states = run(ours, gradients, [1] * 6)
    assert updates == expected == [0.0, 0.0, 2.0, 0.0, 0.0, 6.0]
    assert fields(states, "mini_step") == fields(right, "mini_step")
    for ours_, theirs_ in zip(states, right, strict=True):
        jax.tree.map(np.testing.assert_array_equal, ours_.skip_state, theirs_.skip_state)
    updates, states = run(ours, gradients, [1, 100, 3, 2, 50, 2])
    np.testing.assert_allclose(updates, [0, 0, 2.5, 0, 0, 6.0])
    assert float(states[4].weight) == 2.0
    # without it the gradient reaches the parameters
    assert np.isnan(run(weighted_multi_steps(ONE, 2), gradients, [1] * 6)[0][1])


def test_a_skipped_microbatch_still_flushes():
    tx = weighted_multi_steps(ONE, 4, should_skip_update_fn=optax.skip_not_finite)
    updates, states = run(tx, [4.0, np.nan], [3, 5], flush=[False, True])
    assert updates == [0.0, 4.0]
    assert int(states[-1].mini_step) == 0


def test_a_verdict_that_is_no_bool_is_refused():
    tx = weighted_multi_steps(ONE, 2, should_skip_update_fn=lambda *_: (jnp.ones(2, bool), ()))
    with pytest.raises(ValueError, match="should_skip_update_fn must return a bool scalar and a"):
        tx.init(jnp.float32(0))


@pytest.mark.parametrize("bad", [-2.0, np.nan, np.inf, -np.inf])
def test_a_bad_weight_on_the_device_counts_for_nothing_and_is_counted(bad):
    tx = weighted_multi_steps(ONE, 3)
    weights = [jnp.float32(w) for w in (1.0, bad, 3.0, 2.0)]
    updates, states = run(tx, [1.0, 100.0, 3.0, 6.0], weights, flush=[False, False, False, True])
    np.testing.assert_allclose(updates, [0, 0, 2.5, 6.0], rtol=1e-6)
    assert [int(state.bad_weights) for state in states] == [0, 1, 1, 1]
    assert [float(state.weight) for state in states] == [1.0, 1.0, 0.0, 0.0]


def test_weights_that_are_no_real_numbers_are_refused():
    tx = weighted_multi_steps(ONE, 2)
    for weight in (jnp.complex64(1), "one", 1j):
        with pytest.raises(TypeError, match="weighted_multi_steps: weight must be a number, got"):
            tx.update(1.0, tx.init(1.0), weight=weight)


def test_value_and_gradient_reach_the_inner_optimizer_as_the_windows():
    seen = []

    def look(updates, state, params=None, *, value, grad, weight):
        jax.debug.callback(lambda *each: seen.append([float(x) for x in each]), value, grad, weight)
        return updates, state

    inner = optax.GradientTransformationExtraArgs(lambda _: (), look)
    tx = weighted_multi_steps(inner, 2)
    run(tx, [1.0, 3.0, 5.0, 0.0], [1, 3, 2, 0], value=[8.0, 4.0, 1.0, 9.0], grad=[0.0] * 4)
    jax.effects_barrier()
    assert seen == [[5.0, 2.5, 4.0], [1.0, 5.0, 2.0]]


def test_plateaus_are_those_of_windows():
    tx = weighted_multi_steps(optax.contrib.reduce_on_plateau(factor=0.5, patience=1), 2)
    values = [1.0, 5.0] * 4  # a microbatch looks better or worse, the windows are all the same
    _, states = run(tx, [1.0] * 8, [1, 3] * 4, value=values)
    assert float(states[-1].inner_opt_state.best_value) == pytest.approx(4.0)


def test_a_line_search_over_a_window_is_refused():
    tx = weighted_multi_steps(optax.lbfgs(), 2)
    params = jnp.ones(2)
    with pytest.raises(TypeError, match="optimizer must not call value_fn, got one that does"):
        tx.update(
            params, tx.init(params), params, weight=1, value=1.0, grad=params, value_fn=jnp.sum
        )


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit])
def test_gradients_flow_through_windows(transform):
    # by how much the learning rate, a weight and the data move what two windows end at
    def end(x, rate, weights):
        tx = weighted_multi_steps(optax.sgd(rate), 2)
        w = jnp.float32(1.0)
        state = tx.init(w)
        for i in range(4):
            updates, state = tx.update(w * x[i] ** 2, state, w, weight=weights[i])
            w = optax.apply_updates(w, updates)
        return w

    def naive(x, rate, weights):
        w = 1.0
        for i in (0, 2):
            pair, own = x[i : i + 2] ** 2, weights[i : i + 2]
            w = w - rate * w * jnp.sum(pair * own) / jnp.sum(own)
        return w

    point = jnp.float32([1.0, 2.0, 0.5, 1.5]), jnp.float32(0.1), jnp.float32([1, 3, 0, 2])
    found = transform(jax.grad(end, argnums=(0, 1)))(*point)
    right = jax.jit(jax.grad(naive, argnums=(0, 1)))(*point)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5), found, right)
    tangents = jax.tree.map(jnp.ones_like, point)
    moved = [
        transform(
            lambda x, r, each=each: jax.jvp(partial(each, weights=point[2]), (x, r), tangents[:2])
        )
        for each in (end, naive)
    ]
    ours, naives = (each(*point[:2])[1] for each in moved)
    np.testing.assert_allclose(ours, naives, rtol=1e-5)
    assert np.all(np.abs(right[0][:2]) > 1e-2)


def nested(params):
    return {"layer": {"kernel": params, "bias": params[0]}}


def through_flax(state, like, _):
    return serialization.from_bytes(like, serialization.to_bytes(state))


def through_orbax(state, like, folder):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "state", state)
        checkpointer.wait_until_finished()
        return checkpointer.restore(folder / "state", like)


@pytest.mark.parametrize("restore", [through_flax, through_orbax])
def test_an_open_window_is_saved_and_restored(restore, tmp_path):
    tx = weighted_multi_steps(optax.adamw(0.1), 3, should_skip_update_fn=optax.skip_not_finite)
    params = nested(jnp.arange(3, dtype=jnp.float32))
    gradients = [jax.tree.map(lambda p, i=i: p + i, params) for i in range(6)]

    update = jax.jit(tx.update)

    def go_on(state, start, stop):
        for i in range(start, stop):
            updates, state = update(gradients[i], state, params, weight=np.float32(i % 3 + 1))
        return updates, state

    _, state = go_on(tx.init(params), 0, 4)
    restored = restore(state, tx.init(params), tmp_path)
    assert type(restored) is type(state)
    jax.tree.map(np.testing.assert_array_equal, restored, state)
    jax.tree.map(np.testing.assert_array_equal, go_on(restored, 4, 6), go_on(state, 4, 6))


def test_groups_of_a_partition_have_windows_of_their_own():
    tx = optax.partition(
        {"a": weighted_multi_steps(ONE, 2), "b": weighted_multi_steps(optax.sgd(-2.0), 3)},
        {"a": "a", "b": "b"},
    )
    params = {"a": jnp.float32(0), "b": jnp.float32(0)}
    state, found = tx.init(params), []
    for gradient, weight in [(1.0, 1), (3.0, 3), (6.0, 2)]:
        gradients = {"a": jnp.float32(gradient), "b": jnp.float32(gradient)}
        updates, state = jax.jit(tx.update)(gradients, state, params, weight=weight)
        found.append([float(updates["a"]), float(updates["b"])])
    np.testing.assert_allclose(found, [[0, 0], [2.5, 0], [0, 2 * 22 / 6]], rtol=1e-6)


def test_every_feature_works_inside_shard_map():
    tx = weighted_multi_steps(
        optax.chain(optax.clip_by_global_norm(100.0), ONE),
        2,
        should_skip_update_fn=optax.skip_not_finite,
    )

    def window(params, x):
        state = tx.init(params)
        for k in range(2):
            total = jax.lax.psum(jnp.sum(x[k]), "data")
            updates, state = tx.update(
                total / 2, state, params, weight=2, value=total, flush=k == 1
            )
        return updates, state

    mapped = jax.shard_map(
        window,
        mesh=data_mesh(2),
        in_specs=(PartitionSpec(), PartitionSpec(None, "data")),
        out_specs=PartitionSpec(),
    )
    updates, state = jax.jit(mapped)(jnp.float32(0), jnp.float32([[1.0, 3.0], [2.0, 4.0]]))
    assert float(updates) == 2.5
    assert tx.has_updated(state)


@pytest.mark.parametrize("x64", [False, True])
def test_under_strict_promotion_and_x64(x64):
    with jax.numpy_dtype_promotion("strict"), jax.enable_x64(x64):
        tx = weighted_multi_steps(optax.sgd(0.1, momentum=0.9), 2)  # optax.adam is not strict
        params = {"a": jnp.ones(3), "b": jnp.ones(2, jnp.bfloat16)}
        state = tx.init(params)
        for weight in (1, 3.0, jnp.int32(2), jnp.float32(0.5)):
            updates, state = tx.update(params, state, params, weight=weight, value=jnp.ones(()))
        assert int(state.gradient_step) == 2
        assert updates["b"].dtype == jnp.bfloat16
        assert state.weight.dtype == updates["a"].dtype == jnp.result_type(float)
