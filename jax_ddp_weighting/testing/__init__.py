"""Proofs that gradients are equal, and the name of what somebody else's step does."""

from jax_ddp_weighting.testing.additivity import check_additive
from jax_ddp_weighting.testing.comparison import LeafDifference, ParityError, ParityReport
from jax_ddp_weighting.testing.conventions import CONVENTIONS
from jax_ddp_weighting.testing.diagnosis import Diagnosis, diagnose_weights
from jax_ddp_weighting.testing.parity import check_gradients
from jax_ddp_weighting.testing.per_example import effective_weights, per_example_gradients
from jax_ddp_weighting.testing.probing import diagnose
from jax_ddp_weighting.testing.step_probing import diagnose_step

__all__ = [
    "CONVENTIONS",
    "Diagnosis",
    "LeafDifference",
    "ParityError",
    "ParityReport",
    "check_additive",
    "check_gradients",
    "diagnose",
    "diagnose_step",
    "diagnose_weights",
    "effective_weights",
    "per_example_gradients",
]
