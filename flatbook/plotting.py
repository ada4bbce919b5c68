"""One figure style for the whole book, in a light and a dark version.

Figures are drawn once, in light mode, as SVG. Their paper, ink and grid use four colours and
nothing else does, so :func:`darken` can make the dark twin by exchanging them. Data colours are
chosen to be seen on both: each has a contrast of at least 3 : 1 against either background.

Conventions: no title (the caption states the finding), axis labels in lower case with the unit in
brackets, such as ``loss (nats)``.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flatbook import checks
from flatbook.files import atomic_write
from flatbook.summaries import Summary

if TYPE_CHECKING:  # Matplotlib and NumPy load with the first figure
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LIGHT = {"background": "#ffffff", "ink": "#24292f", "muted": "#57606a", "grid": "#d8dee4"}
DARK = {"background": "#14181e", "ink": "#e6edf3", "muted": "#9aa4af", "grid": "#30363d"}

PALETTE = {
    "blue": "#0096ff",
    "orange": "#d27800",
    "green": "#00785a",
    "purple": "#871eff",
    "red": "#d2000f",
    "magenta": "#b41ea5",
    "grey": "#868f99",
}
"""Colours for data. Found by search: among seven of which one is grey and each is visible on both
backgrounds, the two most alike differ by 0.10 in OKLab to readers with normal vision, protanopia,
deuteranopia or tritanopia (for Okabe and Ito's four that are visible on both: 0.08)."""

METHODS = {
    "SGD": ("grey", "o"),
    "SAM": ("blue", "s"),
    "ASAM": ("orange", "D"),
    "GSAM": ("green", "^"),
    "LookSAM": ("purple", "v"),
    "m-SAM": ("red", "P"),
    "SharpnessMax": ("magenta", "X"),
}
"""Colour and marker of each optimizer, the same in the whole book."""

_ALIASES = {"msam": "m-SAM", "microbatchsam": "m-SAM", "sharpnessmaximisation": "SharpnessMax"}

SEQUENTIAL = "viridis"  # even steps in OKLab: they vary by 7 %, those of cividis by 11 %
DIVERGING = "coolwarm"  # its two arms are equally light to within 0.012 in OKLab

SINGLE = (5.6, 3.4)  # inches: one panel; its text stays legible at a phone's width
WIDE = (7.2, 3.4)  # two panels side by side


def style() -> dict[str, Any]:
    """Return the Matplotlib settings of the book."""
    from cycler import cycler

    paper = dict.fromkeys(
        ("figure.facecolor", "axes.facecolor", "savefig.facecolor"), LIGHT["background"]
    )
    ink = ("text.color", "axes.labelcolor", "axes.titlecolor", "xtick.labelcolor")
    ink += ("ytick.labelcolor", "hatch.color", "patch.edgecolor", "boxplot.boxprops.color")
    ink += tuple(f"boxplot.{part}props.color" for part in ("cap", "flier", "whisker"))
    ink += ("boxplot.flierprops.markeredgecolor",)
    muted = ("axes.edgecolor", "xtick.color", "ytick.color")
    return {
        **paper,
        **dict.fromkeys(ink, LIGHT["ink"]),
        **dict.fromkeys(muted, LIGHT["muted"]),
        "figure.figsize": SINGLE,
        "figure.constrained_layout.use": True,
        "savefig.dpi": 200,  # of the few parts that are images
        # One pass of the layout can leave a label over the edge, beside a colour bar for instance.
        "savefig.bbox": "tight",
        "savefig.pad_inches": 0.05,
        "font.size": 12,
        "axes.labelsize": 12,
        "xtick.labelsize": 11,
        "ytick.labelsize": 11,
        "legend.fontsize": 11,
        "legend.edgecolor": "none",
        "axes.prop_cycle": cycler(color=list(PALETTE.values())),
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.axisbelow": True,
        "axes.formatter.useoffset": False,
        "grid.color": LIGHT["grid"],
        "grid.linewidth": 0.8,
        "lines.linewidth": 2,
        "lines.markersize": 6,
        "image.cmap": SEQUENTIAL,
        # Letters as outlines look the same on every machine, whatever its fonts.
        "svg.fonttype": "path",
        # Names inside the file follow from its content, so a rebuild is identical.
        "svg.hashsalt": "flatbook",
    }


def use_style() -> None:
    """Set the book's style for every figure from here on.

    In IPython and Jupyter, figures are shown as SVG, without the date that would make each
    rebuild differ.

    Example:
        >>> use_style()
        >>> import matplotlib
        >>> matplotlib.rcParams["lines.linewidth"]
        2.0
    """
    import matplotlib

    matplotlib.rcParams.update(style())
    if "IPython" not in sys.modules or sys.modules["IPython"].get_ipython() is None:
        return
    from matplotlib_inline.backend_inline import set_matplotlib_formats
    from matplotlib_inline.config import InlineBackend

    # The backend reads this again if it starts only later, with the first figure.
    backend = InlineBackend.instance()
    options = {"bbox_inches": "tight", "metadata": {"Date": None}}
    backend.print_figure_kwargs = options
    backend.figure_formats = {"svg"}
    set_matplotlib_formats("svg", **options)


def save(figure: Figure, path: str | os.PathLike) -> Path:
    """Write a figure as SVG or PNG, whole or not at all; a rebuild writes the same bytes.

    Args:
        figure: What to write.
        path: The file; its suffix decides between ``.svg`` and ``.png``.

    Returns:
        The file.

    Raises:
        ValueError: If the suffix is another one.
    """
    path = Path(path)
    kind = checks.choice("suffix of path", path.suffix, (".svg", ".png"))[1:]
    metadata = {"Date": None} if kind == "svg" else None
    with atomic_write(path, "wb") as file:
        figure.savefig(file, format=kind, metadata=metadata)
    return path


_TAGS = re.compile(
    r"""(?P<skip><!--.*?-->|<!\[CDATA\[.*?\]\]>)|<[A-Za-z](?:[^"'<>]|"[^"]*"|'[^']*')*>""", re.S
)
_PAINT = re.compile(
    r"""(?<=\s)(style|fill|stroke|color|stop-color)(\s*=\s*)("[^"]*"|'[^']*')""", re.S
)
_TOKEN = re.compile(r"(?<![\w(])#[0-9a-fA-F]{6}(?![\w-])")
_DARKER = {LIGHT[role]: DARK[role] for role in LIGHT}


def darken(svg: str) -> str:
    """Return the dark twin of a figure of this style.

    Exchanges the four colours of :data:`LIGHT` for those of :data:`DARK` wherever an element is
    painted with one of them (``style``, ``fill``, ``stroke``, ``color`` and ``stop-color``).
    Every other byte stays: data colours, text, identifiers, links and embedded images.

    Args:
        svg: The file's text.

    Returns:
        The twin's text.

    Example:
        >>> darken('<path id="#ffffff" style="fill: #FFFFFF; stroke: #0096ff"/>')
        '<path id="#ffffff" style="fill: #14181e; stroke: #0096ff"/>'
    """

    def token(match):
        return _DARKER.get(match[0].lower(), match[0])

    def paint(match):
        return match[1] + match[2] + _TOKEN.sub(token, match[3])

    def tag(match):
        return match[0] if match["skip"] else _PAINT.sub(paint, match[0])

    return _TAGS.sub(tag, svg)


def method(name: str) -> str:
    """Return the book's spelling of an optimizer's name, such as ``m-SAM`` for ``m_sam``.

    Raises:
        ValueError: If the book has no such method; the message names the nearest.
    """
    key = re.sub(r"[^a-z]", "", name.lower()) if isinstance(name, str) else name
    known = {re.sub(r"[^a-z]", "", spelt.lower()): spelt for spelt in METHODS} | _ALIASES
    return known[key] if key in known else checks.choice("method", name, METHODS)


def method_colour(name: str) -> str:
    """Return the colour a method has everywhere in the book.

    Args:
        name: Such as ``"SAM"``; see :data:`METHODS`. Case, hyphens and underscores are ignored.

    Raises:
        ValueError: If there is no such method.

    Example:
        >>> method_colour("looksam") == PALETTE["purple"]
        True
    """
    return PALETTE[METHODS[method(name)][0]]


def method_style(name: str) -> dict[str, str]:
    """Return a method's colour, marker and label, as keywords of Matplotlib's ``plot``.

    Args:
        name: As for :func:`method_colour`.

    Raises:
        ValueError: If there is no such method.

    Example:
        >>> method_style("m_sam")
        {'color': '#d2000f', 'marker': 'P', 'label': 'm-SAM'}
    """
    name = method(name)
    colour, marker = METHODS[name]
    return {"color": PALETTE[colour], "marker": marker, "label": name}


def band(ax: Axes, x, mean, low, high, **line):
    """Draw a line inside the band of its interval.

    Args:
        ax: Where to draw.
        x: Positions. Shape ``(points,)``.
        mean: The line.
        low: Lower end of the interval at each point.
        high: Upper end.
        **line: Passed to ``ax.plot``: ``color``, ``label``, ``**method_style("SAM")``.

    Returns:
        The line and the band.

    Raises:
        ValueError: If the shapes differ, or an interval ends below where it starts.
    """
    x, mean, low, high = (_array(values) for values in (x, mean, low, high))
    shapes = {values.shape for values in (x, mean, low, high)}
    if len(shapes) > 1 or x.ndim != 1 or x.size == 0:
        raise ValueError(
            f"x, mean, low and high must be non-empty rows of one length; got shapes "
            f"{', '.join(str(values.shape) for values in (x, mean, low, high))}."
        )
    if (low > high).any():
        raise ValueError("low must not exceed high.")
    (drawn,) = ax.plot(x, mean, **line)
    filled = ax.fill_between(x, low, high, color=drawn.get_color(), alpha=0.2, linewidth=0)
    return drawn, filled


def dots_with_interval(
    ax: Axes,
    labels: Sequence[str],
    summaries: Sequence[Summary],
    *,
    level: float = 0.95,
    colours: Sequence[str] | None = None,
):
    """Draw one row per label: its mean, the mean's interval, and each measurement faintly.

    Args:
        ax: Where to draw; the first label comes on top.
        labels: What each row is. A method's name gives the row the method's colour and marker.
        summaries: What was measured, in the same order.
        level: Coverage of the intervals. A row with a single measurement has none.
        colours: A colour for each row, instead of the methods' own.

    Returns:
        One container per row, as of ``ax.errorbar``.

    Raises:
        ValueError: If there are no rows, or not one summary (and colour) for each label.
    """
    colours = [None] * len(labels) if colours is None else colours
    if not labels or not len(labels) == len(summaries) == len(colours):
        raise ValueError(
            f"labels, summaries and colours must be as many, and at least one; got {len(labels)}, "
            f"{len(summaries)} and {len(colours)}."
        )
    rows = []
    for row, (label, summary, colour) in enumerate(zip(labels, summaries, colours, strict=True)):
        look = method_style(label if label in METHODS else "SAM")
        marker = look["marker"] if label in METHODS else "o"
        colour = colour or look["color"]
        half = summary.interval(level)[1] - summary.mean if summary.n > 1 else None
        rows.append(ax.errorbar(summary.mean, row, xerr=half, color=colour, fmt=marker, capsize=0))
        if len(summary.values) > 1:
            # Below the row, so that neither hides the other.
            ax.scatter(
                summary.values,
                [row + 0.25] * len(summary.values),
                s=14,
                color=colour,
                alpha=0.45,
                linewidth=0,
            )
    ax.set_yticks(range(len(labels)), labels)
    ax.set_ylim(len(labels) - 0.5, -0.5)
    ax.grid(visible=False, axis="y")
    return rows


def loss_levels(*losses, n: int = 12):
    """Return contour levels, evenly spaced in the logarithm, that span every loss given.

    Panels that are to be compared need the same levels.

    Args:
        *losses: Arrays of losses in nats. Values that are not finite, or not positive, have no
            logarithm and do not count.
        n: How many levels.

    Returns:
        Levels, ascending. Shape ``(n,)``.

    Raises:
        ValueError: If no two positive values differ.

    Example:
        >>> loss_levels([0.01, 1.0], [0.1], n=3).round(6).tolist()
        [0.01, 0.1, 1.0]
    """
    import numpy as np

    checks.count("n", n, at_least=2)
    flat = np.concatenate([np.empty(0), *(_array(loss).ravel() for loss in losses)])
    flat = flat[np.isfinite(flat) & (flat > 0)]
    if flat.size == 0 or flat.min() == flat.max():
        raise ValueError("losses must hold two different finite values above 0.")
    return np.geomspace(flat.min(), flat.max(), n)


def landscape(ax: Axes, surface, *, levels=None, **line):
    """Draw a loss landscape: a curve along one direction, or contours over two.

    Args:
        ax: Where to draw.
        surface: What :func:`flatbook.loss_landscape` returns: ``alphas``, ``betas`` (None for one
            direction) and ``loss``, of shape ``(alphas,)`` or ``(alphas, betas)``.
        levels: Contour levels (nats), ascending; by default :func:`loss_levels` of this surface.
        **line: For one direction, passed to ``ax.plot``.

    Returns:
        The line, or the filled contours for ``figure.colorbar``.

    Raises:
        ValueError: If the shapes disagree.
    """
    import numpy as np
    from matplotlib import colormaps
    from matplotlib.colors import BoundaryNorm

    alphas, loss = _array(surface.alphas), _array(surface.loss)
    betas = None if surface.betas is None else _array(surface.betas)
    shape = alphas.shape if betas is None else alphas.shape + betas.shape
    if alphas.ndim != 1 or loss.shape != shape or (betas is not None and betas.ndim != 1):
        raise ValueError(
            f"loss must have one value for each alpha, or for each alpha and beta, {shape}; "
            f"got {loss.shape}."
        )
    if betas is None:
        # The curve has far more points than a reader needs markers.
        (drawn,) = ax.plot(alphas, loss, **{"markevery": max(1, len(alphas) // 8)} | line)
        ax.set_xlabel("step along the direction")
        ax.set_ylabel("loss (nats)")
        return drawn
    levels = loss_levels(loss) if levels is None else _array(levels)
    colours = colormaps[SEQUENTIAL]
    # Bands of a BoundaryNorm, unlike a logarithm, also take a loss that has underflowed to 0.
    filled = ax.contourf(
        alphas,
        betas,
        np.ma.masked_invalid(loss.T),
        levels=levels,
        cmap=colours,
        norm=BoundaryNorm(levels, colours.N, extend="both"),
        extend="both",
    )
    ax.plot(0, 0, marker="+", markersize=10, color="#f6f8fa", linestyle="none")
    ax.set_aspect("equal")
    ax.grid(visible=False)
    ax.set_xlabel("step along direction 1")
    ax.set_ylabel("step along direction 2")
    return filled


def _array(values):
    import numpy as np

    if hasattr(values, "detach"):  # a tensor, perhaps on a GPU or with a gradient
        values = values.detach().cpu()
    return np.asarray(values, dtype=float)
