"""A gradient on the ranks of a data axis, each of which has all parameters, in one regime."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import chex
import jax
from jax.sharding import AbstractMesh
from jaxtyping import PyTree

from jax_ddp_weighting.data.batch import Batch, place_batch
from jax_ddp_weighting.distributed import mesh as meshes

FAKE_PMAP = "fake_pmap"
"""Beside the regimes proper: what `jax.pmap` becomes under `chex.fake_pmap`."""

Given = tuple[PyTree, Any, PyTree]
"""Parameters, a key or None, a state or None."""

OnRank = Callable[[Given, Batch], dict[str, PyTree]]
"""`(given, rows) -> {"loss": ..., "params": gradients}`, on one rank."""

Ran = tuple[Callable[..., Any], tuple[Any, ...], Callable[[Any], list[dict[str, PyTree]]]]
"""A function of all ranks, its arguments where they belong, and what reads its results off: one, or
one per rank where ranks can be seen apart."""


@dataclass(frozen=True)
class WholeRanks:
    """Ranks that hold every parameter whole.

    Attributes:
        ranks: how many there are.
    """

    ranks: int

    def run(self, on_rank: OnRank, given: Given, rows: Batch, engine: str) -> Ran:
        """What runs all of them.

        Args:
            on_rank: what each rank runs on its rows.
            given: what all ranks are given.
            rows: all ranks' rows.
            engine: a regime.
        """
        if engine == FAKE_PMAP:

            def faked(given: Given, by_rank: Batch) -> Any:
                # It drops whatever it doesn't know, `out_axes` and `devices` among it, without a
                # word, so results come stacked over the ranks. And it patches `jax.pmap` where that
                # is looked up, so the call must stand in the block, and a `from jax import pmap` is
                # not faked.
                with chex.fake_pmap(jit_result=True):
                    return jax.pmap(on_rank, "data", in_axes=(None, 0))(given, by_rank)

            ranks = self.ranks
            by_rank = jax.tree.map(
                lambda leaf: leaf.reshape(ranks, leaf.shape[0] // ranks, *leaf.shape[1:]), rows
            )
            return faked, (given, by_rank), partial(_see_apart, ranks=ranks)
        if engine == "vmap":  # one device holds all ranks
            mesh = AbstractMesh((self.ranks,), ("data",))
        else:
            mesh = meshes.data_mesh(self.ranks)
            given = meshes.place(given, meshes.replicated_sharding(mesh))
            rows = place_batch(rows, meshes.row_sharding(mesh, "data"), caller="check_gradients")
        return jax.jit(meshes.over_ranks(on_rank, mesh, engine=engine)), (given, rows), _as_one


def _as_one(out: dict[str, PyTree]) -> list[dict[str, PyTree]]:
    return [out]


def _see_apart(out: dict[str, PyTree], ranks: int) -> list[dict[str, PyTree]]:
    return [jax.tree.map(lambda leaf, rank=rank: leaf[rank], out) for rank in range(ranks)]
