"""`huorn demo`: the embedded model with a quarter of its experts in slots and all of them in RAM, side by side."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from huorn.commands.output import ModelText
from huorn.commands.slot_stats import SlotStats
from huorn.engine.fast_tier import Residency
from huorn.engine.forecasting import OFF, Forecasting
from huorn.engine.generate import Generation
from huorn.engine.sampling import SamplingSettings
from huorn.engine.session import Session
from huorn.engine.tokenizer import encode
from huorn.errors import HuornError
from huorn.memory import format_bytes

PROMPT = "def quicksort(items):"
SAMPLING = SamplingSettings(temperature=0.7, top_p=0.9, repetition_penalty=1.1, seed=3)
TOKENS, CONTEXT, SHARE = 128, 512, 0.25
WAYS = {
    "a quarter, forecasts": Residency(slots=SHARE),
    "a quarter in slots": Residency(slots=SHARE, forecasting=Forecasting(OFF)),
    "all in RAM": Residency(),
}


@dataclass(frozen=True)
class _Shown:
    text: str
    tokens: int
    tok_s: float
    stats: SlotStats | None


def demo() -> None:
    """Stream the text of the first way, compare the others with it, and print one table. HuornError when a text differs."""
    shown: dict[str, _Shown] = {}
    for name, residency in WAYS.items():
        shown[name] = _run(residency, stream=not shown)
        first = next(iter(shown.values()))
        if shown[name].text != first.text:
            raise HuornError(f"{name} gave another text: this must never be; please report it")
    table = Table(title=f"{len(shown)} times the same {TOKENS} tokens", title_justify="left")
    for column in ("experts", "tok/s", "in a slot", "disk/token", "wait/token"):
        table.add_column(column, justify="left" if column == "experts" else "right")
    for name, one in shown.items():
        table.add_row(name, f"{one.tok_s:.1f}", *_cells(one))
    Console().print(table)


def _run(residency: Residency, stream: bool) -> _Shown:
    with closing(Session.open(None, CONTEXT, residency=residency)) as session:
        generation = Generation(session, encode(session.tokenizer, PROMPT), SAMPLING, TOKENS)
        out = ModelText() if stream else None
        for piece in generation:
            if out is not None:
                out.write(piece)
        if out is not None:
            out.write("\n")
        stats = generation.stats
        return _Shown(stats.text, stats.completion_tokens, stats.decode_tok_s or 0.0, SlotStats.of(session))


def _cells(one: _Shown) -> tuple[str, str, str]:
    if one.stats is None:
        return "100.0 %", "0 bytes", "0.0 ms"
    stats = one.stats
    return (
        f"{100 * stats.hits / stats.lookups:.1f} %",
        format_bytes(round(stats.disk_bytes / one.tokens)),
        f"{1e3 * stats.wait_s / one.tokens:.1f} ms",
    )
