"""Layouts of real models on meshes of two axes: each is one device's gradient, in every regime."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import shards
from jax import lax
from jax.sharding import PartitionSpec as P

from jax_ddp_weighting import value_and_grad, weighted_sum

RNG = np.random.default_rng(11)
WEIGHTS = np.array([1, 1, 0.5, 1, 0, 1, 0, 2.0])  # the second of two data ranks has less
GRID = {"data": 2, "model": 2}


def as_pair(sums):
    return lambda params, rows: (lambda s: (s.total, s.weight))(sums(params, rows))


class Layout:
    """A model written for one device, and the same for a rank of a mesh.

    Args:
        whole: `whole(params, rows)`, a `WeightedSum` of all rows.
        local: the same of a rank's shards and rows.
        params: all parameters.
        specs: how they lie.
        rows: all rows.
        row_specs: how they lie.
        named: the axes that rows lie over.
        axes: the mesh.
    """

    def __init__(self, whole, local, params, specs, rows, row_specs, named, axes=GRID):
        self.whole, self.local, self.params, self.specs = whole, local, params, specs
        self.rows, self.row_specs, self.named, self.axes = rows, row_specs, named, axes

    def right(self):
        return shards.on_one_device(as_pair(self.whole), self.params, self.rows)

    def found(self, regime, *, named=None, after=lambda gradients: gradients, **options):
        options = {"param_specs": self.specs, "axis_name": named or self.named, **options}

        def fn(params, rows):
            loss, gradients = value_and_grad(self.local, **options)(params, rows)
            return loss.value, after(gradients)

        return shards.run(regime, fn, self.params, self.specs, self.rows, self.row_specs, self.axes)


# --- tensor parallel: rows of x @ w1 and columns of w2 lie over the model axis --------------------

WIDE = {
    "w1": RNG.normal(size=(3, 4)),
    "b1": RNG.normal(size=4),
    "w2": RNG.normal(size=(4, 2)),
    "b2": RNG.normal(size=2),
}
ROWS = {"x": RNG.normal(size=(8, 3)), "y": RNG.normal(size=(8, 2)), "weights": WEIGHTS}


def wide(params, rows, add=lambda partial: partial):
    hidden = jnp.tanh(rows["x"] @ params["w1"] + params["b1"][None])
    out = add(hidden @ params["w2"]) + params["b2"][None]
    return weighted_sum(jnp.sum((out - rows["y"]) ** 2, axis=-1), rows["weights"])


TENSOR = Layout(
    wide,
    lambda params, rows: wide(params, rows, lambda partial: lax.psum(partial, "model")),
    WIDE,
    {"w1": P(None, "model"), "b1": P("model"), "w2": P("model"), "b2": P()},
    ROWS,
    P("data"),
    "data",
)


# --- tokens of one row on several ranks: every token attends to all before it ---------------------

TOKENS = {
    "x": RNG.normal(size=(4, 6, 3)),
    "weights": (RNG.random((4, 6)) * (RNG.random((4, 6)) < 0.6)),
}
ATTENTION = {name: RNG.normal(size=(3, 3)) for name in ("q", "k", "v")}


def attention(params, rows, *, whole=lambda leaf: leaf, first=0):
    q, k, v = (rows["x"] @ params[name] for name in "qkv")
    k, v = whole(k), whole(v)
    before = (first + jnp.arange(q.shape[1]))[:, None] >= jnp.arange(k.shape[1])[None]
    scores = jnp.where(before[None], jnp.einsum("btd,bsd->bts", q, k), -jnp.inf)
    out = jnp.einsum("bts,bsd->btd", jax.nn.softmax(scores, axis=-1), v)
    return weighted_sum(jnp.sum((out - rows["x"]) ** 2, axis=-1), rows["weights"])


def local_attention(params, rows):
    return attention(
        params,
        rows,
        whole=lambda leaf: lax.all_gather(leaf, "model", axis=1, tiled=True),
        first=lax.axis_index("model") * rows["x"].shape[1],
    )


SEQUENCE = Layout(
    attention, local_attention, ATTENTION, P(), TOKENS, P("data", "model"), ("data", "model")
)


# --- experts: one on each rank of the data axis, tokens go there and come back --------------------

EXPERTS = {"router": RNG.normal(size=(3, 4)), "w": RNG.normal(size=(4, 3, 3))}
ROUTED = {"x": RNG.normal(size=(16, 3)), "weights": RNG.random(16) * (RNG.random(16) < 0.7)}


def experts(params, rows):
    """Each token goes to every expert, and takes from each by its share."""
    shares = jax.nn.softmax(rows["x"] @ params["router"])
    out = jnp.einsum("td,edf->tef", rows["x"], params["w"])
    out = jnp.einsum("te,tef->tf", shares, jnp.tanh(out))
    return weighted_sum(jnp.sum((out - rows["x"]) ** 2, axis=-1), rows["weights"])


def local_experts(params, rows):
    shares = jax.nn.softmax(rows["x"] @ params["router"])
    sent = jnp.broadcast_to(rows["x"][None], (4, *rows["x"].shape))  # [expert, token, feature]
    here = lax.all_to_all(sent, "data", 0, 0)  # of all ranks' tokens those for this expert
    back = lax.all_to_all(jnp.tanh(here @ params["w"][0]), "data", 0, 0)
    out = jnp.einsum("te,etf->tf", shares, back)
    return weighted_sum(jnp.sum((out - rows["x"]) ** 2, axis=-1), rows["weights"])


EXPERT = Layout(
    experts,
    local_experts,
    EXPERTS,
    {"router": P(), "w": P("data")},
    ROUTED,
    P("data"),
    "data",
    {"data": 4},
)


# --- a pipeline: each rank of the model axis has one layer ----------------------------------------

LAYERS = {"w": RNG.normal(size=(2, 3, 3)), "head": RNG.normal(size=3)}
PIPED = {"x": RNG.normal(size=(8, 3)), "y": RNG.normal(size=8), "weights": WEIGHTS}


def layers(params, rows):
    h = rows["x"]
    for w in params["w"]:
        h = jnp.tanh(h @ w)
    return weighted_sum((h @ params["head"] - rows["y"]) ** 2, rows["weights"])


def local_layers(params, rows):
    """What the last stage has found counts; the others wait, or work on nothing."""
    stage = lax.axis_index("model")
    h = rows["x"]
    for _ in range(2):
        h = lax.ppermute(jnp.tanh(h @ params["w"][0]), "model", [(0, 1), (1, 0)])
    # after two rounds the rows that began on the first stage are back there
    weights = jnp.where(stage == 0, rows["weights"], 0)
    return weighted_sum((h @ params["head"] - rows["y"]) ** 2, weights)


PIPELINE = Layout(
    layers,
    local_layers,
    LAYERS,
    {"w": P("model"), "head": P()},
    PIPED,
    P("data"),
    ("data", "model"),
)


# --- replicas of a sharded model: gathered over one axis, with rows over both ---------------------

HYBRID = Layout(
    wide,
    lambda params, rows: wide(shards.gather(params, HYBRID.specs), rows),
    WIDE,
    {"w1": P(None, "model"), "b1": P("model"), "w2": P("model"), "b2": P()},
    ROWS,
    P(("data", "model")),
    ("data", "model"),
)

# the same, sharded over both: tensor parallel inside, gathered over the data axis
BOTH = Layout(
    wide,
    lambda params, rows: TENSOR.local(
        {
            **params,
            "w1": lax.all_gather(params["w1"], "data", axis=1, tiled=True),
            "w2": lax.all_gather(params["w2"], "data", axis=1, tiled=True),
        },
        rows,
    ),
    WIDE,
    {"w1": P(None, ("model", "data")), "b1": P("model"), "w2": P("model", "data"), "b2": P()},
    ROWS,
    P("data"),
    "data",
)

LAYOUTS = {
    "tensor": TENSOR,
    "sequence": SEQUENCE,
    "expert": EXPERT,
    "pipeline": PIPELINE,
    "hybrid": HYBRID,
    "both": BOTH,
}


@pytest.mark.parametrize(
    ("name", "regime", "microbatches"),
    [
        ("tensor", "shard_map", 2),
        ("tensor", "shard_map_unchecked", 1),
        ("tensor", "vmap", 2),
        ("sequence", "shard_map", 1),
        ("sequence", "shard_map_unchecked", 2),
        ("sequence", "vmap", 1),
        ("expert", "shard_map", 2),
        ("expert", "shard_map_unchecked", 1),
        ("expert", "pmap", 1),
        ("pipeline", "shard_map", 1),
        ("pipeline", "shard_map_unchecked", 2),
        ("pipeline", "vmap", 1),
        ("hybrid", "shard_map", 1),
        ("hybrid", "shard_map_unchecked", 1),
        ("both", "shard_map", 2),
        ("both", "shard_map_unchecked", 2),
        ("both", "vmap", 1),
    ],
)
def test_every_layout_has_one_devices_gradient(name, regime, microbatches):
    layout = LAYOUTS[name]
    with jax.enable_x64(True):
        found = layout.found(regime, microbatches=microbatches)
        shards.assert_the_same(found, layout.right())


@pytest.mark.parametrize("regime", ["shard_map", "shard_map_unchecked"])
def test_a_constant_divisor_counts_the_ranks_of_one_total_once(regime):
    with jax.enable_x64(True):
        value, gradients = TENSOR.found(regime, divisors={"loss": 50.0})
        scale = np.sum(WEIGHTS) / 50
        right = jax.tree.map(lambda leaf: leaf * scale, TENSOR.right())
        shards.assert_the_same((value, gradients), right)


@pytest.mark.parametrize("regime", ["shard_map", "shard_map_unchecked"])
def test_a_regulariser_of_shards_is_the_psum_of_theirs(regime):
    def local(params, rows, add=lambda norm: lax.psum(norm, "model")):
        sums = TENSOR.local(params, rows)
        norm = add(sum(jnp.sum(params[name] ** 2) for name in ("w1", "b1", "w2")))
        return {"fit": sums, "norm": sums.once(norm + jnp.sum(params["b2"] ** 2))}

    def on_one_device(params, rows):
        norm = sum(jnp.sum(leaf**2) for leaf in params.values())
        found = wide(params, rows)
        return found.total + 0.5 * norm * found.weight, found.weight

    rest = (TENSOR.params, TENSOR.specs, TENSOR.rows, TENSOR.row_specs, "data")
    options = {"coefficients": {"fit": 1.0, "norm": 0.5}}
    with jax.enable_x64(True):
        right = shards.on_one_device(on_one_device, WIDE, ROWS)
        shards.assert_the_same(Layout(wide, local, *rest).found(regime, **options), right)
        alone = Layout(wide, lambda p, r: local(p, r, lambda norm: norm), *rest)
        with pytest.raises(ValueError, match=r"axis_name must name every mapped axis .*'model'"):
            alone.found(regime, **options)


CONTROLS = {  # a layout, and what is done to its gradients that must not be
    "tensor": lambda g: {**g, "w1": lax.psum(g["w1"], "model")},
    "sequence": lambda g: lax.psum(g, "model"),
    "expert": lambda g: {**g, "w": lax.psum(g["w"], "data")},
    "pipeline": lambda g: {**g, "w": lax.psum(g["w"], "model")},
}


@pytest.mark.parametrize("name", CONTROLS)
def test_one_sum_more_fails_the_same_check(name):
    with jax.enable_x64(True):
        found = LAYOUTS[name].found("shard_map_unchecked", after=CONTROLS[name])
        with pytest.raises(AssertionError, match="rtol=1e-12"):
            shards.assert_the_same(found, LAYOUTS[name].right())


@pytest.mark.parametrize("regime", ["shard_map", "shard_map_unchecked"])
def test_an_axis_without_rows_of_its_own_may_be_named(regime):
    with jax.enable_x64(True):
        found = TENSOR.found(regime, named=("data", "model"))
        shards.assert_the_same(found, TENSOR.right())


@pytest.mark.parametrize("regime", ["shard_map_unchecked", "vmap"])
@pytest.mark.parametrize("name", ["sequence", "pipeline"])
def test_tokens_over_an_axis_that_is_not_named_are_refused_without_types_too(name, regime):
    message = r"axis_name must name .* differ from rank to rank of \('model',\). Pass axis_name=\("
    with pytest.raises(ValueError, match=message), jax.enable_x64(True):
        LAYOUTS[name].found(regime, named="data")


@pytest.mark.parametrize("name", ["sequence", "pipeline", "hybrid"])
def test_they_are_refused_where_types_tell(name):
    with pytest.raises(ValueError, match="axis_name must name every mapped axis that rows lie"):
        LAYOUTS[name].found("shard_map", named="data")


@pytest.mark.parametrize("regime", ["shard_map_unchecked", "vmap"])
def test_partial_sums_over_an_axis_that_nothing_is_said_of_are_refused(regime):
    message = r"param_specs must be given where loss_fn communicates .* got none and \('model',\)"
    with pytest.raises(ValueError, match=message):
        TENSOR.found(regime, param_specs=None)


def test_where_types_tell_other_axes_need_no_specs():
    with jax.enable_x64(True):
        shards.assert_the_same(TENSOR.found("shard_map", param_specs=None), TENSOR.right())


def test_a_sharded_model_is_not_taken_for_an_ensemble():
    # every parameter lies over the axis, as in an ensemble, whose members do not talk
    specs = {name: P("model") for name in ("w1", "b1", "w2", "b2")}
    params = {**WIDE, "w1": RNG.normal(size=(2, 4)), "b2": RNG.normal(size=2)}
    layout = Layout(
        wide,
        lambda params, rows: wide(shards.gather(params, specs), rows),
        params,
        specs,
        {**ROWS, "x": ROWS["x"][:, :2]},
        P(("data", "model")),
        ("data", "model"),
    )
    with jax.enable_x64(True):
        shards.assert_the_same(layout.found("shard_map"), layout.right())
    message = r"for a total that varies over \('model',\) too, which loss_fn communicates over"
    with pytest.raises(ValueError, match=message):
        layout.found("shard_map", named="data")


def test_a_shard_map_inside_the_loss_is_one_devices_gradient():
    mesh, specs = shards.make_mesh(GRID), TENSOR.specs

    def inner(params, x):
        return lax.psum(jnp.tanh(x @ params["w1"] + params["b1"][None]) @ params["w2"], "model")

    def nested(params, rows):
        over_model = jax.shard_map(
            # JAX 0.10.2 cannot lower what a nested shard_map would keep for the way back, in a
            # plain jax.grad either: so it is computed once more
            jax.checkpoint(inner),
            in_specs=(specs, P()),
            out_specs=P(),
            axis_names={"model"},
        )
        out = over_model(params, rows["x"]) + params["b2"][None]
        return weighted_sum(jnp.sum((out - rows["y"]) ** 2, axis=-1), rows["weights"])

    def fn(params, rows):
        loss, gradients = value_and_grad(nested, axis_name="data", microbatches=2)(params, rows)
        return loss.value, gradients

    mapped = jax.shard_map(
        fn, mesh=mesh, in_specs=(P(), P("data")), out_specs=P(), axis_names={"data"}
    )
    with jax.enable_x64(True):
        shards.assert_the_same(jax.jit(mapped)(WIDE, ROWS), TENSOR.right())
