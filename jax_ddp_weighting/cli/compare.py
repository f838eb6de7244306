"""The command `compare`: two gradients in files, leaf by leaf. It imports JAX when called."""

from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from jax_ddp_weighting._arguments import check_rtol
from jax_ddp_weighting.cli.console import count_of, print_json, print_line
from jax_ddp_weighting.cli.options import RIGHT, WRONG, Json


def compare(
    ours: Annotated[
        Path, typer.Argument(help="The gradient on trial, by name: .npz or .safetensors.")
    ],
    theirs: Annotated[
        Path,
        typer.Argument(
            help="The reference: the same names, or torch's, which are brought to ours; or a step"
            " that record wrote."
        ),
    ],
    rtol: Annotated[
        float | None, typer.Option(help="Difference allowed, of the leaf's largest; by dtype.")
    ] = None,
    rule: Annotated[
        list[str] | None,
        typer.Option(
            help="Which of torch's names is which of ours, where names do not tell: torch=ours,"
            " torch=ours:kind (a Linear behind a flattened image: torch=ours:flattened:16,5,5), or"
            " torch= to leave it out. May be repeated."
        ),
    ] = None,
    json: Json = False,
) -> int:
    """Two gradients compared by name: every leaf of one file beside that of the other."""
    from jax_ddp_weighting.testing.gradient_comparison import compare_gradients
    from jax_ddp_weighting.testing.named_arrays import read_named
    from jax_ddp_weighting.testing.recorded import gradient_of

    if rtol is not None:
        check_rtol("compare: --rtol", rtol)
    one, two = (gradient_of(read_named(path, caller="compare")) for path in (ours, theirs))
    rules = dict(map(_read_rule, rule or []))
    if rules or not _are_same(one, two):
        two = _bring(one, two, rules)
    report = compare_gradients(one, two, rtol=rtol)
    wrong = report.wrong
    if json:
        leaves = [
            {
                "leaf": each.leaf,
                "shape": list(each.shape),
                "difference": each.difference,
                "allowed": each.rtol,
                "ratio": each.ratio,
                "equal": each.equal,
                "note": each.note,
            }
            for each in report.differences
        ]
        print_json({"right": not wrong, "leaves": leaves})
    else:
        print_line(str(report))
        leaves = count_of(len(report.differences), "leaf", "leaves")
        print_line(f"{len(wrong)} of {leaves} differ." if wrong else f"{leaves} equal.")
    return WRONG if wrong else RIGHT


def _read_rule(text: str) -> tuple[str, Any]:
    torch, equals, ours = text.partition("=")
    if not torch or not equals:
        raise ValueError(
            f"compare: --rule must be torch=ours, torch=ours:kind or torch=, got {text!r}. For"
            " instance: --rule head=Dense_3"
        )
    path, *lies = ours.split(":", 2)
    if "flattened" not in lies[:1] and len(lies) < 2:
        return torch, (path, *lies) if lies else path or None
    sizes = lies[1].split(",") if len(lies) > 1 else []
    if lies[0] != "flattened" or not sizes or not all(map(str.isdecimal, sizes)):
        raise ValueError(
            "compare: --rule must give the axes that were flattened, in torch's order, got"
            f" {text!r}. For instance: --rule fc1=Dense_0:flattened:16,5,5"
        )
    return torch, (path, "flattened", tuple(map(int, sizes)))


def _split(name: str) -> tuple[str, ...]:
    plain = name.translate(str.maketrans({"[": "/", "]": "/", ".": "/", "'": None, '"': None}))
    words = tuple(word for word in plain.split("/") if word)
    return words[1:] if len(words) > 1 and words[0] == "params" else words


def _are_same(one: dict[str, np.ndarray], two: dict[str, np.ndarray]) -> bool:
    return {*map(_split, one)} == {*map(_split, two)}


def _bring(
    one: dict[str, np.ndarray], two: dict[str, np.ndarray], rules: dict[str, Any]
) -> dict[str, np.ndarray]:
    """Torch's gradient by our names, laid out as ours."""
    from jax_ddp_weighting.testing.torch_naming import torch_names

    tree: dict[str, Any] = {}
    for name, value in one.items():
        *modules, last = _split(name)
        inside = tree
        for module in modules:
            inside = inside.setdefault(module, {})
            if not isinstance(inside, dict):
                raise ValueError(
                    f"compare: names must be of leaves, got {name!r} inside of one. Write a"
                    " gradient whose names are paths."
                )
        inside[last] = value
    names = torch_names(two, tree, rules=rules)
    if not names.complete:
        left = [
            ("no counterpart for theirs", names.unmatched_torch),
            ("no counterpart for ours", names.unmatched_flax),
            ("theirs, of which each could be several", names.ambiguous_torch),
            ("ours, of which each could be several", names.ambiguous_flax),
        ]
        said = "; ".join(f"{title}: {', '.join([*which][:10])}" for title, which in left if which)
        raise ValueError(
            "compare: both files must hold the same leaves, by the same names or by torch's and"
            f" flax's, got {said}. Write the missing ones, or say which is which: --rule torch=ours"
        )
    return names.gradients(two)
