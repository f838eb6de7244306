"""The examples run as a user runs them, and print what the README says of them.

But for the import of JAX, of which a server takes care; `make demo` runs one as it is.
"""

import re
from importlib.util import find_spec
from pathlib import Path

from programs import run_example as run

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_digits_counts_every_image_once_and_proves_its_gradient():
    out = run("digits.py")
    epochs = re.findall(
        r"accepted (\d+)  duplicated (\d+)  omitted (\d+)  order changed: (\w+)", out
    )
    assert epochs[0] == ("1437", "0", "0", "first")
    assert set(epochs[1:]) == {("1437", "0", "0", "True")}
    right, counted = re.search(r"accuracy: 0\.\d+ = (\d+) of (\d+) test ids", out).groups()
    assert counted == "360"
    assert int(right) >= 330
    split, ours, naive = re.search(
        r"a last step of ([\d +]+) rows .* within (\S+) of one device's; .* is (\d+)% off", out
    ).groups()
    assert split == "3 + 2 + 2 + 2"
    assert float(ours) < 1e-5
    shown = re.search(
        r"last step of 3 \+ 2 \+ 2 \+ 2 digits, .* about\s(\d+) % off", README, re.DOTALL
    )
    assert abs(int(naive) - int(shown.group(1))) <= 2


def test_tokens_shows_naive_errors_grow_while_ours_stay_at_rounding():
    out = run("tokens.py")
    rows = re.findall(r"^(\w[\w ]*?) +((?:\d\.\de[+-]\d\d *)+)$", out, re.MULTILINE)
    errors = {name: [float(each) for each in values.split()] for name, values in rows}
    assert set(errors) == {
        "ours",
        "mean of means",
        "rank means",
        "microbatch means",
        "padding counted",
    }
    assert max(errors["ours"]) < 1e-5
    assert errors["mean of means"][-1] > 2 * errors["mean of means"][0] > 0.01
    assert errors["microbatch means"][0] < 1e-5 < 0.01 < errors["microbatch means"][-1]


def test_experts_are_balanced_over_the_step_however_it_is_split():
    out = run("experts.py")
    splits = re.findall(r"(\d) x (\d)", out)
    assert [sorted(map(int, column)) for column in zip(*splits, strict=True)] == [[1, 2, 4]] * 2
    rows = re.findall(r"^(shares of the step|of each microbatch) +(.*)$", out, re.MULTILINE)
    errors = {name: list(map(float, values.split())) for name, values in rows}
    assert max(errors["shares of the step"]) < 1e-5
    assert errors["of each microbatch"][0] < 1e-5
    assert min(errors["of each microbatch"][1:]) > 5e-3
    losses = list(map(float, re.findall(r"epoch \d: (\S+) nats a byte", out)))
    assert losses == sorted(losses, reverse=True)


# what it does as -> convention, factor
WILD = {
    "flax, wmt example (pmap)": ("mean_of_means", "1"),
    "scenic, weighted losses (pmap)": ("mean_of_means", "1"),
    "EasyLM, tokens of a sequence": ("mean_of_means", "1"),
    "big_vision, captions": ("mean_of_means", "1"),
    "t5x, as it comes": ("sum", "1"),
    "t5x, by real target tokens": ("step_token_mean", "2"),
    "levanter, accumulation of 2022": ("step_token_mean", "1"),
    "MaxText, accumulation": ("unknown", ""),
    "MaxText, accumulation by MultiSteps": ("step_token_mean", "1"),
    "MaxText, one batch": ("global_mean", "1"),
    "kauldron, masked losses": ("global_mean", "1"),
    "DETR, number of boxes": ("clamped_weight", "1"),
}
RIGHT_ON_TEXT = {"t5x, as it comes", "MaxText, accumulation", "MaxText, one batch"} | {
    "kauldron, masked losses",
    "DETR, number of boxes",
}
HF = {
    "HF Trainer, tokens averaged across devices": ("global_mean", "1"),
    "HF Trainer, each device its own tokens": ("rank_token_mean", "1"),
}


def test_trainers_in_the_wild_are_named_and_measured_and_the_docs_say_so():
    head, *lines = run("in_the_wild.py").splitlines()
    width = head.index("is named")
    rows = {line[:width].strip(): line[width:].split() for line in lines}
    for name, (convention, factor) in WILD.items():
        found = rows[name]
        assert found[0] == convention
        assert found[1:2] == ([factor] if factor else found[1:2])
        at_best = float(found[-1].rstrip("%"))
        assert (at_best < 0.1) == (name in RIGHT_ON_TEXT)
        assert name in RIGHT_ON_TEXT or at_best > 3
    assert "a gradient that is not finite where the whole step is empty" in "\n".join(lines)
    missing = [name for name in ("accelerate", "torch", "transformers") if not find_spec(name)]
    if missing:
        needed = "HF Trainer: not run, needs accelerate, torch, transformers"
        assert lines[-1] == f"{needed}: {', '.join(missing)} missing"
    else:
        assert {name: tuple(rows[name][:2]) for name in HF} == HF
    page = (ROOT / "docs" / "in-the-wild.md").read_text()
    told = dict(re.findall(r"^\| ([\w, -]+?(?: \(pmap\))?) \| `?(\w+)`?.* \|$", page, re.MULTILINE))
    assert {name: told[name] for name in WILD | HF} == {
        name: convention for name, (convention, _) in (WILD | HF).items()
    }


def test_loaders_say_which_loaders_they_compared():
    out = run("loaders.py")
    compared = re.search(r"compared: ([\w, ]+)\n", out).group(1).split(", ")
    missing = re.search(r"not compared: ([\w, ]+)\n", out)
    missing = missing.group(1).split(", ") if missing else []
    assert sorted(compared + missing) == ["grain", "numpy", "torch"]
    assert missing == [name for name in ("torch", "grain") if not find_spec(name)]
    for name in compared:
        assert len(re.findall(rf"{name}: the same ids, 103 of 103", out)) == 3
    drawn = re.findall(r"309 rows of 3 epochs, new in each, mean (\S+), learned (\S+); of all", out)
    assert len(drawn) == 2
    for mean, learned in drawn:
        assert abs(float(mean) - float(learned)) < 0.12 * float(mean)


def test_digits_nnx_ends_with_one_devices_parameters():
    out = run("digits_nnx.py")
    losses = re.findall(r"loss on one device (\S+), on four (\S+)", out)
    assert len(losses) == 8
    assert float(losses[-1][0]) < 0.3 * float(losses[0][0])
    (off,) = re.findall(r"parameters of four devices are within (\S+) of one's", out)
    assert float(off) < 1e-3
    right, counted = re.search(r"= (\d+) of (\d+) test ids", out).groups()
    assert counted == "360"
    assert int(right) > 320


def test_evaluation_counts_the_test_images_in_every_way():
    out = run("evaluation.py")
    hits, counted = re.findall(r"accuracy 0\.\d+ = (\d+) of (\d+)", out)[-1]
    assert counted == "360"
    assert int(hits) >= 330
    assert "on the 360 rows" in out
    assert f"confusions {360 - int(hits)}\n" in out
    assert f"'accuracy': '{int(hits) / 360:.4f}'" in out
    by_position = re.search(r"by position, padding and all: (\d+) of (\d+)", out)
    assert by_position.group(2) == "408"


def test_budget_compiles_the_shapes_that_were_told_and_counts_every_word():
    out = run("budget.py")
    plain, by_budget, packed = map(float, re.findall(r"(\d+\.\d)% in", out))
    assert packed < 3 < by_budget < plain
    words = re.findall(r"(\w+) epoch \d: \d+ steps, (\d+) words, loss (\d\.\d+)", out)
    assert len(words) == 4
    assert len({count for _, count, _ in words}) == 1  # each pair of words once, either way
    for name in ("budget", "packed"):
        losses = [float(loss) for kind, _, loss in words if kind == name]
        assert losses[-1] < losses[0]
    assert re.findall(r"(\w+): compiled (\d) shapes, all told before: True", out) == [
        ("budget", "2"),
        ("packed", "1"),
    ]


def test_a_run_that_is_killed_twice_ends_with_the_parameters_of_one_that_is_not():
    out = run("resumable.py")
    assert re.findall(r"^(\d x \d)(?:, killed at step \d+ of 48)?$", out, re.MULTILINE) == [
        *("2 x 2", "1 x 3", "3 x 1")
    ]
    went_on = re.findall(r"goes on after step (\d+), (\d+) images due", out)
    assert len(went_on) == 2
    assert int(went_on[0][0]) < int(went_on[1][0]) or went_on[0] == went_on[1]
    for step, due in went_on:  # of the epoch that it was stopped in
        assert int(due) == max(0, 1437 - 60 * (int(step) % 24 or 24))
    assert out.count("epoch 1: each of 1437 images once") == 2
    (off,) = re.findall(r"within (\S+) of those of a run that nobody disturbed", out)
    assert float(off) < 1e-5
    # what a run pays to survive: the lines that are marked, and the position in them
    source = (ROOT / "examples" / "resumable.py").read_text()
    loop = source[source.index("def train(") : source.index("def work(")].splitlines()
    words = ("manifest", "manager", "options", "position", "run", "ledger", "now", "step", "Named")
    assert sum(any(re.search(rf"\b{word}\b", line) for word in words) for line in loop) <= 40


def test_device_epoch_is_the_loop_to_the_last_bit():
    out = run("device_epoch.py")
    assert "equal to the last bit: True" in out
    assert "images counted in each epoch: [1437]" in out
    right, counted = re.search(r"accuracy: 0\.\d+ = (\d+) of (\d+) test images", out).groups()
    assert counted == "360"
    assert int(right) >= 330
    first, last = map(float, re.search(r"first epoch (\S+), of the last (\S+)", out).groups())
    assert last < 0.1 * first


def test_sharded_is_one_devices_run_with_a_part_of_the_state_on_each_device():
    out = run("sharded.py")
    assert "20 steps on {'data': 2, 'fsdp': 2, 'model': 2}" in out
    part, whole = map(int, re.search(r"state: (\d+) of (\d+) KiB", out).groups())
    assert part < 0.35 * whole  # a quarter of all but embeddings of places, norms and biases
    assert float(re.search(r"parameters within (\S+) of one device's", out).group(1)) < 1e-9
