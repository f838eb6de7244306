"""The table of ratios as a picture: a point for each ratio, beside that of an earlier run."""

from pathlib import Path

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
