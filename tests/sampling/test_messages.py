"""Errors that name the cause: each of these once pointed somewhere else."""

import ml_dtypes
import numpy as np
import pytest

from jax_ddp_weighting import (
    CoverageError,
    DistributedSampler,
    EpochPlan,
    Ledger,
    audit_ids,
    grouped_order,
    weighted_order,
)


def test_a_seed_too_large_by_its_epoch_is_the_plans_and_not_an_orders():
    plan = EpochPlan(10, 2, 2, order="torch", seed=2**64 - 2)
    plan.batch(1, 0)
    for ask, name in ((plan.batch, "batch"), (plan.slots, "slots")):
        text = rf"EpochPlan.{name}: seed \+ epoch must be below 2\*\*64 .* got {2**64 - 2} \+ 2"
        with pytest.raises(ValueError, match=text):
            ask(2, 0)
    EpochPlan(10, 2, 2, order="keyed", seed=2**64 - 2).batch(2, 0)  # hashes both, adds nothing


@pytest.mark.parametrize(
    "kind", [lambda: (i for i in range(4)), lambda: {0, 1, 2, 3}, lambda: map(int, "0123")]
)
def test_an_order_that_can_be_read_but_once_is_named(kind):
    name = type(kind()).__name__
    with pytest.raises(TypeError, match=rf"DistributedSampler: order: ids must be .* got a {name}"):
        DistributedSampler(4, 2, 0, shuffle=False, order=kind())
    with pytest.raises(
        TypeError, match=rf"EpochPlan.from_order: ids must be .* got a {name}\. Make"
    ):
        EpochPlan.from_order(kind(), 2, 2)


@pytest.mark.parametrize(
    ("order", "error"),
    [([[0, 1]], ValueError), ([0.5], TypeError), ([-1], ValueError), ([1, 1], ValueError)],
)
def test_no_error_names_a_class_that_users_never_see(order, error):
    for call, name in (
        (lambda: EpochPlan.from_order(order, 2, 2), r"^EpochPlan\.from_order: ids must"),
        (
            lambda: DistributedSampler(4, 2, 0, shuffle=False, order=order),
            r"^DistributedSampler: order: ids must",
        ),
    ):
        with pytest.raises(error, match=name):
            call()


@pytest.mark.parametrize("ranks", [1, np.int64(1), np.int32(1)])
def test_one_rank_is_a_sequence_of_one(ranks):
    with pytest.raises(TypeError, match=r"ranks must be a sequence of ranks, got 1\. Write \[1\]"):
        EpochPlan(10, 2, 3).batch(0, 0, ranks)


def test_ragged_steps_of_each_rank_are_audited():
    """As a loop over loaders leaves them: rank -> step -> ids, the last step short."""
    steps = [[[0, 1], [2, 3], [4]], [[5, 6], [7, 8]]]
    audit = audit_ids(steps, 10)
    assert (audit.per_rank, audit.omitted) == ((5, 4), (9,))
    weights = [[[1, 1], [1, 1], [0]], [[1, 1], [1, 1]]]
    assert audit_ids(steps, 10, weights=weights).omitted == (4, 9)
    arrays = [[np.array(step) for step in rank] for rank in steps]
    assert audit_ids(arrays, 10) == audit
    with pytest.raises(
        ValueError, match="audit_ids: weights must have the shape of ids, got by rank"
    ):
        audit_ids(steps, 10, weights=[[[1, 1], [1, 1]], [[1, 1], [1, 1]]])
    words = [[["a", "b"], ["c"]], [["d", "e"], []]]
    audit_ids(words, 5).check_exactly_once()


@pytest.mark.parametrize("ids", [[[0, 1], 2], {"a": [1]}, [[0, "a"], [[1]]]])
def test_what_is_no_list_of_ids_is_refused_in_words(ids):
    with pytest.raises((TypeError, ValueError), match=r"^audit_ids: ids must"):
        audit_ids(ids, 10)


def test_a_half_read_ledger_is_advised_no_tail():
    ledger = Ledger(10, epoch=0)
    ledger.add(range(5))
    with pytest.raises(
        CoverageError, match=r"omitted .*, 0 duplicated\. due\(\) gives what is still"
    ):
        ledger.check_exactly_once()
    ledger.add(range(4, 10))
    with pytest.raises(CoverageError, match=r'1 duplicated \(4\)\. tail="repeat" repeats ids'):
        ledger.check_exactly_once()


@pytest.mark.parametrize(
    ("plan", "text"),
    [
        (
            EpochPlan.from_order([4, 4, 1], 2, 2, num_examples=5, repeats=True),
            "An order of your own is read as it is; name every id in it once.$",
        ),
        (
            EpochPlan.from_order([4, 1], 2, 2, num_examples=5, tail="drop"),
            "An order of your own is",
        ),
        (
            EpochPlan(10, 2, 2).resumed(0, 4),
            "rest of an epoch, from place 4 of its order on; a Ledger",
        ),
        (EpochPlan(10, 4, 1, tail="repeat"), 'tail="repeat" repeats ids; tail="mask" keeps every'),
        (EpochPlan(10, 4, 1, tail="drop"), 'tail="drop" cuts the tail; tail="mask" keeps every'),
    ],
)
def test_a_plan_is_advised_what_it_lacks(plan, text):
    with pytest.raises(CoverageError, match=text):
        plan.audit(0).check_exactly_once()


def test_weights_in_a_dtype_that_numpy_does_not_know_are_numbers():
    halves = np.array([0.5, 2, 0, 1], ml_dtypes.bfloat16)
    plan = EpochPlan(4, 1, 4, shuffle=False, weights=halves)
    assert plan.batch(0, 0).weights.tolist() == [[0.5, 2, 0, 1]]
    assert weighted_order(halves, 9)(0).tolist() == weighted_order([0.5, 2, 0, 1], 9)(0).tolist()
    groups = grouped_order(halves, 2)(1), grouped_order([0.5, 2, 0, 1], 2)(1)
    assert groups[0].tolist() == groups[1].tolist()


@pytest.mark.parametrize(
    ("weights", "match"),
    [
        ([[1], [1, 2]], "must be an array of numbers, but setting an array element"),
        ((weight for weight in (1, 2)), "must be an array of numbers, got a generator"),
        ({0: 1, 1: 2}, "must be an array of numbers, got a dict"),
        ([1j, 1], "must be numbers, got complex128"),
        (np.zeros(2, [("w", "f4")]), "must be numbers, got .*'w'"),
    ],
)
def test_weights_that_are_none_are_named(weights, match):
    for call, name in (
        (lambda: EpochPlan(2, 1, 1, weights=weights), "EpochPlan"),
        (lambda: weighted_order(weights, 2), "weighted_order"),
    ):
        with pytest.raises(TypeError, match=rf"^{name}: weights {match}"):
            call()


def test_an_id_beyond_64_bits_is_named_as_it_was_given():
    ids = np.array([2**63 + 1, 0], np.uint64)
    with pytest.raises(ValueError, match=rf"ids must be below 2\*\*62, got {2**63 + 1}"):
        EpochPlan.from_order(ids, 1, 1, num_examples=2**62)


@pytest.mark.parametrize("ids", [(i for i in range(3)), {0, 1}, DistributedSampler(3, 1, 0)])
def test_ids_that_are_no_array_are_named(ids):
    name = type(ids).__name__
    for call, function in ((lambda: audit_ids(ids, 3), "audit_ids"), (Ledger(3).add, "Ledger.add")):
        with pytest.raises(
            TypeError, match=rf"^{function}: ids must be an array .* got a {name}\. Make a list"
        ):
            call() if function == "audit_ids" else call(ids)


@pytest.mark.parametrize("ids", [["a", 1], [["a", 1], ["b"]], [1.5, "a"]])
def test_numbers_beside_strings_are_no_strings(ids):
    with pytest.raises(TypeError, match=r"ids must be all integers or all strings"):
        audit_ids(ids, 3)
    with pytest.raises(TypeError, match=r"Ledger.add: ids must be all integers or all strings"):
        Ledger(3).add(["a", 1])


def test_weights_of_other_batches_than_the_ids_are_refused():
    ids = [[[0, 1], [2]], [[3, 4], [5, 6]]]
    match = r"weights must have the shape of ids, got \(1,\) and \(2,\) in batch 0 of rank 0"
    with pytest.raises(ValueError, match=match):
        audit_ids(ids, 7, weights=[[[1], [1, 1]], [[1, 1], [1, 0]]])
    assert audit_ids(ids, 7, weights=[[[1, 1], [1]], [[1, 1], [1, 0]]]).omitted == (6,)


def test_a_sampler_is_named_in_its_own_errors():
    for options, error, match in (
        ({"seed": None}, TypeError, "seed must be an integer"),
        ({"shuffle": None}, TypeError, "shuffle must be True or False"),
        ({"tail": "pad"}, ValueError, 'tail must be "mask"'),
    ):
        with pytest.raises(error, match=f"^DistributedSampler: {match}"):
            DistributedSampler(4, 2, 0, **options)
    with pytest.raises(TypeError, match=r"Ledger.merge: other must be a Ledger, got NoneType"):
        Ledger(3).merge(None)
