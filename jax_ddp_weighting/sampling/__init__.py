"""Which example sits in which slot, and what the slot weighs: numpy alone, no JAX."""

from jax_ddp_weighting.sampling.audit import CoverageError, EpochAudit, audit_ids
from jax_ddp_weighting.sampling.ledger import Ledger
from jax_ddp_weighting.sampling.manifest import manifest_hash
from jax_ddp_weighting.sampling.order import keyed_order, torch_order
from jax_ddp_weighting.sampling.plan import EpochPlan, Slots
from jax_ddp_weighting.sampling.sampler import DistributedSampler

__all__ = [
    "CoverageError",
    "DistributedSampler",
    "EpochAudit",
    "EpochPlan",
    "Ledger",
    "Slots",
    "audit_ids",
    "keyed_order",
    "manifest_hash",
    "torch_order",
]
