"""Which example sits in which slot, and what the slot weighs: numpy alone, no JAX."""

from jax_ddp_weighting.sampling.audit import CoverageError, EpochAudit, SourceAudit, audit_ids
from jax_ddp_weighting.sampling.draws import WeightedOrder, weighted_order
from jax_ddp_weighting.sampling.ledger import Ledger
from jax_ddp_weighting.sampling.length_groups import GroupedOrder, grouped_order
from jax_ddp_weighting.sampling.manifest import manifest_hash
from jax_ddp_weighting.sampling.mixtures import MixtureOrder, mixture_order
from jax_ddp_weighting.sampling.order import keyed_order, torch_order
from jax_ddp_weighting.sampling.plan import EpochPlan, Slots
from jax_ddp_weighting.sampling.sampler import DistributedSampler

__all__ = [
    "CoverageError",
    "DistributedSampler",
    "EpochAudit",
    "EpochPlan",
    "GroupedOrder",
    "Ledger",
    "MixtureOrder",
    "Slots",
    "SourceAudit",
    "WeightedOrder",
    "audit_ids",
    "grouped_order",
    "keyed_order",
    "manifest_hash",
    "mixture_order",
    "torch_order",
    "weighted_order",
]
