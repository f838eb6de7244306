"""Batches on the mesh: a plan's rows, streams of unknown length, and whether processes agree."""

from jax_ddp_weighting.data.agreement import DisagreementError, EpochRecord, check_agreement
from jax_ddp_weighting.data.batch import Batch
from jax_ddp_weighting.data.device_plan import DevicePlan
from jax_ddp_weighting.data.id_counts import IdCounts
from jax_ddp_weighting.data.join import JOIN_CONVENTIONS, join_batches
from jax_ddp_weighting.data.loader import batches
from jax_ddp_weighting.data.process_rows import global_batch

__all__ = [
    "JOIN_CONVENTIONS",
    "Batch",
    "DevicePlan",
    "DisagreementError",
    "EpochRecord",
    "IdCounts",
    "batches",
    "check_agreement",
    "global_batch",
    "join_batches",
]
