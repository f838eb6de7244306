"""Which example sits in which slot, and what the slot weighs: numpy alone, no JAX."""

from jax_ddp_weighting.sampling.audit import CoverageError, EpochAudit, audit_ids
from jax_ddp_weighting.sampling.budget import BudgetPlan
from jax_ddp_weighting.sampling.ledger import Ledger
from jax_ddp_weighting.sampling.manifest import manifest_hash
from jax_ddp_weighting.sampling.order import keyed_order, torch_order
from jax_ddp_weighting.sampling.packed_rows import PackedRows, pack_rows
from jax_ddp_weighting.sampling.packing import PackedPlan
from jax_ddp_weighting.sampling.padding import PaddingReport, StepPadding
from jax_ddp_weighting.sampling.plan import EpochPlan, Slots
from jax_ddp_weighting.sampling.sampler import DistributedSampler

__all__ = [
    "BudgetPlan",
    "CoverageError",
    "DistributedSampler",
    "EpochAudit",
    "EpochPlan",
    "Ledger",
    "PackedPlan",
    "PackedRows",
    "PaddingReport",
    "Slots",
    "StepPadding",
    "audit_ids",
    "keyed_order",
    "manifest_hash",
    "pack_rows",
    "torch_order",
]
