"""Which state of grain's loader a sampler of ours takes: that of the same ids, and no other's.

grain compares the sampler's text. So it must be the same in every process for the same ids, and
another for others, whatever the order is.
"""

import json
import subprocess
import sys

import grain
import numpy as np
import pytest

import jax_ddp_weighting as jdw

# As a program has them: written out, so that another process can have the same.
ORDERS = """
class Yields:
    def __init__(self, *ids):
        self.ids = ids

    def __iter__(self):
        return iter(self.ids)

def shift(by):
    return lambda epoch: np.roll(np.arange(20), by * (epoch + 1))

def shift_later(by):  # the same ids in epoch 0
    return lambda epoch: np.roll(np.arange(20), by * epoch)

# what each is, what is nearly the same, and the epoch
ORDERS = {
    "torch": (("torch", 0), ("torch", 1), 0),
    "keyed": (("keyed", 0), ("torch", 0), 0),
    "one order": (range(20), range(19, -1, -1), 0),
    "weights": (
        jdw.weighted_order(np.ones(20), 20), jdw.weighted_order(np.arange(1, 21.0), 20), 0
    ),
    "weights of a draw without replacement": (
        jdw.weighted_order(np.ones(20), 9, replacement=False),
        jdw.weighted_order(np.arange(1, 21.0), 9, replacement=False),
        3,
    ),
    "a seed": (jdw.weighted_order(np.ones(20), 20), jdw.weighted_order(np.ones(20), 20, seed=1), 0),
    "lengths": (
        jdw.grouped_order(np.arange(20) % 3, 4), jdw.grouped_order(np.arange(20) % 7, 4), 0
    ),
    "a mixture": (jdw.mixture_order([4, 16], [1, 3], 8), jdw.mixture_order([16, 4], [1, 3], 8), 2),
    "a function": (shift(1), shift(2), 0),
    "a function of a later epoch": (shift_later(1), shift_later(2), 3),
    "a sampler": (jdw.sampler_order(Yields(2, 0, 1)), jdw.sampler_order(Yields(0, 2, 1)), 0),
}

def make(order, epoch):
    options = {"order": order}
    if isinstance(order, tuple):
        options = {"order": order[0], "seed": order[1]}
    elif isinstance(order, range):
        options = {"order": order, "shuffle": False}
    sampler = jdw.DistributedSampler(20, 1, 0, **options)
    sampler.set_epoch(epoch)
    return sampler.grain_sampler(2)
"""

space = {"jdw": jdw, "np": np}
exec(ORDERS, space)
make = space["make"]


def load(order, epoch):
    sampler = make(order, epoch)
    batch = grain.transforms.Batch(batch_size=2)
    return iter(
        grain.DataLoader(
            data_source=np.arange(20), sampler=sampler, operations=[batch], worker_count=0
        )
    )


@pytest.fixture(scope="module")
def told_by_another_process():
    # in a process of its own: what two processes have in common is the program alone
    program = f"""
import json
import numpy as np
import jax_ddp_weighting as jdw
{ORDERS}
print(json.dumps({{name: repr(make(order, at)) for name, (order, _, at) in ORDERS.items()}}))
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


@pytest.mark.parametrize("kind", space["ORDERS"])
def test_a_state_is_taken_by_the_same_order_and_refused_by_another(kind, told_by_another_process):
    order, other, epoch = space["ORDERS"][kind]
    read = load(order, epoch)
    next(read)
    state = read.get_state()
    again: dict = {}
    exec(ORDERS, again | {"jdw": jdw, "np": np}, again)  # functions of their own
    twin = load(again["ORDERS"][kind][0], epoch)
    twin.set_state(state)
    assert next(twin).tolist() == next(read).tolist()
    assert told_by_another_process[kind] == repr(make(order, epoch))
    with pytest.raises(ValueError, match="Sampler in checkpoint does not match"):
        load(other, epoch).set_state(state)
