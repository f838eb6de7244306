"""The house: its rooms from the top down, and the public names that each of them defines.

The one list of both. The lazy `__init__` resolves names by it; the tests hold the direction of
imports, CONTRIBUTING and the navigation of the docs to it.
"""

FLOORS = (
    ("cli",),
    ("train", "evaluation", "testing"),
    ("weighting",),
    ("data",),
    ("sampling", "distributed"),
    ("_arguments", "_errors", "_files", "_version"),
)
"""A room imports only from floors below its own: not from above, and not from its neighbours."""

PUBLIC = {
    "sampling": (
        *("BudgetPlan", "CoverageError", "DistributedBatchSampler", "DistributedSampler"),
        *("EpochAudit", "EpochPlan", "GroupedOrder", "Ledger", "MixtureOrder", "PackedPlan"),
        *("PackedRows", "PaddingReport", "SamplerOrder", "ShardedIterable", "Slots"),
        *("SourceAudit", "StepPadding", "WeightedOrder", "audit_ids", "grouped_order"),
        *("keyed_order", "manifest_hash", "mixture_order", "pack_rows", "sampler_order"),
        *("torch_order", "weighted_order"),
    ),
    "distributed": ("ENGINES", "data_mesh", "force_cpu_devices"),
    "data": (
        *("Batch", "DevicePlan", "DisagreementError", "EpochRecord", "IdCounts"),
        *("JOIN_CONVENTIONS", "RunPosition", "batches", "check_agreement", "gather_ledger"),
        *("global_batch", "join_batches"),
    ),
    "weighting": (
        *("GlobalLoss", "WeightedSum", "average_gradients", "rank_share", "valid_labels"),
        *("value_and_grad", "weighted_sum"),
    ),
    "train": (
        *("BatchNorm", "EpochReport", "NnxBatchNorm", "RestoredRun", "StepReport"),
        *("clip_by_global_norm", "finish_saving", "global_norm", "make_nnx_train_epoch"),
        *("make_nnx_train_step", "make_optax_epoch", "make_optax_step", "make_train_epoch"),
        *("make_train_step", "restore_run", "save_run", "weighted_multi_steps"),
    ),
    "evaluation": (
        *("Evaluation", "Predictions", "due_step", "evaluate", "gather_by_id", "held_ids"),
        *("make_evaluation", "read_parts", "write_part"),
    ),
    "testing": (
        *("CONVENTIONS", "Diagnosis", "LeafDifference", "NameMap", "ParityError", "ParityReport"),
        *("check_additive", "check_gradients", "compare_gradients", "diagnose", "diagnose_step"),
        *("diagnose_torch", "diagnose_weights", "effective_weights", "per_example_gradients"),
        *("record", "torch_names"),
    ),
    "_errors": ("JdwError",),
    "_version": ("__version__",),
}
"""Public names by the room that defines them; `from jax_ddp_weighting import name` finds each."""
