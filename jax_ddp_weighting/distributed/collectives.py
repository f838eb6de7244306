"""Which mapped axes a function communicates over, and what it sends: read off its jaxpr.

In a checked `shard_map` types tell what differs from rank to rank. In the other regimes nothing
does, and how a function uses an axis is the one thing that can still be known of it.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend import core
from jaxtyping import PyTree

Origins = frozenset[int]
"""What a value is made of: leaves of the first argument by number, and `OTHERS`."""

OTHERS = -1
"""What comes from elsewhere: further arguments, what a function closes over, random numbers."""

# casts of types alone
_NO_COLLECTIVE = ("pvary", "pcast")


class Collective(NamedTuple):
    """One collective operation of a function.

    Attributes:
        name: JAX's name of the primitive, such as `all_gather`.
        axes: the mapped axes it goes over, those that are bound outside the function.
        origins: what its operands are made of, as far as gradients flow.
    """

    name: str
    axes: frozenset[str]
    origins: Origins


def find_collectives(fn: Callable[..., Any], first: PyTree, *rest: PyTree) -> list[Collective]:
    """The collectives of `fn(first, *rest)`, traced and not run.

    Left out are those of functions that have a derivative of their own (`jax.custom_vjp`), which
    say themselves how they are pulled back.

    Args:
        fn: any function that can be traced here.
        first: the argument whose leaves are followed through it.
        rest: all other arguments.
    """
    closed = jax.make_jaxpr(fn)(first, *rest)
    count, jaxpr = len(jax.tree.leaves(first)), closed.jaxpr
    others = [frozenset({OTHERS})] * (len(jaxpr.invars) - count)
    found: dict[Collective, None] = {}  # in order, once each
    _walk(jaxpr, [*(frozenset({i}) for i in range(count)), *others], frozenset(), found)
    return list(found)


def _walk(
    jaxpr: Any, origins: Sequence[Origins], bound: frozenset[str], found: dict[Collective, None]
) -> list[Origins]:
    """The origins of the results, of those of the arguments; collectives are noted in `found`."""
    known: dict[Any, Origins] = dict.fromkeys(jaxpr.constvars, frozenset({OTHERS}))
    known.update(zip(jaxpr.invars, origins, strict=True))

    def look_up(atom: Any) -> Origins:
        return known.get(atom, frozenset()) if not isinstance(atom, core.Literal) else frozenset()

    for eqn in jaxpr.eqns:
        given = list(map(look_up, eqn.invars))
        axes = _axes_of(eqn) - bound
        if axes and given and eqn.primitive.name not in _NO_COLLECTIVE:
            found[Collective(eqn.primitive.name, axes, frozenset().union(*given))] = None
        results = _results_of(eqn, given, bound, found)
        known.update(zip(eqn.outvars, results, strict=True))
    return list(map(look_up, jaxpr.outvars))


def _results_of(
    eqn: Any, given: list[Origins], bound: frozenset[str], found: dict[Collective, None]
) -> list[Origins]:
    everything = frozenset().union(*given)
    if eqn.primitive.name == "stop_gradient":
        return [frozenset({OTHERS})]
    inner = list(_jaxprs_in(eqn.params))
    if not inner:
        return [everything] * len(eqn.outvars)
    if eqn.primitive.name.startswith("custom_vjp_call"):
        found = {}
    bound |= _bound_by(eqn)
    if eqn.primitive.name == "cond":
        branches = [_walk(each, given[1:], bound, found) for each in inner]
        return [given[0].union(*results) for results in zip(*branches, strict=True)]
    if eqn.primitive.name == "scan":
        consts, carried = eqn.params["num_consts"], eqn.params["num_carry"]
        while True:  # what is carried takes on what is added to it, in some rounds at most
            results = _walk(inner[0], given, bound, found)
            before = given[consts : consts + carried]
            grown = [a | b for a, b in zip(before, results[:carried], strict=True)]
            if grown == before:
                return results
            given = [*given[:consts], *grown, *given[consts + carried :]]
    one = inner[0]
    if len(inner) == 1 and (len(one.invars), len(one.outvars)) == (len(given), len(eqn.outvars)):
        return _walk(one, given, bound, found)
    for each in inner:  # such as a while loop: what goes in anywhere may come out anywhere
        _walk(each, [everything] * len(each.invars), bound, found)
    return [everything] * len(eqn.outvars)


def _jaxprs_in(params: dict[str, Any]) -> Iterator[Any]:
    for value in params.values():
        for each in value if isinstance(value, tuple | list) else (value,):
            if isinstance(each, core.ClosedJaxpr):
                yield each.jaxpr
            elif isinstance(each, core.Jaxpr):
                yield each


def _axes_of(eqn: Any) -> frozenset[str]:
    """The named axes of a collective; of other operations, whose axes are numbers, none."""
    if any(True for _ in _jaxprs_in(eqn.params)):
        return frozenset()
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
