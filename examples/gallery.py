"""Ways in which training steps are written, and what `diagnose` says of each.

    python examples/gallery.py          a table of all
    python examples/gallery.py NAME     one of them, with what each token counted and the remedy

Each reduction below is written as people write it: two ranks, three microbatches where it knows of
any. Torch's come from gradients that real DistributedDataParallel applied (torch_reference.py).
"""

import json
import sys
from functools import cache, partial
from pathlib import Path

import torch_reference

import jax_ddp_weighting as jdw

jdw.force_cpu_devices(3)

import jax  # noqa: E402 - after the devices are faked
import jax.numpy as jnp  # noqa: E402
import optax  # noqa: E402
from jax import lax  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

RANKS, MICROBATCHES = 2, 3


def weighted(token_loss, params, tokens, weights):
    """A rank's or microbatch's total and weight, as nearly every training script has them."""
    return jnp.sum(token_loss(params, tokens) * weights), jnp.sum(weights)


def local_mean(token_loss, params, tokens, weights):
    """The normalised loss: what most functions named `loss_fn` return."""
    total, weight = weighted(token_loss, params, tokens, weights)
    return total / weight


def over(total, weight):
    """What is divided by the weight of the whole step, which is 0 in a step of padding alone."""
    return total / jnp.where(weight > 0, weight, 1.0)


# --- how the ranks are held -----------------------------------------------------------------------


def in_pmap(of_rank):
    """`of_rank(token_loss, params, tokens, weights)` under `pmap`, one microbatch per rank."""

    @cache
    def compiled(token_loss):
        return jax.pmap(partial(of_rank, token_loss), "data", in_axes=(None, 0, 0))

    return lambda token_loss, *arrays: compiled(token_loss)(*arrays)[0]


def in_shard_map(of_rank, **options):
    """The same under `shard_map`."""

    @cache
    def compiled(token_loss):
        specs = {"in_specs": (P(), P("data"), P("data")), "out_specs": P()}
        fn = partial(of_rank, token_loss)
        return jax.jit(jax.shard_map(fn, mesh=jdw.data_mesh(RANKS), **specs, **options))

    return lambda token_loss, *arrays: compiled(token_loss)(*arrays)


# --- what a rank does -----------------------------------------------------------------------------


def pmean_of_normalised(token_loss, params, tokens, weights):
    """As the wmt and lm1b examples of flax have it: normalise, grad, pmean."""
    return lax.pmean(jax.grad(partial(local_mean, token_loss))(params, tokens, weights), "data")


def textbook(token_loss, params, tokens, weights):
    """The rule for averaged gradients: the total times the ranks, over the global weight."""

    def share(params):
        total, weight = weighted(token_loss, params, tokens, weights)
        return over(total * lax.axis_size("data"), lax.psum(weight, "data"))

    return lax.pmean(jax.grad(share)(params), "data")


def sum_then_divide(token_loss, params, tokens, weights):
    """Sums of gradients and of weights, divided."""
    total = jax.grad(lambda p: weighted(token_loss, p, tokens, weights)[0])(params)
    return over(lax.psum(total, "data"), lax.psum(jnp.sum(weights), "data"))


def clamped(token_loss, params, tokens, weights):
    """The same, guarded against an empty batch by a maximum."""
    total = jax.grad(lambda p: weighted(token_loss, p, tokens, weights)[0])(params)
    return lax.psum(total, "data") / jnp.maximum(lax.psum(jnp.sum(weights), "data"), 1.0)


def forgotten_ranks(token_loss, params, tokens, weights):
    """Each total over the global weight, and then the average that everybody writes."""
    total = jax.grad(lambda p: weighted(token_loss, p, tokens, weights)[0])(params)
    return lax.pmean(over(total, lax.psum(jnp.sum(weights), "data")), "data")


def masked_mean(token_loss, params, tokens, weights):
    """`jnp.mean` of the masked losses."""

    def loss(params):
        return jnp.mean(token_loss(params, tokens) * weights)

    return lax.pmean(jax.grad(loss)(params), "data")


def shared(token_loss, params, tokens, weights):
    """`rank_share` under one's own pmean."""

    def share(params):
        local = jdw.weighted_sum(token_loss(params, tokens), weights)
        return jdw.rank_share(local, "data")

    return lax.pmean(jax.grad(share)(params), "data")


def ours(token_loss, params, tokens, weights):
    """`value_and_grad`."""

    def loss_fn(params, rows):
        return jdw.weighted_sum(token_loss(params, rows[0]), rows[1])

    rows = tokens.reshape(-1), weights.reshape(-1)
    return jdw.value_and_grad(loss_fn, axis_name="data")(params, rows)[1]


# --- microbatches on one rank ---------------------------------------------------------------------


def multi_steps(token_loss, params, tokens, weights):
    """The recipe: `optax.MultiSteps` around the optimizer, each microbatch's mean into it."""
    optimizer = optax.MultiSteps(optax.sgd(1.0), every_k_schedule=tokens.shape[1])
    state, start = optimizer.init(params), params
    for k in range(tokens.shape[1]):
        grads = jax.grad(partial(local_mean, token_loss))(params, tokens[0, k], weights[0, k])
        updates, state = optimizer.update(grads, state, params)
        params = optax.apply_updates(params, updates)
    return start - params


def weighted_multi_steps(token_loss, params, tokens, weights):
    """`weighted_multi_steps` in its place."""
    optimizer = jdw.weighted_multi_steps(optax.sgd(1.0), tokens.shape[1])
    state, start = optimizer.init(params), params
    for k in range(tokens.shape[1]):
        grads = jax.grad(partial(local_mean, token_loss))(params, tokens[0, k], weights[0, k])
        updates, state = optimizer.update(grads, state, params, weight=jnp.sum(weights[0, k]))
        params = optax.apply_updates(params, updates)
    return start - params


def added_means(token_loss, params, tokens, weights):
    """Gradients of microbatch means added up and not divided."""
    mean = jax.grad(partial(local_mean, token_loss))
    return sum(mean(params, tokens[0, k], weights[0, k]) for k in range(tokens.shape[1]))


def scan_over_global_means(token_loss, params, tokens, weights):
    """Under jit on a global array: a scan over microbatches that averages their means."""

    def step(total, rows):
        return total + jax.grad(partial(local_mean, token_loss))(params, *rows), None

    rows = jnp.swapaxes(tokens, 0, 1), jnp.swapaxes(weights, 0, 1)
    total, _ = lax.scan(step, jnp.zeros_like(params), rows)
    return total / tokens.shape[1]


# --- the gallery ----------------------------------------------------------------------------------

RECORDED = Path(__file__).parent.parent / "tests" / "recorded" / "torch_reference.json"


def of_torch(name):
    """What real DDP did with three processes, by the gradient that it applied."""
    found = json.loads(RECORDED.read_text())["ranks"]["3"]
    return torch_reference.diagnosed(found, 3)[name]


def by(gradient_of, ranks=RANKS, microbatches=1):
    """A diagnosis to be made when it is asked for."""
    return partial(jdw.diagnose, gradient_of, num_replicas=ranks, microbatches=microbatches)


UNCHECKED = {"check_vma": False}
GALLERY = {
    "pmap: pmean of normalised losses": by(in_pmap(pmean_of_normalised)),
    "shard_map: pmean of normalised losses": by(in_shard_map(pmean_of_normalised)),
    "pmap: the textbook rule": by(in_pmap(textbook)),
    "shard_map: the textbook rule": by(in_shard_map(textbook)),
    "shard_map(check_vma=False): the textbook rule": by(in_shard_map(textbook, **UNCHECKED)),
    "pmap: psum of gradients over psum of weights": by(in_pmap(sum_then_divide)),
    "shard_map: psum of gradients over psum of weights": by(in_shard_map(sum_then_divide)),
    "pmap: ... over at least 1": by(in_pmap(clamped)),
    "pmap: pmean of totals over the global weight": by(in_pmap(forgotten_ranks)),
    "pmap: jnp.mean(losses * mask)": by(in_pmap(masked_mean)),
    "optax.MultiSteps on microbatch means": by(multi_steps, 1, MICROBATCHES),
    "microbatch means added up": by(added_means, 1, MICROBATCHES),
    "jit: a scan that averages global means": by(scan_over_global_means, RANKS, MICROBATCHES),
    "torch DDP, each rank's mean": partial(of_torch, "usual"),
    "torch DDP join, initial world size": partial(of_torch, "initial_ranks"),
    "torch DDP join, active ranks": partial(of_torch, "active_ranks"),
    "shard_map: pmean of rank_share": by(in_shard_map(shared)),
    "shard_map: value_and_grad": by(in_shard_map(ours)),
    "weighted_multi_steps on microbatch means": by(weighted_multi_steps, 1, MICROBATCHES),
}


def main():
    """Prints the table, or one diagnosis."""
    if len(sys.argv) > 1:
        print(GALLERY[" ".join(sys.argv[1:])]())
        return
    width = max(len(name) for name in GALLERY)
    print(f"{'what the step does':{width}}  {'its convention':22}  factor  right")
    for name, diagnosed in GALLERY.items():
        found = diagnosed()
        factor = "" if found.factor is None else f"{found.factor:.3g}"
        right = "yes" if found.right else "no"
        print(f"{name:{width}}  {found.convention:22}  {factor:>6}  {right}")


if __name__ == "__main__":
    main()
