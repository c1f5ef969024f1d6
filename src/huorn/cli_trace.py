"""The commands `huorn trace ...`: one function each, no logic, heavy imports inside, as in cli.py."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from huorn import cli_options as opt

trace_app = typer.Typer(no_args_is_help=True, help="Record which experts a model routes to, and look at it.")


@trace_app.command("record")
def trace_record(
    prompts: Annotated[
        Path,
        typer.Option(
            metavar="FILE.jsonl",
            help='One object a line: {"prompt"}, {"messages"}; with teacher {"prompt", "completion"}, {"text"}, {"ids"}.',
        ),
    ],
    out: Annotated[Path, typer.Option(metavar="TRACES", help="A new folder, or one to go on with.")],
    model: opt.Model = None,
    tokens: Annotated[int, typer.Option(help="Tokens of each answer or text at most.")] = 256,
    mode: Annotated[
        Literal["decode", "teacher"],
        typer.Option(help="decode: the model writes the answers. teacher: they are given, and read."),
    ] = "decode",
    chunk_rows: Annotated[
        int, typer.Option(help="Rows from which a chunk is closed; a killed recording loses less than that.")
    ] = 4096,
    context: opt.ContextTokens = None,
    threads: opt.Threads = None,
    precision: opt.PrecisionChoice = "bf16",
    memory: opt.Memory = None,
    slots: opt.Slots = None,
    policy: opt.Policy = None,
    warm: opt.Warm = None,
    lm_head: opt.LmHeadChoice = "two-pass",
) -> None:
    """Record what every layer routes for each token: hidden states, router logits, experts, weights."""
    from huorn.commands.model_choice import ModelChoice, residency
    from huorn.commands.trace_record import record
    from huorn.trace.plan_recording import Request

    request = Request(prompts, mode, tokens, chunk_rows)
    fast = residency(memory, slots, policy, warm)
    record(ModelChoice(model, context, threads, precision, "cpu", lm_head, fast), request, out)


@trace_app.command("show")
def trace_show(
    traces: Annotated[Path, typer.Argument(metavar="TRACES", help="Folder of a trace.")],
    model: Annotated[
        Path | None, typer.Option(metavar="DIR", help="The recorded model, to ask its next-layer gate too.")
    ] = None,
    verify: Annotated[bool, typer.Option("--verify", help="Also compare all checksums.")] = False,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE.png", help="Draw the curves of the layers.")
    ] = None,
    json: opt.Json = None,
) -> None:
    """Show what is in a trace, and layer by layer how alike consecutive tokens route."""
    from huorn.commands.trace_show import show

    show(traces, model, verify, plot, json)


@trace_app.command("import")
def trace_import(
    csv: Annotated[Path, typer.Argument(metavar="ROUTE.csv", help="A route_trace v1 file.")],
    out: Annotated[Path, typer.Option(metavar="TRACES", help="A new folder.")],
) -> None:
    """Import the decode steps of a recorded route_trace v1 file, split by time."""
    from huorn.commands.trace_record import import_trace

    import_trace(csv, out)


def replay(
    trace: Annotated[
        Path, typer.Argument(metavar="TRACES|ROUTE.csv", help="A recorded trace, or a route_trace v1 file.")
    ],
    memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE,...", help="Sizes of the cache; for files that say how large an expert is."
        ),
    ] = None,
    slots: Annotated[
        str | None, typer.Option(metavar="SHARE,...", help="Or shares of all experts, such as 0.125,0.25.")
    ] = None,
    policy: Annotated[
        str,
        typer.Option(
            metavar="NAME,...",
            help="Cache policies; belady and belady-bypass know the future; forecast (both), forecast-retention, "
            "forecast-retention-1 (one token ahead) and forecast-prefetch ask a bank.",
        ),
    ] = "lfu,layer-lfu,lru,layer-lru,belady",
    split: Annotated[str, typer.Option(metavar="SPLIT,...", help="Of a recorded trace.")] = "test",
    prompts: Annotated[int | None, typer.Option(help="Only the first N prompts of each split.")] = None,
    bank: Annotated[Path | None, typer.Option(metavar="BANK", help="Default: the embedded model's.")] = None,
    prefetch: opt.Prefetch = "3",
    threshold: Annotated[
        float, typer.Option(help="Of the probability from which a copy starts ahead.")
    ] = 0.15,
    pace: Annotated[
        str | None,
        typer.Option(
            metavar="LAYER,REST,COPY",
            help="Let copies take time: ms to compute a layer, for the rest of a token, to copy an expert (3.2,25,1.6).",
        ),
    ] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE.png", help="Draw hit rates by size.")] = None,
    json: opt.Json = None,
) -> None:
    """Replay recorded routing on cache policies: hits, misses and loads, counted as the engine's cache counts them."""
    from huorn.commands.replay import replay as command

    command(trace, memory, slots, policy, split, prompts, bank, prefetch, threshold, pace, plot, json)
