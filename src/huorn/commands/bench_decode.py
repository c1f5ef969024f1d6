"""`huorn bench decode`: speed of one model."""

from __future__ import annotations

from contextlib import closing
from dataclasses import asdict
from pathlib import Path

from huorn.bench.decode import DecodeBench, Request
from huorn.bench.decode import bench_decode as measure
from huorn.commands.model_choice import ModelChoice, context_cost, describe
from huorn.commands.output import check_json_path, write_json
from huorn.errors import UsageError
from huorn.machine.limits import available_bytes
from huorn.memory import format_bytes


def bench_decode(choice: ModelChoice, request: Request, json_path: Path | None) -> None:
    """Measure and print medians with the range."""
    check_json_path(json_path)
    if request.sequences > 1 and choice.residency.memory_bytes is not None:
        raise UsageError(
            "--sequences needs a state for each, and --memory is promised for one: give --slots instead"
        )
    with closing(choice.open()) as session:
        needed, free = request.sequences * sum(session.state_bytes()), available_bytes()
        if needed > free:
            raise UsageError(
                f"--sequences {request.sequences} need {format_bytes(needed)} for their states and {format_bytes(free)} are "
                "free: give fewer, or a smaller --context"
            )
        result = measure(session, request)
    kernels = f"{session.backend} ({result.isa})" if result.isa else session.backend
    print(
        f"{session.directory.name}, {kernels}, {session.threads} threads, {session.decoder.precision.value}, "
        f"{context_cost(session)}"
    )
    together = f" x {result.sequences} sequences" if result.sequences > 1 else ""
    print(
        f"{result.repeats} runs after one to warm up: {result.prompt_tokens} tokens of prompt, "
        f"{result.completion_tokens} generated{together}"
    )
    for name, value, values in (
        ("prefill", result.prefill_tok_s, result.prefill_tok_s_all),
        ("decode", result.decode_tok_s, result.decode_tok_s_all),
    ):
        print(f"{name:8}median {value:.1f} tok/s, minimum {min(values):.1f}, maximum {max(values):.1f}")
    for line in (*_ram_lines(result), *_slot_lines(result)):
        print(line)
    print(f"peak memory {format_bytes(result.peak_rss_bytes)}")
    write_json(json_path, {**asdict(result), "settings": describe(session)})


def _slot_lines(result: DecodeBench) -> list[str]:
    """What slots did; nothing where all experts are in RAM."""
    if (
        result.hit_rate is None
        or result.disk_bytes_per_token is None
        or result.demand_wait_s_per_token is None
    ):
        return []
    return [
        f"{100 * result.hit_rate:.1f} % of experts were in a slot, {format_bytes(round(result.disk_bytes_per_token))} from disk "
        f"and {1e3 * result.demand_wait_s_per_token:.1f} ms of waiting a step"
    ]


def _ram_lines(result: DecodeBench) -> list[str]:
    """What a decode step reads, beside the limit; nothing for the reference backend."""
    if (
        result.ram_bytes_per_token is None or result.read_bandwidth_bytes_s is None
        or result.limit_fraction is None or result.python_s_per_token is None
    ):  # fmt: skip
        return []
    steps_s = result.decode_tok_s / result.sequences
    rows = result.rescored_rows_per_token
    return [
        f"a step reads {format_bytes(round(result.ram_bytes_per_token))}: "
        f"{result.ram_bytes_per_token * steps_s / 1e9:.1f} GB/s, {100 * result.limit_fraction:.0f} % of the "
        f"{result.read_bandwidth_bytes_s / 1e9:.1f} GB/s that a plain loop reads between the runs",
        f"outside the kernels {1e3 * result.python_s_per_token:.2f} ms a step",
        *([] if rows is None else [f"lm_head in two passes: {rows:.1f} rows in BF16 a token"]),
    ]
