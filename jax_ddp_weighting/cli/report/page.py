"""One self-contained HTML page of a report: nothing is loaded from anywhere else."""

import base64
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from jax_ddp_weighting._version import __version__
from jax_ddp_weighting.cli.console import count_of
from jax_ddp_weighting.cli.report.findings import Findings, sum_microbatches

_GROUPS = 16  # rows of a long table
_EPOCH = {
    **{"epoch": "epoch", "slots": "slots", "accepted": "accepted", "unique": "unique"},
    **{"num_duplicated": "twice+", "num_omitted": "never"},
}
_NEW_ORDER = {None: "first", True: "yes", False: "no"}
_STYLE = Path(__file__).with_name("page.css").read_text()


def page(findings: Findings, pictures: Mapping[str, bytes], command: str) -> str:
    """The report as HTML.

    Args:
        findings: what to tell.
        pictures: PNG files by name, as `figures.draw` names them.
        command: what made the report, to be shown at its end.

    Returns:
        The text of the page.
    """
    plan = findings.plan
    title = f"{count_of(plan.num_examples, 'example')} over {count_of(plan.num_replicas, 'rank')}"
    body = [
        f"<h1>{title}</h1>",
        f"<p>{count_of(plan.batch_size, 'row')} per rank and step,"
        f" {count_of(plan.steps_per_epoch, 'step')} an epoch, tail <code>{plan.tail}</code>,"
        f" order <code>{_order(plan)}</code>, seed {plan.seed}.</p>",
        *_tell_who_read_what(findings, pictures),
        *_tell_what_counted(findings, pictures),
        f"<footer>Made by jax_ddp_weighting {__version__}: <code>{escape(command)}</code></footer>",
    ]
    return "\n".join(
        [
            '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{title}</title>\n<style>\n{_STYLE}</style>\n</head>\n<body>",
            *body,
            "</body>\n</html>\n",
        ]
    )


def _order(plan: Any) -> str:
    if not plan.shuffle:
        return "as it comes"
    return escape(str(plan.order))


def _tell_who_read_what(findings: Findings, pictures: Mapping[str, bytes]) -> list[str]:
    epochs = count_of(len(findings.audited), "epoch")
    if findings.exactly_once:
        verdict = _verdict(True, f"Every id counted exactly once in each of {epochs}.")
    else:
        wrong = [each.audit for each in findings.audited if not each.audit.exactly_once]
        verdict = _verdict(
            False,
            f"Not every id counted once in {len(wrong)} of {epochs}: in epoch"
            f" {wrong[0].epoch}, {wrong[0].num_duplicated:,} came more than once and"
            f" {wrong[0].num_omitted:,} never.",
        )
    return [
        "<h2>Who read what</h2>",
        verdict,
        _picture(
            pictures, "who-read-what", "Rows that count, of each rank in each step of epoch 0."
        ),
        _table(
            "Each epoch, slot by slot",
            [*_EPOCH.values(), "new order"],
            [
                [*(getattr(each.audit, name) for name in _EPOCH), _NEW_ORDER[each.new_order]]
                for each in findings.audited[:_GROUPS]
            ],
        ),
        "<h2>How often each id was seen</h2>",
        _picture(pictures, "times-seen", f"Ids by the times they counted in {epochs}."),
        _table("Ids by times seen", ["times seen", "ids"], list(findings.times_seen.items())),
    ]


def _tell_what_counted(findings: Findings, pictures: Mapping[str, bytes]) -> list[str]:
    looked_at, convention = findings.looked_at, findings.convention
    ranks, microbatches, _ = looked_at.weights.shape
    off = abs(looked_at.counted - looked_at.weights)
    largest = float((off / max(looked_at.weights.max(), 1e-300)).max())
    parts = count_of(microbatches, "microbatch", "microbatches")
    where = f"step {looked_at.step} of epoch 0, {count_of(ranks, 'rank')}, {parts}"
    if largest > 1e-6:
        place = off.reshape(-1).argmax()
        counts, should = (
            float(each.reshape(-1)[place]) for each in (looked_at.counted, looked_at.weights)
        )
        verdict = _verdict(
            False,
            f"By <code>{convention}</code> a slot counts as {counts:.3g} where {should:.3g} is"
            f" right ({where}).",
        )
    else:
        verdict = _verdict(
            True,
            f"Here <code>{convention}</code> counts right ({where}). It may not where microbatches"
            " differ in weight, as with <code>--example-weights</code>.",
        )
    rows = list(sum_microbatches(looked_at))
    return [
        "<h2>How much each example counted</h2>",
        verdict,
        _picture(
            pictures,
            "effective-weights",
            f"Each slot of {where}: what it counts by {convention}, what is right, and what it"
            " counts in a gradient of value_and_grad.",
        ),
        _table(
            "Summed over the rows of each microbatch" + (" (the first)" * (len(rows) > _GROUPS)),
            ["rank", "microbatch", "rows that count", "right", convention, "ours"],
            rows[:_GROUPS],
        ),
        "<h2>The gradient's error</h2>",
        _picture(
            pictures,
            "gradient-error",
            "Relative error of that step's gradient, for examples whose gradients are orthogonal"
            " and of one length; 0 is drawn at 1e-9. What is measured was run, with value_and_grad;"
            " the other lines follow from their definitions.",
        ),
        _table(
            "Relative error by microbatches per rank",
            ["convention", *map(str, findings.microbatches)],
            [[name, *map(_shorten, errors)] for name, errors in findings.errors.items()],
        ),
    ]


def _shorten(error: float) -> str:
    """An error in at most five characters: a telephone has room for seven columns of them."""
    return f"{error:.2f}" if error >= 0.01 else f"{error:.0e}" if error else "0"


def _verdict(right: bool, html: str) -> str:
    return f'<p class="{"right" if right else "wrong"}">{html}</p>'


def _picture(pictures: Mapping[str, bytes], name: str, caption: str) -> str:
    data = base64.b64encode(pictures[name]).decode()
    return (
        f'<figure id="{name}"><img alt="{escape(caption)}" src="data:image/png;base64,{data}">'
        f"<figcaption>{escape(caption)}</figcaption></figure>"
    )


def _table(caption: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    head = "".join(f'<th scope="col">{escape(column)}</th>' for column in columns)
    body = "\n".join(
        "<tr>" + "".join(f"<td>{escape(_format_value(value))}</td>" for value in row) + "</tr>"
        for row in rows
    )
    return (
        f'<div class="scroll"><table><caption>{escape(caption)}</caption>'
        f"<thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table></div>"
    )


def _format_value(value: Any) -> str:
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
