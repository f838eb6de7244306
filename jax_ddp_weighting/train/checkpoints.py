"""A run in a checkpoint of Orbax's: its state, its position, and what it has consumed."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jaxtyping import PyTree

from jax_ddp_weighting.data.ledgers import gather_ledger
from jax_ddp_weighting.data.run_position import RunPosition
from jax_ddp_weighting.distributed.coordination import WAIT_S, this_process
from jax_ddp_weighting.sampling.ledger import Ledger

if TYPE_CHECKING:
    from orbax.checkpoint import CheckpointManager

_STATE, _RUN, _LEDGER = "state", "run", "ledger"


def save_run(
    manager: "CheckpointManager",
    step: int,
    state: PyTree,
    position: RunPosition,
    ledger: Ledger | None = None,
    *,
    force: bool = False,
    timeout_s: float = WAIT_S,
) -> bool:
    """Saves a run into one checkpoint: all of it is there, or nothing is.

    The rule: Orbax saves, as it was told to: in the background, from several processes, each its
    own shards. The position and the ledgers of all processes, merged, go into the checkpoint's own
    tree, as items `run` and `ledger` beside `state`. So what the ledger says was consumed is what
    the state has seen, whenever the run is killed: a checkpoint that is not finished does not
    count, and neither do rows that came after the last one that is.

    Every process must call it.

    Args:
        manager: `orbax.checkpoint.CheckpointManager(directory)`, with the options that you want.
        step: the number of the checkpoint.
        state: a pytree of arrays, sharded in any way: a `TrainState`, `nnx.state(...)`.
        position: where the run is; its ledger's digest is filled in.
        ledger: what this process has consumed of the epoch.
        force: save even where the manager's options would leave this step out.
        timeout_s: how many seconds to wait for other processes, to merge ledgers.

    Returns:
        Whether it is saved, or being saved: not where the manager's options leave this step out.

    Raises:
        TypeError, ValueError, RuntimeError: as `gather_ledger` has them.
        ValueError: the ledger is of another epoch than the position.

    Example:
        >>> import orbax.checkpoint as ocp, tempfile
        >>> plan = EpochPlan(4, num_replicas=1, batch_size=1)
        >>> ledger = Ledger(4, epoch=0)
        >>> ledger.add(plan.batch(0, step=0).ids)
        >>> position = RunPosition.of(plan, 0, 1, manifest_hash="...")
        >>> with ocp.CheckpointManager(tempfile.mkdtemp()) as manager:
        ...     saved = save_run(manager, 1, {"w": jnp.ones(2)}, position, ledger)
        ...     manager.wait_until_finished()
        ...     run = restore_run(manager, {"w": jnp.zeros(2)})
        >>> run.state["w"].tolist(), run.position.position, run.ledger.num_due
        ([1.0, 1.0], 1, 3)
    """
    import orbax.checkpoint as ocp

    if not (force or manager.should_save(step)):
        return False  # on all processes alike: nothing is to be merged
    if ledger is not None and ledger.epoch not in (None, position.epoch):
        raise ValueError(
            f"save_run: ledger must be of the position's epoch, {position.epoch}, got "
            f"{ledger.epoch}. Keep a ledger for each epoch."
        )
    items: dict[str, Any] = {_STATE: ocp.args.StandardSave(state)}
    if ledger is not None:
        merged = gather_ledger(ledger, timeout_s=timeout_s)
        position = replace(position, ledger=merged.digest)
        # numbers, since a pytree is what Orbax keeps best; of host arrays the first process's
        held = np.frombuffer(merged.to_bytes(), np.uint8)
        items[_LEDGER] = ocp.args.StandardSave({"bytes": held})
    items[_RUN] = ocp.args.JsonSave(position.to_dict())
    return bool(manager.save(step, args=ocp.args.Composite(**items), force=force))


@dataclass(frozen=True)
class RestoredRun:
    """What `restore_run` found.

    Attributes:
        step: the number of the checkpoint.
        state: the pytree, laid as it was asked for.
        position: where the run was.
        ledger: what was consumed of the epoch, to go on with: on the first process all of it, on
            the others nothing yet, so that `gather_ledger` counts each row once. None where none
            was kept.
        consumed: the same, whole on every process: for `RunPosition.check`, and to look at.
    """

    step: int
    state: PyTree
    position: RunPosition
    ledger: Ledger | None = None
    consumed: Ledger | None = None


def restore_run(
    manager: "CheckpointManager", like: PyTree, *, step: int | None = None
) -> RestoredRun | None:
    """The run of a checkpoint, on the processes and devices that are there now.

    The rule: arrays come back laid as those of `like` are, on any mesh: Orbax reads the shards that
    are needed. Check the position against plan and data before anything is trained.

    Every process must call it.

    Args:
        manager: a manager of the directory that the run was saved in.
        like: a state of the same structure, shapes and dtypes: arrays, or `jax.ShapeDtypeStruct`s
            with shardings, that say where it is to lie.
        step: the number of the checkpoint; the latest by default.

    Returns:
        A `RestoredRun`; None where the directory holds no checkpoint and no step was asked for.

    Raises:
        FileNotFoundError: there is no checkpoint of this step.
        ValueError: the checkpoint holds no run, or its ledger is not the position's.

    Example:
        >>> import orbax.checkpoint as ocp, tempfile
        >>> with ocp.CheckpointManager(tempfile.mkdtemp()) as manager:
        ...     print(restore_run(manager, {"w": jnp.zeros(2)}))  # nothing was saved yet
        None
    """
    import orbax.checkpoint as ocp

    step = manager.latest_step() if step is None else step
    if step is None:
        return None
    items: dict[str, Any] = {_STATE: ocp.args.StandardRestore(like)}
    try:
        run = manager.restore(step, args=ocp.args.Composite(**{_RUN: ocp.args.JsonRestore()}))
    except (KeyError, FileNotFoundError) as error:
        if step not in manager.all_steps():
            raise
        raise ValueError(
            f"restore_run: checkpoint {step} must hold a run, got none beside what it has. "
            "save_run writes it."
        ) from error
    position = RunPosition.from_dict(run[_RUN])
    if position.ledger:
        items[_LEDGER] = ocp.args.StandardRestore()
    found = manager.restore(step, args=ocp.args.Composite(**items))
    consumed = None
    if position.ledger:
        consumed = Ledger.from_bytes(np.asarray(jax.device_get(found[_LEDGER]["bytes"])).tobytes())
        if consumed.digest != position.ledger:
            raise ValueError(
                f"restore_run: checkpoint {step} must hold the ledger of its position, "
                f"{position.ledger[:16]}..., got {consumed.digest[:16]}... It was put together of "
                "two."
            )
    ledger = consumed
    if consumed is not None and this_process()[0] != 0:
        ledger = Ledger(consumed.num_examples, epoch=consumed.epoch)
    return RestoredRun(step, found[_STATE], position, ledger, consumed)
