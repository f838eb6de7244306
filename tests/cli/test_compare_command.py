"""`compare`: two gradients in files, by name; and what is no such file."""

import json
import sys

import jax.numpy as jnp
import numpy as np
import pytest
from command_line import printed, refusal, run

RNG = np.random.RandomState(0)
OURS = {
    "Dense_0/kernel": RNG.normal(size=(4, 4)),
    "Dense_0/bias": RNG.normal(size=4),
    "Dense_1/kernel": RNG.normal(size=(4, 4)),
    "Dense_1/bias": RNG.normal(size=4),
}
TORCHS = {
    f"fc{k + 1}.{'weight' if part == 'kernel' else part}": OURS[f"Dense_{k}/{part}"].T
    for k in (0, 1)
    for part in ("kernel", "bias")
}


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    np.savez("ours.npz", **OURS)
    np.savez("theirs.npz", **TORCHS)
    return tmp_path


@pytest.mark.usefixtures("files")
def test_torchs_names_are_brought_to_ours(capsys):
    assert run("compare", "ours.npz", "theirs.npz") == 0
    out = printed(capsys)
    assert out.splitlines()[0].split() == ["leaf", "difference", "allowed", "ratio", "where"]
    assert "Dense_0/kernel" in out
    assert out.endswith("4 leaves equal.")


@pytest.mark.usefixtures("files")
def test_equal_names_are_compared_as_they_are(capsys):
    np.savez("wrong.npz", **{**OURS, "Dense_0/kernel": OURS["Dense_0/kernel"].T})
    np.savez("same.npz", **{"params." + name.replace("/", "."): x for name, x in OURS.items()})
    assert run("compare", "ours.npz", "same.npz") == 0
    assert run("compare", "wrong.npz", "ours.npz") == 1
    out = printed(capsys)
    assert "theirs; is the other transposed" in out
    assert out.endswith("1 of 4 leaves differ.")
    assert run("compare", "wrong.npz", "ours.npz", "--json") == 1
    found = json.loads(capsys.readouterr().out)
    assert not found["right"]
    assert [x["leaf"] for x in found["leaves"] if not x["equal"]] == ["Dense_0/kernel"]


@pytest.mark.usefixtures("files")
def test_a_swapped_pair_of_torchs_is_found(capsys):
    swapped = {n.translate(str.maketrans("12", "21")): x for n, x in TORCHS.items()}
    np.savez("swapped.npz", **swapped)
    assert run("compare", "ours.npz", "swapped.npz") == 1
    assert "is swapped with Dense_1/kernel" in printed(capsys)
    rules = ("--rule", "fc1=Dense_1", "--rule", "fc2=Dense_0")
    assert run("compare", "ours.npz", "swapped.npz", *rules) == 0


@pytest.mark.usefixtures("files")
def test_a_tolerance_is_the_users(capsys):
    np.savez("near.npz", **{name: x * (1 + 1e-4) for name, x in OURS.items()})
    assert run("compare", "near.npz", "ours.npz") == 1
    assert run("compare", "near.npz", "ours.npz", "--rtol", "1e-3") == 0


@pytest.mark.usefixtures("files")
def test_names_that_do_not_tell_are_listed_and_settled_by_a_rule(capsys):
    odd = {name.replace("fc1", "a").replace("fc2", "b"): x for name, x in TORCHS.items()}
    np.savez("odd.npz", **odd)
    said = refusal(capsys, "compare", "ours.npz", "odd.npz")
    assert "theirs, of which each could be several: a.weight, a.bias, b.weight, b.bias" in said
    assert "--rule torch=ours" in said
    assert run("compare", "ours.npz", "odd.npz", "--rule", "a=Dense_0") == 0
    printed(capsys)
    np.savez("aux.npz", **TORCHS, **{"aux.weight": np.ones((2, 2))})
    assert "no counterpart for theirs: aux.weight" in refusal(
        capsys, "compare", "ours.npz", "aux.npz"
    )
    assert run("compare", "ours.npz", "aux.npz", "--rule", "aux=") == 0
    square = ("--rule", "fc1.weight=Dense_0/kernel:as_is")
    assert run("compare", "ours.npz", "theirs.npz", *square) == 1


def test_a_flattened_image_is_told_by_a_rule(files, capsys):
    """What torch has channels first, flax has channels last."""
    image = np.arange(4 * 12.0).reshape(4, 2, 3, 2)  # of channels, height and width
    np.savez("image.npz", **{"fc.weight": image.reshape(4, 12), "fc.bias": np.ones(4)})
    kernel = image.transpose(2, 3, 1, 0).reshape(12, 4)
    np.savez("ours.npz", **{"Dense_0/kernel": kernel, "Dense_0/bias": np.ones(4)})
    assert run("compare", "ours.npz", "image.npz", "--rule", "fc=Dense_0") == 1
    flattened = ("--rule", "fc=Dense_0:flattened:2,3,2")
    assert run("compare", "ours.npz", "image.npz", *flattened) == 0
    assert run("compare", "ours.npz", "image.npz", "--rule", "fc=Dense_0:flattened:3,2,2") == 1


def safetensors_file(path, arrays):
    """As the format says: a length, a header, and the numbers."""
    header, numbers = {}, b""
    for name, array in arrays.items():
        data = np.ascontiguousarray(array, np.float64).tobytes()
        ends = [len(numbers), len(numbers) + len(data)]
        header[name] = {"dtype": "F64", "shape": array.shape, "data_offsets": ends}
        numbers += data
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + numbers)


def test_safetensors_are_read_where_they_are_installed_and_else_one_sentence(
    files, capsys, monkeypatch
):
    safetensors_file(files / "theirs.safetensors", TORCHS)
    monkeypatch.setitem(sys.modules, "safetensors", None)
    said = refusal(capsys, "compare", "ours.npz", "theirs.safetensors")
    assert "must be read by the package safetensors, got none installed. pip install" in said


def objects(path):
    np.savez(path, **{**OURS, "Dense_0/bias": np.array([[1], [1, 2]], object)})


def unnamed(path):
    np.savez(path, *OURS.values())


def torn(path):
    np.savez(path, **OURS)
    path.write_bytes(path.read_bytes()[:300])


def flipped(path):
    np.savez(path, **OURS)
    data = bytearray(path.read_bytes())
    data[150] ^= 255
    path.write_bytes(data)


def one_array(path):
    with path.open("wb") as file:
        np.save(file, np.ones(3))


FILES = {
    "no names": (unnamed, "x.npz must name its arrays, got arr_0"),
    "objects": (objects, "must hold numbers, got Python objects, which are never unpickled"),
    "torn": (torn, "must be a whole file of numpy's"),
    "a flipped bit": (flipped, "must be a whole file of numpy's"),
    "empty": (lambda path: path.write_bytes(b""), "must be a whole file of numpy's"),
    "text": (lambda path: path.write_text("hello"), "must be a whole file of numpy's"),
    "one array": (one_array, "must hold arrays by name, got one array without a name"),
    "nothing in it": (lambda path: np.savez(path), "must hold arrays, got none"),
    "bfloat16 as numpy writes it": (
        lambda path: np.savez(path, **{n: x.astype(jnp.bfloat16) for n, x in OURS.items()}),
        "bfloat16 is raw bytes to numpy: write float32",
    ),
    "words": (lambda path: np.savez(path, a=np.array("b")), "must be an array of numbers, got"),
    "NaN": (
        lambda path: np.savez(path, **{**OURS, "Dense_0/bias": np.full(4, np.nan)}),
        "theirs must be finite, got NaN or infinity at Dense_0/bias",
    ),
    "other shapes": (
        lambda path: np.savez(path, **{**OURS, "Dense_0/bias": np.ones(5)}),
        "must have the same shapes, got (4,) and (5,) at Dense_0/bias",
    ),
    "a missing leaf": (
        lambda path: np.savez(path, **{n: x for n, x in OURS.items() if n != "Dense_0/bias"}),
        "no counterpart for ours: ",
    ),
    "a missing leaf of torch's": (
        lambda path: np.savez(path, **{n: x for n, x in TORCHS.items() if n != "fc1.bias"}),
        "theirs, of which each could be several: fc2.weight",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", FILES)
def test_a_file_that_cannot_be_compared_is_one_sentence(case, files, capsys):
    write, said = FILES[case]
    write(files / "x.npz")
    assert said in refusal(capsys, "compare", "ours.npz", "x.npz")


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("ours.npz", "nope.npz"), "nope.npz: No such file"),
        (("ours.npz", "x.pt"), "x.pt must be an .npz or a .safetensors, got .pt suffix. A file of"),
        (("ours.npz", "x.txt"), "got .txt suffix. Write it by np.savez"),
        (("ours.npz",), "Missing argument 'theirs'"),
        (("ours.npz", "ours.npz", "--rtol", "2"), "compare: --rtol must be in [0, 1), got 2"),
        (("ours.npz", "theirs.npz", "--rule", "fc1"), "--rule must be torch=ours, torch=ours:kind"),
        *(
            (
                ("ours.npz", "theirs.npz", "--rule", f"fc1=Dense_0:{kind}"),
                "--rule must give the axes that were flattened, in torch's order, got"
                f" 'fc1=Dense_0:{kind}'. For instance: --rule fc1=Dense_0:flattened:16,5,5",
            )
            for kind in ("flattened", "flattened:", "flattened:a,b", "flattened:2,,3", "linear:4")
        ),
        (
            ("ours.npz", "theirs.npz", "--rule", "x=y"),
            "must name what the state dict holds, got 'x'",
        ),
    ],
)
def test_bad_arguments_are_one_line(arguments, said, capsys):
    assert said in refusal(capsys, "compare", *arguments)


def test_nothing_in_a_file_is_unpickled(files, capsys):
    class Trap:
        def __reduce__(self):
            return (open, (str(files / "sprung"), "w"))

    array = np.empty(1, object)
    array[0] = Trap()
    np.savez("trap.npz", w=array)
    assert "never unpickled" in refusal(capsys, "compare", "trap.npz", "trap.npz")
    assert not (files / "sprung").exists()
