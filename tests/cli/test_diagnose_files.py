"""`diagnose --gradients`: a step that was written down, in three files or in one."""

import json

import numpy as np
import pytest
from command_line import printed, refusal, run

RNG = np.random.RandomState(0)
WEIGHTS = np.array([[[1, 1, 1], [1, 0, 0]], [[1, 1, 0], [2, 1, 1.0]]])
OWN = {"w": RNG.normal(size=(12, 5, 4)), "b": RNG.normal(size=(12, 3))}
SHARES = {
    "global_mean": WEIGHTS / WEIGHTS.sum(),
    "rank_token_mean": WEIGHTS / WEIGHTS.sum((1, 2), keepdims=True) / 2,
    "mean_of_means": WEIGHTS / WEIGHTS.sum(2, keepdims=True) / 4,
}


def gradient(name):
    return {n: np.tensordot(SHARES[name].reshape(-1), x, 1) for n, x in OWN.items()}


def recording(name, **changes):
    arrays = {f"gradient/{n}": x for n, x in gradient(name).items()}
    arrays |= {f"per_example/{n}": x for n, x in OWN.items()}
    part = np.arange(12) // 3
    return (
        arrays
        | {"weights": WEIGHTS.reshape(-1), "rank": part // 2, "microbatch": part % 2}
        | changes
    )


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    np.savez("own.npz", **OWN)
    np.save("w.npy", WEIGHTS.reshape(-1))
    for name in SHARES:
        np.savez(f"{name}.npz", **gradient(name))
    return tmp_path


THREE = ("--per-example", "own.npz", "--weights", "w.npy", "--ranks", "2", "--microbatches", "2")


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize("name", SHARES)
def test_three_files_are_named(name, capsys):
    assert run("diagnose", "--gradients", f"{name}.npz", *THREE) == (name != "global_mean")
    assert printed(capsys).startswith(f"{name}, factor 1")
    assert run("diagnose", "--gradients", f"{name}.npz", *THREE, "--json") == (
        name != "global_mean"
    )
    assert json.loads(capsys.readouterr().out)["convention"] == name


@pytest.mark.usefixtures("files")
def test_weights_may_be_laid_out_and_a_recording_holds_everything(capsys):
    np.save("w.npy", WEIGHTS)
    assert run("diagnose", "--gradients", "mean_of_means.npz", *THREE) == 1
    np.savez("step.npz", **recording("rank_token_mean"))
    assert run("diagnose", "--gradients", "step.npz") == 1
    assert "rank_token_mean, factor 1" in printed(capsys)
    mixed = RNG.permutation(12)  # examples in any order, each with its rank and microbatch
    changes = {n: x[mixed] for n, x in recording("global_mean").items() if not n.startswith("grad")}
    np.savez("mixed.npz", **recording("global_mean", **changes))
    assert run("diagnose", "--gradients", "mixed.npz") == 0


@pytest.mark.usefixtures("files")
def test_gradients_that_are_noisy_are_named_at_a_tolerance_that_allows_it(capsys):
    right = gradient("mean_of_means")
    noisy = {n: x * (1 + 1e-3 * RNG.normal(size=x.shape)) for n, x in right.items()}
    np.savez("noisy.npz", **noisy)
    said = refusal(capsys, "diagnose", "--gradients", "noisy.npz", *THREE)
    assert "must determine the weights to rtol=0.001" in said
    assert run("diagnose", "--gradients", "noisy.npz", *THREE, "--rtol", "0.02") == 1
    assert printed(capsys).startswith("mean_of_means, factor 1")
    said = refusal(capsys, "diagnose", "--gradients", "noisy.npz", *THREE, "--rtol", "1")
    assert "diagnose: --rtol must be in [0, 1), got 1" in said


@pytest.mark.usefixtures("files")
def test_padding_whose_gradient_says_nothing_is_left_out(capsys):
    empty = WEIGHTS.reshape(-1) == 0
    for silence in (0, np.nan):
        silent = {
            n: np.where(empty.reshape(-1, *[1] * (x.ndim - 1)), silence, x) for n, x in OWN.items()
        }
        np.savez("own.npz", **silent)
        assert run("diagnose", "--gradients", "mean_of_means.npz", *THREE) == 1
        assert "mean_of_means, factor 1" in printed(capsys)


def changed(**changes):
    return lambda: np.savez("step.npz", **recording("global_mean", **changes))


def without(name):
    return {each: x for each, x in recording("global_mean").items() if each != name}


BAD = {
    "NaN in the gradient": (
        changed(**{"gradient/b": np.full(3, np.nan)}), "the gradient must be finite, got NaN",
    ),
    "NaN where there is weight": (
        changed(**{"per_example/b": np.full((12, 3), np.nan)}), "finite where there is weight",
    ),
    "other shapes": (
        changed(**{"per_example/b": np.ones((12, 4))}), "of b must have the shape (12, 3)",
    ),
    "other names": (changed(**{"gradient/c": np.ones(3)}), "the same names, got c in one"),
    "no ranks": (
        lambda: np.savez("step.npz", **without("rank")),
        "a recorded step must hold weights, rank and microbatch, got none of rank",
    ),
    "negative weights": (changed(weights=-WEIGHTS.reshape(-1)), "must be finite, at least 0"),
    "ranks that are no numbers": (changed(rank=np.full(12, 0.5)), "with a rank and a microbatch"),
    "another gradient": (
        changed(**{"gradient/b": np.ones(3)}), "gradient must be a weighted sum of per_example",
    ),
    "copies": (
        changed(**{f"per_example/{n}": np.repeat(x[:1], 12, 0) for n, x in OWN.items()}),
        "must be linearly independent",
    ),
}  # fmt: skip


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize("case", BAD)
def test_a_step_that_says_nothing_is_one_sentence(case, capsys):
    write, said = BAD[case]
    write()
    assert said in refusal(capsys, "diagnose", "--gradients", "step.npz")


@pytest.mark.usefixtures("files")
def test_weights_too_even_to_tell_are_bad_input_and_no_verdict(capsys):
    even = np.ones(12)
    shares = {f"gradient/{n}": np.tensordot(even / 12, x, 1) for n, x in OWN.items()}
    changed(weights=even, **shares)()
    said = refusal(capsys, "diagnose", "--gradients", "step.npz")
    assert "must weigh its ranks and microbatches unequally, got weights under which" in said
    twice = {name: 2 * x for name, x in shares.items()}
    changed(weights=even, **twice)()
    assert run("diagnose", "--gradients", "step.npz") == 1


GIVEN = ("--gradients", "global_mean.npz")
ARGUMENTS = [
    ((), "either MODULE:FUNCTION or --gradients must be given, got neither"),
    (GIVEN, "must come with --per-example and --weights, got no --per-example"),
    ((*GIVEN, "--per-example", "own.npz"), "got no --weights"),
    (("--weights", "w.npy"), "--gradients must name the step's gradient, in place of a function"),
    (("users:right", *GIVEN, *THREE), "in place of a function, got a function too"),
    ((*GIVEN, *THREE, "-w", "5"), "in 5 x 2 equal runs for ranks and microbatches"),
    ((*GIVEN, *THREE, "-w", "0"), "diagnose: --ranks must be an integer in"),
    (
        (*GIVEN, *THREE[:2], "--weights", "own.npz"),
        "must be an .npy or a .txt of numbers",
    ),
    ((*GIVEN, *THREE[:2], "--weights", "nope.npy"), "nope.npy: No such file"),
    (("--gradients", "own.npz", *THREE), "the per-example gradient of"),
    (("--gradients", "step.npz", "--ranks", "2"), "must be given alone, got --num-replicas"),
]


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize(("arguments", "said"), ARGUMENTS)
def test_bad_arguments_are_one_line(arguments, said, capsys):
    changed()()
    assert said in refusal(capsys, "diagnose", *arguments)


def test_objects_are_never_unpickled(files, capsys):
    np.save("w.npy", np.array([[1], [1, 2]], object))
    said = refusal(capsys, "diagnose", "--gradients", "global_mean.npz", *THREE)
    assert "got Python objects, which are never unpickled" in said
