"""Torch's names beside flax's: what tells, what does not, and how arrays lie. No torch here."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_ddp_weighting import torch_names

RNG = np.random.RandomState(0)


def arrays(**shapes):
    """Random numbers by name; `__` stands for a dot."""
    return {name.replace("__", "."): RNG.normal(size=shape) for name, shape in shapes.items()}


def linear(*names, size=(4, 4)):
    """A state dict of Linear layers of one shape."""
    found = {}
    for name in names:
        found |= {f"{name}.weight": RNG.normal(size=size), f"{name}.bias": RNG.normal(size=size[0])}
    return found


def dense(*names, size=(4, 4)):
    """Parameters of Dense layers of one shape."""
    tree = {}
    for name in names:
        inside = tree
        for word in name.split("/"):
            inside = inside.setdefault(word, {})
        inside |= {"kernel": np.zeros(size[::-1]), "bias": np.zeros(size[0])}
    return tree


def paired(names):
    """Torch's layer by flax's, of weights."""
    weights = [each for each in names.pairs if each.flax.endswith("kernel")]
    return {
        each.flax.removesuffix("/kernel"): each.torch[0].removesuffix(".weight") for each in weights
    }


def by(names):
    return {each.by for each in names.pairs}


# --- which is which -------------------------------------------------------------------------------

TOLD = {  # torch's names, flax's, and what tells; all of one square shape
    "one name": (("fc1", "fc2"), ("fc2", "fc1"), {"fc1": "fc1", "fc2": "fc2"}, {"name"}),
    "underscores": (("fc1", "head"), ("fc_1", "head"), {"fc_1": "fc1", "head": "head"}, {"name"}),
    "numbers": (("fc1", "fc2"), ("Dense_0", "Dense_1"),
                {"Dense_0": "fc1", "Dense_1": "fc2"}, {"order"}),
    "ten and more": (
        [f"fc{k}" for k in range(12)],
        [f"Dense_{k}" for k in range(12)],
        {f"Dense_{k}": f"fc{k}" for k in range(12)},
        {"order"},
    ),
    "a Sequential": (("0", "2", "4"), ("Dense_0", "Dense_1", "Dense_2"),
                     {"Dense_0": "0", "Dense_1": "2", "Dense_2": "4"}, {"order"}),
    "a ModuleList": (("layers.0", "layers.1"), ("layers_0", "layers_1"),
                     {"layers_0": "layers.0", "layers_1": "layers.1"}, {"name"}),
    "what is left": (("a", "fc"), ("b", "fc"), {"b": "a", "fc": "fc"}, {"name", "shape"}),
    "projections": (
        ("attn.q_proj", "attn.k_proj", "attn.v_proj", "attn.o_proj"),
        ("attn/query", "attn/key", "attn/value", "attn/out"),
        {"attn/query": "attn.q_proj", "attn/key": "attn.k_proj", "attn/value": "attn.v_proj",
         "attn/out": "attn.o_proj"},
        {"name"},
    ),
    "a wrapper around": (("model.fc1", "model.fc2"), ("fc1", "fc2"),
                         {"fc1": "model.fc1", "fc2": "model.fc2"}, {"name"}),
    "DDP's": (("module.fc1", "module.fc2"), ("fc1", "fc2"), {"fc1": "fc1", "fc2": "fc2"}, {"name"}),
    "blocks": (
        ("h.0.up", "h.0.down", "h.1.up", "h.1.down"),
        ("Block_0/up", "Block_0/down", "Block_1/up", "Block_1/down"),
        {f"Block_{k}/{x}": f"h.{k}.{x}" for k in (0, 1) for x in ("up", "down")},
        {"name"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", TOLD)
def test_names_and_numbers_tell(case):
    torch, flax, expected, told = TOLD[case]
    names = torch_names(linear(*torch), dense(*flax))
    assert names.complete, str(names)
    assert paired(names) == expected
    assert by(names) == told


OPEN = {  # nothing tells, though all have one shape
    "words": (("query", "key", "value"), ("Dense_0", "Dense_1", "Dense_2")),
    "other words": (("a", "b"), ("c", "d")),
    "numbers and a word": (("norm1", "norm2", "norm"), ("Dense_0", "Dense_1", "Dense_2")),
    "two words on one side": (("up1", "down1"), ("Dense_0", "Dense_1")),
    "names that contradict the order": (("fc1", "fc2"), ("fc2", "fc3")),
    "encoder and decoder": (("encoder.fc", "decoder.fc"), ("left/fc", "right/fc")),
    "more of one": (("fc1", "fc2"), ("Dense_0", "Dense_1", "Dense_2")),
}


@pytest.mark.parametrize("case", OPEN)
def test_what_could_be_several_is_listed_on_both_sides_and_never_guessed(case):
    torch, flax = OPEN[case]
    state_dict = linear(*torch)
    names = torch_names(state_dict, dense(*flax))
    assert not names.complete
    assert names.pairs == ()
    assert {*names.ambiguous_torch} == {*state_dict}
    assert {*names.ambiguous_flax} == {f"{x}/{part}" for x in flax for part in ("kernel", "bias")}
    assert f"ambiguous in torch: {torch[0]}.weight: {flax[0]} or" in str(names) or len(flax) < 2
    with pytest.raises(ValueError, match=r"to_flax: the map must hold every name.*rules="):
        names.to_flax(state_dict)
    with pytest.raises(ValueError, match="gradients: the map must hold every name"):
        names.gradients(state_dict)


def test_a_rule_settles_what_is_open():
    state_dict = linear("query", "key", "value")
    tree = dense("Dense_0", "Dense_1", "Dense_2")
    names = torch_names(state_dict, tree, rules={"query": "Dense_2", "key": "Dense_0"})
    assert paired(names) == {"Dense_0": "key", "Dense_1": "value", "Dense_2": "query"}
    assert by(names) == {"rule", "shape"}
    swapped = torch_names(state_dict, tree, rules={"query": "Dense_0", "key": "Dense_2"})
    assert paired(swapped) != paired(names)


def test_rules_of_modules_stars_tensors_and_what_is_left_out():
    state_dict = linear("left.a", "right.a", "h.0.x", "h.1.x", "aux", "own")
    tree = dense("one/a", "two/a", "block_1/y", "block_0/y", "mine")
    rules = {"left": "two", "right": "one", "h.*.x": "block_*.y", "aux": None}
    rules |= {"own.weight": "mine/kernel"}
    names = torch_names(state_dict, tree, rules=rules)
    assert names.complete, str(names)
    assert paired(names) == {
        "two/a": "left.a", "one/a": "right.a", "block_0/y": "h.0.x", "block_1/y": "h.1.x",
        "mine": "own",
    }  # fmt: skip
    assert names.left_out == dict.fromkeys(["aux.weight", "aux.bias"], "left out by rules")
    assert np.array_equal(names.to_flax(state_dict)["mine"]["kernel"], state_dict["own.weight"].T)


@pytest.mark.parametrize(
    ("rules", "said"),
    [
        ({"fcc": "fc"}, r"rules must name what the state dict holds, got 'fcc'. Near it: fc"),
        ({"fc": "nope"}, r"rules must name what flax's tree holds, got 'nope' for 'fc'"),
        ({"fc.weight": "fc/nope"}, r"rules must name what flax's tree holds, got 'fc/nope'"),
        (
            {"fc": "wide"},
            r"rules must pair arrays that fit, got fc.weight \(4, 4\) for wide/kernel",
        ),
        ({"fc.weight": "wide/kernel"}, r"rules must pair arrays that fit.*laid out as linear"),
        ({"fc": 3}, r"rules must map torch's names to paths.*got 3 for 'fc'"),
        (
            {"fc": ("fc", "sideways")},
            r"rules must .* a kind of linear, conv.*got \('fc', 'sideways'\)",
        ),
        ({"fc": ("fc", "flattened")}, "rules must say which axes were flattened"),
        ({"fc": ("fc", "flattened", 12)}, "rules must say which axes .* got .*12"),
        ({"fc": ("fc", "flattened", (4, 0.5))}, "rules must say which axes"),
        ({"fc": ("fc", "flattened", "44")}, "rules must say which axes"),
        ({"fc": ("fc", "linear", 12)}, "rules must say which axes"),
        ({"fc": ("fc", "", 0)}, "rules must say which axes"),
    ],
)
def test_a_rule_that_cannot_be_is_refused(rules, said):
    tree = dense("fc") | dense("wide", size=(5, 4))
    with pytest.raises(ValueError, match=f"torch_names: {said}"):
        torch_names(linear("fc"), tree, rules=rules)


@pytest.mark.parametrize("rules", [["fc"], "fc", {"fc"}, 3])
def test_rules_that_map_nothing_are_refused(rules):
    with pytest.raises(TypeError, match=r"torch_names: rules must be a dict of torch's names to"):
        torch_names(linear("fc"), dense("fc"), rules=rules)


ONCE = "must name each part of flax's tree in one rule, got"
TWICE = "must name each part of the state dict in one rule, got"


@pytest.mark.parametrize(
    ("rules", "said"),
    [
        ({"a": "one", "b": "one"}, f"{ONCE} 'one' for 'b', which 'a' has. Leave one of them out"),
        ({"a": "params/one", "b": "one"}, f"{ONCE} 'one' for 'b', which 'a' has"),
        ({"a.weight": "one/kernel", "b.weight": "one.kernel"}, f"{ONCE} 'one.kernel' for 'b.we"),
        ({"b.weight": "two/kernel", "c": "two"}, f"{ONCE} 'two' for 'c', which 'b.weight' has"),
        ({"a": "one", "c.bias": "one/bias"}, f"{ONCE} 'one' for 'a', which 'c.bias' has"),
        ({"a": "one", "*": "one"}, f"{ONCE} 'one' for '\\*', which 'a' has"),
        ({"up.x": "one", "up": "up"}, f"{TWICE} 'up', all of which 'up.x' has"),
        ({"a.weight": "one/kernel", "a.bias": None, "a": "two"}, f"{TWICE} 'a', all of which 'a"),
    ],
)
def test_a_part_of_either_side_has_one_rule(rules, said):
    state_dict = linear("a", "b", "c", "up.x")
    with pytest.raises(ValueError, match=f"torch_names: rules {said}"):
        torch_names(state_dict, {"params": dense("one", "two", "three", "up/x")}, rules=rules)


def test_what_no_rule_could_name_is_suggested_from_the_whole_tree():
    with pytest.raises(ValueError, match=r"got 'zzz' for 'b'\. It holds fc\.$"):
        torch_names(linear("a", "b"), dense("fc"), rules={"a": "fc", "b": "zzz"})


def test_one_name_of_two_shapes_is_listed_with_both():
    names = torch_names(linear("fc", size=(4, 3)), dense("fc", size=(3, 4)))
    assert {*names.unmatched_torch} == {"fc.weight", "fc.bias"}
    assert "does not fit its namesake: torch's weight (4, 3)" in names.unmatched_flax["fc/kernel"]
    no_bias = {"fc.weight": np.ones((4, 4))}
    assert {*torch_names(no_bias, dense("fc")).unmatched_flax} == {"fc/kernel", "fc/bias"}


WORDS = [f"{one}{two}" for one in ("al", "be", "ga", "de") for two in ("ra", "so", "ti", "mu")]


class Size(int):
    """A number that is the same only as itself, so that copies of one layer can be told."""


def grown(rng, depth):
    """A random module: its parts are square layers, blocks of them, and copies of blocks."""
    parts = []
    for _ in range(rng.randint(1, 3)):
        size = Size(rng.choice([3, 4, 5]))
        inside = grown(rng, depth - 1) if depth and rng.rand() < 0.5 else size
        parts += [inside] * (rng.randint(1, 4) if rng.rand() < 0.5 else 1)
    return parts


def named(rng, parts, numbered, side, path=()):
    """Paths of layers and their sizes, in words that the other side does not use.

    Copies of a block are numbered, or have words of their own.
    """
    found, words = [], list(rng.permutation(WORDS))
    k = 0
    while k < len(parts):
        copies = sum(each is parts[k] for each in parts[k:])
        word = words.pop()
        for copy in range(copies):
            other = word if numbered or not copy else words.pop()
            name = f"{side}{other}{copy}" if copies > 1 and numbered else f"{side}{other}"
            inside, own = parts[k], (*path, name)
            if isinstance(inside, int):
                found.append((own, inside))
            else:
                found += named(rng, inside, numbered, side, own)
        k += copies
    return found


@pytest.mark.parametrize("numbered", [True, False])
def test_no_pair_of_120_random_models_is_a_wrong_one(numbered):
    told = every = 0
    for seed in range(60):
        rng = np.random.RandomState(seed)
        parts = grown(rng, 2)
        theirs, ours = (named(rng, parts, numbered, side) for side in ("t", "f"))
        state_dict = {".".join(path) + ".weight": np.zeros((n, n)) for path, n in theirs}
        tree = {}
        for path, n in ours:
            inside = tree
            for word in path:
                inside = inside.setdefault(word, {})
            inside["kernel"] = np.zeros((n, n))
        truth = {"/".join(b): ".".join(a) for (a, _), (b, _) in zip(theirs, ours, strict=True)}
        names = torch_names(state_dict, tree)
        found = paired(names)
        wrong = {flax: torch for flax, torch in found.items() if truth[flax] != torch}
        assert wrong == {}, seed
        told, every = told + len(found), every + len(truth)
        listed = {*names.ambiguous_flax, *names.unmatched_flax, *(p.flax for p in names.pairs)}
        assert listed == {f"{flax}/kernel" for flax in truth}
    assert told > every / 10  # and most of what is told by numbers or shapes is told


# --- how it lies ----------------------------------------------------------------------------------


def test_a_square_kernel_is_transposed_and_a_square_embedding_is_not():
    state_dict = arrays(fc__weight=(4, 4), emb__weight=(4, 4))
    tree = {"fc": {"kernel": np.zeros((4, 4))}, "emb": {"embedding": np.zeros((4, 4))}}
    names = torch_names(state_dict, tree)
    found = names.to_flax(state_dict)
    assert np.array_equal(found["fc"]["kernel"], state_dict["fc.weight"].T)
    assert np.array_equal(found["emb"]["embedding"], state_dict["emb.weight"])
    assert [each.kind for each in names.pairs] == ["linear", "as_is"]


def convolution(name, torch, flax):
    state_dict = {f"{name}.weight": RNG.normal(size=torch)}
    return state_dict, {name: {"kernel": np.zeros(flax)}}


def test_a_convolution_has_its_window_first_and_a_transposed_one_is_turned_around():
    state_dict, tree = convolution("x", (4, 5, 3), (3, 5, 4))
    found = torch_names(state_dict, tree).to_flax(state_dict)["x"]["kernel"]
    assert np.array_equal(found, state_dict["x.weight"].transpose(2, 1, 0))
    state_dict, tree = convolution("x", (4, 5, 3), (3, 4, 5))
    found = torch_names(state_dict, tree).to_flax(state_dict)["x"]["kernel"]
    assert np.array_equal(found, state_dict["x.weight"].transpose(2, 0, 1)[::-1])


@pytest.mark.parametrize("name", ["up", "decoder.up1", "deconv", "ConvTranspose_0"])
def test_a_square_kernel_that_may_be_transposed_is_open_until_a_rule_tells(name):
    state_dict = {f"{name}.weight": RNG.normal(size=(4, 4, 3))}
    flax = name.replace(".", "_")
    tree = {flax: {"kernel": np.zeros((3, 4, 4))}}
    names = torch_names(state_dict, tree)
    assert "fit as conv and as conv_transpose" in names.ambiguous_torch[f"{name}.weight"]
    for kind, turned in (("conv", False), ("conv_transpose", True)):
        ruled = torch_names(state_dict, tree, rules={name: (flax, kind)})
        found = jax.tree.leaves(ruled.to_flax(state_dict))[0]
        plain = state_dict[f"{name}.weight"]
        expected = plain.transpose(2, 0, 1)[::-1] if turned else plain.transpose(2, 1, 0)
        assert np.array_equal(found, expected)


def test_a_square_convolution_is_open_where_the_model_has_transposed_ones():
    one, tree = convolution("a", (4, 4, 3), (3, 4, 4))
    assert torch_names(one, tree).complete
    other, more = convolution("b", (4, 5, 3), (3, 4, 5))
    assert {*torch_names(one | other, tree | more).ambiguous_torch} == {"a.weight"}


def test_a_model_of_nnx_says_itself_what_is_transposed():
    def make(**options):
        return nnx.eval_shape(
            lambda: nnx.ConvTranspose(2, 2, (3,), use_bias=False, rngs=nnx.Rngs(0), **options)
        )

    state_dict = {"weight": RNG.normal(size=(2, 2, 3))}
    plain = torch_names(state_dict, make()).to_flax(state_dict)
    assert np.array_equal(jax.tree.leaves(plain)[0], state_dict["weight"].transpose(2, 0, 1)[::-1])
    flipped = torch_names(state_dict, make(transpose_kernel=True)).to_flax(state_dict)
    assert np.array_equal(jax.tree.leaves(flipped)[0], state_dict["weight"].transpose(2, 1, 0))


def test_a_linear_that_lies_as_flaxs_does_is_told_by_its_bias_and_doubts_square_ones():
    wide = {"c_attn.weight": RNG.normal(size=(4, 6)), "c_attn.bias": np.ones(6)}
    tree = dense("c_attn", size=(6, 4))
    names = torch_names(wide, tree)
    assert names.complete
    assert np.array_equal(names.to_flax(wide)["c_attn"]["kernel"], wide["c_attn.weight"])
    both = torch_names(wide | linear("c_proj"), tree | dense("c_proj"))
    assert {*both.ambiguous_torch} == {"c_proj.weight", "c_proj.bias"}
    rules = {"c_proj": ("c_proj", "as_is")}
    assert torch_names(wide | linear("c_proj"), tree | dense("c_proj"), rules=rules).complete


def test_a_flattened_image_is_channels_first_in_torch():
    state_dict = {"fc.weight": np.arange(24.0).reshape(2, 12)}
    tree = {"fc": {"kernel": np.zeros((12, 2))}}
    names = torch_names(state_dict, tree, rules={"fc": ("fc", "flattened", (3, 2, 2))})
    image = RNG.normal(size=(3, 2, 2))
    theirs = state_dict["fc.weight"] @ image.reshape(-1)
    kernel = names.to_flax(state_dict)["fc"]["kernel"]
    assert np.allclose(np.moveaxis(image, 0, -1).reshape(-1) @ kernel, theirs)
    assert np.array_equal(
        names.to_torch({"fc": {"kernel": kernel}})["fc.weight"], state_dict["fc.weight"]
    )


def test_a_linear_that_may_follow_a_flattened_image_is_noted_and_still_paired():
    state_dict = arrays(conv__weight=(4, 3, 3, 3), fc__weight=(5, 24), head__weight=(8, 8))
    kernels = {"conv": (3, 3, 3, 4), "fc": (24, 5), "head": (8, 8)}
    tree = {name: {"kernel": np.zeros(shape)} for name, shape in kernels.items()}
    names = torch_names(state_dict, tree)
    (note,) = names.notes
    assert note.startswith(
        "fc.weight takes 24 inputs behind 4 channels: where these are a flattened"
    )
    assert names.complete
    assert f"note: {note}" in str(names)
    assert torch_names(state_dict, tree, rules={"fc": ("fc", "flattened", (4, 3, 2))}).notes == ()


def test_a_convolution_over_all_of_its_input_is_no_linear_layer():
    state_dict = {"fc.weight": RNG.normal(size=(5, 24)), "fc.bias": np.zeros(5)}
    tree = {"fc": {"kernel": np.zeros((3, 2, 4, 5)), "bias": np.zeros(5)}}
    assert {*torch_names(state_dict, tree).unmatched_torch} == {"fc.weight", "fc.bias"}
    one = {"fc": {"kernel": np.zeros((1, 1, 24, 5)), "bias": np.zeros(5)}}
    assert torch_names(state_dict, one).complete
    told = torch_names(state_dict, tree, rules={"module.fc": ("fc", "flattened", (4, 3, 2))})
    image = RNG.normal(size=(4, 3, 2))
    kernel = told.to_flax(state_dict)["fc"]["kernel"]
    flat = np.moveaxis(image, 0, -1).reshape(-1)
    assert np.allclose(flat @ kernel.reshape(24, 5), state_dict["fc.weight"] @ image.reshape(-1))


def test_boxes_of_partitioned_parameters_are_no_part_of_a_path():
    layer = nn.Dense(4, kernel_init=nn.with_partitioning(nn.initializers.ones, (None, "model")))
    boxed = layer.init(jax.random.key(0), np.ones((1, 4)))
    state_dict = linear("")
    state_dict = {name.lstrip("."): value for name, value in state_dict.items()}
    names = torch_names(state_dict, boxed)
    assert names.complete, str(names)
    found = names.to_flax(state_dict)
    assert np.array_equal(found["params"]["kernel"].value, state_dict["weight"].T)


def test_heads_are_split_and_a_packed_projection_is_cut_in_three():
    state_dict = arrays(
        attn__in_proj_weight=(12, 4), attn__in_proj_bias=12, attn__out_proj__weight=(4, 4),
        attn__out_proj__bias=4,
    )  # fmt: skip
    model = nn.MultiHeadDotProductAttention(num_heads=2)
    tree = jax.eval_shape(lambda key: model.init(key, jnp.ones((1, 2, 4))), jax.random.key(0))
    names = torch_names(state_dict, tree)
    assert names.complete, str(names)
    found = names.to_flax(state_dict)["params"]
    packed = state_dict["attn.in_proj_weight"]
    for k, part in enumerate(("query", "key", "value")):
        assert np.array_equal(found[part]["kernel"].reshape(4, 4), packed[4 * k : 4 * k + 4].T)
        own = state_dict["attn.in_proj_bias"][4 * k : 4 * k + 4].reshape(2, 2)
        assert np.array_equal(found[part]["bias"], own)
    assert np.array_equal(
        found["out"]["kernel"].reshape(4, 4), state_dict["attn.out_proj.weight"].T
    )
    back = names.to_torch({"params": found})
    assert all(np.array_equal(back[name], state_dict[name]) for name in state_dict)


def test_a_layer_norm_over_several_axes_is_not_paired_by_equal_sizes():
    state_dict = arrays(ln__weight=(3, 3, 3), ln__bias=(3, 3, 3))
    tree = {"ln": {"scale": np.zeros((3, 3, 3)), "bias": np.zeros((3, 3, 3))}}
    assert {*torch_names(state_dict, tree).unmatched_torch} == {"ln.weight", "ln.bias"}


# --- what is shared, left out, and of statistics --------------------------------------------------


def tied():
    emb = RNG.normal(size=(5, 3))
    return {"emb.weight": emb, "head.weight": emb}, {"emb": {"embedding": np.zeros((5, 3))}}


@pytest.mark.parametrize("copied", [False, True])
def test_one_tensor_of_two_names_is_one_leaf(copied):
    state_dict, tree = tied()
    if copied:  # as a file brings it back
        state_dict = {name: value.copy() for name, value in state_dict.items()}
    names = torch_names(state_dict, tree)
    assert names.complete
    assert names.shared == {"head.weight": "emb.weight"}
    found = names.to_flax(state_dict)
    assert np.array_equal(found["emb"]["embedding"], state_dict["emb.weight"])
    assert np.array_equal(names.to_torch(found)["head.weight"], state_dict["head.weight"])
    torn = {**state_dict, "head.weight": state_dict["head.weight"] + 1}
    with pytest.raises(ValueError, match=r"one value under head\.weight and emb\.weight.*got two"):
        names.to_flax(torn)
    for given in ({"emb.weight": torn["head.weight"]}, {"head.weight": torn["head.weight"]}):
        assert np.array_equal(names.gradients(given)["emb"]["embedding"], torn["head.weight"])
    both = dict.fromkeys(state_dict, torn["head.weight"])
    assert np.array_equal(names.gradients(both)["emb"]["embedding"], torn["head.weight"])


def test_one_tensor_that_is_two_leaves_has_no_gradients_to_compare():
    state_dict, tree = tied()
    names = torch_names(state_dict, tree | {"head": {"kernel": np.zeros((3, 5))}})
    assert names.complete
    assert np.array_equal(names.to_flax(state_dict)["head"]["kernel"], state_dict["emb.weight"].T)
    with pytest.raises(ValueError, match=r"params must share what torch shares.*emb\.weight and"):
        names.gradients({"emb.weight": state_dict["emb.weight"]})


def test_two_layers_that_are_equal_by_being_zero_are_two():
    state_dict = {"a.weight": np.zeros((3, 3)), "b.weight": np.zeros((3, 3))}
    names = torch_names(state_dict, {"a": {"kernel": np.zeros((3, 3))}})
    assert names.shared == {}
    assert {*names.unmatched_torch} == {"b.weight"}


def batch_norm():
    state_dict = arrays(bn__weight=4, bn__bias=4, bn__running_mean=4, bn__running_var=4)
    state_dict["bn.num_batches_tracked"] = np.array(7)
    params = {"bn": {"scale": np.zeros(4), "bias": np.zeros(4)}}
    return state_dict, params, {"bn": {"mean": np.zeros(4), "var": np.zeros(4)}}


def test_statistics_have_values_and_no_gradients():
    state_dict, params, stats = batch_norm()
    names = torch_names(state_dict, {"params": params, "batch_stats": stats})
    assert names.complete
    assert names.left_out == {"bn.num_batches_tracked": "flax counts no batches"}
    found = names.to_flax(state_dict)
    assert np.array_equal(found["batch_stats"]["bn"]["var"], state_dict["bn.running_var"])
    back = names.to_torch(found)
    assert back.keys() == state_dict.keys()
    assert back["bn.num_batches_tracked"] == 7
    own = {name: state_dict[name] for name in ("bn.weight", "bn.bias")}
    assert jax.tree.structure(names.gradients(own)) == jax.tree.structure({"params": params})
    alone = torch_names(state_dict, params)
    assert alone.complete
    assert "bn.running_mean" in alone.left_out
    without = {n: x for n, x in state_dict.items() if "running" not in n}
    half = torch_names(without, {"params": params, "batch_stats": stats})
    assert {*half.unmatched_flax} == {"batch_stats/bn/mean", "batch_stats/bn/var"}
    assert names.gradients(own)["params"].keys() == half.gradients(own)["params"].keys()
    with pytest.raises(ValueError, match="unmatched in flax: batch_stats/bn/mean"):
        half.to_flax(without)


def test_a_norm_with_statistics_is_no_layer_norm():
    state_dict, params, stats = batch_norm()
    layer_norm = arrays(ln__weight=4, ln__bias=4)
    tree = {"params": params | {"ln": {"scale": np.zeros(4), "bias": np.zeros(4)}}}
    names = torch_names(state_dict | layer_norm, tree | {"batch_stats": stats})
    assert names.complete, str(names)
    assert {each.flax: each.torch[0] for each in names.pairs}["params/ln/scale"] == "ln.weight"


# --- recurrent cells ------------------------------------------------------------------------------


def cell(gates, width=2):
    rows = gates * width
    return arrays(
        r__weight_ih_l0=(rows, 3), r__weight_hh_l0=(rows, width), r__bias_ih_l0=rows,
        r__bias_hh_l0=rows,
    )  # fmt: skip


def test_two_biases_are_one_and_come_back_as_they_were():
    state_dict = cell(4)
    model = nn.OptimizedLSTMCell(2)
    carry = (np.zeros((1, 2)),) * 2
    tree = jax.eval_shape(lambda key: model.init(key, carry, np.zeros((1, 3))), jax.random.key(0))
    names = torch_names(state_dict, {"r": {"cell": tree["params"]}})
    found = names.to_flax(state_dict)
    sums = state_dict["r.bias_ih_l0"] + state_dict["r.bias_hh_l0"]
    assert np.array_equal(found["r"]["cell"]["hf"]["bias"], sums[2:4])
    back = names.to_torch(found)
    assert all(np.array_equal(back[name], state_dict[name]) for name in state_dict)
    other = jax.tree.map(lambda x: x * 3, found)  # not torch's any more
    split = names.to_torch(other)
    assert not split["r.bias_hh_l0"].any()
    again = names.to_flax(split)
    assert all(map(np.array_equal, jax.tree.leaves(again), jax.tree.leaves(other)))


def test_biases_that_are_added_have_one_gradient_or_are_refused():
    state_dict = cell(4)
    fused = nnx.eval_shape(lambda: nnx.OptimizedLSTMCell(3, 2, rngs=nnx.Rngs(0)))
    names = torch_names(state_dict, {"r": nnx.to_pure_dict(nnx.state(fused, nnx.Param))})
    gradient = {**state_dict, "r.bias_hh_l0": state_dict["r.bias_ih_l0"].copy()}
    found = names.gradients(gradient)
    assert np.array_equal(found["r"]["dense_h"]["bias"], state_dict["r.bias_ih_l0"])
    with pytest.raises(ValueError, match=r"one gradient for r\.bias_ih_l0\[0:2\] and r\.bias_hh"):
        names.gradients(state_dict)


def test_a_bias_that_the_cell_has_no_place_for_must_be_0():
    state_dict = cell(3)
    gru = nnx.eval_shape(lambda: nnx.GRUCell(3, 2, rngs=nnx.Rngs(0)))
    names = torch_names(state_dict, {"r": nnx.to_pure_dict(nnx.state(gru, nnx.Param))})
    assert [*names.left_out] == ["r.bias_hh_l0[4:6]"]
    with pytest.raises(ValueError, match=r"must hold 0 in r\.bias_hh_l0\[4:6\], for which"):
        names.to_flax(state_dict)
    state_dict["r.bias_hh_l0"][4:] = 0
    back = names.to_torch(names.to_flax(state_dict))
    assert all(np.array_equal(back[name], state_dict[name]) for name in state_dict)


def test_an_lstm_is_no_gru_and_a_projected_one_is_neither():
    gru = nnx.eval_shape(lambda: nnx.GRUCell(3, 2, rngs=nnx.Rngs(0)))
    tree = {"r": nnx.to_pure_dict(nnx.state(gru, nnx.Param))}
    for state_dict in (cell(4), {**cell(3), "r.weight_hr_l0": np.ones((2, 2))}):
        names = torch_names(state_dict, tree)
        assert not names.pairs
        assert {*state_dict} == {*names.unmatched_torch}


# --- dtypes, and what is no state dict ------------------------------------------------------------


def test_no_bit_of_a_narrow_or_wide_dtype_is_lost():
    tree = {"fc": {"kernel": np.zeros((2, 3), np.float32)}}
    for dtype in (jnp.bfloat16, np.float16, np.float64):
        state_dict = {"fc.weight": RNG.normal(size=(3, 2)).astype(dtype)}
        names = torch_names(state_dict, tree)
        found = names.to_flax(state_dict)["fc"]["kernel"]
        assert found.dtype == dtype
        assert np.array_equal(found.T, state_dict["fc.weight"])
        assert names.to_torch({"fc": {"kernel": found}})["fc.weight"].dtype == dtype


BAD = {
    "an empty one": ({}, dense("fc"), ValueError, "a dict of tensors by name, got an empty"),
    "a list": ([1], dense("fc"), ValueError, "must be a dict of tensors by name, got list"),
    "numbers as names": ({0: np.ones(2)}, dense("fc"), TypeError, "must have names as keys, got 0"),
    "words": ({"a": "b"}, dense("fc"), TypeError, r"state_dict\['a'\] must be an array of numbers"),
    "objects": ({"a": [[1], [1, 2]]}, dense("fc"), TypeError, "of dtype object"),
    "two of a name": (
        {"fc.weight": np.ones(2), "module.fc.weight": np.ones(2)}, dense("fc"), ValueError,
        "must name a tensor once",
    ),
    "an empty tree": (linear("fc"), {}, ValueError, "params must hold arrays, got an empty tree"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_sentence(case):
    state_dict, tree, error, said = BAD[case]
    with pytest.raises(error, match=f"torch_names: .*{said}"):
        torch_names(state_dict, tree)


def test_other_names_shapes_and_no_gradient_are_refused():
    state_dict = linear("fc")
    names = torch_names(state_dict, dense("fc"))
    less = {"fc.weight": state_dict["fc.weight"]}
    with pytest.raises(ValueError, match=r"names that torch_names was given, got fc\.bias missing"):
        names.to_flax(less)
    with pytest.raises(ValueError, match="got other beside them"):
        names.to_flax(state_dict | {"other": np.ones(2)})
    with pytest.raises(ValueError, match=r"must have the shape \(4,\) that torch_names saw, got"):
        names.to_flax(state_dict | {"fc.bias": np.ones(5)})
    with pytest.raises(ValueError, match=r"got None: that parameter has no gradient"):
        names.gradients(state_dict | {"fc.bias": None})
    with pytest.raises(TypeError, match="must be a dict by torch's names, got list"):
        names.gradients([1])
    with pytest.raises(ValueError, match="params must have the leaves and shapes"):
        names.to_torch(dense("fc", size=(4, 5)))


def test_the_streams_of_a_model_are_no_parameters():
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.fc, self.drop = nnx.Linear(4, 4, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)

    model = Model(nnx.Rngs(0))
    state_dict = linear("fc")
    names = torch_names(state_dict, model)
    assert names.complete
    nnx.update(model, names.to_flax(state_dict))
    assert np.array_equal(model.fc.kernel[...], state_dict["fc.weight"].T)
