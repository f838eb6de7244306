"""Which example sits in which slot, and what the slot weighs: numpy alone, no JAX."""

from jax_ddp_weighting.sampling.audit import CoverageError, EpochAudit, SourceAudit, audit_ids
from jax_ddp_weighting.sampling.budget import BudgetPlan
from jax_ddp_weighting.sampling.draws import WeightedOrder, weighted_order
from jax_ddp_weighting.sampling.iterables import ShardedIterable
from jax_ddp_weighting.sampling.ledger import Ledger
from jax_ddp_weighting.sampling.length_groups import GroupedOrder, grouped_order
from jax_ddp_weighting.sampling.manifest import manifest_hash
from jax_ddp_weighting.sampling.mixtures import MixtureOrder, mixture_order
from jax_ddp_weighting.sampling.order import keyed_order, torch_order
from jax_ddp_weighting.sampling.packed_rows import PackedRows, pack_rows
from jax_ddp_weighting.sampling.packing import PackedPlan
from jax_ddp_weighting.sampling.padding import PaddingReport, StepPadding
from jax_ddp_weighting.sampling.plan import EpochPlan
from jax_ddp_weighting.sampling.sampler import DistributedSampler
from jax_ddp_weighting.sampling.sampler_orders import SamplerOrder, sampler_order
from jax_ddp_weighting.sampling.slots import Slots
from jax_ddp_weighting.sampling.step_sampler import DistributedBatchSampler

__all__ = [
    "BudgetPlan",
    "CoverageError",
    "DistributedBatchSampler",
    "DistributedSampler",
    "EpochAudit",
    "EpochPlan",
    "GroupedOrder",
    "Ledger",
    "MixtureOrder",
    "PackedPlan",
    "PackedRows",
    "PaddingReport",
    "SamplerOrder",
    "ShardedIterable",
    "Slots",
    "SourceAudit",
    "StepPadding",
    "WeightedOrder",
    "audit_ids",
    "grouped_order",
    "keyed_order",
    "manifest_hash",
    "mixture_order",
    "pack_rows",
    "sampler_order",
    "torch_order",
    "weighted_order",
]
