"""Mutations of the core, each of which the tests must notice.

    make mutate                  all of them, and the score
    make mutate ONLY=train/      those whose file or name holds a word

Each is one exact piece of text of one file, and what is put in its place, in a copy of the package
and its tests. Then the tests that should notice are run on the copy: one that fails has noticed. A
text that is not there exactly once is an error: whoever changes that line changes its mutation too.
"""

import os
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import chex  # noqa: F401 - imported once, before anything forks
import flax.linen
import flax.nnx
import flax.training.train_state  # noqa: F401
import optax  # noqa: F401
import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = "jax_ddp_weighting"
LEAST = 0.95  # of the mutations that are not explained
LIMIT_S = 600  # one that hangs has been noticed


@dataclass(frozen=True)
class Mutation:
    """One change that a careless hand might make.

    Attributes:
        name: what goes wrong.
        file: the file, under the package.
        text: a piece of it, there exactly once.
        put: what is put in its place.
        tests: files under `tests`, one of which should notice.
        first: the test that should notice first, which is run alone, to be quick.
        survives: why no test can notice it, if none can.
    """

    name: str
    file: str
    text: str
    put: str
    tests: tuple[str, ...]
    first: str
    survives: str = ""


SUMS = "weighting/test_sums.py"
BETWEEN = "distributed/test_between_steps.py"
CORNERS = "weighting/test_gradient_corners.py"
PIECES = "weighting/test_gradient_pieces.py"
KEPT = "weighting/test_kept_state.py"
RANKS = "distributed/test_over_ranks.py"
SCALE = "train/test_loss_scale.py"
STEPS = "train/test_step_corners.py"
NORMS = "train/test_norm_corners.py"
TERMS = (CORNERS, PIECES, KEPT, "data/test_join.py")
MESH = (RANKS, CORNERS, "distributed/test_mesh.py")
STEP = (STEPS, "train/test_step_rng.py", KEPT)
WINDOWS = (STEPS, "train/test_windows.py", "train/test_accumulation.py")
NORM = (NORMS, "train/test_batch_norm.py")


def of(file: str, tests: tuple[str, ...], *changes: tuple[str, ...]) -> list[Mutation]:
    return [Mutation(name, file, text, put, tests, *rest) for name, text, put, *rest in changes]


ORDERS = ("sampling/test_drawn_orders.py", "sampling/test_order_functions.py")

ON_DEVICE = ("data/test_device_plan.py",)

MUTATIONS = [
    *of(
        "data/device_plan.py",
        ON_DEVICE,
        (
            "a carry of the product that is lost",
            "(middle >> 16) + (other >> 16)",
            "(middle >> 16)",
            "data/test_device_plan.py::test_beyond_32_bits_x64_is_needed",
        ),
        (
            "an epoch without a table reads another's",
            "jnp.argmax(found), jnp.any(found)",
            "jnp.argmax(found), epoch >= 0",
            "data/test_device_plan.py::test_traced_numbers_that_are_not_the_plans_give_nothing",
        ),
        (
            "a wide number cut to one of the plan's",
            "jnp.uint64 if value.dtype.itemsize > 4 else jnp.uint32",
            "jnp.uint32",
            "data/test_device_plan.py::test_traced_numbers_may_be_of_any_integer_dtype",
        ),
    ),
    *of(
        "train/epoch_program.py",
        ("train/test_epoch.py",),
        (
            "the noise of one step in all",
            "jax.random.fold_in(jax.random.fold_in(rng, turn.epochs), turn.steps)",
            "jax.random.fold_in(rng, turn.epochs)",
            "train/test_epoch.py::test_the_state_is_that_of_the_loop",
        ),
    ),
    *of(
        "data/device_rows.py",
        ("train/test_epoch.py",),
        (
            "rows added up as floats over devices",
            "if jnp.issubdtype(leaf.dtype, jnp.floating):",
            "if False:",
            "train/test_epoch.py::test_one_compilation_for_all_epochs_and_data_that_are_sharded",
        ),
    ),
    *of(
        "sampling/draws.py",
        ORDERS,
        (
            "what was drawn is drawn again",
            "rest[picked] = False",
            "rest[picked[:1]] = False",
            "sampling/test_drawn_orders.py::test_draws_without_replacement_are_different_ids_above_0",
        ),
        (
            "one draw for all epochs",
            'derive_key("weighted_order 1:", self.num_samples, self.seed, epoch)',
            'derive_key("weighted_order 1:", self.num_samples, self.seed)',
            "sampling/test_order_functions.py::test_a_weighted_draw_is_new_in_each_epoch_and_the_same_on_all_ranks",
        ),
    ),
    *of(
        "sampling/mixtures.py",
        ORDERS,
        (
            "a source in one order for ever",
            "epoch = done + int(epochs[run[0]])",
            "epoch = 0",
            "sampling/test_drawn_orders.py::test_the_order_within_a_source_is_any_one",
        ),
        (
            "a source that is drawn from too soon",
            "while to_come and to_come[0][0] <= slot:",
            "while to_come:",
            "sampling/test_drawn_orders.py::test_a_mixture_of_any_floats_keeps_its_shares_nearly",
        ),
    ),
    *of(
        "sampling/order_functions.py",
        ORDERS,
        (
            "an epoch of another length is taken",
            "if len(order.ids) != self.length:",
            "if False:",
            "sampling/test_order_functions.py::test_each_epoch_is_checked_as_an_array_is",
        ),
        (
            "other ids for the same epoch are taken",
            "if self._digests.setdefault(epoch, order.digest) != order.digest:",
            "self._digests.setdefault(epoch, order.digest)\n        if False:",
            "sampling/test_order_functions.py::test_what_changes_when_it_is_asked_again_is_refused",
        ),
    ),
    *of(
        "data/stopping.py",
        ("data/test_join_sizes.py",),
        (
            "a stream that goes on for nobody makes no room",
            "return max(stream.rows_per_rank for stream in streams)",
            "return max(0 if s.ended else s.rows_per_rank for s in streams)",
            "data/test_join_sizes.py::test_a_stream_that_begins_again_makes_room_for_its_rows",
        ),
    ),
    *of(
        "data/id_counts.py",
        (BETWEEN, "data/test_id_counts.py"),
        (
            "twenty programs for the ids of a step",
            "return in_one_program(_add_slots, self, ids, weights)",
            "return _add_slots(self, ids, weights)",
            f"{BETWEEN}::test_ids_of_a_step_are_counted_in_one_program",
        ),
    ),
    *of(
        "distributed/between_steps.py",
        (BETWEEN,),
        (
            "sums that starve the step that they are made of",
            "    wait_for_all(leaves)",
            "    leaves.clear()",
            f"{BETWEEN}::test_what_it_needs_is_waited_for_where_more_would_starve_it",
        ),
        (
            "a dozen programs for one addition",
            "return _compiled(compute)(*structure.unflatten(arrays))",
            "return compute(*structure.unflatten(arrays))",
            f"{BETWEEN}::test_each_operation_is_one_program",
        ),
    ),
    *of(
        "weighting/sums.py",
        (CORNERS, SUMS),
        (
            "an unsafe division under the gradient",
            "safe = jnp.where(empty, jnp.ones_like(weight), weight).astype(dtype)",
            "safe = weight.astype(dtype)",
            "weighting/test_gradient_corners.py::test_a_division_by_no_weight_has_gradient_0_and_not_nan",
        ),
        (
            "a mean without weight is its total",
            "return jnp.where(empty, jnp.zeros((), dtype), total.astype(dtype) / safe)",
            "return total.astype(dtype) / safe",
            "weighting/test_gradient_corners.py::test_a_division_by_no_weight_has_gradient_0_and_not_nan",
        ),
        (
            "a gradient into a weight made by hand",
            "    weight = lax.stop_gradient(weight)\n",
            "",
            "weighting/test_gradient_corners.py::test_no_gradient_flows_into_a_weight_made_by_hand",
        ),
        (
            "a gradient into the weights of a sum",
            "    weights = lax.stop_gradient(weights)\n",
            "",
            "weighting/test_gradient_corners.py::test_no_gradient_flows_into_the_weights_of_a_sum",
        ),
        (
            "a loss of weight 0 poisons its sum",
            "kept = jnp.where(weights != 0, losses, jnp.zeros((), losses.dtype)).astype(dtype)",
            "kept = losses.astype(dtype)",
            "weighting/test_sums.py::test_weighted_means",
        ),
        (
            "weights that are not multiplied in",
            "jnp.sum(kept * weights, axis=axes)",
            "jnp.sum(kept, axis=axes)",
            "weighting/test_sums.py::test_weighted_means",
        ),
        (
            "weight clamped to 1",
            "empty = weight == 0",
            "weight = jnp.maximum(weight, 1)\n    empty = weight == 0",
            "weighting/test_sums.py::test_weighted_means",
        ),
        (
            "a term counted once where there is no weight",
            "present = jnp.asarray(self.weight) > 0",
            "present = jnp.asarray(self.weight) >= 0",
            "weighting/test_sums.py::test_a_regulariser_is_counted_once_and_only_beside_data",
        ),
        (
            "a weight that broadcasts",
            "if weight not in ((), total):",
            "if np.broadcast_shapes(weight, total) != total:",
            "weighting/test_array_sums.py::test_a_weight_of_another_shape_is_refused",
        ),
        (
            "a bad weight on the host that is made good",
            "if not np.any(bad):",
            "if True:",
            "weighting/test_array_sums.py::test_a_bad_weight_stays_bad_on_the_host",
        ),
    ),
    *of(
        "weighting/share.py",
        (CORNERS,),
        (
            "vary left out of rank_share",
            'local = mesh.vary(name_terms(local, None)["loss"], axis_name)',
            'local = name_terms(local, None)["loss"]',
            "weighting/test_gradient_corners.py::test_the_share_of_such_a_sum_is_right_under_ones_own_pmean[shard_map]",
        ),
        (
            "rank_share scaled by the ranks in every regime",
            "    if mesh.is_checked(axis_name):\n",
            "    if False:\n",
            "weighting/test_gradient_corners.py::test_the_share_of_such_a_sum_is_right_under_ones_own_pmean[shard_map]",
        ),
        (
            "rank_share's gradient scaled by the ranks under the check",
            "share + lax.stop_gradient(share * (ranks - 1))",
            "share * ranks",
            "weighting/test_gradient_corners.py::test_the_share_of_such_a_sum_is_right_under_ones_own_pmean[shard_map]",
        ),
    ),
    *of(
        "weighting/halves.py",
        ("weighting/test_halves.py",),
        (
            "a half that was summed over the ranks before is taken",
            "if _ROWS in half and summed:",
            "if False:",
            "weighting/test_halves.py::test_one_half_that_was_summed_is_refused[summed_weight0-vmap-1]",
        ),
        (
            "a weight of the whole step is taken",
            "if once == twice:",
            "if False:",
            "weighting/test_halves.py::test_a_weight_of_the_whole_step_is_refused_where_it_is_added_up[of_the_step-options0-jit-2]",
        ),
        (
            "rows that all weigh a number of the step are refused",
            "if once == twice:",
            "if True:",
            "weighting/test_halves.py::test_rows_that_all_weigh_such_a_number_are_taken[as_rows_weigh-3.5-vmap-1]",
        ),
    ),
    *of(
        "weighting/row_parts.py",
        ("train/test_batch_spec.py",),
        (
            "what is a row's counted once for each of its parts",
            "if not mesh.varies(leaf, axis)]",
            "if False]",
            "train/test_batch_spec.py::test_what_is_a_rows_counts_once_beside_what_is_a_tokens[specs0-more0]",
        ),
        (
            "tokens over the weight of rows taken",
            "if total != weight and name not in once:",
            "if False:",
            "train/test_batch_spec.py::test_a_term_of_rows_and_tokens_at_once_is_refused[<lambda>0]",
        ),
    ),
    *of(
        "train/shards.py",
        ("train/test_shards.py",),
        (
            "the norm of a rank's own shards",
            "(lax.psum(part, tuple(sorted(axes))) if axes else part)",
            "part",
            "train/test_shards.py::test_norm_and_clipping_are_those_of_the_whole_tree[vmap]",
        ),
        (
            "an optimizer that mixes a rank's own shards taken",
            "if not every:",
            "if True:",
            "train/test_shards.py::test_what_is_made_of_several_elements_is_refused[vmap-a norm]",
        ),
        (
            "whether to skip asked of each rank's own shards",
            "return count_not_finite if decide is optax.skip_not_finite else check",
            "return decide",
            "train/test_shards.py::test_windows_of_shards_are_those_of_the_whole_tree[vmap]",
        ),
    ),
    *of(
        "testing/sharded_ranks.py",
        ("testing/test_sharded_parity.py",),
        (
            "ranks that hold the same not seen apart",
            "seen[self._slices(spec, whole.shape, at)] = leaf[tuple(at.values())]",
            "pass",
            "testing/test_sharded_parity.py::test_one_rank_that_differs_is_found",
        ),
    ),
    *of(
        "weighting/param_specs.py",
        (CORNERS, "weighting/test_param_specs.py", "weighting/test_parallelisms.py"),
        (
            "gradients averaged over the ranks",
            "summed = lax.psum(summed, axes)",
            "summed = lax.pmean(summed, axes)",
            "weighting/test_gradient_corners.py::test_a_sum_that_is_the_same_on_every_rank_is_pulled_back_from_every_rank[1-shard_map]",
        ),
        (
            "gradients of shards summed once more",
            "return Layout(tuple(tuple(a for a in named if a not in each) for each in own), 1)",
            "return Layout(tuple(named for each in own), 1)",
            "weighting/test_param_specs.py::test_each_shard_gets_its_own_gradient[shard_map-1]",
        ),
        (
            "copies of the same rows counted where types do not tell",
            "leaf if self.copies == 1 else leaf / self.copies",
            "leaf",
            "weighting/test_parallelisms.py::test_every_layout_has_one_devices_gradient[tensor-shard_map_unchecked-1]",
        ),
        (
            "a total that differs over an axis without rows taken",
            "    if wrong:",
            "    if False:",
            "weighting/test_parallelisms.py::test_tokens_over_an_axis_that_is_not_named_are_refused_without_types_too[pipeline-vmap]",
        ),
        (
            "a parameter gathered without a spec taken",
            "if each.others or not each.name.startswith(_MOVES):",
            "if True:",
            "weighting/test_param_specs.py::test_a_shard_without_its_spec_is_refused_in_every_regime[None-vmap]",
        ),
    ),
    *of(
        "weighting/gradient.py",
        (CORNERS, PIECES),
        (
            "vary left out of value_and_grad's parameters",
            "        params = mesh.vary(params, axis_name)",
            "        pass",
            "weighting/test_gradient_corners.py::test_a_sum_that_is_the_same_on_every_rank_is_pulled_back_from_every_rank[1-shard_map]",
        ),
    ),
    *of(
        "weighting/rank_gradient.py",
        (CORNERS, PIECES),
        (
            "vary left out of what a loss function returns",
            "varied = mesh.vary((pulled, metrics, weights), options.axis_name)",
            "varied = pulled, metrics, weights",
            "weighting/test_gradient_corners.py::test_a_sum_that_is_the_same_on_every_rank_is_pulled_back_from_every_rank[1-shard_map]",
        ),
        (
            "gradients of microbatches that are not added up",
            "lambda a, b: a + b.astype(a.dtype), gradients, found.gradients",
            "lambda a, b: b.astype(a.dtype), gradients, found.gradients",
            "weighting/test_gradient_corners.py::test_bfloat16_gradients_of_many_microbatches_add_up",
        ),
        (
            "a sum of gradients in bfloat16",
            "widen(jnp.float32, leaf.dtype)",
            "leaf.dtype",
            "weighting/test_gradient_corners.py::test_bfloat16_gradients_of_many_microbatches_add_up",
        ),
    ),
    *of(
        "weighting/microbatches.py",
        (CORNERS, PIECES),
        (
            "one key for all microbatches",
            "jax.random.fold_in(rows.rng, k)",
            "rows.rng",
            "weighting/test_gradient_corners.py::test_each_microbatch_draws_noise_of_its_own",
        ),
        (
            "microbatches of neighbouring rows",
            "lax.dynamic_index_in_dim(split, k, axis=1, keepdims=False)",
            "lax.dynamic_index_in_dim(split, k, axis=0, keepdims=False)",
            "weighting/test_gradient_pieces.py::test_a_microbatch_holds_every_kth_row_and_its_keys",
        ),
    ),
    *of(
        "weighting/denominators.py",
        TERMS,
        (
            "missing ranks that are not counted",
            "stretch = 1 + divide(to_divisor(sums.missing), to_divisor(sums.present))",
            "stretch = 1",
            "weighting/test_gradient_pieces.py::test_missing_ranks_stretch_what_pulls_and_no_metric",
        ),
    ),
    *of(
        "weighting/divisors.py",
        ("weighting/test_divisors.py",),
        (
            "a divisor that may differ from rank to rank",
            "mesh.varies(divisor, axis_name)",
            "False",
            "weighting/test_divisors.py::test_a_divisor_that_differs_from_rank_to_rank_is_refused",
        ),
        (
            "a divisor of what is counted once",
            "if name in divisors and each.counted_once:",
            "if False:",
            "weighting/test_divisors.py::test_a_term_that_is_counted_once_takes_no_divisor",
        ),
    ),
    *of(
        "weighting/denominators.py",
        ("weighting/test_divisors.py",),
        (
            "a bad divisor that is not counted",
            "bad = jnp.where(found.bad == 0, bad.astype(found.bad.dtype), found.bad)",
            "bad = found.bad",
            "weighting/test_divisors.py::test_what_turns_out_bad_on_a_device_is_counted_and_nothing_else[-1.0]",
        ),
    ),
    *of(
        "weighting/statistics.py",
        ("weighting/test_statistics.py",),
        (
            "statistics that a gradient flows through",
            "lambda each: lax.stop_gradient(_to_float(each))",
            "lambda each: _to_float(each)",
            "weighting/test_statistics.py::test_no_gradient_flows_through_them",
        ),
        (
            "statistics of one rank",
            "sums = sum_over_ranks(sums, axis_name)",
            "sums = sum_over_ranks(sums, None)",
            "weighting/test_statistics.py::test_they_cost_one_all_reduce_for_each_dtype_whatever_their_shapes",
        ),
        (
            "integer statistics that overflow",
            "return as_sum(as_wide(value))",
            "return as_wide(value)",
            "weighting/test_statistics.py::test_integers_do_not_overflow_and_narrow_numbers_do_not_stop_counting",
        ),
    ),
    *of(
        "train/step.py",
        ("train/test_step_divisors.py",),
        (
            "a step that is skipped though a divisor is constant",
            "given = [loss.divisors[name] > 0 for name in pulls if name in loss.divisors]",
            "given = [loss.terms[name].weight > 0 for name in pulls if name in loss.divisors]",
            "train/test_step_divisors.py::test_a_step_is_skipped_where_all_that_pulls_is_divided_by_0",
        ),
    ),
    *of(
        "weighting/loss_terms.py",
        TERMS,
        (
            "a metric that pulls",
            "callable(factor) or bool(np.any(np.asarray(factor) != 0))",
            "True",
            "weighting/test_gradient_corners.py::test_a_metric_that_is_nan_stays_out_of_the_value_and_the_gradient",
        ),
    ),
    *of(
        "weighting/gradient.py",
        (SCALE,),
        (
            "gradients that are not divided by their scale",
            "return gradient / jnp.asarray(scale, gradient.dtype)",
            "return gradient",
            f"{SCALE}::test_without_a_scale_the_same_gradient_vanishes",
        ),
    ),
    *of(
        "weighting/rank_gradient.py",
        (SCALE,),
        (
            "gradients that are narrowed before they are divided",
            "if options.scale is None:  # else they are divided by it first",
            "if True:",
            f"{SCALE}::test_an_overflow_of_all_rows_is_none_of_a_microbatch",
        ),
    ),
    *of(
        "train/loss_scale.py",
        (SCALE,),
        (
            "an empty step that moves the scale",
            "return jnp.where(skipped, old, ",
            "return jnp.where(False, old, ",
            f"{SCALE}::test_an_overflow_leaves_everything_as_it_was_and_an_empty_step_the_scale_too",
        ),
    ),
    *of(
        "train/train_state.py",
        (SCALE,),
        (
            "an overflow that is applied",
            "skipped, held = skipped | ~finite, ~finite & ~jnp",
            "skipped, held = skipped, jnp.zeros((), bool) & ~jnp",
            f"{SCALE}::test_an_overflow_leaves_everything_as_it_was_and_an_empty_step_the_scale_too",
        ),
        (
            "an overflow that has its weight in a window",
            'offered["weight"] = jnp.where(finite, offered["weight"], 0)',
            "pass",
            f"{SCALE}::test_a_window_leaves_an_overflow_out_and_is_closed_without_it_where_it_must",
        ),
        (
            "a window that an overflow keeps open",
            ' & ~jnp.asarray(extra.get("flush", False))',
            "",
            f"{SCALE}::test_a_window_leaves_an_overflow_out_and_is_closed_without_it_where_it_must",
        ),
        (
            "an overflow's collections in a window that it closes",
            "collections = jax.tree.map(partial(jnp.where, finite), collections, old)",
            "pass",
            f"{SCALE}::test_a_window_that_an_overflow_closes_keeps_its_collections",
        ),
    ),
    *of(
        "distributed/mesh.py",
        MESH,
        (
            "pmap on other devices",
            "out_axes=None, devices=list(mesh.devices.flat)",
            "out_axes=None",
            "distributed/test_over_ranks.py::test_ranks_sit_on_the_devices_of_their_mesh",
        ),
        (
            "the order of vmap's axes",
            "for name in reversed(names):",
            "for name in names:",
            "distributed/test_over_ranks.py::test_rows_are_dealt_in_the_order_of_the_axes",
        ),
        (
            "shard_map without its check",
            'check_vma=engine == "shard_map",',
            "check_vma=False,",
            "distributed/test_mesh.py::test_only_default_shard_map_is_checked",
        ),
        (
            "shard_map that is always checked",
            'check_vma=engine == "shard_map",',
            "check_vma=True,",
            "distributed/test_mesh.py::test_only_default_shard_map_is_checked",
        ),
        (
            "vary that varies nothing",
            'return jax.lax.pcast(value, missing, to="varying") if missing else value',
            "return value",
            "distributed/test_mesh.py::test_varying_twice_is_varying_once",
        ),
        (
            "a state that is placed without a copy",
            "own = jnp.copy(leaf) if isinstance(leaf, jax.Array) else as_native(np.array(leaf))",
            "own = leaf",
            "distributed/test_mesh.py::test_donating_what_was_placed_leaves_the_callers_arrays_alone",
        ),
    ),
    *of(
        "train/step.py",
        STEP,
        (
            "a skip unless all terms have weight",
            "jnp.any(jnp.stack(pulling))",
            "jnp.all(jnp.stack(pulling))",
            "train/test_step_corners.py::test_a_step_in_which_one_term_of_two_has_weight_is_taken",
        ),
        (
            "a skip that ignores the batch's weight",
            "(found.accepted != 0) & ",
            "",
            "train/test_step_corners.py::test_a_step_whose_rows_weigh_nothing_is_skipped_whatever_its_terms_weigh",
        ),
        (
            "a skip that ignores the terms' weights",
            " & jnp.any(jnp.stack(pulling))",
            "",
            "train/test_step_corners.py::test_a_step_whose_terms_weigh_nothing_is_skipped_whatever_its_rows_weigh",
        ),
        (
            "a state that an empty step changes",
            "lambda old, new: jnp.where(skipped, old, new), state, found.state",
            "lambda old, new: new, state, found.state",
            "train/test_step_corners.py::test_a_step_without_weight_leaves_what_the_model_keeps",
        ),
        (
            "one key for all ranks",
            "rng = jax.random.fold_in(rng, jax.lax.axis_index(options.mapped_axis))",
            "pass",
            "train/test_step_rng.py::test_each_rank_and_microbatch_has_its_own_rng",
        ),
    ),
    *of(
        "train/accumulation.py",
        WINDOWS,
        (
            "a window of several terms that weighs the first",
            "if len(pulling) != 1:",
            "if False:",
            "train/test_windows.py::test_windows_of_several_terms_are_refused",
        ),
        (
            "an empty microbatch's NaN in the window",
            "return acc + jnp.where(weight > 0, change, 0)",
            "return acc + change",
            "train/test_step_corners.py::test_a_window_without_weight_leaves_the_optimizer_alone",
        ),
        (
            "every microbatch has one vote",
            "change = divide(new - acc * own, all_of_it)",
            "change = divide(new - acc, state.mini_step + 1)",
            "train/test_step_corners.py::test_a_window_weighs_what_its_term_weighs_and_not_its_rows",
        ),
        (
            "a window without weight that steps",
            "steps = closes & (total > 0)",
            "steps = closes",
            "train/test_step_corners.py::test_a_window_without_weight_leaves_the_optimizer_alone",
        ),
        (
            "a flush that is not heard",
            "closes = (~skip & (mini_step >= k)) | jnp.asarray(flush)",
            "closes = ~skip & (mini_step >= k)",
            "train/test_accumulation.py::test_a_short_last_window_is_flushed_with_the_weight_that_it_has",
        ),
        (
            "a window that is one too long",
            "(mini_step >= k)",
            "(mini_step > k)",
            "train/test_step_corners.py::test_a_window_weighs_what_its_term_weighs_and_not_its_rows",
        ),
        (
            "gradients that stay in the window",
            "acc_grads=jax.tree.map(lambda acc: jnp.where(closes, 0, acc), acc_grads)",
            "acc_grads=acc_grads",
            "train/test_multi_steps.py::test_fields_of_one_name_mean_one_thing",
        ),
        (
            "weight that stays in the window",
            "weight=jnp.where(closes, 0, total)",
            "weight=total",
            "train/test_accumulation.py::test_a_window_is_the_mean_over_its_tokens",
        ),
        (
            "a window in bfloat16",
            "widen(jnp.float32, jnp.result_type(parameter))",
            "jnp.result_type(parameter)",
            "train/test_step_corners.py::test_a_window_in_bfloat16_adds_up_in_float32",
        ),
    ),
    *of(
        "train/batch_norm.py",
        NORM,
        (
            "an empty step normalised by its batch",
            "mean, var = choose(present, batch, running)",
            "mean, var = batch",
            "train/test_norm_corners.py::test_a_step_without_weight_is_normalised_by_what_is_known_and_changes_nothing",
        ),
        (
            "running averages that an empty step changes",
            "    return choose(present, tuple(map(update, running, batch)), running)",
            "    return tuple(map(update, running, batch))",
            "train/test_norm_corners.py::test_a_step_without_weight_is_normalised_by_what_is_known_and_changes_nothing",
        ),
        (
            "a variance below 0",
            "var = jnp.maximum(square.real - _square(mean), 0)",
            "var = square.real - _square(mean)",
            "train/test_norm_corners.py::test_a_variance_that_rounding_leaves_below_0_is_0",
        ),
        (
            "a gradient into what is kept",
            "        each = lax.stop_gradient(each)\n",
            "",
            "train/test_norm_corners.py::test_no_gradient_flows_into_what_is_kept_or_into_weights",
        ),
        (
            "a gradient into the weights of rows",
            "weights = lax.stop_gradient(jnp.asarray(weights))",
            "weights = jnp.asarray(weights)",
            "train/test_norm_corners.py::test_no_gradient_flows_into_what_is_kept_or_into_weights",
        ),
        (
            "padding in the statistics",
            "kept = jnp.where(weights != 0, x, jnp.zeros((), x.dtype))",
            "kept = x",
            "train/test_batch_norm.py::test_nan_under_weight_0_does_not_reach_the_statistics_or_other_rows",
        ),
        (
            "statistics of the rank alone",
            "sums = lax.psum(sums, axis_name, axis_index_groups=options.axis_index_groups)",
            "pass",
            "train/test_batch_norm.py::test_rows_0_and_2_4_6_have_mean_3_and_variance_5",
        ),
        (
            "momentum on the wrong side",
            "momentum * old + (1 - momentum) *",
            "(1 - momentum) * old + momentum *",
            "train/test_norm_corners.py::test_a_running_average_moves_by_what_momentum_leaves",
        ),
    ),
]


def copy_of(folder: Path) -> Path:
    """The package and its tests in a folder of their own, and what the tests read beside them."""
    for name in (PACKAGE, "tests", "examples"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


def run_tests(folder: Path, tests: tuple[str, ...]) -> tuple[int, str]:
    """pytest's exit status in a copy, and the last line of what it says.

    In a child of this process, which has imported what is heavy and never the package itself: so
    that fifty mutations don't import JAX fifty times.
    """
    said = folder / "said.txt"
    child = os.fork()
    if not child:
        signal.alarm(LIMIT_S)
        os.chdir(folder)
        sys.path[:0] = [str(folder), str(folder / "tests")]
        sys.dont_write_bytecode = True
        with open(said, "w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        command = ["-x", "-q", "-p", "no:cacheprovider", "--tb=no", f"--rootdir={folder}"]
        status = pytest.main([*command, *(f"tests/{each}" for each in tests)])
        sys.stdout.flush()
        os._exit(status)
    _, ended = os.waitpid(child, 0)
    if os.WIFSIGNALED(ended):
        return 1, "it hung or crashed"
    lines = said.read_text().strip().splitlines() or [""]
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    return os.WEXITSTATUS(ended), (failed or lines)[-1]


def try_out(mutation: Mutation, stock: Path) -> tuple[bool, str]:
    """Whether the tests notice it, and which of them did."""
    with tempfile.TemporaryDirectory() as folder:
        copy = shutil.copytree(stock, Path(folder, "copy"))
        path = copy / PACKAGE / mutation.file
        path.write_text(path.read_text().replace(mutation.text, mutation.put))
        status, said = run_tests(copy, (mutation.first,))
        if status == 0:
            status, said = run_tests(copy, mutation.tests)
    if status not in (0, 1):  # neither passed nor failed: then nothing has been found out
        raise RuntimeError(f"{mutation.name}: pytest could not be run, {said}")
    return status != 0, said


def check_texts() -> list[str]:
    """What is wrong with the list: texts that are not in their files exactly once."""
    wrong = []
    for each in MUTATIONS:
        count = (ROOT / PACKAGE / each.file).read_text().count(each.text)
        if count != 1:
            wrong.append(f"{each.name}: {count} times in {each.file}: {each.text!r}")
    return wrong


def main() -> int:
    """Runs them and prints the score; 1 if it is too low, 2 if it could not be found out."""
    word = " ".join(sys.argv[1:])
    chosen = [each for each in MUTATIONS if word in f"{each.file}: {each.name}"]
    wrong = check_texts()
    if wrong or not chosen:
        print(*(wrong or [f"no mutation is named {word!r}"]), sep="\n")
        return 2
    with tempfile.TemporaryDirectory() as folder:
        stock = copy_of(Path(folder))
        # Those that notice must pass without any mutation, or they notice nothing.
        status, said = run_tests(stock, tuple(dict.fromkeys(each.first for each in chosen)))
        if status:
            print(f"the tests fail without any mutation: {said}")
            return 2
        start = time.monotonic()
        killed = 0
        expected = [each for each in chosen if not each.survives]
        for mutation in chosen:
            noticed, test = try_out(mutation, stock)
            killed += noticed and not mutation.survives
            verdict = "noticed" if noticed else "SURVIVED"
            why = test.split(" - ")[0].split("::")[-1] if noticed else mutation.survives
            print(f"{verdict:9} {mutation.file}: {mutation.name}  {why}", flush=True)
    score = killed / max(len(expected), 1)
    print(
        f"{killed} of {len(expected)} noticed ({score:.0%}), "
        f"{len(chosen) - len(expected)} that cannot be, in {time.monotonic() - start:.0f} s"
    )
    return int(score < LEAST)


if __name__ == "__main__":
    sys.exit(main())
