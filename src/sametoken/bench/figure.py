"""Layout of a figure: colours, title, origin of the measurement, legend; rendering as SVG and PNG."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from sametoken.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK = "#2b2f36"  # colour of lines and letters; a page replaces it with its text colour
# Distinct in hue and lightness, on white and on near-black: Okabe and Ito's palette without the darkest and lightest.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
SIZE = (6.4, 3.6)
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "font.size": 10,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": INK,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": INK,
    "ytick.color": INK,
    "grid.color": INK,
    "grid.alpha": 0.15,
    "axes.grid": True,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "legend.fontsize": 9,
}


class Chart(NamedTuple):
    """A figure.

    Attributes:
        name: name of its file, without extension.
        caption: description, also for screen readers.
        svg: image as SVG.
        png: image as PNG.
    """

    name: str
    caption: str
    svg: str
    png: bytes


def finish(axes: Axes, title: str, x: str, y: str) -> None:
    """Add the title, which states the finding, the labels of the axes, and the legend."""
    axes.set_title(title)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    # Below the axes, so that a long legend hides no data.
    axes.legend(loc="upper left", bbox_to_anchor=(0, -0.2))


def render(name: str, draw: Callable[[Axes], None], origin: str) -> tuple[str, bytes]:
    """Render a drawing as SVG, and as PNG on white.

    Args:
        name: name of the figure.
        draw: function that draws on axes.
        origin: lines below the title.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("matplotlib is not installed; pictures need it: pip install 'sametoken[bench]'") from None
    # Ids in the SVG are hashes; without different salts, figures of one page would share clip paths.
    with mpl.rc_context({**STYLE, "svg.hashsalt": name}):
        figure = Figure(figsize=SIZE)
        axes = figure.add_subplot()
        draw(axes)
        lines = origin.count("\n") + 1
        axes.set_title(axes.get_title("left"), pad=8 + 11 * lines)
        axes.text(0, 1.02, origin, transform=axes.transAxes, fontsize=8, va="bottom")
        svg, png = io.StringIO(), io.BytesIO()
        figure.savefig(svg, format="svg", transparent=True, bbox_inches="tight", metadata={"Date": None})
        figure.savefig(png, format="png", dpi=150, facecolor="white", bbox_inches="tight")
    return svg.getvalue(), png.getvalue()
