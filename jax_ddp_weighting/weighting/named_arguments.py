"""What a user's function is given by name: as much of what there is as its signature names."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any


def find_named(
    fn: Callable[..., Any], positional: str, offered: Mapping[str, Any], *, argument: str
) -> dict[str, Any]:
    """What of `offered` the function names behind its positional arguments, to be given by name.

    Args:
        fn: the function.
        positional: its positional arguments as the error writes them, such as `"params, batch"`.
        offered: what there is by name; None is what is not there.
        argument: who asks for what, as the error names it: `"value_and_grad: statistics"`.

    Raises:
        TypeError: the function cannot be called so, or needs what is not there.
    """
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):  # a builtin that has none: it may take them
        return {}
    count = positional.count(",") + 1
    by_name = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    named = [each.name for each in list(signature.parameters.values()) if each.kind in by_name]
    # what is first in the signature is given by place, whatever it is called
    places = list(signature.parameters)[:count]
    given = {
        name: value
        for name, value in offered.items()
        if name in named and name not in places and value is not None
    }
    try:
        signature.bind(*range(count), **given)
    except TypeError:
        there = [name for name, value in offered.items() if value is not None]
        further = f", and by name {' and '.join(there)}" if there else ""
        raise TypeError(
            f"{argument} must take ({positional}){further}, got {signature}. It is given what it "
            "names, and no more than the step was given."
        ) from None
    return given


def find_for_loss(
    loss_fn: Callable[..., Any], given: Mapping[str, Any], others: Iterable[Any]
) -> dict[str, Any]:
    """What a loss function is given by name.

    All that there is; only `replicated` is left out where it was given for another function, one
    of `others` that names it, such as a divisor, and the loss function does not.
    """
    for_another = any(_names(other, "replicated") for other in others if callable(other))
    if for_another and not _names(loss_fn, "replicated"):
        return {name: value for name, value in given.items() if name != "replicated"}
    return dict(given)


def _names(fn: Callable[..., Any], name: str) -> bool:
    try:
        parameters = inspect.signature(fn).parameters
    except (TypeError, ValueError):
        return False
    takes_all = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())
    return takes_all or name in parameters
