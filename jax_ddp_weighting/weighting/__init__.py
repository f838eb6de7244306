"""Numerators, denominators, and the one gradient."""

from jax_ddp_weighting.weighting.gradient import GlobalLoss, value_and_grad
from jax_ddp_weighting.weighting.share import average_gradients, rank_share
from jax_ddp_weighting.weighting.sums import WeightedSum, valid_labels, weighted_sum

__all__ = [
    "GlobalLoss",
    "WeightedSum",
    "average_gradients",
    "rank_share",
    "valid_labels",
    "value_and_grad",
    "weighted_sum",
]
