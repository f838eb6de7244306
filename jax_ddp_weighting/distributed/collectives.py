"""Which mapped axes a function communicates over, and what it sends: read off its jaxpr.

In a checked `shard_map` types tell what differs from rank to rank. In the other regimes nothing
does, and how a function uses an axis is the one thing that can still be known of it.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend import core
from jaxtyping import PyTree

Origins = frozenset[int | str]
"""What a value is made of: leaves of the first argument by number, and `OTHERS`; and by their names
the axes over which it may differ from rank to rank."""

OTHERS = -1
"""What comes from elsewhere: further arguments, what a function closes over, random numbers."""

# casts of types alone
_NO_COLLECTIVE = ("pvary", "pcast")

# After these every rank has the same.
_MADE_THE_SAME = ("psum", "pmax", "pmin", "all_gather")

# After these one element of a result is made of many of an operand, or of none of its own: a draw
# of random numbers knows nothing of which part of an array it is for.
_MIXES = (
    *("reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or"),
    *("reduce_xor", "argmax", "argmin", "cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"),
    *("dot_general", "ragged_dot", "conv_general", "sort", "top_k", "approx_top_k", "fft", "eig"),
    *(
        "gather",
        "scatter",
        "svd",
        "qr",
        "lu",
        "cholesky",
        "triangular_solve",
        "householder",
        "schur",
        "tridiagonal",
    ),
)
_DRAWS = ("random_bits", "threefry2x32", "rng_")


class Collective(NamedTuple):
    """One collective operation of a function.

    Attributes:
        name: JAX's name of the primitive, such as `all_gather`.
        axes: the mapped axes it goes over, those that are bound outside the function.
        leaves: the leaves of the first argument that its operands are made of, as far as gradients
            flow.
        others: whether they are made of anything else too.
        varying: the axes over which they may differ from rank to rank.
    """

    name: str
    axes: frozenset[str]
    leaves: frozenset[int]
    others: bool
    varying: frozenset[str]


class Program(NamedTuple):
    """A function that has been traced, and not run.

    Attributes:
        jaxpr: its jaxpr.
        leaves: how many leaves its first argument has.
    """

    jaxpr: Any
    leaves: int

    def find_collectives(
        self,
        varying: Sequence[frozenset[str]] | None = None,
        others: frozenset[str] = frozenset(),
    ) -> tuple[list[Collective], frozenset[str]]:
        """The collectives, and the axes over which the results may differ from rank to rank.

        Left out are those of functions that have a derivative of their own (`jax.custom_vjp`),
        which say themselves how they are pulled back.

        Args:
            varying: for each leaf of the first argument the axes over which it differs; None for
                none.
            others: those over which all else that goes in differs.
        """
        firsts = [frozenset()] * self.leaves if varying is None else varying
        found: dict[Collective, None] = {}  # in order, once each
        results = self._walk(firsts, others, found)
        return list(found), _names_in(frozenset().union(*results))

    def find_names(self, names: Sequence[frozenset[str]]) -> list[frozenset[str]]:
        """For each result those names that the leaves which it is made of hand on to it.

        The name of an axis goes as far as the first reduction over that axis; others go everywhere.

        Args:
            names: for each leaf of the first argument its own.
        """
        return list(map(_names_in, self._walk(names, frozenset(), {})))

    def _walk(
        self,
        firsts: Sequence[frozenset[str]],
        others: frozenset[str],
        found: dict[Collective, None],
    ) -> list[Origins]:
        origins: list[Origins] = [frozenset({i}) | names for i, names in enumerate(firsts)]
        origins += [frozenset({OTHERS}) | others] * (len(self.jaxpr.invars) - self.leaves)
        walk = _Walk(frozenset({OTHERS}) | others, frozenset(), found)
        return walk.through(self.jaxpr, origins)

    def find_partial(self, parts: Sequence[frozenset[str]]) -> list[frozenset[str]]:
        """For each result the axes for which it is made of what one rank has of several elements.

        A norm, a mean or a count of the leaves, or of some of them, is so of all axes that these
        are split over, until it is summed over them; what follows element by element is not.

        Args:
            parts: for each leaf of the first argument the axes that it is split over.
        """
        origins: list[Origins] = [frozenset({i}) for i in range(self.leaves)]
        origins += [frozenset({OTHERS})] * (len(self.jaxpr.invars) - self.leaves)
        walk = _Walk(frozenset({OTHERS}), frozenset(), {}, tuple(parts))
        return [_names_in(each) for each in walk.through(self.jaxpr, origins)]


def trace(fn: Callable[..., Any], first: PyTree, *rest: PyTree) -> Program:
    """`fn(first, *rest)`, traced and not run.

    Args:
        fn: any function that can be traced here.
        first: the argument whose leaves are followed through it.
        rest: all other arguments.
    """
    return Program(jax.make_jaxpr(fn)(first, *rest).jaxpr, len(jax.tree.leaves(first)))


def _names_in(origins: Origins) -> frozenset[str]:
    return frozenset(each for each in origins if isinstance(each, str))


class _Walk(NamedTuple):
    """A walk through a jaxpr and those inside it.

    Attributes:
        elsewhere: the origins of what a function closes over.
        bound: axes that are mapped inside.
        found: where collectives are noted.
        parts: for each leaf of the first argument the axes that it is split over, where it is asked
            what mixes elements; the axes among the origins are then those of what was mixed.
    """

    elsewhere: Origins
    bound: frozenset[str]
    found: dict[Collective, None]
    parts: tuple[frozenset[str], ...] = ()

    def through(self, jaxpr: Any, origins: Sequence[Origins]) -> list[Origins]:
        """The origins of the results, of those of the arguments."""
        known: dict[Any, Origins] = dict.fromkeys(jaxpr.constvars, self.elsewhere)
        known.update(zip(jaxpr.invars, origins, strict=True))

        def look_up(atom: Any) -> Origins:
            return frozenset() if isinstance(atom, core.Literal) else known[atom]

        for eqn in jaxpr.eqns:
            results = self._results_of(eqn, list(map(look_up, eqn.invars)))
            known.update(zip(eqn.outvars, results, strict=True))
        return list(map(look_up, jaxpr.outvars))

    def _results_of(self, eqn: Any, given: list[Origins]) -> list[Origins]:
        name, everything = eqn.primitive.name, frozenset[int | str]().union(*given)
        inner = list(_jaxprs_in(eqn.params))
        if inner:
            return self._into(eqn, inner, given, everything)
        axes = _axes_of(eqn) - self.bound
        if name == "stop_gradient":
            everything = _names_in(everything) | {OTHERS}
        elif name == "axis_index":
            everything = axes | {OTHERS}
        elif axes and name not in _NO_COLLECTIVE:
            leaves = frozenset(each for each in everything if isinstance(each, int))
            self.found[
                Collective(name, axes, leaves - {OTHERS}, OTHERS in leaves, _names_in(everything))
            ] = None
            in_groups = eqn.params.get("axis_index_groups") is not None
            if name.startswith(_MADE_THE_SAME) and not in_groups:
                # and what is whole is no part any more, whatever is made of it
                whole = {i for i, own in enumerate(self.parts) if own <= axes}
                everything -= axes | whole
            elif not self.parts:
                everything |= axes
        elif self.parts and name.startswith(_MIXES):
            everything |= self._parts_of(everything)
        elif self.parts and name.startswith(_DRAWS):
            everything |= frozenset().union(*self.parts)
        return [everything] * len(eqn.outvars)

    def _parts_of(self, origins: Origins) -> frozenset[str]:
        leaves = [each for each in origins if isinstance(each, int) and each != OTHERS]
        return frozenset[str]().union(*(self.parts[i] for i in leaves))

    def _into(
        self, eqn: Any, inner: list[Any], given: list[Origins], everything: Origins
    ) -> list[Origins]:
        """The same of an operation that holds others."""
        walk = self._replace(bound=self.bound | _bound_by(eqn))
        if eqn.primitive.name.startswith("custom_vjp_call"):
            walk = walk._replace(found={})
        if eqn.primitive.name == "cond":
            branches = [walk.through(each, given[1:]) for each in inner]
            return [given[0].union(*results) for results in zip(*branches, strict=True)]
        if eqn.primitive.name == "scan":
            consts, carried = _count_inputs(eqn.params, len(given))
            while True:  # what is carried takes on what is added to it, in some rounds at most
                results = walk.through(inner[0], given)
                before = given[consts : consts + carried]
                grown = [a | b for a, b in zip(before, results[:carried], strict=True)]
                if grown == before and len(results) == len(eqn.outvars):
                    return results
                if grown == before:  # some are handed on outside the jaxpr
                    return [everything.union(*results)] * len(eqn.outvars)
                given = [*given[:consts], *grown, *given[consts + carried :]]
        one = inner[0]
        if len(inner) == 1 and (len(one.invars), len(one.outvars)) == (
            len(given),
            len(eqn.outvars),
        ):
            return walk.through(one, given)
        results = [  # such as a while loop: what goes in anywhere may come out anywhere
            walk.through(each, [everything] * len(each.invars)) for each in inner
        ]
        return [everything.union(*(each for some in results for each in some))] * len(eqn.outvars)


def _jaxprs_in(params: dict[str, Any]) -> Iterator[Any]:
    for value in params.values():
        for each in value if isinstance(value, tuple | list) else (value,):
            if isinstance(each, core.ClosedJaxpr):
                yield each.jaxpr
            elif isinstance(each, core.Jaxpr):
                yield each


def _count_inputs(scan: dict[str, Any], count: int) -> tuple[int, int]:
    """How many inputs of a scan are the same in every round, and how many are carried."""
    if "num_carry" in scan:
        return scan["num_consts"], scan["num_carry"]
    # from jax 0.12 on
    consts, carried, _ = map(list, scan["ft_in"].update(list(range(count))).unpack())
    return len(consts), len(carried)


def _axes_of(eqn: Any) -> frozenset[str]:
    """The named axes of a collective; of other operations, whose axes are numbers, none."""
    names = eqn.params.get("axis_name", eqn.params.get("axes", ()))
    names = names if isinstance(names, tuple | list) else (names,)
    return frozenset(name for name in names if isinstance(name, str))


def _bound_by(eqn: Any) -> frozenset[str]:
    """The axes that a `shard_map` or a `pmap` inside the function maps for what it calls."""
    if eqn.primitive.name == "shard_map":
        axes = eqn.params.get("newly_manual_axes", eqn.params.get("manual_axes", ()))
        return frozenset(axes)
    name = eqn.params.get("axis_name")
    return frozenset({name}) if isinstance(name, str) else frozenset()
