"""Training beside torch: what real DistributedDataParallel gave, recorded, against what we give.

`make test-torch` runs torch itself and compares it with the same record.
"""

import importlib.util
import json
from pathlib import Path

import jax
import numpy as np
import pytest
from jax import lax

from jax_ddp_weighting import GlobalLoss

ROOT = Path(__file__).parent.parent
RECORD = json.loads((ROOT / "tests" / "recorded" / "torch_reference.json").read_text())["ranks"]


def example():
    spec = importlib.util.spec_from_file_location(
        "torch_reference", ROOT / "examples" / "torch_reference.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


reference = example()


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_torch_written_right_is_ours_in_every_step(ranks, dtype):
    torchs = RECORD[str(ranks)]["right"][dtype]
    assert len(torchs["losses"]) >= 30
    loss, gradient = reference.compared(reference.train_ours(ranks, dtype), torchs)
    assert loss <= reference.ALLOWED[dtype]
    assert gradient <= reference.ALLOWED[dtype]
    assert reference.ALLOWED == {"float32": 1e-5, "float64": 1e-10}


def mean_of_local_means(loss_fn, *, axis_name):
    def fn(params, batch):
        local = jax.tree.map(lambda p: lax.pcast(p, axis_name, to="varying"), params)
        value, grads = jax.value_and_grad(lambda p: loss_fn(p, batch).mean())(local)
        return GlobalLoss(lax.pmean(value, axis_name), {}), lax.pmean(grads, axis_name)

    return fn


def test_the_mean_of_local_means_fails_the_same_comparison():
    torchs = RECORD["2"]["right"]["float32"]
    ours = reference.train_ours(2, "float32", mean_of_local_means)
    loss, gradient = reference.compared(ours, torchs)
    assert loss > 1e-2
    assert gradient > 1e-2


@pytest.mark.parametrize("ranks", [2, 3])
def test_torchs_usual_mean_is_named_and_its_counts_are_known(ranks):
    found = reference.diagnosed(RECORD[str(ranks)], ranks)["usual"]
    assert (found.convention, found.factor) == ("mean_of_means", 1.0)
    held = [len(ids) for ids in reference.last_ids(ranks)]
    assert held == ([3, 2] if ranks == 2 else [2, 2, 1])
    for rank, rows in enumerate(held):
        np.testing.assert_allclose(found.counted[rank, 0, :rows], 1 / (ranks * rows), rtol=1e-9)
        np.testing.assert_array_equal(found.counted[rank, 0, rows:], 0)


@pytest.mark.parametrize(
    ("name", "convention", "voters"),
    [
        ("initial_ranks", "mean_of_means", [3, 3, 3]),
        ("active_ranks", "mean_of_nonempty_means", [3, 2, 1]),
    ],
)
def test_torchs_join_gives_each_rank_a_vote(name, convention, voters):
    found = reference.diagnosed(RECORD["3"], 3)[name]
    assert (found.convention, found.factor) == (convention, 1.0)
    for step, gradient in enumerate(RECORD["3"][name]):
        ids = [reference.stream_ids(step, rank) for rank in range(3)]
        with jax.enable_x64(True):
            counts, _ = reference.counted(gradient, ids)
        for rank, rank_ids in enumerate(ids):
            if len(rank_ids):
                expected = 1 / (voters[step] * len(rank_ids))
                np.testing.assert_allclose(counts[rank, 0, : len(rank_ids)], expected, rtol=1e-9)


def test_torchs_join_on_powers_of_ten_is_what_its_documentation_leads_one_to_expect():
    assert RECORD["3"]["initial_ranks of powers"] == pytest.approx([111 / 3, 110 / 3, 100 / 3])
    assert RECORD["3"]["active_ranks of powers"] == pytest.approx([111 / 3, 110 / 2, 100.0])
