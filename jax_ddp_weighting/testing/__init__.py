"""Proofs that gradients are equal, and the name of what somebody else's step does."""

from jax_ddp_weighting.testing.additivity import check_additive
from jax_ddp_weighting.testing.comparison import LeafDifference, ParityError, ParityReport
from jax_ddp_weighting.testing.conventions import CONVENTIONS
from jax_ddp_weighting.testing.diagnosis import Diagnosis, diagnose_weights
from jax_ddp_weighting.testing.gradient_comparison import compare_gradients
from jax_ddp_weighting.testing.name_map import NameMap
from jax_ddp_weighting.testing.parity import check_gradients
from jax_ddp_weighting.testing.per_example import effective_weights, per_example_gradients
from jax_ddp_weighting.testing.probing import diagnose
from jax_ddp_weighting.testing.recording import record
from jax_ddp_weighting.testing.step_probing import diagnose_step
from jax_ddp_weighting.testing.torch_naming import torch_names
from jax_ddp_weighting.testing.torch_probing import diagnose_torch

__all__ = [
    "CONVENTIONS",
    "Diagnosis",
    "LeafDifference",
    "NameMap",
    "ParityError",
    "ParityReport",
    "check_additive",
    "check_gradients",
    "compare_gradients",
    "diagnose",
    "diagnose_step",
    "diagnose_torch",
    "diagnose_weights",
    "effective_weights",
    "per_example_gradients",
    "record",
    "torch_names",
]
