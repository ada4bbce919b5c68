import base64
import itertools
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from types import SimpleNamespace

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch

from flatbook import plotting
from flatbook.plotting import DARK, LIGHT, METHODS, PALETTE
from flatbook.results import Summary, summarise


@pytest.fixture(autouse=True)
def book_style():
    plt.switch_backend("agg")
    with matplotlib.rc_context():
        plotting.use_style()
        yield
    plt.close("all")


@pytest.fixture
def ax():
    return plt.subplots()[1]


# Colour as the eye sees it, from the definitions of sRGB, WCAG 2 and OKLab


def linear(colour):
    rgb = np.array(matplotlib.colors.to_rgb(colour))
    return np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)


def contrast(one, other):
    luminance = [linear(colour) @ [0.2126, 0.7152, 0.0722] for colour in (one, other)]
    return (max(luminance) + 0.05) / (min(luminance) + 0.05)


def oklab(rgb):
    cones = np.array(
        [
            [0.4122214708, 0.5363325363, 0.0514459929],
            [0.2119034982, 0.6806995451, 0.1073969566],
            [0.0883024619, 0.2817188376, 0.6299787005],
        ]
    )
    opponents = np.array(
        [
            [0.2104542553, 0.7936177850, -0.0040720468],
            [1.9779984951, -2.4285922050, 0.4505937099],
            [0.0259040371, 0.7827717662, -0.8086757660],
        ]
    )
    return opponents @ np.cbrt(cones @ np.clip(rgb, 0, 1))


# Machado, Oliveira and Fernandes (2009), full severity, on linear RGB.
VISION = {
    "normal": np.eye(3),
    "protanopia": np.array(
        [
            [0.152286, 1.052583, -0.204868],
            [0.114503, 0.786281, 0.099216],
            [-0.003882, -0.048116, 1.051998],
        ]
    ),
    "deuteranopia": np.array(
        [
            [0.367322, 0.860646, -0.227968],
            [0.280085, 0.672501, 0.047413],
            [-0.011820, 0.042940, 0.968881],
        ]
    ),
    "tritanopia": np.array(
        [
            [1.255528, -0.076749, -0.178779],
            [-0.078411, 0.930809, 0.147602],
            [0.004733, 0.691367, 0.303900],
        ]
    ),
}


def nearest(colours, vision):
    points = [oklab(VISION[vision] @ linear(colour)) for colour in colours]
    return min(np.linalg.norm(a - b) for a, b in itertools.combinations(points, 2))


def test_contrast_of_black_on_white_is_21():
    assert contrast("#000000", "#ffffff") == pytest.approx(21)


@pytest.mark.parametrize("paper", [LIGHT, DARK], ids=["light", "dark"])
def test_everything_is_legible(paper):
    for colour in PALETTE.values():
        assert contrast(colour, paper["background"]) >= 3
    assert contrast(paper["ink"], paper["background"]) >= 7
    assert contrast(paper["muted"], paper["background"]) >= 4.5
    assert 1.1 < contrast(paper["grid"], paper["background"]) < 2  # there, but behind the data


@pytest.mark.parametrize("vision", VISION)
def test_palette_is_told_apart(vision):
    okabe_ito_visible_on_both = ["#0072B2", "#D55E00", "#009E73", "#CC79A7"]
    assert nearest(PALETTE.values(), vision) >= 0.10
    if vision != "normal":
        assert nearest(okabe_ito_visible_on_both, vision) < nearest(PALETTE.values(), vision)


def test_no_data_colour_is_an_ink_token():
    data = [*PALETTE.values(), *plt.rcParams["axes.prop_cycle"].by_key()["color"]]
    assert not {colour.lower() for colour in data} & {*LIGHT.values(), *DARK.values()}
    assert not set(LIGHT.values()) & set(DARK.values())  # so that darkening twice is as once
    assert list(LIGHT) == list(DARK)


def test_every_method_has_its_own_marker():
    colours, markers = zip(*METHODS.values(), strict=True)
    assert set(colours) == set(PALETTE)
    assert len(set(markers)) == len(set(colours)) == len(METHODS) == len(set(PALETTE.values()))


def test_sequential_map_climbs_evenly():
    steps = matplotlib.colormaps[plotting.SEQUENTIAL](np.linspace(0, 1, 65))
    points = np.array([oklab(linear(step[:3])) for step in steps])
    assert (np.diff(points[:, 0]) > 0).all()
    lengths = np.linalg.norm(np.diff(points, axis=0), axis=1)
    assert lengths.std() / lengths.mean() < 0.08


def test_diverging_map_has_equal_arms():
    steps = matplotlib.colormaps[plotting.DIVERGING](np.linspace(0, 1, 65))
    light = np.array([oklab(linear(step[:3]))[0] for step in steps])
    assert np.abs(light - light[::-1]).max() < 0.013
    # The very middle is a little less light than its neighbours.
    assert (np.diff(light[:31]) > 0).all()


# Names of methods


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("SAM", "SAM"),
        ("sam", "SAM"),
        ("m-SAM", "m-SAM"),
        ("m_sam", "m-SAM"),
        ("MicroBatchSAM", "m-SAM"),
        ("looksam", "LookSAM"),
        ("sharpness-max", "SharpnessMax"),
    ],
)
def test_method_names(name, method):
    assert plotting.method_colour(name) == PALETTE[METHODS[method][0]]
    assert plotting.method_style(name)["label"] == method


@pytest.mark.parametrize("name", ["SMA", "", None, 3])
def test_unknown_method(name):
    with pytest.raises(ValueError, match="method must be one of SGD, SAM, ASAM"):
        plotting.method_colour(name)


def test_unknown_method_suggests_the_nearest():
    with pytest.raises(ValueError, match=r"Did you mean 'LookSAM'\?"):
        plotting.method_style("LookSAMM")


# Dark twins


@pytest.fixture
def figure():
    figure, (left, right) = plt.subplots(1, 2)
    plotting.band(left, [0, 1], [1, 2], [0, 1], [2, 3], **plotting.method_style("SAM"))
    left.set_xlabel("epoch")
    left.legend()
    right.imshow(np.eye(2))  # becomes an embedded image
    return figure


def saved(figure, path):
    return plotting.save(figure, path).read_text()


def test_dark_twin_of_a_figure(figure, tmp_path):
    light = saved(figure, tmp_path / "a.svg")
    dark = plotting.darken(light)
    for role in LIGHT:
        assert light.count(LIGHT[role]) > 0
        assert LIGHT[role] not in dark
        assert dark.count(DARK[role]) == light.count(LIGHT[role])
    assert dark.count(PALETTE["blue"]) == light.count(PALETTE["blue"]) > 0
    image = re.compile(r"data:image/png;base64,[^\"]+")
    assert image.findall(dark) == image.findall(light) != []
    assert plotting.darken(dark) == dark
    # The same drawing but for the paint of its parts.
    for one, other in zip(ET.fromstring(light).iter(), ET.fromstring(dark).iter(), strict=True):
        assert (one.tag, one.text, one.attrib.keys()) == (
            other.tag,
            other.text,
            other.attrib.keys(),
        )


def test_every_paint_of_a_figure_is_a_token_or_data(figure, tmp_path):
    svg = saved(figure, tmp_path / "a.svg")
    assert set(re.findall(r"#[0-9a-f]{6}\b", svg)) <= {*LIGHT.values(), PALETTE["blue"]}
    # Letters without a colour would be black, and vanish in the dark.
    words = [part for part in ET.fromstring(svg).iter() if part.get("id", "").startswith("text_")]
    assert len(words) > 10
    for word in words:
        assert any(LIGHT["ink"] in part.get("style", "") for part in word.iter())


PAYLOAD = base64.b64encode(b"#ffffff").decode()


@pytest.mark.parametrize(
    "svg",
    [
        '<text style="font: 10px">#ffffff #24292f</text>',
        '<g id="#ffffff" class="#24292f"/>',
        '<a href="#ffffff"/>',
        '<use xlink:href="#24292f" x="1"/>',
        '<g clip-path="url(#d8dee4)"/>',
        '<g style="clip-path: url(#ffffff); fill: url(#24292f)"/>',
        '<g style="fill: #ffffff80; stroke: #ffffffff"/>',
        '<g style="fill: #fff; stroke: #24292"/>',
        f'<image href="data:image/png;base64,{PAYLOAD}#ffffff"/>',
        '<!-- <path style="fill: #ffffff"/> -->',
        '<![CDATA[ <path style="fill: #ffffff"/> ]]>',
        '<g data-style="fill: #ffffff"/>',
        "<g title=\"style='fill: #ffffff'\"/>",
        '<g style="fill: #14181e; stroke: #0096ff"/>',
        "",
    ],
)
def test_darken_leaves(svg):
    assert plotting.darken(svg) == svg


@pytest.mark.parametrize(
    ("light", "dark"),
    [
        ('<g style="fill: #FFFFFF"/>', '<g style="fill: #14181e"/>'),
        ("<g style='fill:#24292f;stroke:#57606A'/>", "<g style='fill:#e6edf3;stroke:#9aa4af'/>"),
        ('<g fill = "#ffffff" />', '<g fill = "#14181e" />'),
        ('<stop stop-color="#d8dee4"/>', '<stop stop-color="#30363d"/>'),
        ('<g id="a > b" stroke="#24292f"/>', '<g id="a > b" stroke="#e6edf3"/>'),
        ('<g\n  style="a: b;\n fill: #24292f"\n>', '<g\n  style="a: b;\n fill: #e6edf3"\n>'),
    ],
)
def test_darken_exchanges(light, dark):
    assert plotting.darken(light) == dark


# Files


def test_rebuilds_are_identical(tmp_path):
    code = f"""
import sys
from flatbook import plotting
plotting.use_style()
import matplotlib; matplotlib.use("agg")
import matplotlib.pyplot as plt
figure, ax = plt.subplots()
ax.plot([0, 1], label="a"); ax.legend(); ax.fill_between([0, 1], [1, 2], hatch="/")
plotting.save(figure, {str(tmp_path)!r} + "/" + sys.argv[1])
"""
    for name in ("a.svg", "b.svg"):
        subprocess.run([sys.executable, "-c", code, name], check=True)
    first = (tmp_path / "a.svg").read_text()
    assert first == (tmp_path / "b.svg").read_text()
    assert "<dc:date>" not in first
    assert "<text" not in first  # letters are outlines
    assert len(first) < 40_000


def test_save_refuses_other_kinds_and_leaves_nothing(figure, tmp_path):
    assert plotting.save(figure, tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match=r"suffix of path must be one of .svg, .png; got '.jpg'"):
        plotting.save(figure, tmp_path / "a.jpg")
    assert [path.name for path in tmp_path.iterdir()] == ["a.png"]


def test_jupyter_shows_svg_without_a_date(tmp_path):
    import nbclient
    import nbformat

    cells = [
        "from flatbook import plotting\nplotting.use_style()",
        "import matplotlib.pyplot as plt\nplt.subplots()[1].plot([0, 1]);",
        "plt.subplots()[1].plot([0, 1]);",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in cells])
    nbclient.NotebookClient(notebook, timeout=60, kernel_name="python3").execute()
    shown = []
    for cell in notebook.cells[1:]:
        (output,) = cell.outputs
        assert "image/png" not in output.data
        shown.append(output.data["image/svg+xml"])
    assert "<dc:date>" not in shown[0]
    assert shown[0] == shown[1]
    assert LIGHT["ink"] in shown[0]


# What chapters draw with


def test_band_draws_what_it_is_given(ax):
    line, filled = plotting.band(ax, [0, 1, 2], torch.ones(3), [0, 0, 0.5], [2, 2, 3], color="red")
    assert line.get_ydata().tolist() == [1, 1, 1]
    corners = filled.get_paths()[0].vertices
    assert corners[:, 1].min() == 0
    assert corners[:, 1].max() == 3
    assert matplotlib.colors.same_color(filled.get_facecolor()[0][:3], "red")


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        (([0, 1], [1], [0], [2]), r"one length; got shapes \(2,\), \(1,\)"),
        (([], [], [], []), "non-empty"),
        ((1.0, 1.0, 1.0, 1.0), "rows"),
        (([0, 1], [1, 1], [0, 3], [2, 2]), "low must not exceed high"),
    ],
)
def test_band_refuses(ax, arrays, message):
    with pytest.raises(ValueError, match=message):
        plotting.band(ax, *arrays)


def test_dots_show_means_intervals_and_measurements(ax):
    summaries = [summarise([0.90, 0.91, 0.92]), summarise([0.95]), Summary(0.8, 0.01, 4)]
    rows = plotting.dots_with_interval(ax, ["SAM", "other", "SGD"], summaries)
    assert [tick.get_text() for tick in ax.get_yticklabels()] == ["SAM", "other", "SGD"]
    assert ax.get_ylim()[0] > ax.get_ylim()[1]  # the first on top
    for place, (row, summary) in enumerate(zip(rows, summaries, strict=True)):
        point, _, bars = row
        assert point.get_xydata().tolist() == [[summary.mean, place]]
        if summary.n > 1:
            (ends,) = bars[0].get_segments()
            assert ends[:, 0] == pytest.approx(summary.interval())
        else:
            assert not bars
    assert rows[0][0].get_color() == PALETTE["blue"]
    assert rows[2][0].get_marker() == METHODS["SGD"][1]
    dots = [c for c in ax.collections if isinstance(c, matplotlib.collections.PathCollection)]
    assert [dot.get_offsets()[:, 0].tolist() for dot in dots] == [[0.90, 0.91, 0.92]]


def test_dots_refuse_what_does_not_match(ax):
    with pytest.raises(ValueError, match="at least one; got 0, 0 and 0"):
        plotting.dots_with_interval(ax, [], [])
    with pytest.raises(ValueError, match="got 2, 1 and 2"):
        plotting.dots_with_interval(ax, ["a", "b"], [summarise([1.0, 2.0])])


def bowl(**changes):
    alphas, betas = np.linspace(-1, 1, 9), np.linspace(-0.5, 0.5, 7)
    loss = 0.1 + alphas[:, None] ** 2 + 10 * betas**2
    return SimpleNamespace(**{"alphas": alphas, "betas": betas, "loss": loss} | changes)


def test_landscape_of_one_direction(ax):
    surface = bowl(betas=None, loss=torch.linspace(1, 2, 9, requires_grad=True))
    line = plotting.landscape(ax, surface, **plotting.method_style("ASAM"))
    assert line.get_xdata().tolist() == surface.alphas.tolist()
    assert line.get_ydata() == pytest.approx(np.linspace(1, 2, 9))
    assert line.get_color() == PALETTE["orange"]
    assert ax.get_ylabel() == "loss (nats)"


def test_landscape_puts_alpha_across(ax):
    filled = plotting.landscape(ax, bowl())
    assert filled.levels[[0, -1]] == pytest.approx([0.1, 3.6])
    ratios = filled.levels[1:] / filled.levels[:-1]
    assert ratios == pytest.approx(np.full(11, ratios[0]))
    # The innermost ring around the valley is longer along alpha, where the loss is flatter.
    ring = filled.get_paths()[2].vertices
    width, height = np.ptp(ring, axis=0)
    assert width > 2 * height


def test_panels_share_levels(ax):
    levels = plotting.loss_levels(bowl().loss, 100 * bowl().loss)
    filled = plotting.landscape(ax, bowl(), levels=levels)
    assert filled.levels.tolist() == levels.tolist()


@pytest.mark.parametrize("value", [0.0, -1e-9, np.nan, np.inf])
def test_landscape_takes_losses_without_a_logarithm(ax, value):
    surface = bowl()
    surface.loss[0, 0] = value
    filled = plotting.landscape(ax, surface)
    ax.figure.canvas.draw()
    assert filled.levels.min() == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loss": np.ones((7, 9))}, r"\(9, 7\); got \(7, 9\)"),
        ({"betas": None}, r"\(9,\); got \(9, 7\)"),
        ({"loss": np.ones((9, 7))}, "two different finite values above 0"),
        ({"loss": np.full((9, 7), np.nan)}, "two different finite values above 0"),
    ],
)
def test_landscape_refuses(ax, changes, message):
    with pytest.raises(ValueError, match=message):
        plotting.landscape(ax, bowl(**changes))


def test_style_is_complete():
    # A default colour left anywhere would be black: find it among all settings.
    black = {
        name
        for name, value in matplotlib.rcParams.items()
        if isinstance(value, str) and value.lower() in ("black", "k", "#000000")
    }
    assert not black
