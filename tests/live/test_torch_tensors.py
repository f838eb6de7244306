"""Tensors of every kind into flax and back, modules that say what they are, and their files."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from jax_ddp_weighting import compare_gradients, effective_weights, torch_names
from jax_ddp_weighting.cli import app as cli

DENSE = {"kernel": np.zeros((3, 4)), "bias": np.zeros(4)}


@pytest.mark.parametrize(
    "dtype", ["bfloat16", "float16", "float32", "float64", "float8_e4m3fn", "float8_e5m2"]
)
def test_every_bit_of_a_tensor_comes_over_and_back(dtype):
    narrow = getattr(torch, dtype)
    given = {name: x.to(narrow) for name, x in torch.nn.Linear(3, 4).state_dict().items()}
    names = torch_names(given, DENSE)
    found = names.to_flax(given)
    assert found["kernel"].dtype == jnp.dtype(dtype)
    wide = np.asarray(found["kernel"], np.float64)
    assert np.array_equal(wide.T, given["weight"].to(torch.float64).numpy())
    back = names.to_torch(found)
    for name, value in given.items():
        assert back[name].dtype == narrow
        assert torch.equal(back[name].view(torch.uint8), value.view(torch.uint8))


def test_parameters_and_views_go_in_as_they_are():
    layer = torch.nn.Linear(3, 4)
    given = dict(layer.named_parameters())  # they require gradients
    wide = torch.randn(3, 4)
    given["weight"] = wide.T  # and need not be contiguous
    found = torch_names(given, DENSE).to_flax(given)
    assert np.array_equal(found["kernel"], wide.numpy())
    found["kernel"][0, 0] = 7  # it is the caller's own
    assert wide[0, 0] != 7


def test_a_tensor_that_holds_no_numbers_is_refused():
    layer = torch.nn.Linear(3, 4)
    names = torch_names(layer.to("meta").state_dict(), DENSE)  # shapes are enough for names
    with pytest.raises(TypeError, match=r"to_flax: state_dict\['weight'\] must hold its numbers"):
        names.to_flax(layer.state_dict())
    sparse = {"weight": torch.ones(4, 3).to_sparse(), "bias": torch.ones(4)}
    with pytest.raises(TypeError, match=r"meta, sparse or quantized.*call \.to_dense\(\)"):
        names.gradients(sparse)


def test_a_parameter_is_no_gradient_and_a_missing_one_is_said():
    layer = torch.nn.Linear(3, 4)
    names = torch_names(layer.state_dict(), DENSE)
    with pytest.raises(TypeError, match="must be a gradient, got the parameter itself"):
        names.gradients(dict(layer.named_parameters()))
    with pytest.raises(ValueError, match="got None: that parameter has no gradient"):
        names.gradients({name: p.grad for name, p in layer.named_parameters()})


def test_a_module_says_what_its_layers_are():
    class Looks(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = torch.nn.Embedding(4, 4), torch.nn.Linear(4, 4, bias=False)

    tree = {"x": {"embedding": np.zeros((4, 4))}, "y": {"kernel": np.zeros((4, 4))}}
    model = Looks()
    assert {*torch_names(model.state_dict(), tree).ambiguous_torch} == {"a.weight", "b.weight"}
    kernel = {"y": tree["y"]}
    names = torch_names(model, kernel, rules={"b": None})
    assert {*names.unmatched_torch} == {"a.weight"}  # which looks rows up, and never multiplies
    square = torch.nn.Sequential(torch.nn.ConvTranspose1d(4, 4, 3, bias=False))
    conv = {"anything": {"kernel": np.zeros((3, 4, 4))}}
    assert torch_names(square.state_dict(), conv).complete
    assert {*torch_names(square, conv).ambiguous_torch} == {"0.weight"}


def test_what_ddp_and_compile_put_before_names_is_left_away():
    layer = torch.nn.Linear(3, 4)
    wrapped = {f"module._orig_mod.{name}": x for name, x in layer.state_dict().items()}
    names = torch_names(wrapped, DENSE)
    assert {pair.torch for pair in names.pairs} == {("weight",), ("bias",)}
    assert np.array_equal(names.to_flax(layer.state_dict())["bias"], layer.bias.detach().numpy())


def test_attention_over_other_keys_and_values():
    torch.manual_seed(0)
    theirs = torch.nn.MultiheadAttention(6, 2, kdim=4, vdim=5, batch_first=True)
    with torch.no_grad():
        for p in theirs.parameters():
            p += 0.1 * torch.randn_like(p)
    query, key, value = torch.randn(2, 3, 6), torch.randn(2, 7, 4), torch.randn(2, 7, 5)
    ours = nn.MultiHeadDotProductAttention(num_heads=2, qkv_features=6, out_features=6)
    arrays = [x.numpy() for x in (query, key, value)]
    tree = jax.eval_shape(ours.init, jax.random.key(0), *arrays)
    names = torch_names(theirs.state_dict(), tree)
    found = ours.apply(names.to_flax(theirs.state_dict()), *arrays)
    np.testing.assert_allclose(found, theirs(query, key, value)[0].detach(), atol=1e-5)


def test_safetensors_are_compared(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    gradient = {"fc.weight": torch.randn(4, 3), "fc.bias": torch.randn(4)}
    save_file(gradient, "theirs.safetensors")
    narrow = {name: x.to(torch.bfloat16) for name, x in gradient.items()}
    save_file(narrow, "narrow.safetensors")
    np.savez("ours.npz", **{"fc/kernel": gradient["fc.weight"].T, "fc/bias": gradient["fc.bias"]})
    assert cli.run(["compare", "ours.npz", "theirs.safetensors"]) == 0
    assert cli.run(["compare", "ours.npz", "narrow.safetensors"]) == 0
    assert cli.run(["compare", "ours.npz", "narrow.safetensors", "--rtol", "1e-5"]) == 1
    (tmp_path / "torn.safetensors").write_bytes(b"12345678{")
    assert cli.run(["compare", "ours.npz", "torn.safetensors"]) == 2


def test_gradients_of_torch_and_jax_go_in_as_they_are():
    theirs = {"w": torch.ones(3, dtype=torch.bfloat16, requires_grad=True)}
    assert compare_gradients({"w": jnp.ones(3)}, theirs).wrong == []
    assert compare_gradients({"w": 2 * jnp.ones(3)}, theirs).wrong[0].ratio == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_tensors_of_any_dtype_and_parameters_say_what_their_examples_counted(dtype):
    own = torch.nn.Parameter(torch.eye(3, 5).to(dtype))  # requires a gradient
    counts = torch.tensor([0.5, 0.25, 0.0], dtype=dtype)
    gradient = {"w": (counts @ own), "b": counts @ own}
    found = effective_weights(gradient, {"w": own, "b": own}, rtol=0.1)
    assert found.tolist() == [0.5, 0.25, 0.0]
    on_their_side = torch.view_as_complex(torch.ones(2, 3, 2)).conj()  # lazily
    assert effective_weights(on_their_side.sum(0), on_their_side[:1]).tolist() == [2.0]


def test_tensors_without_numbers_of_their_own_are_refused_in_words():
    sparse = torch.eye(3).to_sparse()
    with pytest.raises(TypeError, match="effective_weights: per_example_gradients must hold its"):
        effective_weights(torch.ones(3), sparse)
    with pytest.raises(TypeError, match=r"effective_weights: gradient\['w'\] must be an array"):
        effective_weights({"w": "x"}, {"w": np.ones((1, 1))})
