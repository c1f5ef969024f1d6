"""`huorn bench decode`: speed of one model."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from huorn.bench.decode import bench_decode as measure
from huorn.commands.model_choice import ModelChoice, context_cost, describe
from huorn.commands.output import check_json_path, write_json
from huorn.engine.process import peak_rss_bytes
from huorn.memory import format_bytes


def bench_decode(
    choice: ModelChoice, prompt_tokens: int, completion_tokens: int, repeats: int, json_path: Path | None
) -> None:
    """Measure and print median, minimum and maximum."""
    check_json_path(json_path)
    session = choice.open()
    result = measure(session, prompt_tokens, completion_tokens, repeats)
    print(
        f"{session.directory.name}, {session.threads} threads, {session.decoder.precision.value}, {context_cost(session)}"
    )
    print(
        f"{result.repeats} runs after one to warm up: {prompt_tokens} tokens of prompt, {completion_tokens} generated"
    )
    for name, speed in (("prefill", result.prefill_tok_s), ("decode", result.decode_tok_s)):
        print(
            f"{name:8}median {speed.median:.1f} tok/s, minimum {speed.minimum:.1f}, maximum {speed.maximum:.1f}"
        )
    print(f"peak memory {format_bytes(peak_rss_bytes())}")
    write_json(
        json_path, {**asdict(result), "peak_rss_bytes": peak_rss_bytes(), "settings": describe(session)}
    )
