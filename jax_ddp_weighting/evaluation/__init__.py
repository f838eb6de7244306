"""Metrics that do not move with the number of devices, and predictions by id."""

from jax_ddp_weighting.evaluation.device_evaluation import make_evaluation
from jax_ddp_weighting.evaluation.gathering import gather_by_id
from jax_ddp_weighting.evaluation.metrics import evaluate
from jax_ddp_weighting.evaluation.part_files import due_step, held_ids, read_parts, write_part
from jax_ddp_weighting.evaluation.predictions import Predictions
from jax_ddp_weighting.evaluation.step_sums import Evaluation

__all__ = [
    "Evaluation",
    "Predictions",
    "due_step",
    "evaluate",
    "gather_by_id",
    "held_ids",
    "make_evaluation",
    "read_parts",
    "write_part",
]
