"""The table of ratios as a picture, a point for each beside that of an earlier run; and curves."""

from pathlib import Path

from matplotlib import rc_context
from matplotlib.figure import Figure

_FASTER, _SLOWER, _BEFORE = "#2f855a", "#dd6b20", "#4a5568"
_WIDEST = 70  # letters of a name that are drawn


def draw(now: dict[str, dict[str, float] | None], before: dict[str, dict[str, float]]) -> Figure:
    """Every ratio as a point on a scale of powers, green where ours is faster.

    Args:
        now: ratios by benchmark and name; None where a benchmark failed.
        before: those of the run that is compared with; drawn as open circles.
    """
    entries = [
        (name, what, ratio, before.get(name, {}).get(what))
        for name, ratios in now.items()
        for what, ratio in (ratios or {}).items()
    ]
    figure = Figure(figsize=(11, 1.2 + 0.24 * max(len(entries), 1)), layout="constrained")
    axes = figure.subplots()
    axes.axvline(1, color="0.6", linewidth=1)
    for place, (_, _, ratio, earlier) in enumerate(entries):
        if earlier is not None:
            axes.plot([earlier, ratio], [place, place], color="0.8", zorder=1)
            axes.plot(earlier, place, "o", color=_BEFORE, fillstyle="none", zorder=2)
        axes.plot(ratio, place, "o", color=_FASTER if ratio <= 1 else _SLOWER, zorder=3)
    # a name is the more particular the later its part: the beginning is what is cut
    names = [f"{name}: {what}" for name, what, *_ in entries]
    short = [each if len(each) <= _WIDEST else f"...{each[3 - _WIDEST :]}" for each in names]
    axes.set_yticks(range(len(entries)), short, fontsize=7)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter("{x:g}")
    axes.tick_params(axis="x", which="both", labelsize=7)
    axes.invert_yaxis()
    compared = "; open circles: before" if any(each[3] is not None for each in entries) else ""
    axes.set_xlabel(f"time of ours over theirs: left of 1, ours is faster{compared}")
    return figure


def save(path: Path, now: dict, before: dict) -> None:
    """Write the picture as PNG."""
    draw(now, before).savefig(path, format="png", dpi=120)


_CURVES = {
    "MiB": "memory, MiB",
    "descriptors": "file descriptors",
    "threads": "Python threads",
    "keys": "keys in the service",
}


def draw_curves(curves: list[dict[str, list[dict[str, float]]]], times: dict[str, int]) -> Figure:
    """What processes hold as they go on: a column for what they do, a row for what they hold.

    Args:
        curves: for each process, by what it does, samples at equal distances.
        times: how often each is done, from the first sample to the last.
    """
    figure = Figure(figsize=(9, 6), layout="constrained")
    grid = figure.subplots(len(_CURVES), len(times), sharex="col", sharey="row", squeeze=False)
    for row, (what, label) in zip(grid, _CURVES.items(), strict=True):
        for axes, (name, count) in zip(row, times.items(), strict=True):
            for process, (found, color) in enumerate(zip(curves, (_FASTER, _SLOWER), strict=True)):
                held = [sample[what] for sample in found[name]]
                done = [count * part / (len(held) - 1) for part in range(len(held))]
                axes.plot(done, held, color=color, label=f"process {process}")
            axes.tick_params(labelsize=7)
            axes.xaxis.set_major_formatter("{x:,.0f}")
            axes.locator_params(axis="x", nbins=5)
        most = max(sample[what] for each in curves for found in each.values() for sample in found)
        row[0].set_ylim(0, 1.3 * most + 1)
        row[0].set_ylabel(label, fontsize=8)
    for axes, name in zip(grid[-1], times, strict=True):
        axes.set_xlabel(name, fontsize=8)
    grid[0][0].legend(fontsize=7, loc="lower right")
    return figure


def save_curves(path: Path, curves: list, times: dict[str, int]) -> None:
    """Write the curves as SVG, the same bytes for the same curves."""
    with rc_context({"svg.hashsalt": "curves", "svg.fonttype": "none"}):
        draw_curves(curves, times).savefig(path, format="svg", metadata={"Date": None})
