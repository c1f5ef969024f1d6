"""`huorn run`: one completion, streamed."""

from __future__ import annotations

from contextlib import closing
from dataclasses import asdict
from pathlib import Path

from huorn.commands.model_choice import ModelChoice, context_cost, describe
from huorn.commands.output import ModelText, argument_text, check_json_path, note, read_stdin, write_json
from huorn.commands.slot_stats import SlotStats
from huorn.engine.generate import Generation, GenerationStats, check_limits
from huorn.engine.process import started_at
from huorn.engine.sampling import SamplingSettings
from huorn.engine.tokenizer import encode
from huorn.errors import UsageError
from huorn.memory import format_bytes


def run(
    prompt: str,
    choice: ModelChoice,
    sampling: SamplingSettings,
    max_tokens: int,
    stop: list[str],
    json_path: Path | None,
) -> None:
    """Complete `prompt` ("-": stdin): text to stdout, the closing line of figures to stderr."""
    check_json_path(json_path)
    text = read_stdin() if prompt == "-" else argument_text(prompt, "the prompt")
    if not text:
        raise UsageError("the prompt is empty, but the model needs at least one character to go on from")
    stop = [argument_text(value, "--stop") for value in stop]
    check_limits(max_tokens, stop)
    with closing(choice.open()) as session:
        prompt_ids = encode(session.tokenizer, text)
        generation = Generation(session, prompt_ids, sampling, max_tokens, stop, started=started_at())
        out = ModelText()
        for piece in generation:
            out.write(piece)
        out.close_line()
        stats = generation.stats
        note(f"{speed_line(stats)}, {context_cost(session)}")
        slots = SlotStats.of(session)
        for line in [] if slots is None else slots.lines():
            note(line)
        settings = {"max_tokens": max_tokens, "stop": stop, **asdict(sampling), **describe(session)}
        used = {} if slots is None else {"slots": asdict(slots)}
        write_json(json_path, {**asdict(stats), **used, "settings": settings})


def speed_line(stats: GenerationStats) -> str:
    """Return tokens, speeds and memory of one generation as one line."""
    reused = f", {stats.reused_tokens} reused" if stats.reused_tokens else ""
    parts = [
        f"{stats.completion_tokens} tokens ({stats.finish_reason}) after {stats.prompt_tokens} of prompt{reused}",
        f"prefill {_rate(stats.prefill_tok_s)}",
        f"decode {_rate(stats.decode_tok_s)}",
        f"first token after {stats.ttft_s:.2f} s" if stats.ttft_s is not None else "no token generated",
        f"peak memory {format_bytes(stats.peak_rss_bytes)}",
    ]
    return ", ".join(parts)


def _rate(tokens_per_s: float | None) -> str:
    return "not timed" if tokens_per_s is None else f"{tokens_per_s:.1f} tok/s"
