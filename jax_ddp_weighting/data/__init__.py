"""Batches on the mesh: a plan's rows, streams of unknown length, and whether processes agree."""

from jax_ddp_weighting.data.agreement import DisagreementError, EpochRecord, check_agreement
from jax_ddp_weighting.data.batch import Batch
from jax_ddp_weighting.data.device_plan import DevicePlan
from jax_ddp_weighting.data.id_counts import IdCounts
from jax_ddp_weighting.data.join import JOIN_CONVENTIONS, join_batches
from jax_ddp_weighting.data.ledgers import gather_ledger
from jax_ddp_weighting.data.loader import batches
from jax_ddp_weighting.data.process_rows import global_batch
from jax_ddp_weighting.data.run_position import RunPosition

__all__ = [
    "JOIN_CONVENTIONS",
    "Batch",
    "DevicePlan",
    "DisagreementError",
    "EpochRecord",
    "IdCounts",
    "RunPosition",
    "batches",
    "check_agreement",
    "gather_ledger",
    "global_batch",
    "join_batches",
]
