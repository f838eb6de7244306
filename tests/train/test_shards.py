"""Optimizers that are given shards: the norm of all of them, or a refusal; never a rank's own."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import shards
from jax.sharding import PartitionSpec as P

from jax_ddp_weighting import clip_by_global_norm, global_norm, weighted_multi_steps

RNG = np.random.default_rng(9)
TREE = {
    "w1": RNG.normal(size=(4, 6)),
    "rest": {"w2": RNG.normal(size=(8, 2)), "b": RNG.normal(size=4), "scale": np.array(0.7)},
}
SPECS = {"w1": P("replica"), "rest": {"w2": P(("replica", "fsdp")), "b": P("fsdp"), "scale": P()}}
AXES = {"replica": 2, "fsdp": 2}
REGIMES = ("shard_map", "shard_map_unchecked", "vmap")


def on_ranks(regime, fn, tree=TREE, specs=SPECS):
    """`fn(shards) -> (number, shards)`, of all ranks."""
    with jax.enable_x64(True):
        given = jnp.zeros(4)
        return shards.run(regime, lambda t, _: fn(t), tree, specs, given, P(tuple(AXES)), AXES)


@pytest.mark.parametrize("regime", REGIMES)
def test_norm_and_clipping_are_those_of_the_whole_tree(regime):
    clip = clip_by_global_norm(0.5, param_specs=SPECS)

    def fn(tree):
        return global_norm(tree, param_specs=SPECS), clip.update(tree, clip.init(tree))[0]

    norm, clipped = on_ranks(regime, fn)
    squares = [np.sum(np.square(leaf)) for leaf in jax.tree.leaves(TREE)]
    np.testing.assert_allclose(norm, np.sqrt(sum(squares)), rtol=1e-12)
    with jax.enable_x64(True):
        update = jax.jit(optax.clip_by_global_norm(0.5).update)
        right = update(jax.tree.map(jnp.asarray, TREE), optax.EmptyState())[0]
    shards.assert_the_same(clipped, right)


def test_optaxs_own_of_each_ranks_shards_fails_the_same_check():
    specs = {"w1": P("replica"), "rest": P(("replica", "fsdp"))}
    tree = {"w1": TREE["w1"], "rest": TREE["rest"]["w2"]}
    clip = optax.clip_by_global_norm(0.5)
    mapped = jax.vmap(jax.vmap(lambda t: (0, clip.update(t, None)[0]["rest"])))
    with jax.enable_x64(True):
        spread = {name: shards.split(tree[name], specs[name], AXES) for name in tree}
        found = shards.join(mapped(spread)[1], specs["rest"], AXES)
        right = clip.update(jax.tree.map(jnp.asarray, tree), None)[0]["rest"]
    assert np.max(np.abs(found - np.asarray(right))) > 0.01


def test_where_no_axis_is_mapped_specs_say_nothing():
    tree = jax.tree.map(jnp.float32, TREE)
    small = clip_by_global_norm(1e6, param_specs=SPECS).update(tree, optax.EmptyState())[0]
    shards.assert_the_same(small, tree)
    assert float(global_norm({}, param_specs={})) == 0.0
    assert global_norm({"a": jnp.ones(4, jnp.bfloat16)}).dtype == jnp.float32


def windows(tree, tx, **options):
    """Weight, steps and parameters after a window of three, of which the second is not finite."""
    tx, params = weighted_multi_steps(tx, 2, **options), tree
    state = tx.init(params)
    for i, weight in enumerate((1, 2, 3.0, 5)):
        gradients = jax.tree.map(lambda p, i=i: p * (1.0 + i), tree)
        if i == 1:  # in the shard of one rank alone
            first = tree["w1"] == TREE["w1"][3, 0]
            gradients["w1"] = jnp.where(first, jnp.nan, gradients["w1"])
        updates, state = tx.update(gradients, state, params, weight=weight)
        params = optax.apply_updates(params, updates) if i > 1 else params
    return state.weight + 10 * state.gradient_step, params


def make_optimizer(clip):
    return optax.chain(clip(0.5), optax.sgd(0.1, momentum=0.9))


@pytest.mark.parametrize("regime", REGIMES)
def test_windows_of_shards_are_those_of_the_whole_tree(regime):
    skip = optax.skip_not_finite
    ours = make_optimizer(lambda norm: clip_by_global_norm(norm, param_specs=SPECS))
    options = {"should_skip_update_fn": skip, "param_specs": SPECS}
    number, found = on_ranks(regime, lambda tree: windows(tree, ours, **options))
    with jax.enable_x64(True):
        plain = make_optimizer(optax.clip_by_global_norm)
        whole = jax.tree.map(jnp.asarray, TREE)
        windows_of = jax.jit(lambda tree: windows(tree, plain, should_skip_update_fn=skip))
        expected, right = windows_of(whole)
        assert float(number) == float(expected) == 15
        shards.assert_the_same(found, right)


MIXING = {
    "a norm": optax.clip_by_global_norm(0.5),
    "each parameter's norm": optax.lamb(0.1),
    "its mean square": optax.clip_by_block_rms(0.5),
    "factors": optax.adafactor(0.1, min_dim_size_to_factor=2),
    "whether all is finite": optax.apply_if_finite(optax.sgd(0.1), 2),
    "noise": optax.chain(optax.add_noise(0.1, 0.5, 0), optax.sgd(0.1)),
    "a product": optax.contrib.muon(0.1),
    "a window inside": weighted_multi_steps(optax.clip_by_global_norm(0.5), 2),
}
FLAT = {"w1": P("replica"), "w2": P(None, ("replica", "fsdp"))}


def one_update(tx, specs, **options):
    tree = {"w1": TREE["w1"], "w2": TREE["rest"]["w2"].reshape(2, 8)}
    tx = weighted_multi_steps(tx, 1, **options)

    def fn(params):
        updates, state = tx.update(params, tx.init(params), params, weight=2)
        return state.gradient_step, updates

    return tree, specs, fn


@pytest.mark.parametrize("name", MIXING)
@pytest.mark.parametrize("regime", ["shard_map", "vmap"])
def test_what_is_made_of_several_elements_is_refused(regime, name):
    specs = None if regime == "shard_map" else FLAT  # types tell
    tree, lie, fn = one_update(MIXING[name], FLAT, param_specs=specs)
    message = r"weighted_multi_steps: optimizer must change shards element by element.*'replica'"
    with pytest.raises(ValueError, match=message):
        on_ranks(regime, fn, tree, lie)


def test_what_changes_element_by_element_is_taken():
    inner = optax.chain(
        optax.clip(1.0), optax.ema(0.9), optax.adamw(optax.cosine_decay_schedule(0.1, 9))
    )
    tree, lie, fn = one_update(inner, FLAT)
    found = on_ranks("shard_map", fn, tree, lie)[1]
    with jax.enable_x64(True):
        right = fn(jax.tree.map(jnp.asarray, tree))[1]
        shards.assert_the_same(found, right)


def test_a_model_on_every_rank_is_clipped_by_its_own_norm():
    specs = {"w1": P("replica"), "w2": P("replica")}
    tree, lie, fn = one_update(optax.clip_by_global_norm(0.5), specs, param_specs=P())
    _, found = on_ranks("shard_map", fn, tree, lie)
    for name in tree:
        own = {each: np.split(tree[each], 2)[1] for each in tree}
        right = own[name] * 0.5 / optax.tree.norm(own)
        np.testing.assert_allclose(np.split(found[name], 2)[1], right, rtol=1e-6)


def test_a_verdict_of_each_ranks_own_shards_is_refused():
    def too_large(updates, step, params):
        return optax.skip_large_updates(updates, step, params, 100.0)

    tree, lie, fn = one_update(optax.sgd(0.1), FLAT, should_skip_update_fn=too_large)
    message = r"should_skip_update_fn must decide the same on every rank, got .*'fsdp', 'replica'"
    with pytest.raises(ValueError, match=message):
        on_ranks("shard_map", fn, tree, lie)


def test_a_verdict_of_the_norm_of_all_shards_is_taken():
    def too_large(updates, step, params):
        return global_norm(updates, param_specs=FLAT) > 1e3, ()

    tree, lie, fn = one_update(optax.sgd(0.1), FLAT, should_skip_update_fn=too_large)
    assert int(on_ranks("shard_map", fn, tree, lie)[0]) == 1


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        ({"w1": P(), "rest": SPECS["rest"]}, r"got none with 'replica' at tree\['w1'\]"),
        ({**SPECS, "w1": P("replica", "fsdp")}, r"varies, got 'fsdp' at tree\['w1'\]"),
        ({"w1": P()}, "must have the structure of tree"),
    ],
)
def test_specs_that_types_contradict_are_refused(specs, message):
    with pytest.raises(ValueError, match=f"global_norm: param_specs .*{message}"):
        on_ranks("shard_map", lambda tree: (global_norm(tree, param_specs=specs), tree))


@pytest.mark.parametrize(
    ("max_norm", "error", "match"),
    [
        (-1.0, ValueError, "must be at least 0, got -1.0"),
        (np.float32("nan"), ValueError, "must be at least 0, got nan"),
        (lambda count: 1.0, TypeError, "must be a number, got function"),
        (None, TypeError, "must be a number, got NoneType"),
    ],
)
def test_a_norm_that_cannot_be_the_largest_is_refused(max_norm, error, match):
    with pytest.raises(error, match=f"^clip_by_global_norm: max_norm {match}"):
        clip_by_global_norm(max_norm)
