"""The command line: one function per command, no logic.

Heavy modules are imported inside the commands: `import torch` alone takes 1.5 s, which --help and bad usage need not wait for.
"""

from __future__ import annotations

import io
import os
import secrets
import sys
from contextlib import suppress
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from typer.exceptions import TyperException

from huorn import __version__
from huorn import cli_options as opt
from huorn.cli_predictor import predictor_app
from huorn.cli_trace import replay, trace_app
from huorn.errors import HuornError, one_line, reason

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
bench_app = typer.Typer(no_args_is_help=True, help="Measure speed.")
app.add_typer(bench_app, name="bench")
app.add_typer(trace_app, name="trace")
app.add_typer(predictor_app, name="predictor")
app.command()(replay)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"huorn {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Run Qwen3.5 / Qwen3.6 mixture-of-experts models on one machine."""


@app.command()
def run(
    prompt: opt.Prompt,
    model: opt.Model = None,
    max_tokens: opt.MaxTokens = 256,
    temperature: opt.Temperature = 0.0,
    top_k: opt.TopK = 0,
    top_p: opt.TopP = 1.0,
    min_p: opt.MinP = 0.0,
    repetition_penalty: opt.RepetitionPenalty = 1.0,
    presence_penalty: opt.PresencePenalty = 0.0,
    frequency_penalty: opt.FrequencyPenalty = 0.0,
    stop: opt.Stop = None,
    seed: opt.Seed = None,
    context: opt.ContextTokens = None,
    threads: opt.Threads = None,
    precision: opt.PrecisionChoice = "bf16",
    backend: opt.BackendChoice = "cpu",
    memory: opt.Memory = None,
    slots: opt.Slots = None,
    policy: opt.Policy = None,
    predictor: opt.Predictor = "auto",
    prefetch: opt.Prefetch = "3",
    lookahead: opt.Lookahead = False,
    warm: opt.Warm = None,
    lm_head: opt.LmHeadChoice = "two-pass",
    json: opt.Json = None,
) -> None:
    """Continue a prompt: the text goes to stdout as it is generated, a line with speed and memory to stderr."""
    from huorn.commands.model_choice import ModelChoice, residency
    from huorn.commands.run import run as command
    from huorn.engine.forecasting import Forecasting
    from huorn.engine.sampling import SamplingSettings

    sampling = SamplingSettings(
        temperature, top_k, top_p, min_p, repetition_penalty, presence_penalty, frequency_penalty, _seed(seed)
    )
    command(
        prompt,
        ModelChoice(
            model,
            context,
            threads,
            precision,
            backend,
            lm_head,
            residency(
                memory, slots, policy, warm, None, Forecasting(predictor, prefetch, lookahead=lookahead)
            ),
        ),
        sampling,
        max_tokens,
        stop or [],
        json,
    )


@app.command()
def demo() -> None:
    """Let the embedded model write with a quarter of its experts in RAM, then with all: the same text, and what it took."""
    from huorn.commands.demo import demo as command

    command()


@app.command()
def chat(
    model: opt.Model = None,
    system: Annotated[str | None, typer.Option(help="The system message.")] = None,
    load: Annotated[Path | None, typer.Option(help="Go on with a conversation that /save wrote.")] = None,
    think: Annotated[
        bool | None, typer.Option(help="Let the model think first; by default its template decides.")
    ] = None,
    max_tokens: opt.MaxTokens = 1024,
    temperature: opt.Temperature = 0.7,
    top_k: opt.TopK = 20,
    top_p: opt.TopP = 0.8,
    min_p: opt.MinP = 0.0,
    repetition_penalty: opt.RepetitionPenalty = 1.0,
    presence_penalty: opt.PresencePenalty = 0.0,
    frequency_penalty: opt.FrequencyPenalty = 0.0,
    stop: opt.Stop = None,
    seed: opt.Seed = None,
    context: opt.ContextTokens = None,
    threads: opt.Threads = None,
    precision: opt.PrecisionChoice = "bf16",
    backend: opt.BackendChoice = "cpu",
    memory: opt.Memory = None,
    slots: opt.Slots = None,
    policy: opt.Policy = None,
    predictor: opt.Predictor = "auto",
    prefetch: opt.Prefetch = "3",
    lookahead: opt.Lookahead = False,
    warm: opt.Warm = None,
    lm_head: opt.LmHeadChoice = "two-pass",
    json: opt.Json = None,
) -> None:
    """Talk with a model, line by line. /reset forgets, /save FILE writes, /quit ends; Ctrl-C stops an answer."""
    from huorn.commands.chat import chat as command
    from huorn.commands.model_choice import ModelChoice, residency
    from huorn.engine.conversation import AnswerSettings
    from huorn.engine.forecasting import Forecasting
    from huorn.engine.sampling import SamplingSettings

    sampling = SamplingSettings(
        temperature, top_k, top_p, min_p, repetition_penalty, presence_penalty, frequency_penalty, _seed(seed)
    )
    settings = AnswerSettings(sampling, max_tokens, tuple(stop or ()), think)
    choice = ModelChoice(
        model,
        context,
        threads,
        precision,
        backend,
        lm_head,
        residency(memory, slots, policy, warm, None, Forecasting(predictor, prefetch, lookahead=lookahead)),
    )
    command(choice, settings, system, load, json)


@app.command()
def doctor(
    disk: Annotated[Path, typer.Option(help="A folder on the disk to measure.")] = Path(),
    json: opt.Json = None,
) -> None:
    """Show what this machine has (cores, instruction sets, RAM, disk speed, GPUs) and what would run on it."""
    from huorn.commands.doctor import doctor as command

    command(disk, json)


@app.command()
def verify(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of a checkpoint.")],
    manifest: Annotated[
        Path | None, typer.Option(help="SHA-256 sums to compare with. Default: one in the folder.")
    ] = None,
    json: opt.Json = None,
) -> None:
    """Check every tensor of a checkpoint: present, shape, dtype, readable; checksums against a manifest."""
    from huorn.commands.verify import verify as command

    command(directory, manifest, json)


@app.command()
def synth(
    preset: Annotated[str, typer.Option(help="Which release to imitate, such as qwen3.5-35b-a3b-fp8.")],
    out: Annotated[Path, typer.Option(metavar="DIR", help="A new or empty folder.")],
    layers: Annotated[int | None, typer.Option(help="Decoder layers. Default: as in the release.")] = None,
    seed: Annotated[int, typer.Option(help="The same seed gives the same bytes on every machine.")] = 0,
    manifest: Annotated[
        bool, typer.Option("--manifest", help="Also write SHA-256 sums for huorn verify.")
    ] = False,
    overlap: Annotated[
        float | None,
        typer.Option(
            metavar="P",
            help="Let each token use this share of its experts again for the next, 0.2 to 0.6; trained models 0.2 to 0.45. "
            "Default: as random weights do, 0.04.",
        ),
    ] = None,
    measure: Annotated[
        bool,
        typer.Option("--measure/--no-measure", help="With --overlap: decode a little and print what it is."),
    ] = True,
    json: opt.Json = None,
) -> None:
    """Write a synthetic checkpoint: random weights in the exact layout of a release."""
    from huorn.commands.synth import synth as command

    command(preset, out, layers, seed, manifest, overlap, measure, json)


@app.command()
def plan(
    model: opt.Model = None,
    memory: opt.Memory = None,
    slots: opt.Slots = None,
    context: opt.ContextTokens = None,
    threads: opt.Threads = None,
    predictor: opt.Predictor = "auto",
    json: opt.Json = None,
) -> None:
    """Show what a model would take of a size of memory, and about how fast it would decode; nothing is loaded."""
    from huorn.commands.model_choice import residency
    from huorn.commands.plan import plan as command
    from huorn.engine.forecasting import Forecasting

    fast = residency(memory, slots, None, None, None, Forecasting(predictor))
    command(model, fast, context, threads, json)


@bench_app.command("decode")
def bench_decode(
    model: opt.Model = None,
    prompt_tokens: Annotated[int, typer.Option(help="Tokens of prompt.")] = 128,
    max_tokens: Annotated[int, typer.Option(help="Tokens to generate, exactly.")] = 64,
    repeats: Annotated[int, typer.Option(help="Timed runs, after one to warm up.")] = 5,
    sequences: Annotated[int, typer.Option(help="Sequences that decode together.")] = 1,
    yardstick: Annotated[
        bool, typer.Option(help="Also measure what RAM gives, in 4 GiB of its own on top of --memory.")
    ] = True,
    context: opt.ContextTokens = None,
    threads: opt.Threads = None,
    precision: opt.PrecisionChoice = "bf16",
    backend: opt.BackendChoice = "cpu",
    memory: opt.Memory = None,
    slots: opt.Slots = None,
    policy: opt.Policy = None,
    predictor: opt.Predictor = "auto",
    prefetch: opt.Prefetch = "3",
    lookahead: opt.Lookahead = False,
    warm: opt.Warm = None,
    mapped: opt.Mapped = None,
    lm_head: opt.LmHeadChoice = "two-pass",
    json: opt.Json = None,
) -> None:
    """Measure prefill and decode speed, and what decoding reads from RAM beside what RAM gives."""
    from huorn.bench.decode import Request
    from huorn.commands.bench_decode import bench_decode as command
    from huorn.commands.model_choice import ModelChoice, residency
    from huorn.engine.forecasting import Forecasting

    request = Request(prompt_tokens, max_tokens, repeats, sequences, yardstick)
    fast = residency(
        memory, slots, policy, warm, mapped, Forecasting(predictor, prefetch, lookahead=lookahead)
    )
    command(ModelChoice(model, context, threads, precision, backend, lm_head, fast), request, json)


@bench_app.command("pairs")
def bench_pairs(
    prompts: Annotated[
        Path,
        typer.Option(
            metavar="FILE.jsonl", help='One {"prompt": "..."} a line; none should be in the training text.'
        ),
    ],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder for pairs.json, pairs.md and pairs.png.")],
    model: opt.Model = None,
    arms: Annotated[
        str,
        typer.Option(
            metavar="ARM,...",
            help="The first is what others are compared with: mmap, plain, engine, engine+lookahead, engine+prefetch, "
            "engine+retention, engine+both, engine+all.",
        ),
    ] = "engine,engine+both",
    pairs: Annotated[
        int, typer.Option(help="Matched runs of each arm, and of the first against itself.")
    ] = 9,
    max_tokens: Annotated[int, typer.Option(help="Tokens to generate per prompt, exactly.")] = 64,
    memory: opt.Memory = None,
    slots: Annotated[
        float | None,
        typer.Option(help="Or experts in RAM, of arms without a bank: a share up to 1, or how many."),
    ] = None,
    predictor: opt.Predictor = "auto",
    prefetch: opt.Prefetch = "3",
    link: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", help="Slow reading down to so much per second, to try a balance: 200MB."
        ),
    ] = None,
    predictor_slots: Annotated[
        int | None,
        typer.Option(
            help="With --slots: slots that a bank costs, if not what it takes. Others then hold the bank unused."
        ),
    ] = None,
    context: opt.ContextTokens = 1024,
    threads: opt.Threads = None,
) -> None:
    """Compare arms of the engine in matched pairs, in equal memory; one differing token ends it. Resumes where it was
    interrupted."""
    from huorn.commands.bench_pairs import PairsRequest
    from huorn.commands.bench_pairs import bench_pairs as command
    from huorn.engine.forecasting import Forecasting
    from huorn.sizes import parse_bytes

    names = tuple(name.strip() for name in arms.split(","))
    asked = PairsRequest(
        names, pairs, prompts, out, max_tokens, None if memory is None else parse_bytes(memory, "--memory"), slots,
        context or 1024, threads, Forecasting(predictor, prefetch), None if link is None else parse_bytes(link, "--link"),
        predictor_slots,
    )  # fmt: skip
    command(model, asked)


@bench_app.command("kernels")
def bench_kernels(
    threads: opt.Threads = None,
    repeats: Annotated[int, typer.Option(help="Passes over everything; medians are shown.")] = 5,
    json: opt.Json = None,
) -> None:
    """Measure each kernel per instruction set, beside the read bandwidth and matmul peak of the same run."""
    from huorn.commands.bench_kernels import bench_kernels as command

    command(threads, repeats, json)


def _seed(seed: int | None) -> int:
    """Without --seed one is drawn here, so that --json can say which and the text can be had again."""
    return secrets.randbits(32) if seed is None else seed


def main() -> NoReturn:
    """Run the command line; every error that a user can cause is one line on stderr and exit code 2."""
    _open_streams()
    try:
        code = app(standalone_mode=False)
        sys.stdout.flush()
    except HuornError as error:
        _fail(str(error))
    except TyperException as error:  # a bad option or argument; empty when help was printed instead
        _fail(error.format_message())
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(130)  # 128 + SIGINT, as shells report it
    except OSError as error:
        _discard_output()
        if isinstance(error, BrokenPipeError):  # the reader has gone, as in `huorn run ... | head -1`
            sys.exit(1)  # what typer answers when the pipe breaks inside a command
        # What has a name is mostly caught where it is used; what has none here is print, to a disk that is full.
        what = "stdout can not be written" if error.filename is None else f"{error.filename} can not be used"
        _fail(one_line(f"{what}: {reason(error)}"))
    sys.exit(code)


def _open_streams() -> None:
    """Stand in for streams that the caller closed, and let a name that the locale can not spell be no reason to fail."""
    sys.stdin = sys.stdin or open(os.devnull)  # noqa: SIM115
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def _discard_output() -> None:
    """Python would complain when it flushes what is left for a reader or a disk that takes no more."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())


def _fail(message: str) -> NoReturn:
    if message:
        with suppress(OSError):  # stderr may be what could not be written
            print(f"error: {message}", file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    main()
