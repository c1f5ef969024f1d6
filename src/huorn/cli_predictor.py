"""The commands `huorn predictor ...`: one function each, no logic, heavy imports inside, as in cli.py."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from huorn import cli_options as opt

predictor_app = typer.Typer(
    no_args_is_help=True,
    help="Train heads that forecast which experts the next token will use, and release them.",
)

_Traces = Annotated[
    Path, typer.Option("--traces", metavar="TRACES", help="What huorn trace record or import wrote.")
]


@predictor_app.command("train")
def predictor_train(
    traces: _Traces,
    out: Annotated[Path, typer.Option(metavar="RUN", help="A new folder, or one to go on with.")],
    layers: Annotated[
        str | None, typer.Option(metavar="LAYERS", help="Layers that get a head, such as 6-39. Default: all.")
    ] = None,
    profile: Annotated[
        Literal["huorn", "card", "routing"],
        typer.Option(
            help="Features. huorn: what measured best. card: as the published bank. routing: expert ids alone, for imports."
        ),
    ] = "huorn",
    size: Annotated[
        Literal["large", "small"],
        typer.Option(help="Trunk of 512 or 128 units: 6.3 or 2.0 MB a head in int8 in the 35B shape."),
    ] = "large",
    trunk: Annotated[int | None, typer.Option(help="Units of the trunk instead of --size.")] = None,
    pool: Annotated[int | None, typer.Option(help="Train on the first N prompts only.")] = None,
    workers: Annotated[
        int | None, typer.Option(help="Heads trained at a time, each by one thread. Default: one per core.")
    ] = None,
    epochs: Annotated[int, typer.Option(help="Passes over the training rows at most.")] = 6,
    batch: Annotated[int, typer.Option(help="Rows of a step.")] = 1024,
    learning_rate: Annotated[float, typer.Option(help="Of Adam, falling to 0.")] = 2e-3,
    seed: Annotated[int, typer.Option(help="The same seed gives the same weights.")] = 0,
    without: Annotated[
        list[str] | None, typer.Option(help="Leave out this block of features. May be given several times.")
    ] = None,
    uncaptured: Annotated[
        str | None, typer.Option(metavar="LAYERS", help="Layers whose router logits are to count as zeros.")
    ] = None,
    text_tokens: Annotated[
        int | None, typer.Option(help="Token ids that have a row. Default: the whole vocabulary.")
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="The recorded model, whose embedding profile huorn reads. Default: the embedded one.",
        ),
    ] = None,
) -> None:
    """Train one head for each layer. Killed at any moment, the same command goes on and ends with the same weights."""
    from huorn.commands.predictor import train
    from huorn.predictor.run_folder import TRUNKS, TrainSettings

    settings = TrainSettings(
        trunk=TRUNKS[size] if trunk is None else trunk, epochs=epochs, batch=batch, learning_rate=learning_rate,
        seed=seed, pool=pool,
    )  # fmt: skip
    train(
        traces, out, layers, profile, settings, workers, tuple(without or ()), uncaptured, text_tokens, model
    )


@predictor_app.command("evaluate")
def predictor_evaluate(
    sources: Annotated[
        list[Path], typer.Argument(metavar="RUN|BANK...", help="Training runs or banks, of one profile each.")
    ],
    traces: _Traces,
    force: Annotated[
        bool,
        typer.Option(
            "--force", help="Also score a bank of another model of these shapes; every report says so."
        ),
    ] = False,
    json: opt.Json = None,
) -> None:
    """Recall@K of every head on the validation and the test split, beside forecasts that need no predictor."""
    from huorn.commands.predictor import evaluate

    evaluate(sources, traces, json, force)


@predictor_app.command("release")
def predictor_release(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A finished training run.")],
    out: Annotated[Path, typer.Option(metavar="BANK", help="A new folder.")],
    traces: Annotated[
        Path | None,
        typer.Option(metavar="TRACES", help="What the run was trained on. Default: where it was then."),
    ] = None,
    repo: Annotated[str | None, typer.Option(help="Repository of the base model, for the card.")] = None,
    revision: Annotated[str, typer.Option(help="Revision of the base model.")] = "unknown",
    notice: Annotated[
        str, typer.Option(help="What the card says about the training text and its terms.")
    ] = "The terms of the text that the traces were recorded on were not stated by whoever released this bank.",
) -> None:
    """Write a bank that works without huorn: weights, loader, scorer, fixture, card; after a gate that compares every byte."""
    from huorn.commands.predictor import release

    release(run, out, traces, repo, revision, notice)


@predictor_app.command("verify")
def predictor_verify(
    bank: Annotated[
        Path | None, typer.Argument(metavar="BANK", help="Folder of a bank. Default: the embedded model's.")
    ] = None,
) -> None:
    """Check every file of a bank against its manifest, and score its fixture again on this machine."""
    from huorn.assets import EMBEDDED_BANK
    from huorn.commands.predictor import verify

    verify(bank or EMBEDDED_BANK)
