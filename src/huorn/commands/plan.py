"""`huorn plan`: what a model takes of a size of memory, and about how fast it would decode in it. Nothing is loaded."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path

from huorn.checkpoint.reader import Checkpoint
from huorn.commands.model_choice import show_budget
from huorn.commands.output import check_json_path, write_json
from huorn.engine.estimate import estimate_speed
from huorn.engine.fast_tier import Residency, plan_fast_tier
from huorn.engine.open_decoder import predictor_bytes
from huorn.engine.session import checked_context, checked_threads, existing_model
from huorn.engine.tokenizer import load_tokenizer
from huorn.machine.limits import available_bytes
from huorn.machine.speed import measure_disk_read, measure_ram_read
from huorn.memory import format_bytes
from huorn.model.precision import Precision


def plan(
    directory: Path | None, asked: Residency, context: int | None, threads: int | None, json_path: Path | None
) -> None:
    """Print the budget and the estimate. Raises UsageError, CheckpointError."""
    check_json_path(json_path)
    directory, threads = existing_model(directory), checked_threads(threads)
    checkpoint = Checkpoint.open(directory)
    context = checked_context(context, checkpoint.config)
    load_tokenizer(directory, checkpoint.config.vocab_size)  # part of what the program takes
    bank_bytes = predictor_bytes(asked.forecasting.bank_of(directory))
    tier = plan_fast_tier(checkpoint, asked, context, Precision.BF16, threads, predictor_bytes=bank_bytes)
    show_budget(tier, sys.stdout)
    if tier.remark is not None:
        print(tier.remark)
    config = checkpoint.config
    total = config.num_hidden_layers * config.num_experts
    share = 1.0 if tier.store is None else tier.slots / total
    ram, disk = measure_ram_read(available_bytes(), threads), measure_disk_read(directory)
    estimate = None
    if ram is not None and disk.bytes_per_s > 0:
        expert = sum(part.nbytes for part in checkpoint.expert_parts(0, 0))
        lookups = config.num_hidden_layers * config.num_experts_per_tok
        estimate = estimate_speed(tier.budget, expert, lookups, share, ram.bytes_per_s, disk.bytes_per_s)
        print(
            f"about {estimate.tok_s:.1f} tok/s: {format_bytes(round(estimate.ram_bytes))} a token from RAM at "
            f"{ram.bytes_per_s / 1e9:.1f} GB/s, {format_bytes(round(estimate.disk_bytes))} from disk at "
            f"{disk.bytes_per_s / 1e9:.2f} GB/s if {100 * estimate.hit_rate:.0f} % of experts are in a slot, as on a recorded "
            "text"
        )
    else:
        print(f"no estimate of speed: the disk was {disk.note or 'not measured'}")
    write_json(
        json_path,
        {
            "lines": [asdict(line) for line in tier.budget.lines],
            "resident_bytes": tier.budget.resident_bytes,
            "slots": tier.slots if tier.store is not None else total,
            "experts": total,
            "estimate": None if estimate is None else asdict(estimate),
        },
    )
