"""The figures of the report for papers: PNG and PDF, by matplotlib."""

from __future__ import annotations

from pathlib import Path

from matplotlib import colormaps, rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas

from experiments.figures import STYLE
from experiments.report_parts import Figure, Panel
from msb_jax.atomic import atomic_file

COLUMNS = 4
# Without the time of writing, so that the same data give the same file.
METADATA = {"png": {"Software": "msb_jax"}, "pdf": {"CreationDate": None}}


def plot_figure(folder: Path, figure: Figure) -> None:
    """Draw a figure and write it as <key>.png and <key>.pdf."""
    number = max(1, len(figure.panels))
    columns = min(COLUMNS, number)
    rows = -(-number // columns)
    names = list(dict.fromkeys(s.name for p in figure.panels for s in p.series))
    with rc_context(STYLE):
        size = (max(3.6 * columns, 5.0), 2.9 * rows + 0.8)
        canvas = Canvas(figsize=size, layout="constrained")
        axes = canvas.subplots(rows, columns, squeeze=False).ravel()
        for axis in axes[number:]:
            axis.set_visible(False)
        for axis, panel in zip(axes, figure.panels, strict=False):
            _draw(axis, figure, panel, names)
        lines = {
            line.get_label(): line for axis in axes[:number] for line in axis.lines
        }
        if lines:
            canvas.legend(
                list(lines.values()),
                [str(name) for name in lines],
                loc="outside lower center",
                ncols=min(len(lines), 2 * columns),
                fontsize="small",
            )
        for kind, metadata in METADATA.items():
            with atomic_file(folder / f"{figure.key}.{kind}") as file:
                canvas.savefig(file, format=kind, dpi=130, metadata=metadata)


def _draw(axis: Axes, figure: Figure, panel: Panel, names: list[str]) -> None:
    palette = colormaps["tab10" if len(names) <= 10 else "tab20"]
    axis.set_title(panel.title)
    axis.set_xlabel(figure.x)
    axis.set_ylabel(figure.y)
    if not panel.series:
        axis.text(0.5, 0.5, panel.reason or "no data", ha="center", va="center")
        return
    for series in panel.series:
        colour = palette(names.index(series.name) % palette.N)
        is_first = series.name == names[0]
        axis.plot(
            series.x,
            series.mean,
            label=series.name,
            color=colour,
            linewidth=1.8 if is_first else 1.1,
            marker="o" if len(series.x) < 12 else None,
            markersize=3,
            zorder=3 if is_first else 2,
        )
        low = [m - e for m, e in zip(series.mean, series.error, strict=True)]
        high = [m + e for m, e in zip(series.mean, series.error, strict=True)]
        axis.fill_between(series.x, low, high, color=colour, alpha=0.15, lw=0)
    if panel.shaded:
        axis.axvspan(0, panel.shaded, color="black", alpha=0.05, lw=0)
