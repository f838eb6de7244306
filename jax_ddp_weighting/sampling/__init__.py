"""Which example sits in which slot, and what the slot weighs: numpy alone, no JAX."""

from jax_ddp_weighting.sampling.audit import CoverageError, EpochAudit, SourceAudit, audit_ids
from jax_ddp_weighting.sampling.draws import WeightedOrder, weighted_order
from jax_ddp_weighting.sampling.iterables import ShardedIterable
from jax_ddp_weighting.sampling.ledger import Ledger
from jax_ddp_weighting.sampling.length_groups import GroupedOrder, grouped_order
from jax_ddp_weighting.sampling.manifest import manifest_hash
from jax_ddp_weighting.sampling.mixtures import MixtureOrder, mixture_order
from jax_ddp_weighting.sampling.order import keyed_order, torch_order
from jax_ddp_weighting.sampling.plan import EpochPlan, Slots
from jax_ddp_weighting.sampling.sampler import DistributedSampler
from jax_ddp_weighting.sampling.sampler_orders import SamplerOrder, sampler_order
from jax_ddp_weighting.sampling.step_sampler import DistributedBatchSampler

__all__ = [
    "CoverageError",
    "DistributedBatchSampler",
    "DistributedSampler",
    "EpochAudit",
    "EpochPlan",
    "GroupedOrder",
    "Ledger",
    "MixtureOrder",
    "SamplerOrder",
    "ShardedIterable",
    "Slots",
    "SourceAudit",
    "WeightedOrder",
    "audit_ids",
    "grouped_order",
    "keyed_order",
    "manifest_hash",
    "mixture_order",
    "sampler_order",
    "torch_order",
    "weighted_order",
]
