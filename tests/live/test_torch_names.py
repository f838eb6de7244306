"""Models of torch and of flax with one another's numbers: same outputs, same gradients, by name."""

from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from torch.nn import functional as F

from jax_ddp_weighting import compare_gradients, torch_names

RNG = np.random.RandomState(0)
WIDE = {"param_dtype": np.float64}  # of layers that compute in it, whatever they are given


@dataclass(frozen=True)
class Pair:
    """A model of torch and one of flax, and an input for each."""

    torch: torch.nn.Module
    inputs: np.ndarray
    flax: Any
    params: Any
    run: Any
    rules: dict[str, Any] = field(default_factory=dict)


def images(*shape):
    return RNG.normal(size=shape)


def to_last(x):
    """Channels from torch's place to flax's."""
    return np.moveaxis(x, 1, -1)


def linen(model, x, **options):
    """Variables of a linen model, shapes alone, and how it is run."""
    variables = jax.eval_shape(lambda key: model.init(key, x, **options), jax.random.key(0))
    return variables, lambda variables, x: model.apply(variables, x, **options)


# --- the models -----------------------------------------------------------------------------------


class Mlp(nn.Module):
    @nn.compact
    def __call__(self, x):
        for _ in range(2):
            x = nn.tanh(nn.Dense(5)(x))
        return nn.Dense(3)(x)


def mlp():
    layers = [torch.nn.Linear(5, 5), torch.nn.Tanh(), torch.nn.Linear(5, 5), torch.nn.Tanh()]
    model = Mlp()
    x = images(4, 5)
    return Pair(torch.nn.Sequential(*layers, torch.nn.Linear(5, 3)), x, x, *linen(model, x))


class TorchCnn(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = torch.nn.Conv2d(3, 4, 3), torch.nn.Conv2d(4, 4, 3, bias=False)
        self.bn1, self.bn2 = torch.nn.BatchNorm2d(4), torch.nn.BatchNorm2d(4, affine=False)
        self.fc1, self.fc2 = torch.nn.Linear(4 * 3 * 2, 6), torch.nn.Linear(6, 6)

    def forward(self, x):
        x = torch.relu(self.bn1(self.conv1(x)))
        x = torch.relu(self.bn2(self.conv2(x)))
        return self.fc2(torch.relu(self.fc1(x.flatten(1))))


class Cnn(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Conv(4, (3, 3), padding="VALID")(x)
        x = nn.relu(nn.BatchNorm(use_running_average=True)(x))
        x = nn.Conv(4, (3, 3), padding="VALID", use_bias=False)(x)
        plain = {"use_bias": False, "use_scale": False}
        x = nn.relu(nn.BatchNorm(use_running_average=True, **plain)(x))
        x = nn.relu(nn.Dense(6)(x.reshape(len(x), -1)))
        return nn.Dense(6)(x)


def cnn():
    x = images(2, 3, 7, 6)
    rules = {"fc1": ("Dense_0", "flattened", (4, 3, 2))}
    return Pair(TorchCnn(), x, to_last(x), *linen(Cnn(), to_last(x)), rules)


class TorchBlock(torch.nn.Module):
    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.conv1 = torch.nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = torch.nn.BatchNorm2d(outputs)
        self.conv2 = torch.nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = torch.nn.BatchNorm2d(outputs)
        self.downsample = None
        if stride > 1:
            conv = torch.nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.downsample = torch.nn.Sequential(conv, torch.nn.BatchNorm2d(outputs))

    def forward(self, x):
        y = self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x)))))
        return torch.relu(y + (x if self.downsample is None else self.downsample(x)))


class TorchResNet(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.bn1 = torch.nn.Conv2d(3, 4, 3, bias=False), torch.nn.BatchNorm2d(4)
        self.layer1 = torch.nn.Sequential(TorchBlock(4, 4, 1), TorchBlock(4, 4, 1))
        self.layer2 = torch.nn.Sequential(TorchBlock(4, 8, 2), TorchBlock(8, 8, 1))
        self.fc = torch.nn.Linear(8, 3)

    def forward(self, x):
        x = self.layer2(self.layer1(torch.relu(self.bn1(self.conv1(x)))))
        return self.fc(x.mean((2, 3)))


class Block(nnx.Module):
    def __init__(self, inputs, outputs, stride, rngs):
        plain = {"use_bias": False, "rngs": rngs}
        same = [(1, 1), (1, 1)]
        self.conv1 = nnx.Conv(inputs, outputs, (3, 3), stride, padding=same, **plain)
        self.bn1 = nnx.BatchNorm(outputs, use_running_average=True, rngs=rngs)
        self.conv2 = nnx.Conv(outputs, outputs, (3, 3), padding=same, **plain)
        self.bn2 = nnx.BatchNorm(outputs, use_running_average=True, rngs=rngs)
        self.projects = stride > 1
        if self.projects:
            self.conv_proj = nnx.Conv(inputs, outputs, (1, 1), stride, padding="VALID", **plain)
            self.norm_proj = nnx.BatchNorm(outputs, use_running_average=True, rngs=rngs)

    def __call__(self, x):
        y = self.bn2(self.conv2(nnx.relu(self.bn1(self.conv1(x)))))
        return nnx.relu(y + (self.norm_proj(self.conv_proj(x)) if self.projects else x))


class ResNet(nnx.Module):
    def __init__(self, rngs):
        self.stem = nnx.Conv(3, 4, (3, 3), padding="VALID", use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(4, use_running_average=True, rngs=rngs)
        sizes = [(4, 4, 1), (4, 4, 1), (4, 8, 2), (8, 8, 1)]
        self.blocks = nnx.List([Block(*each, rngs) for each in sizes])
        self.head = nnx.Linear(8, 3, rngs=rngs)

    def __call__(self, x):
        x = nnx.relu(self.norm(self.stem(x)))
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((1, 2)))


def with_nnx(make):
    model = nnx.eval_shape(lambda: make(nnx.Rngs(0)))
    graph, state, streams = nnx.split(model, nnx.Not(nnx.RngState), ...)

    def run(state, x):
        key = jax.random.key(0)  # that nothing draws from
        fill = lambda each: key if each.dtype == key.dtype else jnp.zeros((), each.dtype)  # noqa: E731
        return nnx.merge(graph, state, jax.tree.map(fill, streams))(x)

    return state, run


def resnet():
    x = images(2, 3, 8, 8)
    return Pair(TorchResNet(), x, to_last(x), *with_nnx(ResNet))


class EncoderBlock(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.LayerNorm(epsilon=1e-5)(x + nn.MultiHeadDotProductAttention(num_heads=2)(x))
        return nn.LayerNorm(epsilon=1e-5)(x + nn.Dense(6)(nn.relu(nn.Dense(8)(x))))


class Encoder(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(7, 6)(tokens)
        for _ in range(2):
            x = EncoderBlock()(x)
        return nn.Dense(3, name="classify")(x.mean(1))


class TorchEncoder(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(7, 6)
        layer = torch.nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True)
        self.encoder = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = torch.nn.Linear(6, 3)

    def forward(self, x):
        return self.head(self.encoder(self.embedding(x)).mean(1))


def transformer():
    x = RNG.randint(7, size=(2, 5))
    return Pair(TorchEncoder(), x, x, *linen(Encoder(), x))


class TorchLm(torch.nn.Module):
    """Tied, with separate projections and RMSNorm, as language models are today."""

    def __init__(self):
        super().__init__()
        self.wte, self.lm_head = torch.nn.Embedding(7, 6), torch.nn.Linear(6, 7, bias=False)
        self.lm_head.weight = self.wte.weight
        names = ("q_proj", "k_proj", "v_proj", "o_proj")
        self.attn = torch.nn.ModuleDict({n: torch.nn.Linear(6, 6, bias=False) for n in names})
        self.ln_1, self.ln_f = torch.nn.RMSNorm(6, eps=1e-6), torch.nn.RMSNorm(6, eps=1e-6)

    def forward(self, tokens):
        x = self.wte(tokens)
        y = self.ln_1(x)
        heads = [
            self.attn[n](y).unflatten(-1, (2, 3)).transpose(1, 2)
            for n in ("q_proj", "k_proj", "v_proj")
        ]
        y = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.attn["o_proj"](y.transpose(1, 2).flatten(2))
        return self.lm_head(self.ln_f(x))


class Lm(nnx.Module):
    def __init__(self, rngs):
        self.wte = nnx.Embed(7, 6, **WIDE, rngs=rngs)
        self.attn = nnx.MultiHeadAttention(2, 6, use_bias=False, decode=False, **WIDE, rngs=rngs)
        self.ln_1, self.ln_f = (nnx.RMSNorm(6, **WIDE, rngs=rngs) for _ in range(2))

    def __call__(self, tokens):
        x = self.wte(tokens)
        x = x + self.attn(self.ln_1(x), mask=nnx.make_causal_mask(tokens))
        return self.wte.attend(self.ln_f(x))


def language_model():
    x = RNG.randint(7, size=(2, 5))
    return Pair(TorchLm(), x, x, *with_nnx(Lm))


class TorchLstm(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = torch.nn.Embedding(7, 3)
        self.lstm = torch.nn.LSTM(3, 4, num_layers=2, bidirectional=True, batch_first=True)
        self.fc = torch.nn.Linear(8, 2)

    def forward(self, x):
        return self.fc(self.lstm(self.emb(x))[0])


class Lstm(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Embed(7, 3)(x)
        for layer in range(2):
            cells = [
                nn.OptimizedLSTMCell(4, **WIDE, name=f"{side}_{layer}") for side in ("fwd", "bwd")
            ]
            x = nn.Bidirectional(*(nn.RNN(cell) for cell in cells))(x)
        return nn.Dense(2)(x)


def lstm():
    x = RNG.randint(7, size=(2, 5))
    rules = {f"lstm.l{k}": f"fwd_{k}" for k in (0, 1)}
    rules |= {f"lstm.l{k}_reverse": f"bwd_{k}" for k in (0, 1)}
    return Pair(TorchLstm(), x, x, *linen(Lstm(), x), rules)


class TorchGru(torch.nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.rnn = kind(3, 4, batch_first=True)
        self.out = torch.nn.Linear(4, 2)

    def forward(self, x):
        return self.out(self.rnn(x)[0])


class Gru(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(2)(nn.RNN(nn.GRUCell(4, **WIDE))(x))


def gru():
    x = images(2, 5, 3)
    return Pair(TorchGru(torch.nn.GRU), x, x, *linen(Gru(), x))


class NnxRnn(nnx.Module):
    def __init__(self, cell, rngs):
        self.rnn = nnx.RNN(cell(3, 4, **WIDE, rngs=rngs))
        self.out = nnx.Linear(4, 2, rngs=rngs)

    def __call__(self, x):
        return self.out(self.rnn(x))


def nnx_rnn(kind, cell):
    x = images(2, 5, 3)
    return Pair(TorchGru(kind), x, x, *with_nnx(lambda rngs: NnxRnn(cell, rngs)))


def nnx_gru():
    pair = nnx_rnn(torch.nn.GRU, nnx.GRUCell)
    with torch.no_grad():
        pair.torch.rnn.bias_hh_l0[8:] = 0  # for which nnx has no place
    return pair


class TorchAutoencoder(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.down = torch.nn.Conv2d(3, 5, 3, stride=2)
        self.norm = torch.nn.GroupNorm(2, 4)
        self.mid = torch.nn.Conv2d(5, 4, 1)
        self.up1 = torch.nn.ConvTranspose2d(4, 5, 3, stride=2)
        self.up2 = torch.nn.ConvTranspose2d(5, 3, 2)
        self.slope = torch.nn.PReLU()

    def forward(self, x):
        x = self.slope(self.norm(self.mid(self.down(x))))
        return self.up2(torch.tanh(self.up1(x)))


class Autoencoder(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Conv(5, (3, 3), strides=2, padding="VALID", name="down")(x)
        x = nn.Conv(4, (1, 1), name="mid")(x)
        x = nn.PReLU(name="slope")(nn.GroupNorm(2, epsilon=1e-5, name="norm")(x))
        kind = {"padding": "VALID"}
        x = nn.ConvTranspose(5, (3, 3), strides=(2, 2), **kind, name="up1")(x)
        return nn.ConvTranspose(3, (2, 2), transpose_kernel=True, **kind, name="up2")(nn.tanh(x))


def autoencoder():
    x = images(2, 3, 7, 9)
    return Pair(TorchAutoencoder(), x, to_last(x), *linen(Autoencoder(), to_last(x)))


class TorchSignals(torch.nn.Module):
    """One and three dimensions, square kernels of transposed convolutions among them."""

    def __init__(self):
        super().__init__()
        self.conv_a, self.conv_b = torch.nn.Conv1d(2, 4, 3), torch.nn.Conv1d(4, 4, 2, groups=2)
        self.up = torch.nn.ConvTranspose1d(4, 4, 3)
        self.cube = torch.nn.Conv3d(1, 2, (2, 3, 1))
        self.back = torch.nn.ConvTranspose3d(2, 1, (2, 2, 2))

    def forward(self, x):
        x = self.up(torch.tanh(self.conv_b(self.conv_a(x))))
        return self.back(self.cube(x[:, None, :, :, None]))


class Signals(nnx.Module):
    def __init__(self, rngs):
        plain = {"padding": "VALID", "rngs": rngs}
        self.conv_a = nnx.Conv(2, 4, (3,), **plain)
        self.conv_b = nnx.Conv(4, 4, (2,), feature_group_count=2, **plain)
        self.up = nnx.ConvTranspose(4, 4, (3,), **plain)
        self.cube = nnx.Conv(1, 2, (2, 3, 1), **plain)
        self.back = nnx.ConvTranspose(2, 1, (2, 2, 2), transpose_kernel=True, **plain)

    def __call__(self, x):
        x = self.up(jnp.tanh(self.conv_b(self.conv_a(x))))
        return self.back(self.cube(x.swapaxes(1, 2)[:, :, :, None, None]))


def signals():
    x = images(2, 2, 9)
    rules = {"up": ("up", "conv_transpose")}
    return Pair(TorchSignals(), x, to_last(x), *with_nnx(Signals), rules)


class TorchVit(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.patches = torch.nn.Conv2d(3, 4, 2, stride=2)
        self.cls_token = torch.nn.Parameter(torch.zeros(1, 1, 4))
        self.pos_embed = torch.nn.Parameter(torch.zeros(1, 5, 4))
        self.attn = torch.nn.MultiheadAttention(4, 2, batch_first=True)
        self.ln1, self.ln2 = torch.nn.LayerNorm(4), torch.nn.LayerNorm(4)
        self.mlp = torch.nn.Sequential(
            torch.nn.Linear(4, 4), torch.nn.GELU(), torch.nn.Linear(4, 4)
        )

    def forward(self, x):
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], 1) + self.pos_embed
        y = self.ln1(x)
        x = x + self.attn(y, y, y, need_weights=False)[0]
        return x + self.mlp(self.ln2(x))


class Vit(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Conv(4, (2, 2), strides=2, padding="VALID")(x).reshape(len(x), -1, 4)
        cls = self.param("cls_token", nn.initializers.zeros, (1, 1, 4))
        x = jnp.concatenate([jnp.broadcast_to(cls, (len(x), 1, 4)), x], 1)
        x = x + self.param("pos_embed", nn.initializers.zeros, (1, 5, 4))
        y = nn.LayerNorm(epsilon=1e-5)(x)
        x = x + nn.MultiHeadDotProductAttention(num_heads=2)(y)
        y = nn.gelu(nn.Dense(4)(nn.LayerNorm(epsilon=1e-5)(x)), approximate=False)
        return x + nn.Dense(4)(y)


def vit():
    x = images(2, 3, 4, 4)
    return Pair(TorchVit(), x, to_last(x), *linen(Vit(), to_last(x)))


PAIRS = {
    "MLP": mlp,
    "CNN with BatchNorm": cnn,
    "ResNet": resnet,
    "transformer encoder": transformer,
    "tied language model": language_model,
    "two bidirectional LSTMs": lstm,
    "GRU": gru,
    "GRU of nnx": nnx_gru,
    "LSTM of nnx": lambda: nnx_rnn(torch.nn.LSTM, nnx.LSTMCell),
    "fused LSTM of nnx": lambda: nnx_rnn(torch.nn.LSTM, nnx.OptimizedLSTMCell),
    "RNN of nnx": lambda: nnx_rnn(torch.nn.RNN, partial(nnx.SimpleCell, dtype=np.float64)),
    "convolutional autoencoder": autoencoder,
    "convolutions of one and three dimensions": signals,
    "vision transformer": vit,
}


@cache
def made(name):
    """A pair with random numbers everywhere, so that nothing is equal by being 0 or 1."""
    with jax.enable_x64(True):
        pair = PAIRS[name]()
    torch.manual_seed(0)
    model = pair.torch.double().eval()
    with torch.no_grad():
        for each in {id(x): x for x in [*model.parameters(), *model.buffers()]}.values():
            if each.is_floating_point():
                each += 0.3 * torch.rand_like(each) * (each != 0 if name == "GRU of nnx" else 1)
    names = torch_names(model.state_dict(), pair.params, rules=pair.rules)
    return pair, names


@cache
def compared(name):
    """Outputs and gradients of both."""
    pair, names = made(name)
    assert names.complete, str(names)
    out = pair.torch(torch.tensor(pair.inputs))
    pull = np.random.RandomState(1).normal(size=out.shape)
    pair.torch.zero_grad()
    (out * torch.tensor(pull)).sum().backward()
    theirs = names.gradients({n: p.grad for n, p in pair.torch.named_parameters()})
    last = (out.ndim == 4 and pair.inputs.ndim == 4) or out.ndim == 5
    with jax.enable_x64(True):
        tree = names.to_flax(pair.torch.state_dict())
        collections = isinstance(tree, dict) and "params" in tree
        trained = tree["params"] if collections else tree
        own = to_last(pull) if last else pull

        def loss(trained):
            whole = {**tree, "params": trained} if collections else trained
            out = pair.run(whole, jnp.asarray(pair.flax))
            return (out * own).sum(), out

        (_, ours), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True, allow_int=True))(
            trained
        )
    theirs_out = out.detach().numpy()
    return np.asarray(ours), to_last(theirs_out) if last else theirs_out, gradient, theirs


def allowed_in(name):
    return 2e-6 if name == "tied language model" else 1e-9  # nnx's attention has a float32 in it


@pytest.mark.parametrize("name", PAIRS)
def test_outputs_are_equal(name):
    ours, theirs, _, _ = compared(name)
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=allowed_in(name) * np.abs(theirs).max())
    assert np.abs(theirs).max() > 1e-2


def without_statistics(gradient):
    """The gradient of a state, of which those of statistics are no gradients."""
    return nnx.filter_state(gradient, nnx.Param) if isinstance(gradient, nnx.State) else gradient


@pytest.mark.parametrize("name", PAIRS)
def test_gradients_are_equal_by_name_and_a_wrong_one_is_found(name):
    _, _, ours, theirs = compared(name)
    ours = without_statistics(ours)
    allowed = 10 * allowed_in(name)
    report = compare_gradients(ours, theirs, rtol=allowed)
    assert not report.wrong, str(report)
    leaves, structure = jax.tree.flatten(ours)
    place = max(range(len(leaves)), key=lambda k: leaves[k].size)
    for change in (lambda x: x[::-1], lambda x: 2 * x, lambda x: x + 1e-3):
        wrong = [change(np.asarray(x)) if k == place else x for k, x in enumerate(leaves)]
        found = compare_gradients(jax.tree.unflatten(structure, wrong), theirs, rtol=allowed).wrong
        assert len(found) == 1


@pytest.mark.parametrize("name", PAIRS)
def test_there_and_back_is_exact(name):
    pair, names = made(name)
    given = pair.torch.state_dict()
    tree = names.to_flax(given)
    back = names.to_torch(tree)
    assert back.keys() == given.keys()
    assert all(torch.equal(back[n], given[n]) and back[n].dtype == given[n].dtype for n in given)
    pair.torch.load_state_dict(back)
    again = names.to_flax(back)
    assert all(map(np.array_equal, jax.tree.leaves(tree), jax.tree.leaves(again)))
    changed = jax.tree.map(lambda x: x * 3 + 1, tree)
    if name != "GRU of nnx":
        other = names.to_flax(names.to_torch(changed))
        assert all(map(np.array_equal, jax.tree.leaves(changed), jax.tree.leaves(other)))
