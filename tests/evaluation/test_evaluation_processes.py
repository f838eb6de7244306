"""Evaluation over several real processes: uneven and empty shards, and errors on every process.

In processes of their own, since what is tested is what travels between them. A start costs
seconds, so each program tests many things and prints one line for each.
"""

import processes

COMMON = """
import numpy as np
import jax.numpy as jnp
import jax_ddp_weighting as jdw
from jax_ddp_weighting import gather_by_id
from jax_ddp_weighting.distributed import allgather
from jax_ddp_weighting.distributed.waiting import Waiting

def fails(*args, **kwargs):
    try:
        gather_by_id(*args, **kwargs)
    except (ValueError, TypeError, jdw.CoverageError) as error:
        print(type(error).__name__, error)
    else:
        print("accepted")

def shows(found):
    print(None if found is None else (found.ids.tolist(), found.predictions.tolist()))
"""

TWO = (
    COMMON
    + """
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec as P

mine = [[2**40 + 1, 3, 9, 0, 5], [1, 4]][rank]
weights = [[1, 1, 0, 1, 1], [1, 0.5]][rank]
values = np.array(mine) * 2
shows(gather_by_id(mine, weights, values))
print(multihost_utils.process_allgather(np.array([2**40 + 1])).tolist())  # why we do not use it
shows(gather_by_id(mine, weights, values, to="first"))
text = gather_by_id([str(i) for i in mine], weights, {"t": [f"<{i}>" for i in mine]})
print(text.ids.tolist(), text.predictions["t"].tolist())
shows(gather_by_id(np.array(mine, np.uint64) + np.uint64(2**63 * rank), None, np.array(mine)))

# many chunks, of several kinds of columns, with copies on both sides
chunk, allgather._CHUNK = allgather._CHUNK, 1
n = 301
ids = np.random.default_rng(0).permutation(n)[[slice(0, 200), slice(190, 301)][rank]]
tree = {"class": ids.astype(np.int8), "logits": np.stack([ids, -ids], 1) / 7,
        "hit": ids % 3 == 0, "half": jnp.asarray(ids, jnp.bfloat16), "name": ids.astype(str)}
if rank == 1:  # as another machine's files hold them
    tree |= {"logits": tree["logits"].astype(">f8"), "name": tree["name"].astype(">U3")}
for known in (None, n):
    found = gather_by_id(ids, None, tree, num_examples=known)
    every = np.arange(n)
    np.testing.assert_array_equal(found.ids, every)
    np.testing.assert_array_equal(found.predictions["class"], every.astype(np.int8))
    np.testing.assert_array_equal(found.predictions["logits"], np.stack([every, -every], 1) / 7)
    np.testing.assert_array_equal(found.predictions["hit"], every % 3 == 0)
    assert found.predictions["half"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(found.predictions["half"], every.astype(jnp.bfloat16))
    assert found.predictions["name"].tolist() == [str(i) for i in range(n)]
    print(found.num_duplicated, set(found.duplicated.values()))
allgather._CHUNK = chunk
print([len(m) for m in allgather.allgather_messages("x" * 9000 * (rank + 1), Waiting("test", 60))])

# global arrays, a step at a time, spread over the devices of both processes
mesh = jdw.data_mesh()
plan = jdw.EpochPlan(13, num_replicas=4, batch_size=3, seed=1)
predict = jax.jit(lambda x: jnp.stack([x, -x], 1))
elsewhere = NamedSharding(mesh, P(None, "data"))
seen = list(jdw.batches(plan, 0, lambda ids: ids * 10, mesh))
rows = [b.ids for b in seen], [b.weights for b in seen]
found = gather_by_id(*rows, [predict(b.data) for b in seen], num_examples=13)
print(found.predictions[:, 0].tolist())
wide = [jax.jit(lambda x: jnp.stack([x] * 4, 1), out_shardings=elsewhere)(b.data) for b in seen]
found = gather_by_id(*rows, wide, num_examples=13)
print(found.predictions.shape, found.predictions[:, 3].tolist())
alike = jax.device_put([seen[0].ids, seen[0].weights], NamedSharding(mesh, P()))
shows(gather_by_id(*alike, jax.device_put(seen[0].ids * 2, NamedSharding(mesh, P()))))

def metric(batch):
    is_bin = batch.data[:, None] == 10 * jnp.arange(2, 14)  # as many as rows; the last is absent
    return {
        "even": jdw.weighted_sum(batch.data % 20 == 0, batch.weights),
        "bins": jdw.weighted_sum(is_bin, is_bin * batch.weights[:, None], axis=0),
    }

found = jdw.evaluate(metric, iter(seen), mesh)
print(found["even"], found.sums["even"].total, found.accepted)
print(found.sums["bins"].total.tolist(), found["bins"][-2:])

print("errors")
fails([[0, 1], [1, 2]][rank], [1, 1], [[0, 1], [5, 2]][rank])
fails([[0, 1], [1, 2]][rank], [1, 1], [[0, 1], [5, 2]][rank], to="first")
fails([[0, 1], [4, 2]][rank], [1, 1], [0, 1], num_examples=7, to="first")
fails([[0, 1], [9, 2]][rank], [1, 1], [0, 1], num_examples=3)
fails([0, 1], [1, 1], [[0, 1], [0, 1, 2]][rank])
fails([0, 1], [1, [1, -1][rank]], [0, 1])
fails([rank], [1], [{"a": np.zeros(1)}, (np.zeros(1),)][rank])
fails([rank], [1], np.zeros((1, 5 + 2 * rank)))
fails([rank], [1], np.zeros(1, ["float32", "float64"][rank]))
fails([rank], [1], [1], num_examples=2 + rank)
fails([[0], ["a"]][rank], [1], [1])
fails([seen[0].ids, [1]][rank], [seen[0].weights, [1]][rank], [seen[0].data, [1]][rank])
fails(np.asarray(seen[0].ids.addressable_data(0)), None, seen[0].data)
padded = gather_by_id([rank], [1], np.ones((1, 2 + 2 * rank), int), pad=-1)
print(padded.predictions.tolist(), padded.lengths.tolist())
"""
)

TWO_SHOWN = """\
([0, 1, 3, 4, 5, 1099511627777], [0, 2, 6, 8, 10, 2199023255554])
[[1], [1]]
{first}
['0', '1', '1099511627777', '3', '4', '5'] ['<0>', '<1>', '<1099511627777>', '<3>', '<4>', '<5>']
([0, 3, 5, 9, 1099511627777, 9223372036854775809, 9223372036854775812], \
[0, 3, 5, 9, 1099511627777, 1, 4])
10 {{2}}
10 {{2}}
[9000, 18000]
[0, 10, 20, 30, 40, 50, 60, 70, 80, 90, 100, 110, 120]
(13, 4) [0, 10, 20, 30, 40, 50, 60, 70, 80, 90, 100, 110, 120]
{replicated}
0.5384615384615384 7 13
[1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 0] [ 1. nan]
errors
ValueError gather_by_id: predictions must agree where rows claim one id, got different ones for \
id 1: row 1 on process 0, row 0 on process 1. Neither can be believed: padding rows and copies \
weigh 0, as tail="mask" has them.
ValueError gather_by_id: predictions must agree where rows claim one id, got different ones for \
id 1: row 1 on process 0, row 0 on process 1. Neither can be believed: padding rows and copies \
weigh 0, as tail="mask" has them.
CoverageError gather_by_id: 3 of 7 ids omitted (3, 5, 6), 0 duplicated. tail="drop" cuts the \
tail; tail="mask" keeps every id once.{by_0}
CoverageError gather_by_id: 0 of 3 ids omitted, 0 duplicated, 1 slots out of range (9). Ids count \
from zero, below num_examples.
ValueError gather_by_id: predictions must have one row per id, got shape (3,) at predictions and \
2 ids. Gather whole batches, padding rows and their weights included.{by_1}
ValueError gather_by_id: weights must be finite and at least 0, got -1 at row 1. A row that is \
not to count weighs 0.{by_1}
ValueError gather_by_id: the structure of predictions must be the same on every process, got \
PyTreeDef({{'a': *}}) on process 0 and PyTreeDef((*,)) on process 1. A process without rows gives \
arrays [0, ...] of the same structure.
ValueError gather_by_id: predictions must have rows of one shape everywhere, got (5,) on process 0 \
and (7,) on process 1 at predictions. pad= fills narrower rows up to the widest and keeps their \
lengths.
TypeError gather_by_id: predictions must have one dtype everywhere, got float32 on process 0 and \
float64 on process 1 at predictions. Cast them to one first.
ValueError gather_by_id: num_examples, to and pad must be the same on every process, got \
(2, 'all', None) on process 0 and (3, 'all', None) on process 1. They are no matter of the \
process.
TypeError gather_by_id: ids must be of one kind, got integers and strings. Use the same ids \
everywhere.
ValueError gather_by_id: global arrays must be the same on every process, got True on process 0 \
and False on process 1. Gather batches everywhere, or host arrays everywhere.
ValueError gather_by_id: ids, weights and predictions must be all global arrays or all this \
process's own rows, got some of each. Keep ids and weights as the batch has them.
[[1, 1, -1, -1], [1, 1, 1, 1]] [2, 4]
"""


def test_two_processes_gather_and_evaluate_and_fail_together():
    ended = processes.launch(TWO, 2, devices=2)
    assert [each.code for each in ended] == [0, 0], ended
    for rank, each in enumerate(ended):
        assert each.out == TWO_SHOWN.format(
            first=TWO_SHOWN.splitlines()[0] if rank == 0 else None,
            replicated="([0, 1, 2, 3, 4, 5, 6, 7, 9, 10, 11, 12], "
            "[0, 2, 4, 6, 8, 10, 12, 14, 18, 20, 22, 24])",
            by_0=" (raised on process 0)" if rank == 1 else "",
            by_1=" (raised on process 1)" if rank == 0 else "",
        )


THREE = (
    COMMON
    + """
mine = [[5, 0, 3], [], [1, 1, 2, 2, 4]][rank]
weights = [[1, 1, 1], [], [1, 0, 0, 1, 1]][rank]
shows(gather_by_id(mine, weights, [i * 10 for i in mine], num_examples=6))
# step by step, and a process without any step
steps = ([mine[:2], mine[2:]], [weights[:2], weights[2:]]) if mine else ([], [])
shows(gather_by_id(*steps, [[i * 10 for i in step] for step in steps[0]], to="first"))
# nothing that counts: on one process, and on all
shows(gather_by_id([rank, rank], [rank % 2, 0], [7, 8]))
shows(gather_by_id([rank], [0], [7]))
none = np.zeros(0, int)
shows(gather_by_id(none, none, np.zeros((0, 2)), num_examples=0))
fails(mine, weights, mine, num_examples=7)
# a process without steps cannot know what the others hold
tree = {"a": [mine, {"b": mine}]} if mine else []
found = gather_by_id(mine, weights, tree, num_examples=6).predictions
print(found["a"][0].tolist() == found["a"][1]["b"].tolist() == list(range(6)))
by_step = gather_by_id(*steps, [{"x": step} for step in steps[0]], num_examples=6)
print(by_step.predictions["x"].tolist())

class Own:
    def __init__(self, x):
        self.x = x

jax.tree_util.register_pytree_node(Own, lambda own: ((own.x,), None), lambda _, x: Own(*x))
fails(mine, weights, Own(np.array(mine)) if mine else [], num_examples=6)

# fewer examples than ranks: the last rank has padding alone, and takes the same steps
mesh = jdw.data_mesh()

def metric(batch):
    return jdw.weighted_sum(batch.data, batch.weights)

for n, width in ((2, 1), (7, 2), (4, 8)):
    plan = jdw.EpochPlan(n, 3, width)
    seen = list(jdw.batches(plan, 0, lambda ids: ids * 1.0, mesh))
    found = jdw.evaluate(metric, seen, mesh)
    print(found["loss"] * n, found.accepted, len(seen))
    part = [b.ids for b in seen], [b.weights for b in seen], [b.data for b in seen]
    shows(gather_by_id(*part, num_examples=n))
"""
)


def test_three_processes_with_uneven_shards_and_an_empty_one():
    ended = processes.launch(THREE, 3)
    assert [each.code for each in ended] == [0, 0, 0], ended
    whole = "([0, 1, 2, 3, 4, 5], [0, 10, 20, 30, 40, 50])"
    for rank, each in enumerate(ended):
        assert each.out.splitlines() == [
            whole,
            whole if rank == 0 else "None",
            "([1], [7])",
            "([], [])",
            "([], [])",
            "CoverageError gather_by_id: 1 of 7 ids omitted (6), 0 duplicated. "
            'tail="drop" cuts the tail; tail="mask" keeps every id once.',
            "True",
            "[0, 1, 2, 3, 4, 5]",
            "ValueError gather_by_id: predictions must be dicts with string keys, lists, tuples "
            "and arrays where a process gives an empty list, got PyTreeDef(CustomNode(Own[None], "
            "[*])). A process without rows gives arrays [0, ...] of the same structure.",
            "1.0 2 1",
            "([0, 1], [0.0, 1.0])",
            "21.0 7 2",
            "([0, 1, 2, 3, 4, 5, 6], [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0])",
            "6.0 4 1",
            "([0, 1, 2, 3], [0.0, 1.0, 2.0, 3.0])",
        ]
