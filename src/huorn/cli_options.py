"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

Prompt = Annotated[str, typer.Argument(help='The text to continue; "-" reads it from stdin, unchanged.')]
Model = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Folder of a checkpoint. Default: the embedded model.")
]
MaxTokens = Annotated[int, typer.Option(help="Tokens to generate at most; the context may end it earlier.")]
Temperature = Annotated[float, typer.Option(help="0 takes the likeliest token; higher is more varied.")]
TopK = Annotated[int, typer.Option(help="Draw among the K likeliest tokens; 0: all.")]
TopP = Annotated[
    float, typer.Option(help="Draw among the likeliest tokens that together reach this probability; 1: all.")
]
MinP = Annotated[
    float, typer.Option(help="Leave out tokens less likely than this times the likeliest; 0: none.")
]
RepetitionPenalty = Annotated[
    float, typer.Option(help="Divide the logits of tokens seen in prompt or answer; 1: off.")
]
PresencePenalty = Annotated[
    float, typer.Option(help="Subtract from logits of tokens generated before; 0: off.")
]
FrequencyPenalty = Annotated[
    float, typer.Option(help="Subtract this times how often a token was generated; 0: off.")
]
Stop = Annotated[list[str] | None, typer.Option(help="End before this text. May be given several times.")]
Seed = Annotated[int | None, typer.Option(help="The same seed gives the same text. Default: a fresh one.")]
ContextTokens = Annotated[
    int | None,
    typer.Option(
        "--context", help="Tokens of prompt and answer together. Default: 4096, or the model's own limit."
    ),
]
Threads = Annotated[
    int | None,
    typer.Option(
        help="CPU threads. Default: every core this process may use; fewer is faster where others compute too."
    ),
]
PrecisionChoice = Annotated[
    Literal["bf16", "f32"], typer.Option("--precision", help="What matmul operands are rounded to.")
]
Json = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Also write the result to this file.")
]
Memory = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE", help="Stay under this size (12GiB): hot experts in RAM, others read from disk."
    ),
]
Slots = Annotated[
    float | None,
    typer.Option(help="Experts in RAM: a share of all up to 1 (0.25), or how many. Default: what fits."),
]
Policy = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Which expert makes room for another; see docs/benchmarks.md."),
]
Predictor = Annotated[
    str,
    typer.Option(
        metavar="BANK|auto|off",
        help="Forecasts of the next token's experts, for slots. auto: the bank in DIR/bank or DIR_bank, if there is one.",
    ),
]
Prefetch = Annotated[
    str,
    typer.Option(
        metavar="CAPS",
        help="Copies ahead per layer and token at most; 0: none. Also one number for each five layers (2,2,3), or card.",
    ),
]
Lookahead = Annotated[
    bool,
    typer.Option("--lookahead", help="Also copy what the next layer's router makes of this layer's input."),
]
Warm = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Load the experts that were most used last time; saved when it ends."),
]
Mapped = Annotated[
    Literal["plain", "random", "ahead", "huge"] | None,
    typer.Option(help="Leave experts to the page cache instead, with this advice to it, to compare with."),
]
BackendChoice = Annotated[
    Literal["cpu", "reference"],
    typer.Option("--backend", help="cpu: native kernels. reference: plain PyTorch, slow, to compare with."),
]
LmHeadChoice = Annotated[
    Literal["two-pass", "full"],
    typer.Option(
        "--lm-head",
        help="two-pass: half the memory and bytes per token, the same text; for large heads in BF16. "
        "full: faster where all probabilities are needed (temperature without top-k).",
    ),
]
