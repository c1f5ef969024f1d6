"""Hit rate of every cache policy on recorded routing, by the size of the cache: how the default was chosen.

    python benchmarks/choose_policy.py TRACE...                  # tables: policies, then half-lives of the default
    python benchmarks/choose_policy.py TRACE... --plot FILE.png

TRACE is a `route_trace v1` file. Rates are of decode alone, in percent.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from math import inf
from pathlib import Path
from statistics import mean

from huorn.experts.policy import DEFAULT_POLICY, HALF_LIFE, POLICIES, make_policy
from huorn.trace.replay import replay, replay_belady
from huorn.trace.route_csv import RouteTrace, read_route_csv

SHARES = (0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6)  # of the bytes of all experts
HALF_LIVES = (2.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0, 32.0, 64.0, inf)
Rates = list[float]  # by SHARES


def rates(trace: RouteTrace, policy: str, half_life: float = HALF_LIFE) -> Rates:
    """Of a policy by its name, or of `belady`."""
    found = []
    for share in SHARES:
        capacity = int(share * trace.all_bytes)
        if policy == "belady":
            result = replay_belady(trace, capacity)
        else:
            slots = int(share * trace.layers * trace.experts)
            result = replay(
                trace, make_policy(policy, trace.layers, trace.experts, slots, half_life), capacity
            )
        found.append(result.decode.percent)
    return found


def table(
    title: str, traces: list[RouteTrace], rows: dict[str, Callable[[RouteTrace], Rates]]
) -> dict[str, list[Rates]]:
    """Prints one line per row, traces side by side; returns the rates, row -> trace -> share."""
    print(f"\n{title}")
    heads = [
        f"{Path(trace.model).stem}: {trace.layers} x {trace.experts}, top-{trace.top_k}" for trace in traces
    ]
    print(" " * 12 + "   ".join(f"{head:{6 * len(SHARES) + 6}}" for head in heads))
    print(
        " " * 12
        + "   ".join("".join(f"{share:6.0%}" for share in SHARES) + "  mean" for _ in traces)
        + "   of all"
    )
    everything = {}
    for name, of_trace in rows.items():
        everything[name] = [of_trace(trace) for trace in traces]
        cells = (
            "".join(f"{rate:6.1f}" for rate in found) + f"{mean(found):6.1f}" for found in everything[name]
        )
        print(f"{name:12}" + "   ".join(cells) + f"{mean(map(mean, everything[name])):9.2f}")
    return everything


def plot(path: Path, traces: list[RouteTrace], curves: dict[str, list[Rates]]) -> None:
    """One panel per trace."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, len(traces), figsize=(5 * len(traces), 3.8), sharey=True, squeeze=False)
    for number, (trace, axes) in enumerate(zip(traces, panels[0], strict=True)):
        for name, by_trace in curves.items():
            style = {"belady": "k:", DEFAULT_POLICY: "C3-"}.get(name, "-")
            label = {"belady": "optimum, knows the future"}.get(name, name)
            axes.plot([100 * share for share in SHARES], by_trace[number], style, label=label, marker=".")
        cycle = 100 * trace.top_k / trace.experts
        axes.axvline(cycle, color="0.7", linewidth=1)
        axes.text(cycle + 0.7, 2, "one token", color="0.4", fontsize=8)
        axes.set_title(Path(trace.model).stem, fontsize=10)
        axes.set_xlabel("cache, % of all experts")
        axes.grid(color="0.92")
        axes.set_ylim(0, 100)
    panels[0][0].set_ylabel("hit rate while decoding, %")
    panels[0][-1].legend(loc="lower right", fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=100)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("traces", nargs="+", type=Path, metavar="TRACE")
    parser.add_argument("--plot", type=Path, metavar="FILE.png")
    arguments = parser.parse_args()
    traces = [read_route_csv(path) for path in arguments.traces]
    names = [*sorted(POLICIES), "belady"]
    curves = table("By policy", traces, {name: lambda trace, name=name: rates(trace, name) for name in names})
    for policy in (name for name in POLICIES if name.endswith("lfu")):
        table(
            f"{policy}, by half-life in tokens",
            traces,
            {
                f"{half:g}": lambda trace, policy=policy, half=half: rates(trace, policy, half)
                for half in HALF_LIVES
            },
        )
    if arguments.plot is not None:
        plot(arguments.plot, traces, curves)


if __name__ == "__main__":
    main()
