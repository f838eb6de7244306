"""Processes that need not import JAX again: a server imports it, and is forked for each of them.

The server makes no device and starts no thread. There is one in a run, which whoever asks first
starts: what a process is to be told comes with it, as JAX has read the environment by then.
"""

import multiprocessing

FORKED = multiprocessing.get_context("forkserver")
FORKED.set_forkserver_preload(
    [
        *("flax.linen", "flax.nnx", "flax.training.train_state", "optax"),
        *("jax.experimental.multihost_utils", "jax_ddp_weighting.train.nnx"),
        *("jax_ddp_weighting.evaluation", "jax_ddp_weighting.testing"),
    ]
)
