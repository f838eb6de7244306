"""Real steps on trial: they donate, carry states, accumulate, draw, bring their own optimizer."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

from jax_ddp_weighting import (
    Batch,
    data_mesh,
    diagnose_step,
    make_nnx_train_step,
    make_train_step,
    weighted_multi_steps,
    weighted_sum,
)

ROWS = np.random.default_rng(5).normal(size=(12, 20)).astype(np.float32)
WEIGHTS = np.array([1, 1, 1, 1, 1, 0, 1, 1, 0, 0, 0, 0], np.float32)
BATCH = Batch.of(ROWS, WEIGHTS)


def new_params():
    return {"w": jnp.linspace(-1, 1, 20), "b": jnp.float32(0.3)}


def loss_of_example(params, x):
    return jnp.tanh((x @ params["w"]) / 4 + params["b"])


def mean_loss(params, data, weights):
    losses = jax.vmap(loss_of_example, (None, 0))(params, data)
    return jnp.sum(losses * weights) / jnp.maximum(jnp.sum(weights), 1)


def gradient_of(parts, params, batch):
    """The mean of the parts' own means: of one part that is right."""
    size = len(batch.weights) // parts
    own = [
        jax.grad(mean_loss)(params, batch.data[k * size :][:size], batch.weights[k * size :][:size])
        for k in range(parts)
    ]
    return jax.tree.map(lambda *leaves: sum(leaves) / parts, *own)


PARTS = {"global_mean": 1, "mean_of_means": 2}


def diagnosed(step, state, **options):
    given = {"ranks": 2, "loss_of_example": loss_of_example} | options
    return diagnose_step(step, state, BATCH, **given)


# --- a flax train state ---------------------------------------------------------------------------


def new_state(tx):
    return TrainState.create(apply_fn=None, params=new_params(), tx=tx)


@partial(jax.jit, donate_argnums=0, static_argnums=2)
def train_step(state, batch, parts):
    grads = gradient_of(parts, state.params, batch)
    return state.apply_gradients(grads=grads), {"norm": grads["b"]}


OPTIMIZERS = {
    "adamw": optax.adamw(1e-3),
    "clipped adafactor": optax.chain(optax.clip_by_global_norm(1e-3), optax.adafactor(1e-3)),
    "sgd of some rate": optax.sgd(0.01, momentum=0.9),
}


@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_donating_step_of_a_train_state_is_named_whatever_its_optimizer(optimizer, name):
    state = new_state(OPTIMIZERS[optimizer])
    found = diagnosed(lambda state, batch: train_step(state, batch, PARTS[name]), state)
    assert (found.convention, found.factor) == (name, pytest.approx(1.0))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(state.params))


def test_a_state_may_come_back_alone_or_behind_the_metrics():
    for answer in (lambda state, metrics: state, lambda state, metrics: (metrics, state)):
        found = diagnosed(lambda s, b, a=answer: a(*train_step(s, b, 2)), new_state(optax.adam(1)))
        assert found.convention == "mean_of_means"
    with pytest.raises(ValueError, match=r"step must return the TrainState, alone or in a tuple"):
        diagnosed(lambda s, b: {"state": s}, new_state(optax.adam(1)))


def test_plain_sgd_may_still_be_told_by_its_rate():
    state = new_state(optax.sgd(1.0))
    found = diagnosed(lambda s, b: train_step(s, b, 2), state, learning_rate=1.0)
    assert (found.convention, found.factor) == ("mean_of_means", pytest.approx(1.0, rel=1e-3))


def holding(tx, parts):
    """A step that has its optimizer from elsewhere than the state."""

    @jax.jit
    def step(state, batch):
        grads = gradient_of(parts, state.params, batch)
        updates, opt_state = tx.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        return state.replace(params=params, opt_state=opt_state, step=state.step + 1)

    return step


@pytest.mark.parametrize(
    "tx", [optax.adamw(0.1), optax.sgd(0.1)], ids=["adamw", "sgd, another rate than the trial's"]
)
def test_an_optimizer_that_the_step_holds_itself_is_undone(tx):
    found = diagnosed(holding(tx, 2), new_state(tx))
    assert (found.convention, found.factor) == ("mean_of_means", pytest.approx(1.0, rel=1e-3))


# --- parameters and the optimizer's state ---------------------------------------------------------


def apply(tx, parts, params, opt_state, batch):
    updates, opt_state = tx.update(gradient_of(parts, params, batch), opt_state, params)
    return optax.apply_updates(params, updates), opt_state


UNDONE = {
    "momentum": optax.sgd(0.3, momentum=0.9),
    "adam": optax.adam(0.1),
    "lion": optax.lion(0.1),
    "a schedule": optax.chain(optax.trace(0.5), optax.scale_by_schedule(lambda n: -0.2 / (n + 1))),
}


@pytest.mark.parametrize("name", UNDONE)
def test_updates_of_plain_parts_are_undone(name):
    tx = UNDONE[name]
    params = new_params()

    def step(params, opt_state, batch):
        params, opt_state = apply(tx, 2, params, opt_state, batch)
        return jnp.float32(0), opt_state, params  # in any order

    # in the middle of training, where the optimizer remembers other gradients
    warm = apply(tx, 1, params, tx.init(params), BATCH)
    found = diagnosed(jax.jit(step, donate_argnums=(0, 1)), warm, optimizer=tx)
    assert (found.convention, found.factor) == ("mean_of_means", pytest.approx(1.0, rel=1e-3))
    right = jax.jit(lambda p, s, b: apply(tx, 1, p, s, b))
    assert diagnosed(right, warm, optimizer=tx).right


class State(NamedTuple):
    params: dict
    opt_state: tuple
    count: int


def test_a_state_of_ones_own_is_taken_with_its_optimizer():
    tx = optax.adam(0.1)

    def step(state, batch):
        return State(*apply(tx, 2, state.params, state.opt_state, batch), state.count + 1)

    state = State(new_params(), tx.init(new_params()), 0)
    assert diagnosed(step, state, optimizer=tx).convention == "mean_of_means"
    with pytest.raises(ValueError, match="optimizer must be given where the state holds none"):
        diagnosed(step, state)


@pytest.mark.parametrize(
    ("applied", "told", "message"),
    [
        (optax.adagrad(0.1), optax.adagrad(0.1), "got one of which nothing is proportional to it"),
        (
            optax.chain(optax.clip_by_global_norm(0.1), optax.trace(0.5)),
            optax.chain(optax.clip_by_global_norm(0.1), optax.trace(0.5)),
            "got one of which nothing is proportional to it",
        ),
        (optax.adam(0.1), optax.sgd(0.1), "the one that the step's state belongs to"),
        (optax.adam(0.1), optax.adam(0.2), "one that moves from the same state to another"),
        (optax.sgd(0.1), weighted_multi_steps(optax.sgd(0.1), 2), "the one inside the windows"),
        (
            optax.sgd(0.1),
            optax.MultiSteps(optax.sgd(0.1), 2).gradient_transformation(),
            "the one inside the windows",
        ),
    ],
)
def test_what_cannot_be_undone_is_said(applied, told, message):
    def step(params, opt_state, batch):
        return apply(applied, 2, params, opt_state, batch)

    state = new_params(), applied.init(new_params())
    with pytest.raises(ValueError, match=message):
        diagnosed(step, state, optimizer=told)


def test_parts_that_do_not_come_back_are_said():
    state = new_params(), optax.adam(0.1).init(new_params())
    with pytest.raises(ValueError, match="step must return opt_state as it was given"):
        diagnosed(lambda params, opt_state, batch: params, state, optimizer=optax.adam(0.1))
    with pytest.raises(TypeError, match=r"params must be \(params, opt_state\) where optimizer"):
        diagnosed(lambda params, batch: params, new_params(), optimizer=optax.adam(0.1))


# --- nnx ------------------------------------------------------------------------------------------


class Model(nnx.Module):
    def __init__(self):
        params = new_params()
        self.w, self.b = nnx.Param(params["w"]), nnx.Param(params["b"])
        self.calls = nnx.Variable(jnp.int32(0))

    def __call__(self, x):
        return loss_of_example({"w": self.w[...], "b": self.b[...]}, x)


def loss_of_model(model, x):
    return model(x)


def gradient_of_model(model, batch, parts=2):
    def loss(model, rows):
        losses = jax.vmap(lambda x: model(x))(batch.data[rows])
        return jnp.sum(losses * batch.weights[rows]) / jnp.sum(batch.weights[rows])

    size = len(ROWS) // parts
    own = [nnx.grad(loss)(model, slice(k * size, (k + 1) * size)) for k in range(parts)]
    return jax.tree.map(lambda *leaves: sum(leaves) / parts, *own)


@pytest.mark.parametrize("name", PARTS)
def test_an_nnx_model_and_its_optimizer_are_updated_in_place_and_left_as_they_were(name):
    @nnx.jit
    def step(model, optimizer, batch):
        optimizer.update(model, gradient_of_model(model, batch, PARTS[name]))
        model.calls[...] += 1

    model = Model()
    optimizer = nnx.Optimizer(model, optax.adamw(0.1), wrt=nnx.Param)
    found = diagnosed(step, (model, optimizer), loss_of_example=loss_of_model)
    assert (found.convention, found.factor) == (name, pytest.approx(1.0))
    assert (int(model.calls[...]), int(optimizer.step[...])) == (0, 0)
    np.testing.assert_array_equal(model.w[...], new_params()["w"])


def test_an_nnx_model_alone_is_moved_or_gives_its_gradient():
    def move(model, batch):
        grads = gradient_of_model(model, batch)
        nnx.update(model, jax.tree.map(lambda p, g: p - g, nnx.state(model, nnx.Param), grads))

    found = diagnosed(move, Model(), loss_of_example=loss_of_model, learning_rate=1.0)
    assert found.convention == "mean_of_means"
    found = diagnosed(gradient_of_model, Model(), loss_of_example=loss_of_model)
    assert found.convention == "mean_of_means"
    with pytest.raises(ValueError, match="step must return the gradient of the model's"):
        diagnosed(move, Model(), loss_of_example=loss_of_model)


def test_an_nnx_step_that_has_its_optimizer_elsewhere_is_refused():
    model = Model()
    optimizer = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)
    with pytest.raises(ValueError, match="step must call the optimizer that it is given"):
        diagnosed(lambda m, o, b: None, (model, optimizer), loss_of_example=loss_of_model)


class Writing(nnx.Module):
    """A model that writes into itself on its way forward, as those do that are in training."""

    def __init__(self, kind):
        rngs = nnx.Rngs(0)
        self.hidden, self.kind = nnx.Linear(20, 4, rngs=rngs), kind
        self.norm, self.drop = nnx.BatchNorm(4, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)
        self.calls = nnx.Variable(jnp.int32(0))

    def __call__(self, x):
        x = jnp.tanh(self.hidden(x))
        if self.kind == "counts":
            self.calls[...] += 1
        return {"norm": self.norm, "drop": self.drop}.get(self.kind, lambda x: x)(x).sum(-1)


def of_both_ranks(parts):
    def step(model, batch):
        def loss(model, rows):
            return (
                jnp.sum(model(batch.data[rows]) * batch.weights[rows]) / batch.weights[rows].sum()
            )

        size = len(ROWS) // parts
        own = [nnx.grad(loss)(model, slice(k * size, (k + 1) * size)) for k in range(parts)]
        return jax.tree.map(lambda *leaves: sum(leaves) / parts, *own)

    return step


@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize("kind", ["counts", "norm", "drop"])
def test_a_model_that_writes_into_itself_is_named_where_rows_are_apart(kind, name):
    model = Writing(kind)
    model.eval()  # the counter counts all the same
    for loss in (loss_of_model, lambda model, x: weighted_sum(model(x)[None])):
        found = diagnosed(of_both_ranks(PARTS[name]), model, loss_of_example=loss)
        assert found.convention == name
    assert int(model.calls[...]) == 0


@pytest.mark.parametrize(
    ("kind", "layer"), [("norm", r"BatchNorm at 'norm'"), ("drop", r"Dropout at 'drop'")]
)
def test_layers_in_training_that_keep_rows_from_being_apart_are_named(kind, layer):
    model = Writing(kind)
    if kind == "norm":
        model.drop.deterministic = True
    else:
        model.norm.use_running_average = True
    message = rf"loss_of_example must take each row by itself, got {layer}, in training.*eval\(\)"
    for loss in (loss_of_model, lambda model, x: model(x[None])[0]):
        with pytest.raises(ValueError, match=message):
            diagnosed(of_both_ranks(1), model, loss_of_example=loss)


# --- our own --------------------------------------------------------------------------------------


def loss_fn(params, batch):
    losses = jax.vmap(loss_of_example, (None, 0))(params, batch.data)
    return weighted_sum(losses, batch.weights)


def test_our_own_steps_are_right_as_they_are():
    state = new_state(optax.adamw(1e-3))
    step = make_train_step(loss_fn, data_mesh(2), microbatches=3)
    assert diagnosed(step, state, microbatches=np.arange(12) % 3).right

    model = Model()
    optimizer = nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)

    def of_model(model, batch):
        return weighted_sum(jax.vmap(lambda x: model(x))(batch.data), batch.weights)

    step = make_nnx_train_step(of_model, data_mesh(2))
    assert diagnosed(step, (model, optimizer), loss_of_example=loss_of_model).right


# --- several calls are one step -------------------------------------------------------------------

UNEVEN = Batch.of(ROWS, np.float32([1, 1, 1, 1, 1, 0, 1, 1, 1, 0, 0, 0]))


def in_windows(tx, parts=1, **options):
    state = new_state(tx)
    given = {"ranks": 1, "calls": 2, "loss_of_example": loss_of_example} | options
    return diagnose_step(lambda s, b: train_step(s, b, parts), state, UNEVEN, **given)


@pytest.mark.parametrize("spelling", ["object", "transformation"])
def test_multi_steps_stays_around_the_optimizer_on_trial(spelling):
    tx = optax.MultiSteps(optax.adam(0.1), 2)
    tx = tx if spelling == "object" else tx.gradient_transformation()
    found = in_windows(tx)
    assert (found.convention, found.factor) == ("mean_of_means", pytest.approx(1.0))
    assert found.weights.shape == (1, 2, 6)
    summed = in_windows(optax.MultiSteps(optax.adam(0.1), 2, use_grad_mean=False))
    assert (summed.convention, summed.factor) == ("mean_of_means", pytest.approx(2.0))


def test_a_window_that_stays_open_is_said():
    for rate, inside in ((None, optax.adam(0.1)), (1.0, optax.sgd(1.0))):
        with pytest.raises(ValueError, match="calls must be as many as the optimizer accumulates"):
            in_windows(optax.MultiSteps(inside, 3), learning_rate=rate)
    with pytest.raises(ValueError, match="calls must divide the 3 microbatches, got 2"):
        in_windows(optax.MultiSteps(optax.adam(0.1), 2), microbatches=3)


@pytest.mark.parametrize(
    ("tx", "rate", "updates"),
    [
        (optax.MultiSteps(optax.adam(0.1), 3), None, 2),
        (optax.MultiSteps(optax.sgd(1.0), 3), 1.0, 2),
        (optax.chain(optax.identity(), optax.MultiSteps(optax.sgd(1.0), 3)), 1.0, 2),
        (optax.adam(0.1), None, 6),
    ],
)
def test_calls_that_make_several_updates_are_said(tx, rate, updates):
    message = rf"calls must make one update, got 6 that make {updates}\. Say calls={6 // updates}\."
    with pytest.raises(ValueError, match=message):
        in_windows(tx, calls=6, learning_rate=rate)


def test_calls_of_nnx_that_make_several_updates_are_said():
    model = Model()

    def step(model, optimizer, batch):
        optimizer.update(model, gradient_of_model(model, batch, 1))

    given = {"ranks": 1, "loss_of_example": loss_of_model}
    for k, said in ((1, "calls must make one update, got 2 that make 2"), (4, "got fewer")):
        tx = optax.MultiSteps(optax.adam(0.1), k)
        carried = model, nnx.Optimizer(model, tx, wrt=nnx.Param)
        with pytest.raises(ValueError, match=said):
            diagnose_step(step, carried, UNEVEN, calls=2, **given)


def in_our_windows(inside, ranks=2, **options):
    step = make_train_step(loss_fn, data_mesh(ranks), donate=False)
    given = {"ranks": ranks, "calls": 2, "loss_of_example": loss_of_example} | options
    return diagnose_step(step, new_state(weighted_multi_steps(inside, 2)), UNEVEN, **given)


@pytest.mark.parametrize(
    ("inside", "options"), [(optax.sgd(1.0), {"learning_rate": 1.0}), (optax.adam(1e-3), {})]
)
def test_our_windows_are_right_as_they_are(inside, options):
    assert in_our_windows(inside, **options).right
    with pytest.raises(ValueError, match="calls must make one update, got 6 that make 3"):
        in_our_windows(inside, calls=6, ranks=1, **options)
    with pytest.raises(ValueError, match="calls must be as many as the optimizer accumulates"):
        in_our_windows(inside, calls=1, **options)


def test_our_windows_are_right_in_nnx_and_wrong_where_their_weights_are():
    model = Model()

    def carried(**options):
        tx = weighted_multi_steps(optax.adam(1e-3), 2, **options)
        return model, nnx.Optimizer(model, tx, wrt=nnx.Param)

    def of_model(model, batch):
        return weighted_sum(jax.vmap(lambda x: model(x))(batch.data), batch.weights)

    step = make_nnx_train_step(of_model, data_mesh(2), donate=False)
    given = {"ranks": 2, "calls": 2, "loss_of_example": loss_of_model}
    assert diagnose_step(step, carried(), UNEVEN, **given).right

    def without_weights(model, optimizer, batch):
        optimizer.update(model, gradient_of_model(model, batch, 1), weight=1.0)

    found = diagnose_step(without_weights, carried(), UNEVEN, **given | {"ranks": 1})
    assert found.convention == "mean_of_means"


def test_a_window_inside_of_other_transformations_is_refused():
    for window in (weighted_multi_steps(optax.adam(1), 2), optax.MultiSteps(optax.adam(1), 2)):
        inside = optax.GradientTransformationExtraArgs(window.init, window.update)
        with pytest.raises(ValueError, match=r"state must keep its window .* optax\.sgd"):
            in_windows(optax.chain(optax.clip(1.0), inside))


def test_a_gradient_that_is_returned_is_that_of_one_call():
    with pytest.raises(ValueError, match="calls must be 1 for a step that returns its gradient"):
        diagnosed(partial(gradient_of, 1), new_params(), calls=2)


# --- token losses ---------------------------------------------------------------------------------

TOKENS = np.arange(8) < np.array([3, 1, 8, 5, 7, 0, 2, 4, 6, 1, 5, 8])[:, None]
ROWS_OF_TOKENS = np.random.default_rng(3).normal(size=(12, 8, 20)).astype(np.float32)


def losses_of_tokens(params, data):
    return jnp.tanh(data["x"] @ params["w"] / 4 + params["b"])


def loss_of_tokens(params, example):
    return weighted_sum(losses_of_tokens(params, example), example["real"])


def token_mean(params, data, weights):
    w = data["real"] * weights[:, None]
    return jnp.sum(losses_of_tokens(params, data) * w) / jnp.sum(w)


def mean_of_token_means(params, data, weights):
    halves = [slice(0, 6), slice(6, 12)]
    return sum(
        token_mean(params, jax.tree.map(lambda leaf, h=half: leaf[h], data), weights[half])
        for half in halves
    ) / len(halves)


def mean_of_sequences(params, data, weights):
    held = jnp.maximum(data["real"].sum(axis=1), 1)
    means = jnp.sum(losses_of_tokens(params, data) * data["real"], axis=1) / held
    there = weights * (data["real"].sum(axis=1) > 0)
    return jnp.sum(means * there) / jnp.sum(there)


@pytest.mark.parametrize(
    ("loss", "name"),
    [
        (token_mean, "global_mean"),
        (mean_of_token_means, "mean_of_means"),
        (mean_of_sequences, "unknown"),
    ],
)
def test_rows_of_tokens_weigh_what_their_sum_weighs(loss, name):
    data = {"x": ROWS_OF_TOKENS, "real": TOKENS.astype(np.float32)}
    batch = Batch.of(data, np.float32([1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 0]))

    def step(params, batch):
        return jax.grad(loss)(params, batch.data, batch.weights)

    found = diagnose_step(step, new_params(), batch, loss_of_example=loss_of_tokens, ranks=2)
    assert found.convention == name
    tokens = (TOKENS.sum(axis=1) * batch.weights).reshape(2, 1, 6)
    np.testing.assert_array_equal(found.weights, tokens)
    if name == "unknown":
        assert found.words == "every weight above 0 for 1"
    if name == "global_mean":
        np.testing.assert_allclose(found.counted, tokens / tokens.sum(), atol=1e-4)


def test_what_is_no_loss_of_a_row_is_refused():
    packed = Batch(ROWS, np.arange(24).reshape(12, 2), np.ones((12, 2)))
    with pytest.raises(ValueError, match=r"batch must have one weight for each row, got shape"):
        diagnose_step(None, new_params(), packed, loss_of_example=loss_of_example, ranks=2)
    with pytest.raises(TypeError, match="loss_of_example must return a scalar or one WeightedSum"):
        diagnosed(partial(gradient_of, 1), new_params(), loss_of_example=lambda p, x: x * p["b"])


# --- keys, padding --------------------------------------------------------------------------------


def dropped(params, x, key):
    return loss_of_example(params, x * jax.random.bernoulli(key, 0.5, x.shape) * 2)


def test_dropout_is_the_same_where_its_keys_are_given():
    rng = jax.random.key(3)
    keys = jax.random.split(rng, 12)

    def step(params, batch, rng):
        def loss(params, rows):
            losses = jax.vmap(dropped, (None, 0, 0))(
                params, batch.data[rows], jax.random.split(rng, 12)[rows]
            )
            return jnp.sum(losses * batch.weights[rows]) / jnp.sum(batch.weights[rows])

        own = [jax.grad(loss)(params, rows) for rows in (slice(0, 6), slice(6, 12))]
        return jax.tree.map(lambda a, b: (a + b) / 2, *own)

    options = {"rng": rng, "keys": keys, "loss_of_example": dropped}
    found = diagnosed(jax.jit(step, donate_argnums=2), new_params(), **options)
    assert found.convention == "mean_of_means"
    assert not rng.is_deleted()
    with pytest.raises(ValueError, match="unexplained"):
        diagnosed(step, new_params(), rng=rng)


def test_padding_that_copies_a_row_or_holds_nan_is_counted_with_it():
    rows = ROWS.copy()
    rows[8:11] = rows[0]
    batch = Batch.of(rows, WEIGHTS)
    given = {"loss_of_example": loss_of_example, "ranks": 2}
    for parts, name in ((1, "global_mean"), (2, "mean_of_means")):
        found = diagnose_step(partial(gradient_of, parts), new_params(), batch, **given)
        assert found.convention == name
    counts = partial(jax.grad(lambda p, b: jax.vmap(loss_of_example, (None, 0))(p, b.data).mean()))
    assert not diagnose_step(counts, new_params(), batch, **given).right

    rows[11] = np.nan
    batch = Batch.of(rows, WEIGHTS)

    def safe(params, batch):
        data = jnp.where(batch.weights[:, None] > 0, batch.data, 0)
        return gradient_of(1, params, Batch(data, batch.ids, batch.weights))

    assert diagnose_step(safe, new_params(), batch, **given).right
