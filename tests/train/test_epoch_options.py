"""Whatever is wrong with the options of an epoch's steps, the maker that was called says so."""

from functools import partial

import fitting
import jax
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, PartitionSpec

from jax_ddp_weighting import (
    EpochPlan,
    data_mesh,
    make_evaluation,
    make_nnx_train_epoch,
    make_optax_epoch,
    make_train_epoch,
    weighted_sum,
)

PLAN = EpochPlan(47, 2, 6)
MAKERS = {
    "make_train_epoch": partial(make_train_epoch, fitting.loss_fn),
    "make_nnx_train_epoch": partial(make_nnx_train_epoch, fitting.loss_fn),
    "make_optax_epoch": partial(make_optax_epoch, fitting.loss_fn, optax.sgd(0.1)),
}


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"engine": "pmap"}, ValueError, "engine must be .*, got 'pmap'"),
        ({"rng_per": "row"}, ValueError, "rng_per must be one of rank, example, got 'row'"),
        ({"gather_per": "row"}, ValueError, "gather_per must be one of step, microbatch"),
        ({"microbatches": 0}, ValueError, "microbatches must be an integer, at least 1, got 0"),
        ({"coefficients": {"a": 0}}, ValueError, "coefficients must have one that is not 0"),
        ({"divisors": {"b": 1.0}}, ValueError, "divisors must each be for a term of the loss"),
        ({"skip_empty": 2}, TypeError, "skip_empty must be True or False, got 2"),
        ({"statistics": 3}, TypeError, "statistics must be a function"),
        ({"batch_spec": 3}, TypeError, "batch_spec must be PartitionSpecs, got int"),
        ({"batch_spec": PartitionSpec()}, ValueError, "batch_spec must name the data axis"),
        ({"axis_name": "model"}, ValueError, "mesh must have the axis 'model'"),
    ],
)
def test_what_is_wrong_is_said_by_the_maker_that_was_called(name, options, error, text):
    with pytest.raises(error, match=f"^{name}: {text}"):
        MAKERS[name](data_mesh(2), PLAN, **options)


@pytest.mark.parametrize("name", MAKERS)
def test_an_option_that_no_step_has_and_a_mesh_without_devices_are_refused(name):
    for options in ({"microbatch": 2}, {"caller": "me"}):
        text = rf"^{name}\(\) got an unexpected keyword argument '{next(iter(options))}'\. Its st"
        with pytest.raises(TypeError, match=text):
            MAKERS[name](data_mesh(2), PLAN, **options)
    with pytest.raises(TypeError, match=f"^{name}: mesh must have devices, got an AbstractMesh"):
        MAKERS[name](AbstractMesh((2,), ("data",)), PLAN)


def test_an_evaluation_needs_devices_too():
    with pytest.raises(TypeError, match=r"^make_evaluation: mesh must have devices, got an Abst"):
        make_evaluation(lambda batch: None, AbstractMesh((2,), ("data",)), PLAN)


def test_what_a_loss_function_does_wrong_is_said_by_it_too():
    run_epoch = make_train_epoch(lambda params: 0, data_mesh(2), PLAN)
    with pytest.raises(TypeError, match=r"^make_train_epoch: loss_fn must take \(params, batch\)"):
        run_epoch(fitting.new_state(optax.sgd(0.1)), (fitting.X, fitting.Y), 0)

    def noisy(model, batch, keys):
        drawn = jax.random.normal(model.rngs.noise())
        return weighted_sum(batch.data[1] * model.w[...] + drawn, batch.weights)

    class Model(nnx.Module):
        def __init__(self):
            self.w, self.rngs = nnx.Param(np.float32(1)), nnx.Rngs(noise=0)

    model = Model()
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    run_epoch = make_nnx_train_epoch(noisy, data_mesh(2), PLAN, rng_per="example")
    with pytest.raises(ValueError, match=r"^make_nnx_train_epoch: loss_fn must draw from its rng"):
        run_epoch(model, optimizer, (fitting.X, fitting.Y), 0, jax.random.key(0))
