"""Pairs as JSON, as a Markdown page and as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from huorn.bench.arms import ArmResult
from huorn.bench.pairs import NOISE, Comparison
from huorn.files import write_atomically
from huorn.memory import format_bytes

JSON, MARKDOWN, PICTURE = "pairs.json", "pairs.md", "pairs.png"


def results_by_arm(base: str, found: Sequence[Comparison]) -> dict[str, list[ArmResult]]:
    """Of all pairs that count; the first arm has those of its runs beside every other."""
    by_arm: dict[str, list[ArmResult]] = {base: []}
    for comparison in found:
        by_arm[base] += [pair.base for pair in comparison.counted]
        name = base if comparison.arm == NOISE else comparison.arm
        by_arm.setdefault(name, []).extend(pair.other for pair in comparison.counted)
    return by_arm


def limit_ratio(result: ArmResult) -> float:
    """Time per token over max(compute, bytes from disk / what the disk gives); nan without a measured disk."""
    if not result.disk_bytes_s:
        return float("nan")
    return result.token_s / max(result.kernel_s, result.disk_bytes / result.disk_bytes_s)


def medians(results: Sequence[ArmResult]) -> dict[str, float]:
    """Of what a row of the table shows."""
    names = (
        "tok_s", "token_s", "hit_rate", "late_rate", "misses", "disk_bytes", "wait_s", "kernel_s", "predictor_s", "prefetched",
        "prefetched_used", "slots", "peak_bytes",
    )  # fmt: skip
    found: dict[str, float] = {name: median(getattr(result, name) for result in results) for name in names}
    return {**found, "limit_ratio": median(limit_ratio(result) for result in results)}


def as_json(settings: dict[str, Any], base: str, found: Sequence[Comparison]) -> dict[str, Any]:
    """Everything, token ids left out."""
    return {
        "settings": settings,
        "arms": {arm: medians(results) for arm, results in results_by_arm(base, found).items() if results},
        "comparisons": [comparison.summary() for comparison in found],
        "pairs": [
            {
                "arm": comparison.arm, "number": pair.number, "gain": pair.gain, "void": pair.void,
                "base": pair.base.model_dump(exclude={"ids"}), "other": pair.other.model_dump(exclude={"ids"}),
            }
            for comparison in found
            for pair in comparison.pairs
        ],
    }  # fmt: skip


def markdown(title: str, command: str, base: str, found: Sequence[Comparison]) -> str:
    """The page."""
    lines = [f"# {title}", "", f"`{command}`", ""]
    lines += [
        "| arm | tok/s | in a slot | late | misses | from disk | wait | kernels | forecasts | slots | of the limit |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for arm, results in results_by_arm(base, found).items():
        if results:
            row = medians(results)
            lines.append(
                f"| {arm} | {row['tok_s']:.1f} | {100 * row['hit_rate']:.1f} % | {100 * row['late_rate']:.1f} % | "
                f"{row['misses']:.1f} | {format_bytes(round(row['disk_bytes']))} | {1e3 * row['wait_s']:.1f} ms | "
                f"{1e3 * row['kernel_s']:.1f} ms | {1e3 * row['predictor_s']:.1f} ms | {row['slots']:.0f} | "
                f"{row['limit_ratio']:.2f} |"
            )
    lines += [
        "",
        "Medians per decoded token over all pairs that count. Late: a copy ahead was under way. Of the limit: time per token "
        "over max(kernels, bytes from disk over what the disk gave beside the runs).",
        "",
        f"| against {base} | pairs | median gain | 95 % interval | wins |",
        "|---|---|---|---|---|",
    ]
    for comparison in found:
        said = comparison.summary()
        name = f"{base} itself (noise)" if comparison.arm == NOISE else comparison.arm
        if said["pairs"]:
            gain, low, high = (100 * float(said[key]) for key in ("gain", "low", "high"))
            lines.append(
                f"| {name} | {said['pairs']} ({said['void']} void) | {gain:+.1f} % | {low:+.1f} to {high:+.1f} % | "
                f"{said['wins']} |"
            )
        else:
            lines.append(f"| {name} | 0 ({said['void']} void) | | | |")
    lines += ["", "The tokens of every prompt were equal in all arms.", ""]
    return "\n".join(lines)


def write_report(
    folder: Path, title: str, command: str, base: str, found: Sequence[Comparison]
) -> list[Path]:
    """Writes the page and, where matplotlib is installed, the picture. OSError."""
    write_atomically(folder / MARKDOWN, markdown(title, command, base, found))
    return [folder / MARKDOWN, *([folder / PICTURE] if draw(folder / PICTURE, title, base, found) else [])]


def draw(path: Path, title: str, base: str, found: Sequence[Comparison]) -> bool:
    """A row per arm: each pair's gain, the median and its interval. False without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = [comparison for comparison in found if comparison.counted]
    figure, axes = plt.subplots(figsize=(8, 1.6 + 0.6 * len(rows)), layout="constrained")
    for place, comparison in enumerate(reversed(rows)):
        row = comparison.summary()
        gains = [100 * pair.gain for pair in comparison.counted]
        color = "0.55" if comparison.arm == NOISE else "#2f5d9b"
        low, high, middle = (100 * float(row[key]) for key in ("low", "high", "gain"))
        axes.plot([low, high], [place, place], color=color, linewidth=6, alpha=0.3, solid_capstyle="butt")
        axes.plot(gains, [place] * len(gains), "o", color=color, markersize=4, alpha=0.8)
        axes.plot([middle, middle], [place - 0.25, place + 0.25], color=color, linewidth=2)
    names = [f"{base} itself" if row.arm == NOISE else row.arm for row in reversed(rows)]
    axes.set_yticks(range(len(rows)), names)
    axes.set_ylim(-0.6, len(rows) - 0.4)
    axes.axvline(0, color="0.3", linewidth=0.8)
    axes.set(
        title=title,
        xlabel=f"tokens per second against {base}, % (dots: pairs; line: median; band: 95 % interval)",
    )
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.grid(axis="x", color="0.9")
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return True
