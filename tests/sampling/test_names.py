"""Strings as ids, in audits and ledgers."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_ddp_weighting import CoverageError, Ledger, audit_ids

WORDS = ["cat", "dog", "eel", "fox"]


def forms(ids):
    """The ids in every form that strings come in."""
    return [
        ids,
        tuple(ids),
        np.array(ids),
        np.array(ids, object),
        np.array(ids, np.dtypes.StringDType()),
    ]


@pytest.mark.parametrize("form", range(5))
def test_strings_are_counted_by_id(form):
    audit = audit_ids(forms(["dog", "cat", "dog", "fox"])[form], 5)
    assert (audit.unique, audit.accepted, audit.num_omitted) == (3, 4, 2)
    assert audit.duplicated == {"dog": 2}
    assert audit.omitted == ()  # nobody has said what there is
    with pytest.raises(CoverageError, match=r"2 of 5 ids omitted, 1 duplicated \(dog\)\."):
        audit.check_exactly_once()


@pytest.mark.parametrize("form", range(5))
def test_with_all_names_the_omitted_are_named(form):
    audit = audit_ids(forms(["dog", "cat", "dog"])[form], 4, names=WORDS)
    assert audit.omitted == ("eel", "fox")
    with pytest.raises(CoverageError, match=r"2 of 4 ids omitted \(eel, fox\), 1 duplicated \(dog"):
        audit.check_exactly_once()
    audit_ids([["dog", "cat"], ["fox", "eel"]], 4, names=WORDS).check_exactly_once()


def test_strings_that_are_no_examples_are_out_of_range():
    audit = audit_ids(["dog", "cow", "cow"], 4, names=WORDS)
    assert (audit.out_of_range, audit.num_out_of_range) == (("cow",), 2)
    audit = audit_ids(["a", "b", "c"], 2)  # more different ones than there are
    assert audit.num_out_of_range == 1


def test_strings_of_padding_count_nothing():
    audit = audit_ids(["dog", "cat", ""], 2, weights=[1, 1, 0])
    audit.check_exactly_once()
    audit = audit_ids(["dog", "cat", "cat"], 2, weights=[0.5, 0.25, 2])
    assert audit.weight_range == (0.5, 2.25)


@settings(max_examples=150, deadline=None)
@given(
    ranks=st.lists(st.lists(st.integers(0, 11), max_size=30), min_size=1, max_size=4),
    n=st.integers(12, 15),
    data=st.data(),
)
def test_strings_are_counted_as_their_numbers_are(ranks, n, data):
    names = [f"example {number:03}" for number in range(n)]
    weights = [[data.draw(st.sampled_from([0, 1])) for _ in rank] for rank in ranks]
    by_number = audit_ids([np.array(rank, int) for rank in ranks], n, weights=weights)
    by_name = audit_ids(
        [np.array([names[i] for i in rank], "U20") for rank in ranks],
        n,
        weights=weights,
        names=data.draw(st.permutations(names)),
    )
    assert by_name.duplicated == {names[i]: k for i, k in by_number.duplicated.items()}
    assert by_name.omitted == tuple(names[i] for i in by_number.omitted)
    for field in ("slots", "accepted", "unique", "per_rank", "weight_range", "num_omitted"):
        assert getattr(by_name, field) == getattr(by_number, field)


def filled(names=None, **options):
    ledger = Ledger(4, epoch=1, names=names, **options)
    ledger.add(["dog", "cat"], weights=[1, 1])
    ledger.add(np.array([["dog", "pad"]]), weights=[[1, 0]])
    return ledger


def test_a_ledger_of_strings():
    ledger = filled()
    assert (ledger.accepted, ledger.num_due) == (3, 2)
    with pytest.raises(CoverageError, match=r"2 of 4 ids omitted, 1 duplicated \(dog\)"):
        ledger.check_exactly_once()
    with pytest.raises(ValueError, match=r"Ledger.due: names must be known .* got 2 of 4"):
        ledger.due()
    named = filled(WORDS)
    assert named.due().tolist() == ["eel", "fox"]
    assert named.audit().omitted == ("eel", "fox")


@pytest.mark.parametrize("names", [None, WORDS])
def test_a_ledger_of_strings_survives_saving(tmp_path, names):
    ledger = filled(names)
    ledger.save(tmp_path / "ledger")
    loaded = Ledger.load(tmp_path / "ledger")
    assert loaded.audit() == ledger.audit()
    for each in (loaded, ledger):
        each.add(["fox", "new\nline" if names is None else "eel"])
    assert loaded.audit() == ledger.audit()
    loaded.save(tmp_path / "ledger")
    assert Ledger.load(tmp_path / "ledger").audit() == ledger.audit()


def test_ledgers_of_strings_merge_whatever_they_met_first():
    rng = np.random.default_rng(0)
    words = np.array([f"w{i}" for i in range(60)])
    parts = [words[rng.integers(0, 60, 40)] for _ in range(3)]
    merged, whole = Ledger(60), Ledger(60)
    for part in parts:
        one = Ledger(60)
        one.add(part)
        merged.merge(one)
        whole.add(part)
    assert merged.audit() == whole.audit()
    assert merged.audit().duplicated == audit_ids(parts, 60).duplicated


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (
            lambda: audit_ids([["a"], [1]], 3),
            TypeError,
            "audit_ids: ids must be all integers or all",
        ),
        (lambda: audit_ids([0.5], 3), TypeError, "audit_ids: ids must be integers, got float64"),
        (
            lambda: audit_ids(["a"], 3, names=["a", "b", "b"]),
            ValueError,
            "audit_ids: names must be 3 different strings, .* got 2 different of 3",
        ),
        (lambda: audit_ids(["a"], 2, names=[1, 2]), TypeError, "names must be strings, got int64"),
        (lambda: filled().add([1]), TypeError, "ids must be strings, as before, got integers"),
        (
            lambda: filled().add(["x", "y", "z"]),
            ValueError,
            r"must be 4 different strings .* x, y, z",
        ),
        (
            lambda: filled(WORDS).add(["cow"]),
            ValueError,
            r"or those that were named, got cow beside 4",
        ),
        (
            lambda: Ledger(4, names=WORDS[:3]),
            ValueError,
            "Ledger: names must be 4 different strings",
        ),
    ],
)
def test_bad_strings_are_one_clear_error(call, error, text):
    with pytest.raises(error, match=text):
        call()


def test_integers_and_strings_do_not_mix_in_a_ledger():
    numbers = Ledger(4)
    numbers.add([1, 2])
    with pytest.raises(
        TypeError, match=r"Ledger.add: ids must be integers, as before, got strings"
    ):
        numbers.add(["dog"])
    with pytest.raises(TypeError, match=r"Ledger.merge: ids must be integers, as before, got str"):
        numbers.merge(filled_without_epoch())
    words = filled_without_epoch()
    with pytest.raises(TypeError, match=r"Ledger.merge: ids must be strings, as before, got int"):
        words.merge(numbers)
    assert (numbers.accepted, words.accepted) == (2, 1)
    words.merge(Ledger(4))  # an empty one is of either kind


def filled_without_epoch():
    ledger = Ledger(4)
    ledger.add(["dog"])
    return ledger


@pytest.mark.parametrize("names", [None, list("abcd")])
@pytest.mark.parametrize("dtype", [str, object, np.dtypes.StringDType(), ">U3"])
def test_strings_that_all_weigh_0_are_entered_nowhere(dtype, names):
    ledger = Ledger(4, epoch=0, names=names)
    before = ledger.digest
    ids = np.array(["a", "b"], dtype)
    for some in (ids, ids.tolist(), ids[:0]):
        ledger.add(some, weights=np.zeros(len(some)))
        assert (ledger.accepted, ledger.digest) == (0, before)
        audit = audit_ids(some, 4, weights=np.zeros(len(some)), names=names)
        assert (audit.accepted, audit.num_omitted) == (0, 4)
    ledger.add(ids, weights=[0, 1])  # the control
    assert (ledger.accepted, ledger.num_due) == (1, 3)


def test_padding_of_strings_does_not_say_what_a_ledger_is_of():
    ledger = Ledger(4, epoch=0)
    ledger.add(["padding"], weights=[0])
    ledger.add([1, 2])
    ledger.add(["padding"], weights=[0])
    assert ledger.due().tolist() == [0, 3]
