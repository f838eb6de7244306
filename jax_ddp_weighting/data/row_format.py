"""What rows look like: one look for a whole stream, on every process and at every step."""

import jax
from jaxtyping import PyTree

from jax_ddp_weighting.data.batch import Batch
from jax_ddp_weighting.distributed.placement import device_dtype

RowFormat = dict[str, str]
"""The structure of rows, and the dtype and the shape of one row of each leaf."""


def describe_rows(rows: PyTree) -> RowFormat:
    """The form of rows as they would be on a device: arrays with one leading axis."""
    found = {"structure": str(jax.tree.structure(rows))}
    for path, leaf in jax.tree_util.tree_leaves_with_path(rows):
        shape = ", ".join(map(str, leaf.shape[1:]))
        found[f"data{jax.tree_util.keystr(path)}"] = f"{device_dtype(leaf.dtype)}[{shape}]"
    return found


def describe_batch(batch: Batch) -> RowFormat:
    """The form of a batch's rows, with that of their weights."""
    found = describe_rows(batch.data)
    for name in ("weights", "missing"):
        values = getattr(batch, name)
        if values is not None:
            found[name] = str(device_dtype(values.dtype))
    return found


def check_format(caller: str, format: RowFormat, first: RowFormat) -> None:
    """Refuses rows of another form than the first ones of their stream.

    Raises:
        ValueError: the forms differ; names the first leaf that does.
    """
    for leaf in first | format:
        before, now = first.get(leaf, "nothing"), format.get(leaf, "nothing")
        if before != now:
            raise ValueError(
                f"{caller}: rows must keep the form of the first ones, got {now} for {before} at "
                f"{leaf}. Pad rows to one shape, and give them one dtype."
            )
