"""A plan as a function of traced numbers: who reads what, made on the device that reads it."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array

from jax_ddp_weighting._arguments import check_below, check_epoch, check_integer, list_some
from jax_ddp_weighting.sampling.budget import BudgetPlan
from jax_ddp_weighting.sampling.order import (
    MIX,
    RANKED,
    ROUNDS,
    GivenOrder,
    cut_in_halves,
    derive_round_keys,
    keyed_order,
    torch_order,
)
from jax_ddp_weighting.sampling.packing import PackedPlan
from jax_ddp_weighting.sampling.plan import EpochPlan, check_plan
from jax_ddp_weighting.sampling.slots import Slots

_NARROW = 2**31  # examples whose ids fit int32

Lookup = Literal["places", "table", "cipher"]


class _Sizes(NamedTuple):
    """A plan's numbers as scalars of one unsigned dtype: traced, so that they compile but once."""

    steps: Any
    ranks: Any
    start: Any
    length: Any  # of the whole order
    accepted: Any  # the first places from `start` on that count
    bits: Any  # of a place that are its column, where the order is a cipher
    rows: Any


# Made and taken apart without the checks of a new one: JAX puts all kinds of things in a tree.
def _unflatten_slots(length: int | None, children: tuple[Any, Any]) -> Slots:
    slots = object.__new__(Slots)
    for name, value in zip(("ids", "weights", "length"), (*children, length), strict=True):
        object.__setattr__(slots, name, value)
    return slots


jax.tree_util.register_pytree_node(
    Slots, lambda slots: ((slots.ids, slots.weights), slots.length), _unflatten_slots
)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class DevicePlan:
    """An `EpochPlan` on the device: `batch` takes traced epochs, steps and ranks.

    The rule: ids and weights are bit for bit the plan's. They are made where they are used, under
    `jit`, `shard_map`, `pmap`, `vmap` and `scan`, in unsigned integers of 32 bits: x64 is needed
    only beyond ``2**31`` examples.

    A pytree: as an argument of a compiled function it compiles once for all epochs, and for another
    seed, or other epochs of as many, not again. What an epoch hangs on is made on the host and kept
    on the device: in keyed order 64 bytes an epoch (up to 4,096 examples, 4 bytes an example and
    epoch); in torch's order, or that of a function of your own, 4 bytes an example and epoch; of an
    array of your own once for all epochs. Without shuffling nothing.

    A traced epoch, step or rank that the plan does not have raises nothing, since nothing can: its
    ids are -1 and its weights 0, all of them. Numbers that are known are checked.

    Attributes:
        num_examples: length of the dataset.
        num_replicas: number of ranks.
        batch_size: rows per rank and step.
        steps_per_epoch: steps of every rank in an epoch: what to scan over.

    Example:
        >>> plan = EpochPlan(10**9, num_replicas=4, batch_size=2)
        >>> on_device = DevicePlan.of(plan, epochs=3)
        >>> read = jax.jit(lambda on_device, epoch, step: on_device.batch(epoch, step, rank=1))
        >>> read(on_device, 2, 70_000).ids.tolist()
        [967047256, 440808491]
        >>> plan.batch(2, 70_000, ranks=[1]).ids.tolist()
        [[967047256, 440808491]]
    """

    num_examples: int = field(metadata={"static": True})
    num_replicas: int = field(metadata={"static": True})
    batch_size: int = field(metadata={"static": True})
    steps_per_epoch: int = field(metadata={"static": True})
    _lookup: Lookup = field(metadata={"static": True})
    _wraps_once: bool = field(metadata={"static": True})
    _sizes: _Sizes
    _epochs: Any  # int32 [epochs], those that there are tables of; None for any
    _table: Any  # ids [epochs, entries], or round keys [epochs, rounds, 2]; None for neither
    _weights: Any  # float32 [num_examples]

    @classmethod
    def of(cls, plan: EpochPlan, epochs: int | range | Sequence[int] | None = None) -> "DevicePlan":
        """A plan's counterpart on the device, for some epochs.

        Args:
            plan: an `EpochPlan` of any order and tail, resumed or not, with weights or without.
            epochs: which epochs it is to know: the first so many, or which. May be left out where
                all epochs are read in one order (without shuffling, or in that of an array), and
                where the plan is the rest of one epoch.

        Returns:
            A `DevicePlan`.

        Raises:
            TypeError: `plan` is no `EpochPlan`, or epochs are no integers.
            ValueError: epochs are missing, out of range or not the plan's; or the plan needs more
                than 32 bits while x64 is off.
        """
        if isinstance(plan, BudgetPlan | PackedPlan):
            raise TypeError(
                f"DevicePlan.of: plan must be an EpochPlan, got a {type(plan).__name__}, whose"
                " steps have shapes of their own. A compiled program has one: read it with"
                " batches(plan, ...)."
            )
        return jax.device_put(cls.on_host(plan, epochs))

    @classmethod
    def on_host(
        cls, plan: EpochPlan, epochs: int | range | Sequence[int] | None = None
    ) -> "DevicePlan":
        """The same of numpy arrays, for who places it where it is to be read: see `of`."""
        check_plan("DevicePlan.of: plan", plan)
        known = _find_epochs(plan, epochs)
        rows = plan.num_replicas * plan.batch_size
        length = plan.epoch_length
        # a place is below length + rows, and what is accepted below that of the last round of ranks
        wide = max(plan.num_examples, length) > _NARROW or length + rows > 2 * _NARROW
        if wide:
            _check_x64("DevicePlan.of", max(plan.num_examples, length), rows)
        lookup, table = _make_table(plan, [0] if known is None else known)
        bits, halves = cut_in_halves(length) if lookup == "cipher" else (0, 0)
        sizes = (
            *(plan.steps_per_epoch, plan.num_replicas, plan.start, length),
            *(plan.accepted_per_epoch, bits, halves),
        )
        word = np.uint64 if wide else np.uint32
        return cls(
            num_examples=plan.num_examples,
            num_replicas=plan.num_replicas,
            batch_size=plan.batch_size,
            steps_per_epoch=plan.steps_per_epoch,
            _lookup=lookup,
            _wraps_once=rows <= length,
            _sizes=_Sizes(*(word(size) for size in sizes)),
            _epochs=None if known is None else np.array(known, np.int32),
            _table=table,
            _weights=None if plan.weights is None else plan.weights.values,
        )

    def of_epochs(self, other: "DevicePlan") -> "DevicePlan":
        """This plan with the epochs of another of its kind, so that only they are placed anew."""
        return replace(self, _epochs=other._epochs, _table=other._table)

    def batch(self, epoch: Any, step: Any, rank: Any = None) -> Slots:
        """The slots of one step: those of the plan's own `batch`, on the device.

        Args:
            epoch: an integer, or a traced one of any integer dtype.
            step: as the epoch, in ``[0, steps_per_epoch)``.
            rank: as the epoch, in ``[0, num_replicas)``, such as ``jax.lax.axis_index("data")``;
                all ranks by default.

        Returns:
            `Slots` of shape ``[batch_size]``, or ``[num_replicas, batch_size]`` of all ranks. Ids
            are int32 (int64 beyond ``2**31`` examples); weights int32, or float32 where the plan
            has its own. Of an epoch, a step or a rank that is traced and not the plan's, ids are
            -1 and weights 0.

        Raises:
            TypeError: a number is none.
            ValueError: a number that is known is out of range.
        """
        wide = self._sizes.steps.dtype.itemsize > 4 or self.num_examples > _NARROW
        if wide:
            rows = self.num_replicas * self.batch_size
            _check_x64("DevicePlan.batch", self.num_examples, rows)
        epoch = self._check_epoch(epoch)
        remedy = f"An epoch of this plan has {self.steps_per_epoch} steps."
        step = _check_number("DevicePlan.batch: step", step, self.steps_per_epoch, remedy)
        if rank is None:
            ranks = jnp.arange(self.num_replicas, dtype=self._sizes.ranks.dtype)
        else:
            remedy = f"The last of {self.num_replicas} replicas is rank {self.num_replicas - 1}."
            ranks = _check_number("DevicePlan.batch: rank", rank, self.num_replicas, remedy)
        id_dtype = jnp.int32 if self.num_examples <= _NARROW else jnp.int64
        if not self.steps_per_epoch:  # a traced step of a plan that has none: nothing to look up
            shape = (*ranks.shape, self.batch_size)
            dtype = jnp.int32 if self._weights is None else jnp.float32
            return Slots(jnp.full(shape, -1, id_dtype), jnp.zeros(shape, dtype))
        options = (self._lookup, self._wraps_once, self.batch_size, id_dtype)
        leaves = (self._sizes, self._epochs, self._table, self._weights)
        return Slots(*_read(*options, *leaves, epoch, step, ranks))

    def _check_epoch(self, epoch: Any) -> Array:
        argument = "DevicePlan.batch: epoch"
        if isinstance(epoch, Tracer):
            return _check_traced(argument, epoch)
        number = check_epoch(argument, epoch)
        if self._epochs is None:
            return jnp.int32(0)  # they are all one
        if not isinstance(self._epochs, Tracer):
            known = np.asarray(self._epochs)
            if number not in known:
                raise ValueError(
                    f"{argument} must be one that the plan on the device was made for,"
                    f" {list_some(known)}, got {number}. Write DevicePlan.of(plan, epochs=...) with"
                    " all that are to be read."
                )
        return jnp.int32(number if number < _NARROW else -1)  # beyond it there is none


def _find_epochs(plan: EpochPlan, epochs: Any) -> list[int] | None:
    """The epochs to make tables of; None where the plan reads one order in all."""
    argument = "DevicePlan.of: epochs"
    if epochs is None:
        if plan.only_epoch is not None:
            epochs = [plan.only_epoch]
        elif not plan.shuffle:
            return None
        else:
            raise ValueError(
                f"{argument} must be given where every epoch has an order of its own, got None."
                " What orders hang on is made beforehand: write DevicePlan.of(plan, epochs=10), or"
                " epochs=range(first, stop); an order function is asked for the ids of each."
            )
    if isinstance(epochs, range | Sequence | np.ndarray) and not isinstance(epochs, str):
        wanted = list(epochs)
    else:
        remedy = "It is how many, from 0 on; a range says which."
        wanted = list(range(check_integer(argument, epochs, 1, _NARROW, remedy)))
    if not wanted:
        raise ValueError(f"{argument} must be at least one, got none. epochs=1 is the first.")
    remedy = "A traced epoch has 32 bits."
    wanted = [check_integer(argument, epoch, 0, _NARROW - 1, remedy) for epoch in wanted]
    return [plan.check_epoch("DevicePlan.of", epoch) for epoch in wanted]


def _make_table(plan: EpochPlan, epochs: list[int]) -> tuple[Lookup, np.ndarray | None]:
    """How ids are looked up, and in what: nothing, each epoch's ids, or its keys."""
    order, n = plan.order, plan.num_examples
    dtype = np.int32 if n <= _NARROW else np.int64
    if isinstance(order, GivenOrder):
        return "table", order.ids.astype(dtype)[None]  # the same in all epochs
    if not isinstance(order, str):
        return "table", np.stack([order.ids_of(epoch).astype(dtype) for epoch in epochs])
    if not plan.shuffle:
        return "places", None
    if order == "torch":
        orders = [torch_order(n, plan.seed + epoch).astype(dtype) for epoch in epochs]
        return "table", np.stack(orders)
    if n > RANKED:
        keys = [derive_round_keys(n, plan.seed, epoch) for epoch in epochs]
        return "cipher", np.array(keys, np.uint32)
    places = np.arange(n)
    orders = [keyed_order(places, n, seed=plan.seed, epoch=epoch) for epoch in epochs]
    return "table", np.stack(orders).astype(dtype)


def _check_x64(function: str, examples: int, rows: int) -> None:
    if not jax.config.read("jax_enable_x64"):
        raise ValueError(
            f"{function}: plan must have at most 2**31 examples, and as many rows in a step, while"
            f" x64 is off, got {examples} and {rows}. Switch jax_enable_x64 on, or shard the data"
            " set into parts."
        )


def _check_number(argument: str, value: Any, count: int, remedy: str) -> Array:
    if isinstance(value, Tracer):
        return _check_traced(argument, value)
    # in the narrowest dtype that holds it: JAX cuts what is given to it as a Python int
    number = check_below(argument, value, count, remedy)
    return jnp.asarray(np.uint32(number) if number < 2**32 else np.uint64(number))


def _check_traced(argument: str, value: Any) -> Array:
    if not jnp.issubdtype(value.dtype, jnp.integer) or value.shape:
        raise TypeError(
            f"{argument} must be an integer, got {value.dtype}{list(value.shape)}. For several,"
            " jax.vmap it."
        )
    return value


@partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _read(
    lookup: Lookup,
    wraps_once: bool,
    batch_size: int,
    id_dtype: Any,
    sizes: _Sizes,
    epochs: Any,
    table: Any,  # None, where places are ids
    weights: Any,
    epoch: Array,
    step: Array,
    rank: Array,
) -> tuple[Array, Array]:
    """The ids and the weights of a step, ``[*rank.shape, batch_size]``."""
    word = sizes.steps.dtype
    step, has_step = _bound(step, sizes.steps)
    rank, has_rank = _bound(rank, sizes.ranks)
    if epochs is None:
        index, has_epoch = 0, epoch >= 0
    else:
        found = epochs == epoch
        index, has_epoch = jnp.argmax(found), jnp.any(found)
        if table is not None and table.shape[0] == 1:  # one order for all that there are
            index = 0
    has = (has_step & has_epoch) & has_rank
    # Row j of step t on rank r is place (t * batch_size + j) * ranks + r, counted from the start.
    rows = step * batch_size + jnp.arange(batch_size, dtype=word)
    places = rows.reshape((1,) * rank.ndim + (batch_size,)) * sizes.ranks + rank[..., None]
    counts = (places < sizes.accepted) & has[..., None]
    places = places + sizes.start
    if wraps_once:  # a division costs more than the rest
        places = jnp.where(places >= sizes.length, places - sizes.length, places)
    else:
        places = places % sizes.length
    if lookup == "places" or table is None:
        ids = places
    elif lookup == "table":
        ids = table.at[index, places].get(mode="promise_in_bounds")
    else:
        ids = _encipher(places, table[index], sizes)
    ids = jnp.where(has[..., None], ids.astype(id_dtype), -1)
    if weights is None:
        return ids, counts.astype(jnp.int32)
    own = weights.at[jnp.maximum(ids, 0)].get(mode="promise_in_bounds")
    return ids, jnp.where(counts, own, 0)


def _bound(value: Array, count: Array) -> tuple[Array, Array]:
    """`value` in the dtype of `count`, or 0 where it is not in ``[0, count)``; and whether it is.

    Compared in an unsigned dtype as wide as either: a cast to a narrower one would wrap.
    """
    unsigned = value.astype(jnp.uint64 if value.dtype.itemsize > 4 else jnp.uint32)
    inside = (value >= 0) & (unsigned < count)
    return jnp.where(inside, unsigned, 0).astype(count.dtype), inside


def _encipher(places: Array, keys: Array, sizes: _Sizes) -> Array:
    """`keyed_order` of more than `RANKED` examples: its cipher, walked until it lands inside."""

    def walk(ids: Array) -> Array:
        return jnp.where(ids >= sizes.length, _cipher(ids, keys, sizes), ids)

    # all walk while any must: on the device a select costs less than taking those out
    return jax.lax.while_loop(
        lambda ids: jnp.any(ids >= sizes.length), walk, _cipher(places, keys, sizes)
    )


def _cipher(places: Array, keys: Array, sizes: _Sizes) -> Array:
    """One pass of the network, as `sampling.order` has it, in uint32 but for the place itself."""
    word = places.dtype
    bits, rows = sizes.bits.astype(jnp.uint32), sizes.rows.astype(jnp.uint32)
    row = (places >> sizes.bits).astype(jnp.uint32)
    column = (places & ((jnp.ones((), word) << sizes.bits) - 1)).astype(jnp.uint32)
    for turn in range(ROUNDS):
        mixed = (column if turn % 2 else row) * keys[turn, 0] + keys[turn, 1]
        mixed = (mixed ^ (mixed >> 15)) * jnp.uint32(MIX)
        if turn % 2 == 0:
            column = column ^ (mixed >> (32 - bits))
        else:
            row = row + _multiply_high(mixed, rows)
            row = jnp.minimum(row, row - rows)  # which wraps to a huge number where row < rows
    return (row.astype(word) << sizes.bits) | column.astype(word)


def _multiply_high(a: Array, b: Array) -> Array:
    """The high half of a product of uint32, of four products of 16 bits: there is no uint64."""
    a_high, a_low, b_high, b_low = a >> 16, a & 0xFFFF, b >> 16, b & 0xFFFF
    middle = a_high * b_low + ((a_low * b_low) >> 16)  # at most 2**32 - 2**16
    other = a_low * b_high + (middle & 0xFFFF)
    return a_high * b_high + (middle >> 16) + (other >> 16)
