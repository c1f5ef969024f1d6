"""`huorn replay`: what cache policies would have made of recorded routing."""

from __future__ import annotations

from math import inf
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from huorn.assets import EMBEDDED_BANK
from huorn.commands.output import check_json_path, note, write_json
from huorn.commands.progress import step_progress
from huorn.errors import UsageError
from huorn.experts.foresight import MULTI_HORIZON, ONE_TOKEN, Forecast
from huorn.experts.policy import check_policy
from huorn.experts.prefetch import PrefetchRule, parse_caps
from huorn.memory import format_bytes
from huorn.predictor.evaluate import check_traces
from huorn.predictor.forecasts import forecasts as forecasts_of
from huorn.predictor.released import open_bank
from huorn.sizes import parse_bytes
from huorn.trace.engine_replay import ForecastUse, Pace, replay_engine
from huorn.trace.manifest import SPLITS, Split
from huorn.trace.plot import check_plot_path, plot_replay
from huorn.trace.recorded_calls import read_replay
from huorn.trace.recording import Traces
from huorn.trace.replay import Replayed, replay_belady, replay_bypass, replay_policy
from huorn.trace.route_csv import RouteTrace

OPTIMA = {"belady": replay_belady, "belady-bypass": replay_bypass}
# Name -> by which horizons forecasts decide who leaves (None: not), and whether copies start ahead.
FORECAST = {
    "forecast": (MULTI_HORIZON, True), "forecast-retention": (MULTI_HORIZON, False), "forecast-retention-1": (ONE_TOKEN, False),
    "forecast-prefetch": (None, True),
}  # fmt: skip


def replay(
    trace_path: Path,
    memory: str | None,
    slots: str | None,
    policies: str,
    splits: str,
    prompts: int | None,
    bank: Path | None,
    caps: str,
    threshold: float,
    pace: str | None,
    plot: Path | None,
    json: Path | None,
) -> None:
    """Print hit rates by policy and size, and write them down."""
    check_json_path(json)
    if plot is not None:
        check_plot_path(plot)
    names = [name.strip() for name in policies.split(",")]
    for name in names:
        if name not in (*OPTIMA, *FORECAST):
            check_policy(name)
    if not 0 <= threshold <= 1:
        raise UsageError("--threshold must be a probability from 0 to 1")
    timed = None if pace is None else parse_pace(pace)
    parse_caps(caps, 1, 0)
    if prompts is not None and prompts < 1:
        raise UsageError(f"--prompts is {prompts}, but it must be 1 or more")
    some = [_split(name) for name in splits.split(",")]
    trace = read_replay(trace_path, some, prompts)
    sizes = _sizes(trace, memory, slots)
    forecasts = (
        _forecasts(trace_path, bank or EMBEDDED_BANK, some, prompts) if set(names) & set(FORECAST) else []
    )
    found: dict[str, dict[str, Replayed]] = {name: {} for name in names}
    with step_progress("replaying") as progress:
        for number, (name, label) in enumerate((name, label) for name in names for label in sizes):
            progress(number, len(names) * len(sizes))
            capacity = sizes[label]
            if name in FORECAST:
                weighting, ahead = FORECAST[name]
                rule = PrefetchRule(parse_caps(caps, trace.layers, 0), threshold) if ahead else None
                use = ForecastUse(weighting, rule)
                found[name][label] = replay_engine(trace, forecasts, capacity, use, timed)
            elif name in OPTIMA:
                found[name][label] = OPTIMA[name](trace, capacity)
            elif timed is not None:
                use = ForecastUse(None, None, name)
                found[name][label] = replay_engine(trace, [], capacity, use, timed)
            else:
                found[name][label] = replay_policy(trace, name, capacity)
    _print(trace, sizes, found)
    if plot is not None:
        curves = {name: [by_size[label].decode.percent for label in sizes] for name, by_size in found.items()}
        plot_replay(plot, trace.model, [capacity / trace.all_bytes for capacity in sizes.values()], curves)
        note(f"drawn to {plot}")
    write_json(json, as_json(trace, sizes, found))


def _forecasts(path: Path, folder: Path, splits: list[Split], prompts: int | None) -> list[Forecast | None]:
    """Before each step what the bank said after the one before; None before the first of a prompt."""
    if not path.is_dir():
        raise UsageError(
            "forecasts need hidden states, which a route_trace v1 file does not have: give a recorded trace"
        )
    traces, bank = Traces.open(path), open_bank(folder)
    check_traces(bank, traces, force=False)
    model, found = traces.manifest.model, list[Forecast | None]()
    for split in splits:
        ends = np.cumsum([prompt.count for prompt in traces.split(split)[:prompts]])
        if not len(ends):
            continue
        said = np.full((int(ends[-1]), model.layers, 3, model.experts), np.nan, dtype=np.float32)
        with step_progress("forecasting") as progress:
            for number, (layer, values) in enumerate(forecasts_of(bank, traces, split, prompts), 1):
                said[:, layer] = values.numpy()
                progress(number, len(bank.config.heads.layers))
        starts = {0, *ends.tolist()}
        found += [None if row in starts else said[row - 1] for row in range(int(ends[-1]))]
    return found


def parse_pace(text: str) -> Pace:
    """Milliseconds "layer,rest,copy". UsageError."""
    try:
        layer, rest, copy = (float(part) / 1e3 for part in text.split(","))
    except ValueError:
        layer = rest = copy = -1.0
    if not (layer >= 0 and rest >= 0 and copy > 0 and layer + rest + copy < inf):
        raise UsageError(
            f"--pace {text!r} must be three numbers of milliseconds: to compute a layer, for the rest of a token, to copy an "
            "expert (3.2,25,1.6)"
        )
    return Pace(layer, rest, copy)


def _split(name: str) -> Split:
    for split in SPLITS:
        if name.strip() == split:
            return split
    raise UsageError(f"--split {name} is not known; give one or more of {', '.join(SPLITS)}")


def _sizes(trace: RouteTrace, memory: str | None, slots: str | None) -> dict[str, int]:
    """Label -> bytes of the cache."""
    known = len(set(trace.expert_bytes)) > 1 or trace.expert_bytes[0] > 1
    if (memory is None) == (slots is None):
        raise UsageError("give one of --memory (2000MiB,4000MiB) and --slots (0.125,0.25)")
    if memory is not None:
        if not known:
            raise UsageError(
                "a recorded trace does not say how large an expert is: give --slots instead of --memory"
            )
        return {text.strip(): parse_bytes(text, "--memory") for text in memory.split(",")}
    found = {}
    for text in (slots or "").split(","):
        try:
            share = float(text)
        except ValueError:
            share = 0.0
        if not 0 < share <= 1:
            raise UsageError(
                f"--slots {text.strip()!r} must be shares of all experts, above 0 and up to 1, such as 0.125,0.25"
            )
        found[text.strip()] = round(share * trace.all_bytes)
    return found


def _print(trace: RouteTrace, sizes: dict[str, int], found: dict[str, dict[str, Replayed]]) -> None:
    table = Table(title=f"{trace.model}: hits in percent, decode (all calls)", title_justify="left")
    table.add_column("policy")
    for label, capacity in sizes.items():
        table.add_column(
            label if trace.expert_bytes[0] == 1 else f"{label} = {format_bytes(capacity)}", justify="right"
        )
    for name, by_size in found.items():
        cells = [_cell(result) for result in by_size.values()]
        table.add_row(f"{name}, knows the future" if name in OPTIMA else name, *cells)
    Console().print(table)


def _cell(result: Replayed) -> str:
    said = [f"{result.all.percent:.1f}"]
    if result.prefetched:
        said.append(f"{100 * result.loads / result.all.lookups:.1f} loads")
    if result.late:
        said.append(f"{100 * result.late / result.all.lookups:.1f} late")
    if result.token_s is not None and result.wait_s is not None:
        said.append(f"{1e3 * result.token_s:.1f} ms a token, {1e3 * result.wait_s:.1f} waiting")
    return f"{result.decode.percent:.1f} ({', '.join(said)})"


def as_json(
    trace: RouteTrace, sizes: dict[str, int], found: dict[str, dict[str, Replayed]]
) -> dict[str, Any]:
    """results[policy][size]: rates from 0 to 1, loads, demand misses (all loads, without prefetch), bytes where known."""
    known = trace.expert_bytes[0] > 1
    return {
        "model": trace.model,
        "layers": trace.layers,
        "experts": trace.experts,
        "top_k": trace.top_k,
        "capacity_bytes": sizes if known else None,
        "results": {
            name: {
                label: {
                    "hit_rate_all": result.all.percent / 100,
                    "hit_rate_decode": result.decode.percent / 100,
                    "loads": result.loads,
                    "demand_misses": result.misses,
                    "bytes_read": result.loaded_bytes if known else None,
                    "late": result.late,
                    "token_s": result.token_s,
                    "wait_s": result.wait_s,
                }
                for label, result in by_size.items()
            }
            for name, by_size in found.items()
        },
    }
