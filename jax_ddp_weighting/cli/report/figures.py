"""The pictures of a report, drawn by matplotlib without a screen."""

from io import BytesIO

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from jax_ddp_weighting.cli.console import count_of
from jax_ddp_weighting.cli.report.findings import OURS, Findings

_RIGHT, _WRONG, _OURS, _EMPTY = "#2b6cb0", "#dd6b20", "#2f855a", "#edf2f7"
_OTHERS = ("#805ad5", "#4a5568", "#d69e2e", "#b83280")
_FIRST, _LAST = 4, 16  # steps of a long epoch that are drawn
_RANKS = 16  # ranks that are drawn, half of them the first and half the last
_LEAST = 1e-9  # where an error of 0 is drawn, which has no place on a scale of powers
_POINTS = 600  # slots up to which each has its number


def draw(findings: Findings) -> dict[str, Figure]:
    """All pictures, by name."""
    with rc_context({"font.size": 12.5}):  # a telephone shows them at three quarters
        return {
            "who-read-what": who_read_what(findings),
            "times-seen": times_seen(findings),
            "effective-weights": effective_weights(findings),
            "gradient-error": gradient_error(findings),
        }


def as_png(figure: Figure) -> bytes:
    """A picture as PNG."""
    file = BytesIO()
    figure.savefig(file, format="png", dpi=160)
    return file.getvalue()


def _figure(height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(6.4, height), layout="constrained")
    axes = figure.subplots()
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return figure, axes


def _some(count: int, first: int, last: int) -> list[int | None]:
    """All places, or the first and the last with a gap, None, between them."""
    if count <= first + last + 1:
        return list(range(count))
    return [*range(first), None, *range(count - last, count)]


def who_read_what(findings: Findings) -> Figure:
    """Ranks against steps: full batches, those with slots of weight 0, and those with copies."""
    plan = findings.plan
    steps = _some(plan.steps_per_epoch, _FIRST, _LAST)
    ranks = _some(plan.num_replicas, _RANKS // 2, _RANKS // 2)
    figure, axes = _figure(1.5 + 0.42 * len(ranks))
    blue, orange, empty = (np.array(_rgb(color)) for color in (_RIGHT, _WRONG, _EMPTY))
    image = np.ones((len(ranks), len(steps), 3))
    for y, rank in enumerate(ranks):
        for x, step in enumerate(steps):
            if rank is None or step is None:
                axes.text(x, y, "…", ha="center", va="center", color="#718096")
                continue
            accepted = findings.accepted[rank, step]
            copies = findings.copies[rank, step]
            share = accepted / plan.batch_size
            image[y, x] = orange if copies else share * blue + (1 - share) * empty
            text = f"{accepted}" + (f"\n{copies} twice" if copies else "")
            color = "white" if share > 0.5 or copies else "#1a202c"
            size = 11 if len(steps) <= 8 else 9 if max(map(len, text.split("\n"))) <= 3 else 5.5
            axes.text(x, y, text, ha="center", va="center", color=color, fontsize=size)
    axes.imshow(image, aspect="auto")
    axes.set_xticks(np.arange(len(steps)), ["" if s is None else str(s) for s in steps])
    axes.set_yticks(np.arange(len(ranks)), ["" if r is None else str(r) for r in ranks])
    axes.set_xticks(np.arange(len(steps) + 1) - 0.5, minor=True)
    axes.set_yticks(np.arange(len(ranks) + 1) - 0.5, minor=True)
    axes.grid(which="minor", color="white", linewidth=2)
    axes.tick_params(which="both", length=0)
    axes.tick_params(axis="x", labelsize=11 if len(steps) <= 16 else 9)
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.set(xlabel="step of epoch 0", ylabel="rank")
    legend = {
        f"all of {count_of(plan.batch_size, 'row')} count": _RIGHT,
        "padding of weight 0": _EMPTY,
        "ids read twice": _WRONG,
    }
    figure.legend(
        handles=[Patch(facecolor=color, label=label) for label, color in legend.items()],
        loc="outside upper center",
        ncols=3,
        frameon=False,
        fontsize=11.5,
    )
    return figure


def times_seen(findings: Findings) -> Figure:
    """How many ids were seen how often over all epochs."""
    epochs = len(findings.audited)
    times = dict.fromkeys(range(epochs + 2), 0) | findings.times_seen
    shown = {t: ids for t, ids in sorted(times.items()) if ids or abs(t - epochs) <= 1}
    figure, axes = _figure(3.4)
    colors = [_RIGHT if t == epochs else _WRONG for t in shown]
    bars = axes.bar([str(t) for t in shown], list(shown.values()), color=colors, width=0.7)
    axes.bar_label(bars, [f"{ids:,}" for ids in shown.values()], padding=2)
    axes.margins(y=0.15)
    axes.set(xlabel=f"times seen in {count_of(epochs, 'epoch')}", ylabel="ids")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    return figure


def effective_weights(findings: Findings) -> Figure:
    """Slot by slot: what it counts by the convention, and what it should."""
    looked_at = findings.looked_at
    ranks = looked_at.weights.shape[0]
    weights, counted, ours = (
        each.reshape(-1) for each in (looked_at.weights, looked_at.counted, looked_at.ours)
    )
    figure, axes = _figure(4.2)
    places = np.arange(weights.size)
    small = 6 if weights.size <= _POINTS else 2
    axes.vlines(places, weights, counted, color=_WRONG, alpha=0.4, linewidth=1)
    axes.plot(places, counted, "o", color=_WRONG, markersize=small, label=findings.convention)
    axes.plot(places, weights, "_", color=_RIGHT, markersize=small + 4, label="right")
    axes.plot(places, ours, ".", color=_OURS, markersize=small - 1, label=OURS)
    width = weights.size // ranks
    if ranks <= _RANKS:
        for rank in range(1, ranks):  # of many ranks such lines would make a grey picture
            axes.axvline(rank * width - 0.5, color="#cbd5e0", linewidth=0.8)
        axes.set_xticks(
            (np.arange(ranks) + 0.5) * width - 0.5, [f"rank {rank}" for rank in range(ranks)]
        )
        axes.tick_params(axis="x", length=0, labelsize=11.5 if ranks <= 6 else 7)
    else:
        axes.set_xlabel("slots, rank by rank")
    highest = max(counted.max(), weights.max())
    axes.set_ylim(-0.05 * highest, 1.1 * highest)
    axes.set_ylabel("examples it counts as")
    _legend(figure)
    return figure


def gradient_error(findings: Findings) -> Figure:
    """The error of the step's gradient against the number of microbatches."""
    figure, axes = _figure(4.2)
    others = iter(_OTHERS)
    for name, errors in findings.errors.items():
        chosen = {OURS: _OURS, findings.convention: _WRONG}.get(name)
        axes.plot(
            findings.microbatches,
            np.maximum(errors, _LEAST),
            label=name,
            color=chosen or next(others),
            linewidth=3 if chosen else 1.5,
            marker="o",
            markersize=4,
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(findings.microbatches, [str(k) for k in findings.microbatches])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.set(xlabel="microbatches per rank", ylabel="relative error")
    _legend(figure)
    return figure


def _legend(figure: Figure) -> None:
    figure.legend(loc="outside upper center", ncols=2, frameon=False, fontsize=11.5)


def _rgb(color: str) -> tuple[float, ...]:
    return tuple(int(color[i : i + 2], 16) / 255 for i in (1, 3, 5))
