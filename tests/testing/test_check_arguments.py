"""What the checks and diagnoses are given: whatever is wrong with it is named, by its argument."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jax_ddp_weighting import (
    Batch,
    check_additive,
    check_gradients,
    diagnose,
    diagnose_step,
    diagnose_weights,
    per_example_gradients,
    weighted_sum,
)

ROWS = np.random.default_rng(0).normal(size=(4, 8)).astype(np.float32)
BATCH = Batch.of(ROWS, np.float32([1, 1, 1, 0]))
PARAMS = jnp.asarray(np.linspace(-1, 1, 8), jnp.float32)


def loss_fn(params, batch):
    return weighted_sum((batch.data @ params) ** 2, batch.weights)


def loss_of_example(params, x):
    return jnp.tanh(x @ params)


def step(params, batch):
    def mean(params):
        return weighted_sum(jnp.tanh(batch.data @ params), batch.weights).mean()

    return jax.grad(mean)(params)


CHECKS = {"check_gradients": check_gradients, "check_additive": check_additive}


def call(name, **options):
    given = {"loss_fn": loss_fn, "params": PARAMS, "batch": BATCH, "splits": [(3, 1)]}
    given |= {"engines": ["vmap"]} if name == "check_gradients" else {}
    return CHECKS[name](**(given | options))


# --- check_gradients and check_additive -----------------------------------------------------------


@pytest.mark.parametrize("name", CHECKS)
@pytest.mark.parametrize(
    "splits",
    [
        4, 4.0, "31", ["31"], [(3.0, 1)], [(3, "1")], [(True, 3)], [None], [(3, 1), 4],
        {(3, 1): 1}, [{3: 1}], [[(3, 1)]], [np.array([3.0, 1.0])],
    ],
    ids=repr,
)  # fmt: skip
def test_splits_that_are_none_are_refused(name, splits):
    with pytest.raises(TypeError, match=rf"^{name}: splits must be tuples of rows, integers, got"):
        call(name, splits=splits)


@pytest.mark.parametrize("name", CHECKS)
@pytest.mark.parametrize(
    "splits",
    [(3, 1), [(3, 1)], np.array([3, 1]), np.array([[3, 1], [2, 2]]), [np.array([3, 1])], ((3, 1),)],
    ids=repr,
)
def test_splits_of_any_spelling_are_taken(name, splits):
    assert call(name, splits=splits).worst.equal


def test_only_parts_have_a_default():
    assert call("check_additive", splits=None).worst.equal
    with pytest.raises(TypeError, match=r"check_gradients: splits must be tuples .* got None"):
        call("check_gradients", splits=None)


@pytest.mark.parametrize("name", CHECKS)
@pytest.mark.parametrize(
    ("params", "got"),
    [
        (np.arange(8), r"int64 at params\."),
        ({"w": 3}, r"int64 at params\['w'\]"),
        ({"w": PARAMS, "name": "w"}, r"<U1 at params\['name'\]"),
        ({"w": object()}, r"object at params\['w'\]"),
        ({"key": jax.random.key(0)}, r"key<fry> at params\['key'\]"),
    ],
)
def test_params_that_have_no_gradient_are_refused(name, params, got):
    with pytest.raises(TypeError, match=rf"^{name}: params must be floating point, got {got}"):
        call(name, params=params)


@pytest.mark.parametrize(
    ("name", "argument"),
    [
        ("check_gradients", "loss_fn"),
        ("check_gradients", "gradient"),
        ("check_gradients", "reference"),
        ("check_additive", "loss_fn"),
    ],
)
def test_what_is_no_function_is_refused(name, argument):
    with pytest.raises(TypeError, match=rf"^{name}: {argument} must be a function.* got int\. "):
        call(name, **{argument: 3})


@pytest.mark.parametrize("name", CHECKS)
def test_a_batch_without_weight_shows_nothing(name):
    batch = Batch.of(ROWS, np.zeros(4, np.float32))
    with pytest.raises(
        ValueError, match=rf"^{name}: batch must have a row of weight above 0, got 4"
    ):
        call(name, batch=batch)


def test_regimes_and_axes_that_are_none_are_refused():
    with pytest.raises(ValueError, match=r"engines must be a list of some of .* got 3"):
        call("check_gradients", engines=3)
    with pytest.raises(ValueError, match=r"axes must give the sizes of axes .* got 3"):
        call("check_gradients", axes=3)


# --- diagnoses ------------------------------------------------------------------------------------


def diagnosed(**options):
    given = {"step": step, "params": PARAMS, "batch": BATCH, "ranks": 2}
    return diagnose_step(**(given | {"loss_of_example": loss_of_example} | options))


@pytest.mark.parametrize("argument", ["ranks", "microbatches"])
@pytest.mark.parametrize("given", [True, 2.0, "2", None, np.float32(1), np.True_, {0: 1}], ids=repr)
def test_a_number_of_ranks_that_is_none_is_refused(argument, given):
    rule = "must be an integer of at least 1, or one for each row, got"
    with pytest.raises(TypeError, match=rf"^diagnose_step: {argument} {rule} .*\. Give"):
        diagnosed(**{argument: given})


@pytest.mark.parametrize(
    "given",
    [[[0], [1, 1]], [0, 0, 1, "a"], [0, 0, 1.0, 1], [[0, 0], [1, 1]], [0]],
    ids=repr,
)
def test_numbers_of_rows_that_are_none_are_refused(given):
    with pytest.raises(ValueError, match=r"ranks must be one integer of at least 0 per row, got"):
        diagnosed(ranks=given)


def test_a_number_of_ranks_may_be_numpys():
    assert diagnosed(ranks=np.int64(2), microbatches=np.int64(1)).convention == "global_mean"


@pytest.mark.parametrize(
    "rate",
    ["0.1", True, [0.1], 0.1j, np.ones(1), jnp.ones(2), lambda count: 0.1],
    ids=lambda rate: "schedule" if callable(rate) else repr(rate),
)
def test_a_rate_that_is_none_is_refused(rate):
    with pytest.raises(TypeError, match=r"^diagnose_step: learning_rate must be a number, got"):
        diagnosed(learning_rate=rate)


@pytest.mark.parametrize("rate", [0, 0.0, np.nan, np.inf, jnp.float32(0)], ids=repr)
def test_a_rate_that_moves_nothing_is_refused(rate):
    with pytest.raises(ValueError, match="learning_rate must be finite and not 0, got"):
        diagnosed(learning_rate=rate)


@pytest.mark.parametrize("argument", ["step", "loss_of_example"])
def test_a_step_and_its_loss_are_functions(argument):
    with pytest.raises(TypeError, match=rf"^diagnose_step: {argument} must be a function.* NoneT"):
        diagnosed(**{argument: None})


@pytest.mark.parametrize("optimizer", ["adam", optax.adam, 3])
def test_what_is_no_optimizer_is_refused(optimizer):
    params = PARAMS, optax.adam(0.1).init(PARAMS)
    with pytest.raises(TypeError, match="diagnose_step: optimizer must be an optax transformation"):
        diagnosed(optimizer=optimizer, params=params)


@pytest.mark.parametrize(
    "keys", [jax.random.key(0), jax.random.split(jax.random.key(0), 3), 3], ids=["one", "3", "none"]
)
def test_keys_are_those_of_the_rows(keys):
    with pytest.raises(
        ValueError, match=r"diagnose_step: keys must be one for each of 4 rows, got"
    ):
        diagnosed(keys=keys, loss_of_example=lambda params, x, key: loss_of_example(params, x))


def test_a_reduction_is_a_function():
    for given in (None, 3, "module:function"):
        kind = type(given).__name__
        with pytest.raises(TypeError, match=rf"^diagnose: gradient_of must be a function.* {kind}"):
            diagnose(given, num_replicas=2)
    with pytest.raises(TypeError, match=r"^per_example_gradients: loss_of_example must be a funct"):
        per_example_gradients(None, PARAMS, ROWS)


@pytest.mark.parametrize("argument", ["counted", "weights"])
@pytest.mark.parametrize("given", [[[[1], [2, 3]]], "abc", [[["a"]]], None], ids=repr)
def test_counts_that_are_no_numbers_are_refused(argument, given):
    arguments = {"counted": np.ones((1, 1, 2)), "weights": np.ones((1, 1, 2))} | {argument: given}
    with pytest.raises(TypeError, match=rf"^diagnose_weights: {argument} must be"):
        diagnose_weights(**arguments)
