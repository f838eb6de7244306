"""What was really read, counted on the devices that read it."""

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jax_ddp_weighting._arguments import (
    check_integer,
    check_limit,
    check_not_masked,
    check_num_replicas,
)
from jax_ddp_weighting.distributed.between_steps import in_one_program
from jax_ddp_weighting.distributed.mesh import AxisName, axis_size
from jax_ddp_weighting.distributed.placement import device_ids
from jax_ddp_weighting.sampling.audit import LISTED, EpochAudit

_MOST = 2**32 - 1


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class IdCounts:
    """How often each id was read, as arrays that a compiled program carries: `add`, then `audit`.

    The rule: what `audit_ids` counts on the host, in 4 bytes an example. Every array has a leading
    axis of ranks, and a rank holds the counts of its own part of the ids, whoever read them: with
    ``PartitionSpec("data")`` for all of it, memory is that of the examples over the ranks, and each
    `add` gathers the ranks' ids.

    Attributes:
        num_examples: how many ids there are, below ``2**31``.
        num_replicas: number of ranks.

    Example:
        >>> from jax_ddp_weighting import EpochPlan
        >>> from jax_ddp_weighting.data import DevicePlan
        >>> plan = EpochPlan(5, num_replicas=2, batch_size=2)
        >>> on_device = DevicePlan.of(plan, epochs=1)
        >>> def read(counts, step):
        ...     slots = on_device.batch(0, step)
        ...     return counts.add(slots.ids, slots.weights), None
        >>> counts, _ = jax.lax.scan(read, IdCounts.zeros(5, 2), jnp.arange(2))
        >>> counts.audit(epoch=0).exactly_once
        True
    """

    num_examples: int = field(metadata={"static": True})
    num_replicas: int = field(metadata={"static": True})
    _times: Any  # uint32 [ranks, ids of a rank]
    _slots: Any  # uint32 [ranks], as the next two: what each rank has read
    _accepted: Any
    _beyond: Any  # accepted slots whose id is out of range
    _unlike: Any  # bool [ranks], whether a weight was neither 0 nor 1

    @classmethod
    def zeros(cls, num_examples: int, num_replicas: int) -> "IdCounts":
        """Counts of nothing.

        Raises:
            TypeError: a number is none.
            ValueError: a number is out of range.
        """
        remedy = "audit_ids, on the host, takes more."
        n = check_integer("IdCounts.zeros: num_examples", num_examples, 0, 2**31 - 1, remedy)
        ranks = check_num_replicas("IdCounts.zeros: num_replicas", num_replicas)
        none = jnp.zeros(ranks, jnp.uint32)
        # at least one a rank, so that there is something to index
        times = jnp.zeros((ranks, max(-(-n // ranks), 1)), jnp.uint32)
        return cls(n, ranks, times, none, none, none, jnp.zeros(ranks, bool))

    def add(self, ids: Any, weights: Any, axis_name: AxisName | None = None) -> "IdCounts":
        """The counts with some slots more: of all ranks, or of one inside a mapped function.

        Args:
            ids: integer ids. Of all ranks, ``[ranks, rows]``, or ``[ranks * rows]`` as a global
                batch has them; of this rank, of any shape, where `axis_name` is given.
            weights: of the shape of ids, each 0 or 1; a slot of weight 0 is not counted.
            axis_name: the mapped axis whose rank this is; each has as many slots.

        Returns:
            An `IdCounts`.

        Raises:
            TypeError: ids are no integers, or ids or weights are masked.
            ValueError: shapes are not as they must be, an id on the host is cut by the device, or
                the axis is not mapped here or of another size.
        """
        check_not_masked("IdCounts.add: ids", ids)
        check_not_masked("IdCounts.add: weights", weights)
        ids = ids if isinstance(ids, jax.Array) else np.asarray(ids)
        if not isinstance(weights, jax.Array):
            weights = np.asarray(weights)  # compared as they are: a device would cut small ones
        if not jnp.issubdtype(ids.dtype, jnp.integer):
            raise TypeError(f"IdCounts.add: ids must be integers, got {ids.dtype}.")
        if not isinstance(ids, jax.Array):
            ids = device_ids(ids, caller="IdCounts.add")
        here = self._slots.shape[0]
        wanted = self.num_replicas
        if axis_name is not None:
            wanted, size = 1, axis_size(axis_name, caller="IdCounts.add")
            if size != self.num_replicas:
                raise ValueError(
                    f"IdCounts.add: axis_name must be an axis of {self.num_replicas} ranks, as the"
                    f" counts are of, got {size}. Make them with IdCounts.zeros(..., {size})."
                )
        if here != wanted:
            raise ValueError(
                f"IdCounts.add: counts must be those of {wanted} ranks here, got {here}. In"
                ' shard_map give them the spec PartitionSpec("data"), and axis_name="data"; outside'
                " leave axis_name out."
            )
        if ids.shape != weights.shape or ids.size % here:
            raise ValueError(
                f"IdCounts.add: ids must have the shape of weights, and rows that divide by {here}"
                f" ranks, got {ids.shape} and {weights.shape}."
            )
        if not isinstance(weights, jax.Array):
            weights = _judge(weights)
        if axis_name is None:
            return in_one_program(_add_slots, self, ids, weights)
        return _add_slots(self, ids, weights, axis_name)

    def audit(self, *, epoch: int | None = None, limit: int = LISTED) -> EpochAudit:
        """What was read, as `audit_ids` says it: waits for the devices.

        Ids out of range are counted and not listed.

        Args:
            epoch: the epoch to name in errors.
            limit: how many ids of a kind to list; the rest are counted.

        Returns:
            An `EpochAudit`, equal to that of `audit_ids`.

        Raises:
            ValueError: a weight was neither 0 nor 1, or there were more slots than 32 bits count.
        """
        limit = check_limit("IdCounts.audit: limit", limit)
        if np.any(self._unlike):
            raise ValueError(
                "IdCounts.audit: weights must be 0 or 1, got others. Count (weights > 0), or let"
                " audit_ids(ids, num_examples, weights=weights) tell them apart, on the host."
            )
        slots, accepted, beyond = (
            np.asarray(each).astype(np.int64)
            for each in (self._slots, self._accepted, self._beyond)
        )
        if slots.sum() >= _MOST:
            raise ValueError(
                "IdCounts.audit: slots must be fewer than 2**32 - 1, got as many. Count each epoch"
                " on its own."
            )
        times = np.asarray(self._times).reshape(-1)[: self.num_examples]
        several, missing = np.flatnonzero(times > 1), np.flatnonzero(times == 0)
        listed = several[:limit]
        return EpochAudit(
            num_examples=self.num_examples,
            slots=int(slots.sum()),
            accepted=int(accepted.sum()),
            unique=self.num_examples - len(missing),
            duplicated=dict(zip(listed.tolist(), times[listed].tolist(), strict=True)),
            omitted=tuple(missing[:limit].tolist()),
            num_duplicated=len(several),
            num_omitted=len(missing),
            num_out_of_range=int(beyond.sum()),
            per_rank=tuple(accepted.tolist()),
            weight_range=(int(times.min()), int(times.max())) if len(times) else (0, 0),
            epoch=epoch,
        )


def _judge(weights: Any) -> tuple[Any, Any]:
    """Which slots are accepted, and which have a weight that is neither 0 nor 1."""
    return weights > 0, (weights != 0) & (weights != 1)


def _add_slots(
    counts: IdCounts, ids: Array, weights: Any, axis_name: AxisName | None = None
) -> IdCounts:
    here = counts._slots.shape[0]
    accepted, unlike = (
        jnp.reshape(each, (here, -1))
        for each in (_judge(weights) if isinstance(weights, jax.Array) else weights)
    )
    ids = jnp.reshape(ids, (here, -1))
    if ids.dtype.itemsize < 4:
        ids = ids.astype(jnp.int32)  # so that it can be compared with the length
    inside = (ids >= 0) & (ids <= counts.num_examples - 1) & accepted
    # out of range of all parts; a cast of what is inside cuts nothing
    own = jnp.where(inside, ids, 0).astype(jnp.uint32)
    parts = counts._times.shape[1]
    if axis_name is None:
        first, everything = jnp.uint32(0), (own, inside)
        parts *= here
    else:
        # modulo 2**32, in which what lies before this rank's part lies far beyond it
        first = jax.lax.axis_index(axis_name).astype(jnp.uint32) * jnp.uint32(parts)
        everything = jax.lax.all_gather((own, inside), axis_name, axis=0, tiled=True)
    place = everything[0] - first
    place = jnp.where(everything[1] & (place < parts), place, parts)
    times = counts._times.reshape(-1).at[place.reshape(-1)].add(jnp.uint32(1), mode="drop")

    def count(before: Array, found: Array) -> Array:
        after = before + found.sum(axis=1, dtype=jnp.uint32)
        return jnp.where(after < before, jnp.uint32(_MOST), after)  # no wrap unseen

    return IdCounts(
        counts.num_examples,
        counts.num_replicas,
        times.reshape(counts._times.shape),
        count(counts._slots, jnp.ones_like(accepted)),
        count(counts._accepted, accepted),
        count(counts._beyond, accepted & ~inside),
        counts._unlike | unlike.any(axis=1),
    )
