"""Data-parallel training in which every example counts as its weight, once.

The public names below are resolved on first use (PEP 562), so that importing the package, or only
its numpy half (`order`, `audit`, `plan`, `sampler`, `manifest`), never imports JAX.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jax_ddp_weighting.additive import check_additive as check_additive
    from jax_ddp_weighting.agreement import DisagreementError as DisagreementError
    from jax_ddp_weighting.agreement import EpochRecord as EpochRecord
    from jax_ddp_weighting.agreement import check_agreement as check_agreement
    from jax_ddp_weighting.audit import audit_ids as audit_ids
    from jax_ddp_weighting.coverage import CoverageError as CoverageError
    from jax_ddp_weighting.coverage import EpochAudit as EpochAudit
    from jax_ddp_weighting.diagnosis import diagnose as diagnose
    from jax_ddp_weighting.diagnosis import diagnose_step as diagnose_step
    from jax_ddp_weighting.differences import ParityError as ParityError
    from jax_ddp_weighting.effective import effective_weights as effective_weights
    from jax_ddp_weighting.effective import per_example_gradients as per_example_gradients
    from jax_ddp_weighting.evaluation import evaluate as evaluate
    from jax_ddp_weighting.feed import Batch as Batch
    from jax_ddp_weighting.feed import batches as batches
    from jax_ddp_weighting.gathering import gather_by_id as gather_by_id
    from jax_ddp_weighting.join import join_batches as join_batches
    from jax_ddp_weighting.ledger import Ledger as Ledger
    from jax_ddp_weighting.manifest import manifest_hash as manifest_hash
    from jax_ddp_weighting.mesh import data_mesh as data_mesh
    from jax_ddp_weighting.mesh import force_cpu_devices as force_cpu_devices
    from jax_ddp_weighting.multi_steps import weighted_multi_steps as weighted_multi_steps
    from jax_ddp_weighting.naming import Diagnosis as Diagnosis
    from jax_ddp_weighting.naming import diagnose_weights as diagnose_weights
    from jax_ddp_weighting.nnx_train import make_nnx_train_step as make_nnx_train_step
    from jax_ddp_weighting.norm import BatchNorm as BatchNorm
    from jax_ddp_weighting.norm import NnxBatchNorm as NnxBatchNorm
    from jax_ddp_weighting.order import keyed_order as keyed_order
    from jax_ddp_weighting.order import torch_order as torch_order
    from jax_ddp_weighting.parity import check_gradients as check_gradients
    from jax_ddp_weighting.parts import due_step as due_step
    from jax_ddp_weighting.parts import held_ids as held_ids
    from jax_ddp_weighting.parts import read_parts as read_parts
    from jax_ddp_weighting.parts import write_part as write_part
    from jax_ddp_weighting.plan import EpochPlan as EpochPlan
    from jax_ddp_weighting.plan import Slots as Slots
    from jax_ddp_weighting.sampler import DistributedSampler as DistributedSampler
    from jax_ddp_weighting.sums import WeightedSum as WeightedSum
    from jax_ddp_weighting.sums import valid_labels as valid_labels
    from jax_ddp_weighting.sums import weighted_sum as weighted_sum
    from jax_ddp_weighting.train import make_train_step as make_train_step
    from jax_ddp_weighting.weighting import GlobalLoss as GlobalLoss
    from jax_ddp_weighting.weighting import rank_share as rank_share
    from jax_ddp_weighting.weighting import value_and_grad as value_and_grad

__version__ = "0.1.0"

_PUBLIC = {
    "order": ("torch_order", "keyed_order"),
    "coverage": ("EpochAudit", "CoverageError"),
    "ledger": ("Ledger",),
    "audit": ("audit_ids",),
    "plan": ("Slots", "EpochPlan"),
    "sampler": ("DistributedSampler",),
    "manifest": ("manifest_hash",),
    "mesh": ("force_cpu_devices", "data_mesh"),
    "sums": ("WeightedSum", "weighted_sum", "valid_labels"),
    "weighting": ("GlobalLoss", "value_and_grad", "rank_share"),
    "feed": ("Batch", "batches"),
    "multi_steps": ("weighted_multi_steps",),
    "nnx_train": ("make_nnx_train_step",),
    "train": ("make_train_step",),
    "join": ("join_batches",),
    "gathering": ("gather_by_id",),
    "parts": ("write_part", "read_parts", "held_ids", "due_step"),
    "evaluation": ("evaluate",),
    "agreement": ("EpochRecord", "check_agreement", "DisagreementError"),
    "norm": ("BatchNorm", "NnxBatchNorm"),
    "differences": ("ParityError",),
    "additive": ("check_additive",),
    "parity": ("check_gradients",),
    "effective": ("effective_weights", "per_example_gradients"),
    "naming": ("Diagnosis", "diagnose_weights"),
    "diagnosis": ("diagnose", "diagnose_step"),
}
_HOME = {name: module for module, names in _PUBLIC.items() for name in names}

__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return import_module(f"{__name__}.{name}")
    if name in _HOME:
        value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME, *_PUBLIC})
