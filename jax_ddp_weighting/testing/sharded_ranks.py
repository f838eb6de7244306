"""A gradient on the ranks of a mesh of several axes, each of which holds shards of the parameters.

Rows lie over the first axis, `"data"`. Shards are cut and put together here, in numpy, so that no
regime of JAX's has a say in what a rank is given, or in what its gradient is taken for.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from itertools import product
from typing import Any

import chex
import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from jax_ddp_weighting.data.batch import Batch, place_batch
from jax_ddp_weighting.distributed import mesh as meshes
from jax_ddp_weighting.testing.whole_ranks import Given, OnRank, Ran
from jax_ddp_weighting.weighting.param_specs import ParamSpecs, sharded_axes


class ShardedRanks:
    """The ranks of a mesh over `"data"` and further axes, and which shards each of them holds.

    Args:
        ranks: how many there are on the data axis.
        axes: the sizes of the further axes, by name.
        specs: how parameters lie over all of them.
        params: whole parameters.
    """

    def __init__(
        self, ranks: int, axes: Mapping[str, int], specs: ParamSpecs, params: PyTree
    ) -> None:
        self.axes = {"data": ranks, **axes}
        spread = jax.tree.broadcast(specs, params, is_leaf=_is_spec)
        self.specs = jax.tree.leaves(spread, is_leaf=_is_spec)
        self.tree_of_specs = spread
        for (path, leaf), spec in zip(
            jax.tree_util.tree_leaves_with_path(params), self.specs, strict=True
        ):
            for dim, entry in enumerate(spec):
                parts = math.prod(self.axes[name] for name in meshes.names_of(entry))
                if np.shape(leaf)[dim] % parts:
                    raise ValueError(
                        f"check_gradients: param_specs must split parameters evenly, got {spec} "
                        f"and shape {np.shape(leaf)} at params{jax.tree_util.keystr(path)} on "
                        f"{self.axes}. Choose another split of rows, or another size."
                    )

    def run(self, on_rank: OnRank, given: Given, rows: Batch, engine: str) -> Ran:
        """What runs all of them.

        Args:
            on_rank: what each rank runs on its shards and its rows.
            given: what all ranks are given, whole.
            rows: all ranks' rows.
            engine: a regime.
        """
        if engine in ("jit", "shard_map", "shard_map_unchecked"):
            return self._run_on_mesh(on_rank, given, rows, engine)
        params, rng, state = given
        stacked = jax.tree.unflatten(
            jax.tree.structure(params), list(map(self._split, jax.tree.leaves(params), self.specs))
        )
        by_rank = jax.tree.map(
            lambda leaf: np.reshape(leaf, (self.axes["data"], -1, *np.shape(leaf)[1:])), rows
        )

        def in_axes(name: str) -> Any:
            return (0, None, None), 0 if name == "data" else None

        def fake(given: Given, by_rank: Batch) -> Any:
            with chex.fake_pmap(jit_result=True):
                return jax.pmap(on_rank, "data", in_axes=in_axes("data"))(given, by_rank)

        mapped: Callable[..., Any] = fake
        if engine == "pmap":
            mapped = jax.pmap(on_rank, "data", in_axes=in_axes("data"))
        elif engine == "vmap":
            mapped = on_rank
            for name in reversed(self.axes):
                mapped = jax.vmap(mapped, in_axes=in_axes(name), axis_name=name)
            mapped = jax.jit(mapped)
        return mapped, ((stacked, rng, state), by_rank), self._read

    def _run_on_mesh(self, on_rank: OnRank, given: Given, rows: Batch, engine: str) -> Any:
        mesh, p = self._make_mesh(), PartitionSpec()
        params, *others = given
        lie = jax.tree.map(
            lambda spec: NamedSharding(mesh, spec), self.tree_of_specs, is_leaf=_is_spec
        )
        everywhere = meshes.replicated_sharding(mesh)
        placed = (meshes.place(params, lie), *meshes.place(tuple(others), everywhere))
        sharding = meshes.row_sharding(mesh, "data")
        args = (placed, place_batch(rows, sharding, caller="check_gradients"))
        run: Any = on_rank
        if engine != "jit":
            run = jax.shard_map(
                on_rank,
                mesh=mesh,
                in_specs=((self.tree_of_specs, p, p), PartitionSpec("data")),
                out_specs={"loss": p, "params": self.tree_of_specs},
                check_vma=engine == "shard_map",
            )
        return jax.jit(run), args, lambda out: [out]

    def _make_mesh(self) -> Mesh:
        shape, names = tuple(self.axes.values()), tuple(self.axes)
        size, found = math.prod(shape), jax.devices()
        if size > len(found):
            raise ValueError(
                f"check_gradients: a mesh of {self.axes} must have {size} devices, got "
                f"{len(found)}. Call force_cpu_devices({size}) before the first JAX operation, or "
                'leave engines to "vmap", which needs none.'
            )
        kinds = (AxisType.Auto,) * len(names)
        return jax.make_mesh(shape, names, axis_types=kinds, devices=found[:size])

    def _places(self) -> Iterator[dict[str, int]]:
        for at in product(*map(range, self.axes.values())):
            yield dict(zip(self.axes, at, strict=True))

    def _slices(
        self, spec: PartitionSpec, shape: tuple[int, ...], at: Mapping[str, int]
    ) -> tuple[slice, ...]:
        """Which part of an array of that shape a rank holds."""
        slices = [slice(None)] * len(shape)
        for dim, entry in enumerate(spec):
            count, index = 1, 0
            for name in meshes.names_of(entry):
                count, index = count * self.axes[name], index * self.axes[name] + at[name]
            size = shape[dim] // count
            slices[dim] = slice(index * size, (index + 1) * size)
        return tuple(slices)

    def _split(self, leaf: Any, spec: PartitionSpec) -> np.ndarray:
        """Every rank's part of an array, `[*axes, *part]`."""
        leaf = np.asarray(leaf)
        parts = [leaf[self._slices(spec, leaf.shape, at)] for at in self._places()]
        return np.stack(parts).reshape(*self.axes.values(), *parts[0].shape)

    def _read(self, out: dict[str, PyTree]) -> list[dict[str, PyTree]]:
        """The result as each rank has it: its own part, and the others' where it has none."""
        leaves, structure = jax.tree.flatten(out["params"])
        stacked = list(map(np.asarray, leaves))
        wholes = [self._join(leaf, spec) for leaf, spec in zip(stacked, self.specs, strict=True)]
        losses, found = np.asarray(out["loss"]), []
        for at in self._places():
            own = []
            for whole, leaf, spec in zip(wholes, stacked, self.specs, strict=True):
                seen = whole.copy()
                seen[self._slices(spec, whole.shape, at)] = leaf[tuple(at.values())]
                own.append(seen)
            loss = losses[tuple(at.values())]
            found.append({"loss": loss, "params": structure.unflatten(own)})
        return found

    def _join(self, stacked: np.ndarray, spec: PartitionSpec) -> np.ndarray:
        shape = list(stacked.shape[len(self.axes) :])
        for dim, entry in enumerate(spec):
            shape[dim] *= math.prod(self.axes[name] for name in meshes.names_of(entry))
        whole = np.zeros(shape, stacked.dtype)
        for at in self._places():
            whole[self._slices(spec, whole.shape, at)] = stacked[tuple(at.values())]
        return whole


def check_axes(axes: Mapping[str, int], specs: ParamSpecs | None, params: PyTree) -> None:
    """Raises `TypeError` or `ValueError` for axes, or specs of parameters, that no mesh has."""
    if not isinstance(axes, Mapping):
        raise ValueError(
            "check_gradients: axes must give the sizes of axes beside 'data', by name, got "
            f"{axes!r}. For instance axes={{'model': 2}}."
        )
    for name, size in axes.items():
        whole = isinstance(size, int | np.integer) and not isinstance(size, bool)
        if not (isinstance(name, str) and name != "data" and whole and size >= 1):
            raise ValueError(
                "check_gradients: axes must give the sizes of axes beside 'data', by name, got "
                f"{dict(axes)}. For instance axes={{'model': 2}}."
            )
    named = sharded_axes(specs, params, caller="check_gradients")
    for name in sorted(frozenset().union(*named)):
        if name != "data" and name not in axes:
            raise ValueError(
                f"check_gradients: param_specs must name 'data' or one of axes, got {name!r} and "
                f"axes={dict(axes)}. Give its size: axes={{{name!r}: 2}}."
            )


def _is_spec(node: Any) -> bool:
    return isinstance(node, PartitionSpec)
