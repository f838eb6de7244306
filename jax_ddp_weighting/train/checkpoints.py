"""A run in a checkpoint of Orbax's: its state, its position, and what it has consumed."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from queue import Empty
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jaxtyping import PyTree

from jax_ddp_weighting._arguments import list_some
from jax_ddp_weighting.data.ledgers import gather_ledger
from jax_ddp_weighting.data.run_position import RunPosition
from jax_ddp_weighting.distributed.allgather import together
from jax_ddp_weighting.distributed.coordination import (
    WAIT_S,
    Aside,
    check_timeout,
    find_differences,
    this_process,
)
from jax_ddp_weighting.distributed.waiting import Waiting
from jax_ddp_weighting.sampling.ledger import Ledger
from jax_ddp_weighting.train.array_sums import add_sums, find_changed, sum_arrays
from jax_ddp_weighting.train.background_errors import (
    check_background,
    check_told,
    forget_background,
    forget_told,
    has_failed,
    hear_background,
    is_news,
    not_written,
)

if TYPE_CHECKING:
    from orbax.checkpoint import CheckpointManager

_STATE, _RUN, _LEDGER, _SUMS = "state", "run", "ledger", "sums"
_PAUSE_S, _SETTLED_S = 0.1, 1.0
_LONGEST = 400  # letters of an error of Orbax's
_PLAIN = (bool, int, float, complex, str, bytes)


def save_run(
    manager: "CheckpointManager",
    step: int,
    state: PyTree,
    position: RunPosition,
    ledger: Ledger | None = None,
    *,
    force: bool = False,
    sums: bool = True,
    timeout_s: float = WAIT_S,
) -> bool:
    """Saves a run into one checkpoint: all of it is there, or nothing is.

    The rule: Orbax saves, as it was told to: in the background, from several processes, each its
    own shards. The position and the ledgers of all processes, merged, go into the checkpoint's own
    tree, as items `run` and `ledger` beside `state`. So what the ledger says was consumed is what
    the state has seen, whenever the run is killed: a checkpoint that is not finished does not
    count, and neither do rows that came after the last one that is. A sum of each array's bits, as
    item `sums`, is what `restore_run` knows by that it reads what was written.

    Every process must call it, with the same step and position. An error on one is an error on all
    of them, in time; that of a write in the background is raised on all by the next `save_run`,
    `finish_saving` or `restore_run`.

    Args:
        manager: `orbax.checkpoint.CheckpointManager(directory)`, with the options that you want.
        step: the number of the checkpoint.
        state: a pytree of arrays, sharded in any way: a `TrainState`, `nnx.state(...)`.
        position: where the run is; its ledger's digest is filled in.
        ledger: what this process has consumed of the epoch.
        force: save even where the manager's options would leave this step out.
        sums: keep the sums: the host reads the state for them, 2 to 12 s for 1e9 numbers.
        timeout_s: how many seconds to wait for other processes.

    Returns:
        Whether it is saved, or being saved: not where the manager's options leave this step out.

    Raises:
        TypeError: `ledger` is no `Ledger`, or a number is none.
        ValueError: the ledger is of another epoch than the position, or processes save different
            steps or positions.
        RuntimeError: another process failed or is absent, it names it; or the checkpoint before was
            not written.
        Exception: whatever Orbax raises of this process's.

    Example:
        >>> import orbax.checkpoint as ocp, tempfile
        >>> plan = EpochPlan(4, num_replicas=1, batch_size=1)
        >>> ledger = Ledger(4, epoch=0)
        >>> ledger.add(plan.batch(0, step=0).ids)
        >>> position = RunPosition.of(plan, 0, 1, manifest_hash="...")
        >>> with ocp.CheckpointManager(tempfile.mkdtemp()) as manager:
        ...     saved = save_run(manager, 1, {"w": jnp.ones(2)}, position, ledger)
        ...     finish_saving(manager)
        ...     run = restore_run(manager, {"w": jnp.zeros(2)})
        >>> run.state["w"].tolist(), run.position.position, run.ledger.num_due
        ([1.0, 1.0], 1, 3)
    """
    import orbax.checkpoint as ocp

    timeout_s = check_timeout("save_run: timeout_s", timeout_s)
    if not (force or manager.should_save(step)):
        return False  # on all processes alike: nothing is to be merged
    waiting = Waiting("save_run", timeout_s)
    with together(waiting) as looked:
        _check_run(state, position, ledger)
        about = {"step": step, "ledger": "kept" if ledger else "none", **position.to_dict()}
        looked.tell([about, sum_arrays(state) if sums else {}])
    _check_alike("save_run", {process: said for process, (said, _) in enumerate(looked.heard)})
    items: dict[str, Any] = {_STATE: ocp.args.StandardSave(state)}
    if ledger is not None:
        merged = gather_ledger(ledger, timeout_s=timeout_s)
        position = replace(position, ledger=merged.digest)
        # numbers, since a pytree is what Orbax keeps best; of host arrays the first process's
        held = np.frombuffer(merged.to_bytes(), np.uint8)
        items[_LEDGER] = ocp.args.StandardSave({"bytes": held})
    items[_RUN] = ocp.args.JsonSave(position.to_dict())
    if sums:
        items[_SUMS] = ocp.args.JsonSave(add_sums(part for _, part in looked.heard))

    def save() -> bool:
        _finish(manager, "save_run")
        hear_background(manager)
        saved = bool(manager.save(step, args=ocp.args.Composite(**items), force=force))
        forget_told(manager)
        return saved

    return waiting.run(save)


def finish_saving(manager: "CheckpointManager", *, timeout_s: float = WAIT_S) -> None:
    """Waits until what `save_run` saves in the background is there, on all processes.

    The rule: a write that failed on one process is an error on all of them. Orbax's own
    `manager.wait_until_finished()` and `manager.close()` raise on the others too, but once
    its `AsyncOptions(timeout_secs=)` have passed, 600 of them.

    Every process must call it.

    Args:
        manager: the manager that the run is saved with.
        timeout_s: how many seconds to wait for other processes to come to this call; while all are
            there the disk is slow, and is waited for.

    Raises:
        RuntimeError: the checkpoint was not written, here or on another process; it says why. Or
            another process is absent; it names it.

    Example:
        >>> import orbax.checkpoint as ocp, tempfile
        >>> with ocp.CheckpointManager(tempfile.mkdtemp()) as manager:
        ...     finish_saving(manager)
    """
    timeout_s = check_timeout("finish_saving: timeout_s", timeout_s)
    Waiting("finish_saving", timeout_s).run(lambda: _finish(manager, "finish_saving"))


def _finish(manager: "CheckpointManager", caller: str) -> None:
    """Waits for a write in the background, in words that can be told to other processes."""
    finished = Aside(manager.wait_until_finished, caller)
    pause = _PAUSE_S
    while True:
        try:
            error = _catch(partial(finished.wait, pause))
            break
        except Empty:
            # Orbax's threads wait for those of other processes before they say that they failed;
            # where there are none to wait for, it is given time to strike the step off its list
            if pause < _SETTLED_S and has_failed(manager):
                pause = _SETTLED_S
                continue
            check_background(manager, caller)
            check_told(manager, caller)
    # it raises an error once in every thread: so in this one too, before anything else is saved
    _catch(manager.wait_until_finished)
    kept = _catch(manager.check_for_errors)  # one of several is kept for the next save
    error = error or kept
    if error is None:
        check_background(manager, caller)
    elif is_news(manager, error):
        forget_background(manager)
        raise not_written(caller, error) from error


def _catch(call: Callable[[], Any]) -> Exception | None:
    """What a call raises; `Empty` is raised."""
    try:
        call()
    except Empty:
        raise
    except Exception as error:  # whatever a disk, or Orbax of it, has raised
        return error
    return None


def _check_run(state: PyTree, position: RunPosition, ledger: Ledger | None) -> None:
    for path, leaf in jax.tree_util.tree_flatten_with_path(state)[0]:
        # Orbax finds out too, but while other processes wait for this one
        if not (hasattr(leaf, "__array__") or isinstance(leaf, _PLAIN)):
            raise TypeError(
                f"save_run: state must hold arrays and numbers, got {type(leaf).__name__} at "
                f"state{jax.tree_util.keystr(path)}. Leave it out."
            )
    if not isinstance(position, RunPosition):
        raise TypeError(
            f"save_run: position must be a RunPosition, got {type(position).__name__}. "
            "RunPosition.of makes one."
        )
    if ledger is not None and not isinstance(ledger, Ledger):
        raise TypeError(f"save_run: ledger must be a Ledger, got {type(ledger).__name__}.")
    if ledger is not None and ledger.epoch not in (None, position.epoch):
        raise ValueError(
            f"save_run: ledger must be of the position's epoch, {position.epoch}, got "
            f"{ledger.epoch}. Keep a ledger for each epoch."
        )


def _check_alike(caller: str, said: Mapping[int, dict[str, Any]]) -> None:
    if differences := find_differences(dict(said), "process"):
        raise ValueError(
            f"{caller}: all processes must be at one checkpoint of one run, got "
            f"{'; '.join(differences)}. Call it on every process at the same step."
        )


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
    manager: "CheckpointManager",
    like: PyTree,
    *,
    step: int | None = None,
    timeout_s: float = WAIT_S,
) -> RestoredRun | None:
    """The run of a checkpoint, on the processes and devices that are there now.

    The rule: arrays come back laid as those of `like` are, on any mesh: Orbax reads the shards that
    are needed. What is not whole, or not what was written, is refused, and names the checkpoint:
    nothing is half restored. Check the position against plan and data before anything is trained.

    Every process must call it. An error on one is an error on all of them.

    Args:
        manager: a manager of the directory that the run was saved in.
        like: a state of the same structure, shapes and dtypes: arrays, or `jax.ShapeDtypeStruct`s
            with shardings, that say where it is to lie.
        step: the number of the checkpoint; the latest by default, of those that are there now.
        timeout_s: how many seconds to wait for other processes to come to this call.

    Returns:
        A `RestoredRun`; None where the directory holds no checkpoint and no step was asked for.

    Raises:
        FileNotFoundError: there is no checkpoint of this step.
        ValueError: the checkpoint holds no run, or none like `like`; it is not whole, or an array
            or the ledger is not what was saved; processes find different checkpoints.
        RuntimeError: another process failed or is absent, it names it; or a write in the background
            failed.

    Example:
        >>> import orbax.checkpoint as ocp, tempfile
        >>> with ocp.CheckpointManager(tempfile.mkdtemp()) as manager:
        ...     print(restore_run(manager, {"w": jnp.zeros(2)}))  # nothing was saved yet
        None
    """
    waiting = Waiting("restore_run", check_timeout("restore_run: timeout_s", timeout_s))
    waiting.run(lambda: _finish(manager, "restore_run"))
    with together(waiting, FileNotFoundError) as looked:
        manager.reload()  # one that failed to save has forgotten what was there before
        looked.tell({"step": _find_step(manager, step)})
    _check_alike("restore_run", dict(enumerate(looked.heard)))
    if (step := looked.heard[0]["step"]) is None:
        return None
    found = waiting.run(lambda: _read(manager, step, like))
    position: RunPosition = found[_RUN]
    consumed = None
    if position.ledger:
        held = np.asarray(jax.device_get(found[_LEDGER]["bytes"]))
        consumed = Ledger.from_bytes(held.tobytes())
        if consumed.digest != position.ledger:
            raise ValueError(
                f"restore_run: checkpoint {step} must hold the ledger of its position, "
                f"{position.ledger[:16]}..., got {consumed.digest[:16]}... It was put together of "
                "two."
            )
    if _SUMS in found:
        with together(waiting) as summed:
            summed.tell(sum_arrays(found[_STATE]))
        if changed := find_changed(found[_SUMS], add_sums(summed.heard)):
            raise _torn_error(manager, step, f"other numbers than were saved at {changed[0]}")
    ledger = consumed
    if consumed is not None and this_process()[0] != 0:
        ledger = Ledger(consumed.num_examples, epoch=consumed.epoch)
    return RestoredRun(step, found[_STATE], position, ledger, consumed)


def _find_step(manager: "CheckpointManager", step: int | None) -> int | None:
    there = sorted(manager.all_steps())
    if step is not None and step not in there:
        raise FileNotFoundError(
            f"restore_run: step must be one of {list_some(there) or 'none'}, got {step}: "
            f"{manager.directory} holds no other checkpoint that is finished."
        )
    return manager.latest_step() if step is None else step


def _read(manager: "CheckpointManager", step: int, like: PyTree) -> dict[str, Any]:
    """The items of a checkpoint."""
    import orbax.checkpoint as ocp

    def restore(what: str, **items: Any) -> Any:
        try:
            return manager.restore(step, args=ocp.args.Composite(**items))
        except (KeyError, FileNotFoundError) as error:
            if what == _STATE:
                raise _torn_error(manager, step, _shorten(error)) from error
            raise
        except Exception as error:  # what Orbax raises of a file that is cut short is anything
            # also what a thread of the last save has come to since
            check_background(manager, "restore_run")
            raise _torn_error(manager, step, _shorten(error)) from error

    try:
        run = restore(_RUN, run=ocp.args.JsonRestore())[_RUN]
    except (KeyError, FileNotFoundError) as error:
        raise ValueError(
            f"restore_run: checkpoint {step} must hold a run, got none beside what it has. "
            "save_run writes it."
        ) from error
    try:
        position = RunPosition.from_dict(run)
    except (TypeError, ValueError) as error:
        raise _torn_error(manager, step, str(error)) from error
    items: dict[str, Any] = {_STATE: ocp.args.StandardRestore(like)}
    if position.ledger:
        items[_LEDGER] = ocp.args.StandardRestore()
    found = dict(restore(_STATE, **items).items())
    try:
        found[_SUMS] = restore(_SUMS, sums=ocp.args.JsonRestore())[_SUMS]
    except KeyError:  # none were kept
        pass
    except FileNotFoundError as error:
        raise _torn_error(manager, step, _shorten(error)) from error
    return {**found, _RUN: position}


def _torn_error(manager: "CheckpointManager", step: int, got: str) -> ValueError:
    others = sorted(set(manager.all_steps()) - {step})
    remedy = f"step={others[-1]} gives another one" if others else "There is no other one"
    return ValueError(
        f"restore_run: checkpoint {step} in {manager.directory} must be whole, and like `like`, "
        f"got {got.rstrip('.')}. {remedy}; delete this one, if it is torn."
    )


def _shorten(error: Exception) -> str:
    """Orbax's errors print whole specifications."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:_LONGEST]}{'...' if len(text) > _LONGEST else ''}"
