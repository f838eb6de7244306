"""Accumulated windows count each microbatch as its weight; optax.MultiSteps is the control."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jax_ddp_weighting import value_and_grad, weighted_multi_steps, weighted_sum
from jax_ddp_weighting.distributed import mesh as meshes

ONE = optax.sgd(-1.0)  # updates are the gradient itself


def applied(tx, microbatches, params=0.0, **last):
    """The updates of each microbatch `(gradient, weight)`; `last` goes with the last of them."""
    params = jnp.asarray(params, jnp.float32)
    state, found, update = tx.init(params), [], jax.jit(tx.update)
    for i, (gradient, weight) in enumerate(microbatches):
        extra = last if i == len(microbatches) - 1 else {}
        gradient = jnp.asarray(gradient, jnp.float32)
        updates, state = update(gradient, state, params, weight=weight, **extra)
        found.append(np.asarray(updates).tolist())
    return found, state


def one_vote_each(optimizer, k):
    """optax.MultiSteps, which knows no weights: the control."""
    multi = optax.MultiSteps(optimizer, k)

    def update(updates, state, params=None, **_):
        return multi.update(updates, state, params)

    return optax.GradientTransformationExtraArgs(multi.init, update)


# (gradient of the microbatch's mean, its weight) ..., right, what MultiSteps applies
WINDOWS = {
    # optax MultiSteps; flax wmt and nlp_seq examples: counts 1 and 3
    "means 1 and 3 of 1 and 3 tokens": ([(1.0, 1), (3.0, 3)], 2.5, 2.0),
    # prime-rl 1957: 5 and 1 tokens of values 1 and 7
    "5 and 1 tokens": ([(1.0, 5), (7.0, 1)], 2.0, 4.0),
    # transformers 24725: 10 and 100 targets, each to count 1/110
    "10 and 100 targets": ([(1.0, 10), (0.0, 100)], 10 / 110, 0.5),
    # transformers 608: 13 rows as 7 + 6
    "13 rows as 7 and 6": ([(13.0, 7), (0.0, 6)], 7.0, 6.5),
    # tunix 1833: weights below 1 are no reason to divide by 1
    "weights of a quarter": ([(2.0, 0.25), (4.0, 0.25)], 3.0, 3.0),
    # Megatron 1764: a microbatch without valid tokens is no vote, even as 0/0
    "one microbatch empty": ([(float("nan"), 0), (3.0, 2)], 3.0, float("nan")),
    # unlike in optax, nothing is lost where every weight is the same
    "equal weights": ([(1.0, 2), (2.0, 2), (6.0, 2)], 3.0, 3.0),
}


@pytest.mark.parametrize("name", WINDOWS)
def test_a_window_is_the_mean_over_its_tokens(name):
    microbatches, right, wrong = WINDOWS[name]
    k = len(microbatches)
    found, state = applied(weighted_multi_steps(ONE, k), microbatches)
    assert found == [0.0] * (k - 1) + [pytest.approx(right, rel=1e-6)]
    assert (int(state.mini_step), int(state.gradient_step), float(state.weight)) == (0, 1, 0.0)
    control, _ = applied(one_vote_each(ONE, k), microbatches)
    assert control[-1] == pytest.approx(wrong, rel=1e-6, nan_ok=True)


def test_gradients_of_totals_are_added_as_they_are():
    totals = [(1.0, 1), (9.0, 3)]
    found, _ = applied(weighted_multi_steps(ONE, 2, gradients_of="total"), totals)
    assert found == [0.0, 2.5]
    assert applied(weighted_multi_steps(ONE, 2), totals)[0] != found


@pytest.mark.parametrize("left", [(8.0, 3), (8.0, 0)])
def test_a_short_last_window_is_flushed_with_the_weight_that_it_has(left):
    # transformers 39659, DeepSpeed 7439: a window of 4, two microbatches left
    microbatches = [(4.0, 1), left]
    right = 7.0 if left[1] else 4.0
    found, state = applied(weighted_multi_steps(ONE, 4), microbatches, flush=True)
    assert found == [0.0, right]
    assert int(state.mini_step) == 0
    # MultiSteps applies nothing and keeps them for the next epoch's window; dividing by the four
    # that never came, as others do, halves them
    control, state = applied(one_vote_each(ONE, 4), microbatches)
    assert control == [0.0, 0.0]
    assert int(state.mini_step) == 2
    assert sum(gradient for gradient, _ in microbatches) / 4 != right


def test_a_flush_of_an_empty_window_does_nothing():
    found, state = applied(weighted_multi_steps(optax.adamw(0.1), 4), [(0.0, 0)], flush=True)
    assert found == [0.0]
    assert int(state.gradient_step) == 0


def test_clipping_comes_once_after_the_mean():
    # transformers 986, praxis 6
    clip = optax.clip_by_global_norm(1.0)
    microbatches = [([2.0, 0.0], 1), ([0.0, 2.0], 1)]
    once = weighted_multi_steps(optax.chain(clip, ONE), 2)
    found, _ = applied(once, microbatches, params=[0.0, 0.0])
    np.testing.assert_allclose(found[-1], [0.707, 0.707], atol=1e-3)

    # the running sum clipped after every microbatch, as the reports' loops did
    total = np.zeros(2)
    for gradient, _ in microbatches:
        total = total + gradient
        total = total / max(np.linalg.norm(total), 1.0)
    np.testing.assert_allclose(total, [0.447, 0.894], atol=1e-3)

    # the same transformations in the other order: each microbatch clipped, then their mean
    each = optax.chain(clip, weighted_multi_steps(ONE, 2))
    control, _ = applied(each, microbatches, params=[0.0, 0.0])
    np.testing.assert_allclose(control[-1], [0.5, 0.5], rtol=1e-6)


def test_schedules_count_real_steps():
    schedule = optax.piecewise_constant_schedule(-1.0, {2: 10.0})
    tx = weighted_multi_steps(optax.sgd(schedule), 2)
    found, state = applied(tx, [(1.0, 1)] * 4 + [(1.0, 0)] * 2 + [(1.0, 1)] * 4)
    assert found == [0.0, 1.0, 0.0, 1.0, 0.0, 0.0, 0.0, 10.0, 0.0, 10.0]
    assert int(state.gradient_step) == 4


def test_k_may_grow_with_the_steps_taken():
    tx = weighted_multi_steps(ONE, lambda step: jnp.where(step < 2, 1, 3))
    found, state = applied(tx, [(1.0, 1), (2.0, 1), (3.0, 1), (5.0, 2), (1.0, 1)])
    assert found == [1.0, 2.0, 0.0, 0.0, 3.5]
    assert int(state.gradient_step) == 3


def test_a_window_without_weight_leaves_adamw_alone():
    # Relax 285: a zero gradient would move the parameters and the moments
    tx = weighted_multi_steps(optax.adamw(0.1), 2)
    params = jnp.float32(1.0)
    _, before = applied(tx, [(1.0, 1), (1.0, 1)], params=1.0)
    state = before
    for _ in range(2):
        updates, state = tx.update(jnp.float32(jnp.nan), state, params, weight=0)
        assert updates == 0.0
    assert not tx.has_updated(state)
    jax.tree.map(np.testing.assert_array_equal, state._replace(stepped=True), before)
    moved, _ = optax.adamw(0.1).update(jnp.float32(0), before.inner_opt_state, params)
    assert abs(float(moved)) > 1e-2


def test_equal_full_windows_are_what_optax_applies():
    params = {"a": jnp.zeros((3, 2)), "b": jnp.zeros(4, jnp.bfloat16)}
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.1))
    ours, theirs = weighted_multi_steps(optimizer, 3), optax.MultiSteps(optimizer, 3)
    rng = np.random.default_rng(0)

    def run(tx, params, extra):
        state = tx.init(params)
        update = jax.jit(tx.update)
        for gradients in draws:
            updates, state = update(gradients, state, params, **extra)
            params = optax.apply_updates(params, updates)
        return params

    draws = [
        jax.tree.map(lambda p: jnp.asarray(rng.normal(size=p.shape), p.dtype), params)
        for _ in range(6)
    ]

    def check(got, expected):
        """To rounding; in bfloat16 to two last digits of an update of 0.1, as machines differ."""
        atol = 2.0**-10 if expected.dtype == jnp.bfloat16 else 0
        np.testing.assert_allclose(*map(np.float32, (got, expected)), rtol=1e-5, atol=atol)

    expected = run(theirs, params, {})
    for dtype in (jnp.int32, jnp.float32):
        got = run(ours, params, {"weight": dtype(7)})
        jax.tree.map(check, got, expected)
    for name in params:
        with pytest.raises(AssertionError, match="Not equal to tolerance"):
            check(params[name], expected[name])


def test_small_gradients_add_up_in_bfloat16():
    # 512 microbatches of 1/512 each: a bfloat16 accumulator stops at a quarter of them
    tx = weighted_multi_steps(ONE, 512, gradients_of="total")
    gradient = jnp.bfloat16(1 / 512)
    update = jax.jit(lambda state: tx.update(gradient, state, gradient, weight=1 / 512))
    state = tx.init(gradient)
    for _ in range(512):
        updates, state = update(state)
    assert updates.dtype == jnp.bfloat16
    assert float(updates) == 1.0


def window_loss(w, batch):
    x, weights = batch
    return weighted_sum(w * x, weights)


X = np.float32([1, 0, 2, 4, 3, 3, 7, 0])  # two ranks of two microbatches of two rows
WEIGHTS = np.int32([1, 0, 1, 1, 1, 1, 1, 0])
RIGHT = float(np.sum(X * WEIGHTS) / np.sum(WEIGHTS))


def window(axis_name):
    """Two microbatches of each rank's rows, as a loop of update steps."""

    def fn(w, batch):
        tx = weighted_multi_steps(optax.chain(optax.clip(100.0), ONE), 2)
        gradient = value_and_grad(window_loss, axis_name=axis_name)
        rows = jax.tree.map(lambda x: x.reshape(2, -1), batch)
        state = tx.init(w)
        updates = []
        for k in range(2):
            loss, grads = gradient(w, jax.tree.map(lambda x, k=k: x[k], rows))
            update, state = tx.update(grads, state, w, weight=loss.terms["loss"].weight)
            updates.append(update)
        return jnp.stack(updates)

    return fn


@pytest.mark.parametrize("check_vma", [True, False])
def test_windows_inside_shard_map(check_vma):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    mapped = jax.shard_map(
        window("data"),
        mesh=mesh,
        in_specs=(PartitionSpec(), PartitionSpec("data")),
        out_specs=PartitionSpec(),
        check_vma=check_vma,
    )
    np.testing.assert_allclose(jax.jit(mapped)(jnp.float32(1), (X, WEIGHTS)), [0, RIGHT], rtol=1e-6)


@pytest.mark.parametrize("mapping", [jax.pmap, jax.vmap])
def test_windows_inside_pmap_and_vmap(mapping):
    mapped = jax.jit(mapping(window("data"), axis_name="data", in_axes=(None, 0)))
    batch = jax.tree.map(lambda x: x.reshape(2, 4), (X, WEIGHTS))
    np.testing.assert_allclose(mapped(jnp.float32(1), batch), [[0, RIGHT]] * 2, rtol=1e-6)


def test_the_mean_of_the_windows_local_means_is_another_number():
    means = [
        np.average(x, weights=w)
        for x, w in zip(X.reshape(4, 2), WEIGHTS.reshape(4, 2), strict=True)
    ]
    assert abs(np.mean(means) / RIGHT - 1) > 0.05


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_the_state_lies_where_the_parameters_lie(axis_type):
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(axis_type,) * 2)
    sharding = NamedSharding(mesh, PartitionSpec(None, "model"))
    params = jax.device_put(jnp.ones((4, 4)), sharding)
    tx = weighted_multi_steps(optax.adamw(0.1), 2)
    replicated = NamedSharding(mesh, PartitionSpec())
    state = meshes.place(tx.init(params), replicated)  # moves the counters alone
    update = jax.jit(tx.update)
    for weight in (1, 3):
        updates, state = update(params * weight, state, params, weight=weight)
    for leaf in (updates, state.acc_grads, state.inner_opt_state[0].mu):
        assert leaf.sharding.is_equivalent_to(sharding, 2)
    np.testing.assert_allclose(state.inner_opt_state[0].mu, 0.1 * (1 + 9) / 4, rtol=1e-6)
    assert update._cache_size() == 1


def test_the_inner_optimizer_runs_once_per_window():
    calls = []

    def counted(updates, state, params=None):
        jax.debug.callback(lambda: calls.append(1))
        return updates, state

    tx = weighted_multi_steps(optax.GradientTransformation(lambda _: (), counted), 4)
    state = tx.init(jnp.float32(0))
    update = jax.jit(tx.update)
    for _ in range(8):
        _, state = update(jnp.float32(1), state, weight=1)
    jax.effects_barrier()
    assert len(calls) == 2


def test_extra_arguments_reach_the_inner_optimizer_beside_the_windows_weight():
    seen = []

    def update(updates, state, params=None, *, weight, value):
        seen.append(value)
        return updates * weight, state

    inner = optax.GradientTransformationExtraArgs(lambda _: (), update)
    tx = weighted_multi_steps(inner, 1)
    updates, _ = tx.update(jnp.float32(2), tx.init(jnp.float32(0)), weight=3, value="a value")
    assert updates == 6.0
    assert "a value" in seen


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((0.1, 2), TypeError, "optimizer must be an optax transformation, got float"),
        ((ONE, 0), ValueError, "every_k_steps must be a number .*, got 0. 1 applies"),
        ((ONE, 2.0), TypeError, r"at least 1, or a function of the step count, got 2\.0"),
        ((ONE, True), TypeError, "every_k_steps must be a number of microbatches, .*, got True"),
    ],
)
def test_bad_constructions_are_refused(arguments, error, message):
    with pytest.raises(error, match=f"weighted_multi_steps: .*{message}"):
        weighted_multi_steps(*arguments)


def test_other_kinds_of_gradients_are_refused():
    with pytest.raises(ValueError, match="gradients_of must be 'mean' or 'total', got 'sum'"):
        weighted_multi_steps(ONE, 2, gradients_of="sum")


@pytest.mark.parametrize(
    ("weight", "error", "message"),
    [
        (None, TypeError, "weight must be given to update, got None"),
        (-1, ValueError, "weight must be finite and at least 0, got -1"),
        (float("nan"), ValueError, "weight must be finite and at least 0, got nan"),
        (np.ones(3), ValueError, r"weight must be a scalar, got shape \(3,\)"),
    ],
)
def test_bad_weights_are_refused(weight, error, message):
    tx = weighted_multi_steps(ONE, 2)
    with pytest.raises(error, match=f"weighted_multi_steps: {message}"):
        tx.update(1.0, tx.init(1.0), weight=weight)


def test_a_window_may_hold_other_windows():
    # 2 x 2: the outer window is given each inner window's mean with its weight
    tx = weighted_multi_steps(weighted_multi_steps(ONE, 2), 2)
    found, _ = applied(tx, [(1.0, 1), (3.0, 3), (0.0, 1), (6.0, 5)])
    assert found == [0.0, 0.0, 0.0, 4.0]


def test_windows_in_a_scan():
    tx = weighted_multi_steps(ONE, 2)

    def step(state, microbatch):
        updates, state = tx.update(microbatch[0], state, jnp.float32(0), weight=microbatch[1])
        return state, updates

    gradients, weights = jnp.float32([1, 3, 5, 1]), jnp.int32([1, 3, 1, 1])
    _, updates = jax.jit(lambda s: lax.scan(step, s, (gradients, weights)))(tx.init(jnp.float32(0)))
    np.testing.assert_array_equal(updates, [0, 2.5, 0, 3])
