"""Two gradients by name: what is equal, what a wrong one is, and what cannot be compared."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_ddp_weighting import compare_gradients

RNG = np.random.RandomState(0)


def gradient():
    return {
        "conv": {"kernel": RNG.normal(size=(3, 3, 4, 4)), "bias": RNG.normal(size=4)},
        "fc1": {"kernel": RNG.normal(size=(6, 6)), "bias": RNG.normal(size=6)},
        "fc2": {"kernel": RNG.normal(size=(6, 6)), "bias": RNG.normal(size=6)},
    }


RIGHT = gradient()


def changed(module, leaf, value):
    return RIGHT | {module: RIGHT[module] | {leaf: value}}


def wrong(ours, rtol=1e-9):
    return {each.leaf: each.note for each in compare_gradients(ours, RIGHT, rtol=rtol).wrong}


def test_equal_gradients_are_equal_and_the_report_is_a_table():
    report = compare_gradients(RIGHT, RIGHT)
    assert report.wrong == []
    lines = str(report).splitlines()
    assert lines[0].split() == ["leaf", "difference", "allowed", "ratio", "where"]
    assert lines[1].split()[:2] == ["conv/bias", "0.0e+00"]
    assert [each.leaf for each in report.differences][:3] == [
        "conv/bias",
        "conv/kernel",
        "fc1/bias",
    ]


KERNEL, WINDOW = RIGHT["fc1"]["kernel"], RIGHT["conv"]["kernel"]
INSTEAD = {
    "transposed": (changed("fc1", "kernel", KERNEL.T), "is the other transposed"),
    "transposed twice as large": (changed("fc1", "kernel", 2 * KERNEL.T), ""),
    "a window transposed": (
        changed("conv", "kernel", WINDOW.transpose(0, 1, 3, 2)),
        "is the other transposed to axes (0, 1, 3, 2)",
    ),
    "turned around": (
        changed("conv", "kernel", WINDOW[::-1, ::-1]), "is the other with its window turned around",
    ),
    "both": (
        changed("conv", "kernel", WINDOW[::-1, ::-1].transpose(0, 1, 3, 2)),
        "is the other transposed, with its window turned around",
    ),
    "rows in another order": (
        changed("fc1", "kernel", KERNEL[[2, 0, 1, 5, 4, 3]]),
        "has axis 0 of the other in another order",
    ),
    "columns in another order": (
        changed("fc1", "kernel", KERNEL[:, [2, 0, 1, 5, 4, 3]]),
        "has axis 1 of the other in another order",
    ),
    "another leaf's": (
        changed("fc1", "kernel", RIGHT["fc2"]["kernel"]), "is the other's fc2/kernel",
    ),
    "twice": (changed("fc1", "kernel", 2 * KERNEL), ""),
    "one entry": (changed("fc1", "kernel", KERNEL + 1e-3 * np.eye(6)), ""),
    "zero": (changed("fc1", "kernel", 0 * KERNEL), ""),
}  # fmt: skip


@pytest.mark.parametrize("case", INSTEAD)
def test_a_wrong_leaf_is_found_and_named(case):
    ours, note = INSTEAD[case]
    assert [*wrong(ours).values()] == [note]
    assert case != "twice" or compare_gradients(ours, RIGHT).wrong[0].ratio == pytest.approx(2)


def test_a_swapped_pair_is_named_on_both_sides():
    ours = RIGHT | {"fc1": RIGHT["fc2"], "fc2": RIGHT["fc1"]}
    assert wrong(ours) == {
        "fc1/kernel": "is swapped with fc2/kernel",
        "fc2/kernel": "is swapped with fc1/kernel",
        "fc1/bias": "is swapped with fc2/bias",
        "fc2/bias": "is swapped with fc1/bias",
    }
    assert "is swapped with fc1/bias" in str(compare_gradients(ours, RIGHT))


def test_rounding_has_no_note_and_is_allowed_by_dtype():
    ours = changed("fc1", "kernel", KERNEL * (1 + 1e-7))
    assert wrong(ours) == {"fc1/kernel": ""}
    as_float32 = {
        module: {name: x.astype(np.float32) for name, x in leaves.items()}
        for module, leaves in ours.items()
    }
    assert compare_gradients(as_float32, RIGHT).wrong == []
    assert compare_gradients(ours, RIGHT).wrong != []


def test_a_leaf_that_cancels_is_measured_by_the_rounding_of_the_others():
    ours = changed("fc1", "bias", np.float64([1e-17, 0, 0, -1e-17, 0, 0]))
    theirs = changed("fc1", "bias", np.zeros(6))
    assert compare_gradients(ours, theirs).wrong == []
    assert compare_gradients(changed("fc1", "bias", np.full(6, 1e-9)), theirs).wrong != []


DEEP = {  # as a deep network has them: each leaf some times smaller than the next
    f"fc{layer}": np.float32(10.0 ** (layer - 5) * RNG.normal(size=(6, 6))) for layer in range(6)
}
SMALL_AND_WRONG = {
    "transposed": (np.transpose, "is the other transposed"),
    "turned over": (np.negative, ""),
    "thrown away": (np.zeros_like, ""),
    "twice": (lambda leaf: 2 * leaf, ""),
}


@pytest.mark.parametrize("case", SMALL_AND_WRONG)
@pytest.mark.parametrize("rtol", [None, 1e-4, 1e-2, 0.3])
def test_no_tolerance_hides_a_leaf_that_is_smaller_than_the_others(case, rtol):
    change, note = SMALL_AND_WRONG[case]
    ours = DEEP | {name: change(DEEP[name]) for name in ("fc0", "fc3")}
    found = compare_gradients(ours, DEEP, rtol=rtol).wrong
    assert {each.leaf: each.note for each in found} == {"fc0": note, "fc3": note}
    # and what is within the tolerance of each leaf is equal
    near = {name: leaf * np.float32(1 + (rtol or 1e-5) / 2) for name, leaf in DEEP.items()}
    assert compare_gradients(near, DEEP, rtol=rtol).wrong == []


@pytest.mark.parametrize("dtype", [jnp.bfloat16, np.float16])
def test_a_small_leaf_in_half_precision_is_measured_by_itself(dtype):
    theirs = {name: leaf.astype(dtype) for name, leaf in DEEP.items()}
    ours = {name: -leaf if name < "fc4" else leaf for name, leaf in theirs.items()}
    found = compare_gradients(ours, theirs)
    assert {each.leaf: each.ratio for each in found.wrong} == {f"fc{n}": -1 for n in range(4)}
    assert not any(each.note for each in found.wrong)
    # cast from float32, whatever it was rounded to there
    rounded = {name: (leaf * np.float32(1 + 1e-6)).astype(dtype) for name, leaf in DEEP.items()}
    assert compare_gradients(rounded, theirs).wrong == []


def test_a_leaf_that_cancels_in_half_precision_is_said_to_be_rounding_perhaps():
    theirs = {"w": np.ones(3, jnp.bfloat16), "bias": np.array([1e-3, 2e-3], jnp.bfloat16)}
    ours = {**theirs, "bias": np.array([-2e-3, 1e-3], jnp.bfloat16)}
    (found,) = compare_gradients(ours, theirs).wrong
    assert found.note == "may be bfloat16's rounding of larger leaves: compare it in float32"
    in_float32 = {name: leaf.astype(np.float32) for name, leaf in ours.items()}
    theirs = {name: leaf.astype(np.float32) for name, leaf in theirs.items()}
    assert [each.note for each in compare_gradients(in_float32, theirs).wrong] == [""]


def test_names_decide_and_not_how_they_are_spelled():
    flat = {f"{module}/{name}": x for module, leaves in RIGHT.items() for name, x in leaves.items()}
    dots = {name.replace("/", "."): x for name, x in reversed(flat.items())}
    brackets = {f"params['{n.replace('/', chr(39) + '][' + chr(39))}']": x for n, x in flat.items()}
    for ours in (flat, dots, brackets, {"params": RIGHT}):
        assert compare_gradients(ours, RIGHT).wrong == []
        assert compare_gradients(RIGHT, ours).wrong == []


def test_states_of_nnx_and_narrow_arrays_go_in():
    state = nnx.State({"w": nnx.Param(jnp.ones(3, jnp.bfloat16))})
    theirs = {"w": np.ones(3, jnp.bfloat16)}
    assert compare_gradients(state, theirs).wrong == []
    assert compare_gradients(state, {"w": 1.2 * np.ones(3)}).wrong != []


ONE = {"w": np.ones(3), "b": np.ones(2)}
BAD = {
    "missing": ({"w": ONE["w"]}, ONE, ValueError, "got b missing in ours. Bring torch's names"),
    "missing in theirs": (ONE, {"w": ONE["w"]}, ValueError, "got b missing in theirs"),
    "other names": ({"v": 1.0}, {"w": 1.0}, ValueError, "got w missing in ours and v missing in"),
    "other shapes": ({"w": np.ones((2, 3))}, {"w": np.ones((3, 2))}, ValueError,
                     r"same shapes, got \(2, 3\) and \(3, 2\) at w. One is the other transposed"),
    "NaN in ours": ({**ONE, "b": np.array([1, np.nan])}, ONE, ValueError,
                    "ours must be finite, got NaN or infinity at b"),
    "infinity in theirs": (ONE, {**ONE, "b": np.array([1, np.inf])}, ValueError,
                           "theirs must be finite"),
    "empty": ({}, ONE, ValueError, "ours must have leaves, got an empty tree"),
    "counters": ({"n": np.arange(3)}, ONE, TypeError, "must hold floating point numbers, got int"),
    "words": ({"w": "x"}, ONE, TypeError, "ours at w must be an array of numbers"),
    "one name twice": ({"a/b": 1.0, "a": {"b": 1.0}}, ONE, ValueError, "name each leaf once"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_compared_is_one_sentence(case):
    ours, theirs, error, said = BAD[case]
    with pytest.raises(error, match=f"compare_gradients: .*{said}"):
        compare_gradients(ours, theirs)


def test_a_tolerance_that_allows_anything_is_refused():
    with pytest.raises(ValueError, match=r"compare_gradients: rtol must be in \[0, 1\)"):
        compare_gradients(ONE, ONE, rtol=1)
