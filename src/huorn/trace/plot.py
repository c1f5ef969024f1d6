"""The per-layer curves of a trace as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from huorn.errors import UsageError, reason

_COLORS = ("#2f5d9b", "#a85510", "#3d7a3d", "#7a3d72")


def check_plot_path(path: Path) -> None:
    """Raises UsageError when no picture can be drawn to `path`: before work is done."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise UsageError("--plot needs matplotlib, which is not installed: pip install matplotlib") from error
    if path.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise UsageError(f"--plot {path} must end in .png, .svg or .pdf")
    if not path.parent.is_dir() or path.is_dir():
        raise UsageError(f"--plot {path} can not be written: name a file in a folder that exists")


def plot_layers(
    path: Path, title: str, curves: Sequence[tuple[str, Sequence[float | None]]], chance: float
) -> None:
    """Draws shares from 0 to 1, one value per layer (None: none), and a dotted line at the overlap of `chance`.

    Raises UsageError when `path` can not be written.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import MaxNLocator

    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    try:
        for (label, values), color in zip(curves, _COLORS, strict=False):
            points = [(layer, value) for layer, value in enumerate(values) if value is not None]
            if points:
                layers, shares = zip(*points, strict=True)
                axes.plot(
                    layers, shares, "o-", markersize=3.5, color=color, label=label, clip_on=False, zorder=3
                )
        axes.axhline(chance, color="0.55", linestyle=":", linewidth=1.2, label="overlap of uniform routing")
        axes.set(title=title, xlabel="layer", ylabel="share", ylim=(0, 1))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(axis="y", color="0.9")
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        figure.legend(loc="outside lower center", ncols=2, frameon=False)
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise UsageError(f"--plot {path} can not be written: {reason(error)}") from error
    finally:
        plt.close(figure)


def plot_replay(
    path: Path, title: str, shares: Sequence[float], curves: Mapping[str, Sequence[float]]
) -> None:
    """Draws hit rates in percent by the share of all experts that has room, a line per policy. UsageError as plot_layers."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    try:
        for name, values in curves.items():
            style = "k:" if name.startswith("belady") else "-"
            label = "optimum without prefetch (belady)" if name == "belady" else name
            axes.plot([100 * share for share in shares], values, style, marker=".", label=label)
        axes.set(title=title, xlabel="% of all experts in slots", ylabel="hits in decode, %", ylim=(0, 100))
        axes.legend(fontsize=8)
        figure.savefig(path, dpi=110)
    except OSError as error:
        raise UsageError(f"--plot {path} can not be written: {reason(error)}") from error
    finally:
        plt.close(figure)
