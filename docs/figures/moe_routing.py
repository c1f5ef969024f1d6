"""Draws docs/moe-routing.svg and docs/moe-routing.png: `make figures`.

Coordinates are pixels of a 900 wide picture, y downwards. The files depend on this script and the version of matplotlib alone.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import FancyBboxPatch

DOCS = Path(__file__).resolve().parents[1]
WIDTH, HEIGHT = 900, 1010
LINE = 566  # y of the dividing line
LEFT, MIDDLE, RIGHT = (25, 290), (320, 590), (620, 860)  # columns
MODEL, HUORN = "#2f5d9b", "#a85510"
FILL = {MODEL: "#edf3fc", HUORN: "#fdf2e6"}
SETTINGS = {
    "svg.hashsalt": "moe-routing",
    "svg.fonttype": "path",
    "font.family": "DejaVu Sans",
    "font.size": 10,
}


def box(
    axes: Axes,
    across: tuple[int, int],
    down: tuple[int, int],
    color: str,
    lines: list[str],
    strong: bool = False,
) -> None:
    """A box with centred lines, the first of them bold; strong: a heavy border."""
    (left, right), (top, bottom) = across, down
    axes.add_patch(
        FancyBboxPatch(
            (left, top), right - left, bottom - top, boxstyle="round,pad=0,rounding_size=6",
            facecolor=FILL[color], edgecolor=color, linewidth=2.6 if strong else 1.2,
        )
    )  # fmt: skip
    step, middle = 21, (top + bottom) / 2
    for number, line in enumerate(lines):
        y = middle + step * (number - (len(lines) - 1) / 2)
        weight = "bold" if number == 0 else "normal"
        axes.text((left + right) / 2, y, line, ha="center", va="center", weight=weight, color="#1a1a1a")


def arrow(axes: Axes, points: list[tuple[int, int]], color: str, width: float = 1.5) -> None:
    """Straight pieces through the points, with a head at the last."""
    axes.plot(*zip(*points[:-1], strict=True), color=color, linewidth=width, solid_capstyle="butt")
    axes.annotate(
        "", points[-1], points[-2],
        arrowprops={"arrowstyle": "-|>", "color": color, "linewidth": width, "shrinkA": 0, "shrinkB": 0, "mutation_scale": 13},
    )  # fmt: skip


def model(axes: Axes) -> None:
    """Above the line: what is computed."""
    axes.text(25, 38, "The model's computation", size=13, weight="bold", color=MODEL, va="center")
    axes.text(25, 64, "one MoE block, T tokens, 35B shape", color=MODEL, va="center")
    box(axes, RIGHT, (25, 78), MODEL, ["residual stream x", "F32 [T, 2048]"])
    box(axes, MIDDLE, (25, 78), MODEL, ["h = norm(x)", "[T, 2048], BF16 operand"])
    arrow(axes, [(620, 51), (590, 51)], MODEL)
    axes.plot([455, 455], [78, 99], color=MODEL, linewidth=1.5)
    for x in (157, 455, 740):
        arrow(axes, [(455, 99), (x, 99), (x, 121)], MODEL)

    box(axes, LEFT, (121, 179), MODEL, ["router logits", "256 per token, F32"])
    box(axes, LEFT, (200, 236), MODEL, ["softmax over all 256"])
    box(axes, LEFT, (257, 315), MODEL, ["the 8 largest", "ties: the lower id"])
    box(axes, LEFT, (336, 372), MODEL, ["renormalise to sum 1"])
    box(
        axes,
        LEFT,
        (393, 475),
        MODEL,
        ["Routing, frozen", "ids int32 [T, 8]", "weights F32 [T, 8]"],
        strong=True,
    )
    for top, bottom in ((179, 200), (236, 257), (315, 336), (372, 393)):
        arrow(axes, [(157, top), (157, bottom)], MODEL)

    box(
        axes, MIDDLE, (121, 315), MODEL,
        ["8 routed experts per token", "", "gate and up:  2048 to 512", "silu(gate h) · up h", "down:  512 to 2048", "",
         r"$E_r(h)$,  r = rank 0 to 7"],
    )  # fmt: skip
    arrow(axes, [(455, 315), (455, 393)], MODEL)
    box(
        axes, MIDDLE, (393, 475), MODEL,
        ["sum in rank order", "", r"$w_0\,E_0(h) + w_1\,E_1(h) + \cdots + w_7\,E_7(h)$"],
    )  # fmt: skip
    arrow(axes, [(290, 434), (320, 434)], MODEL)

    box(axes, RIGHT, (121, 200), MODEL, ["shared expert", "for every token", "2048 to 512 to 2048"])
    arrow(axes, [(740, 200), (740, 236)], MODEL)
    box(axes, RIGHT, (236, 315), MODEL, ["times its gate", "sigmoid(gate row · h)", "one number per token"])
    arrow(axes, [(740, 315), (740, 393)], MODEL)
    box(
        axes, RIGHT, (393, 475), MODEL, ["add both branches", "routed + gated shared,", "then the residual x"]
    )
    arrow(axes, [(590, 434), (620, 434)], MODEL)
    arrow(axes, [(860, 51), (882, 51), (882, 434), (860, 434)], MODEL)
    arrow(axes, [(740, 475), (740, 505)], MODEL)
    axes.text(740, 515, "to the next layer", ha="center", va="center", color=MODEL)


def line(axes: Axes) -> None:
    """The dividing line and what crosses it."""
    axes.plot([0, WIDTH], [LINE, LINE], color="#222222", linewidth=2.5, dashes=(5, 2))
    axes.text(
        860, LINE - 17, "nothing above this line changes", ha="right", va="center", weight="bold", size=11.5
    )
    arrow(axes, [(157, 475), (157, 626)], HUORN, 2.4)
    axes.text(170, 514, "ids", va="center", color=HUORN, weight="bold")
    arrow(axes, [(455, 626), (455, 475)], HUORN, 2.4)
    axes.text(443, 514, "pair outputs", ha="right", va="center", color=HUORN, weight="bold")


def scheduling(axes: Axes) -> None:
    """Below the line: in which order, and by whom."""
    axes.text(
        860, LINE + 22, "huorn's scheduling", ha="right", size=13, weight="bold", color=HUORN, va="center"
    )
    box(axes, LEFT, (626, 690), HUORN, ["how many tokens?", "of all requests in the call"])
    arrow(axes, [(157, 690), (157, 724)], HUORN)
    arrow(axes, [(290, 658), (305, 658), (305, 800), (320, 800)], HUORN)
    box(
        axes, LEFT, (724, 876), HUORN,
        ["1 to 3: per-pair route", "every pair is a chunk,", "in the order (token, rank)", "nothing sorted or packed"],
    )  # fmt: skip
    box(
        axes, MIDDLE, (724, 876), HUORN,
        ["4 or more: bucketed", "count pairs per expert", "offsets, active experts", "pack pairs, expert by expert",
         "cut into chunks of up to C"],
    )  # fmt: skip
    for x in (157, 455):
        arrow(axes, [(x, 876), (x, 910)], HUORN)
    box(
        axes, (LEFT[0], MIDDLE[1]), (910, 985), HUORN,
        ["Plan", "pairs:  token · 8 + rank, each exactly once", "chunks:  (expert, first pair, count)"], strong=True,
    )  # fmt: skip
    arrow(axes, [(590, 948), (620, 948)], HUORN)
    box(
        axes,
        RIGHT,
        (876, 985),
        HUORN,
        ["row units", "claimed by threads as", "they get free; every unit", "reads its rows once"],
    )
    arrow(axes, [(740, 876), (740, 842)], HUORN)
    box(
        axes,
        RIGHT,
        (724, 842),
        HUORN,
        ["two phases", "1  a = silu(gate h) · up h", "all threads wait", "2  down a"],
    )
    arrow(axes, [(740, 724), (740, 690)], HUORN)
    box(
        axes, (MIDDLE[0], RIGHT[1]), (626, 690), HUORN,
        ["every output to its own place", "row  token · 8 + rank  of  F32 [T · 8, 2048]"],
    )  # fmt: skip


def main() -> None:
    """Writes both files."""
    with plt.rc_context(SETTINGS):
        figure = plt.figure(figsize=(WIDTH / 100, HEIGHT / 100), facecolor="white")
        axes = figure.add_axes((0, 0, 1, 1))
        axes.set(xlim=(0, WIDTH), ylim=(HEIGHT, 0))
        axes.axis("off")
        model(axes)
        line(axes)
        scheduling(axes)
        figure.savefig(DOCS / "moe-routing.svg", metadata={"Date": None, "Creator": None})
        figure.savefig(DOCS / "moe-routing.png", dpi=200, metadata={"Software": None})


if __name__ == "__main__":
    main()
