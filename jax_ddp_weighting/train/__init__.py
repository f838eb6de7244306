"""One compiled optimizer step, accumulation by weight, and BatchNorm over all ranks' rows.

The nnx twins are imported on first use: `flax.nnx` costs a quarter of a second, and programs of
linen or of plain functions never need it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from jax_ddp_weighting.train.accumulation import weighted_multi_steps
from jax_ddp_weighting.train.batch_norm import BatchNorm
from jax_ddp_weighting.train.checkpoints import RestoredRun, restore_run, save_run
from jax_ddp_weighting.train.epoch import EpochReport, make_train_epoch
from jax_ddp_weighting.train.step import StepReport
from jax_ddp_weighting.train.train_state import make_train_step

if TYPE_CHECKING:
    from jax_ddp_weighting.train.nnx import make_nnx_train_step
    from jax_ddp_weighting.train.nnx_batch_norm import NnxBatchNorm

__all__ = [
    "BatchNorm",
    "EpochReport",
    "NnxBatchNorm",
    "RestoredRun",
    "StepReport",
    "make_nnx_train_step",
    "make_train_epoch",
    "make_train_step",
    "restore_run",
    "save_run",
    "weighted_multi_steps",
]

_LAZY = {"make_nnx_train_step": "nnx", "NnxBatchNorm": "nnx_batch_norm"}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
    globals()[name] = value
    return value
