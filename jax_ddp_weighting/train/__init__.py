"""One compiled optimizer step, accumulation by weight, and BatchNorm over all ranks' rows.

The nnx twins are imported on first use: `flax.nnx` costs a quarter of a second, and programs of
linen or of plain functions never need it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from jax_ddp_weighting.train.accumulation import weighted_multi_steps
from jax_ddp_weighting.train.batch_norm import BatchNorm
from jax_ddp_weighting.train.checkpoints import RestoredRun, finish_saving, restore_run, save_run
from jax_ddp_weighting.train.epoch import make_train_epoch
from jax_ddp_weighting.train.epoch_program import EpochReport
from jax_ddp_weighting.train.optax_epoch import make_optax_epoch
from jax_ddp_weighting.train.optax_step import make_optax_step
from jax_ddp_weighting.train.shards import clip_by_global_norm, global_norm
from jax_ddp_weighting.train.step import StepReport
from jax_ddp_weighting.train.train_state import make_train_step

if TYPE_CHECKING:
    from jax_ddp_weighting.train.nnx import make_nnx_train_step
    from jax_ddp_weighting.train.nnx_batch_norm import NnxBatchNorm
    from jax_ddp_weighting.train.nnx_epoch import make_nnx_train_epoch

__all__ = [
    "BatchNorm",
    "EpochReport",
    "NnxBatchNorm",
    "RestoredRun",
    "StepReport",
    "clip_by_global_norm",
    "finish_saving",
    "global_norm",
    "make_nnx_train_epoch",
    "make_nnx_train_step",
    "make_optax_epoch",
    "make_optax_step",
    "make_train_epoch",
    "make_train_step",
    "restore_run",
    "save_run",
    "weighted_multi_steps",
]

_LAZY = {
    "NnxBatchNorm": "nnx_batch_norm",
    "make_nnx_train_epoch": "nnx_epoch",
    "make_nnx_train_step": "nnx",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
    globals()[name] = value
    return value
