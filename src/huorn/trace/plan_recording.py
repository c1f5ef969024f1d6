"""What a recording will hold, worked out before a model is loaded: prompts, their splits, and the manifest without a chunk."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from huorn.checkpoint.fingerprint import model_fingerprint
from huorn.checkpoint.reader import Checkpoint
from huorn.engine.template import ChatTemplate
from huorn.engine.tokenizer import load_tokenizer
from huorn.errors import UsageError
from huorn.kernels import isa
from huorn.model.precision import Precision
from huorn.trace.duplicates import group_duplicates
from huorn.trace.layout import CAPTURED, MOST_EXPERTS
from huorn.trace.manifest import Manifest, PromptEntry, RecordedModel, Source
from huorn.trace.prompts import Prompt, PromptReader, RecordMode, read_file
from huorn.trace.splits import split_by_group

CHUNK_ROWS = 4096  # 760 MB in the 35B shape, and what a killed recording loses at most


@dataclass(frozen=True)
class Request:
    """What is to be recorded: a file of prompts, at most `tokens` tokens of each answer or text, chunks of `chunk_rows` rows."""

    prompts: Path
    mode: RecordMode
    tokens: int
    chunk_rows: int = CHUNK_ROWS

    def __post_init__(self) -> None:
        """Raises UsageError for what no model could record."""
        if not 2 <= self.tokens <= 2**31:
            raise UsageError(
                f"--tokens is {self.tokens}, but it must be 2 or more: the last token gives no row"
            )
        if not 1 <= self.chunk_rows <= 2**31:
            raise UsageError(f"--chunk-rows is {self.chunk_rows}, but it must be 1 or more")


@dataclass(frozen=True)
class RecordingPlan:
    """The prompts in the order of the manifest, which knows no chunk yet."""

    prompts: tuple[Prompt, ...]
    manifest: Manifest

    def most_rows(self, start: int) -> int:
        """Rows that the prompts from number `start` on give at most; with teacher exactly."""
        tokens = self.manifest.tokens or 0
        decode = self.manifest.mode == "decode"
        answers = (tokens if decode else len(each.ids) - each.prompt_tokens for each in self.prompts[start:])
        return sum(max(0, answer - 1) for answer in answers)


def plan_recording(
    request: Request,
    directory: Path,
    context: int,
    precision: Precision,
    progress: Callable[[int, int], None],
) -> RecordingPlan:
    """Reads and splits the prompts for the checkpoint in `directory`, of which config, tokenizer, routers and embedding are read.

    progress(bytes of prompts, bytes in all). Raises UsageError for prompts that can not be used, CheckpointError.
    """
    data = read_file(request.prompts)
    checkpoint = Checkpoint.open(directory)
    config = checkpoint.config
    if config.num_experts > MOST_EXPERTS:
        raise UsageError(
            f"a trace holds up to {MOST_EXPERTS} experts of a layer, and this model has {config.num_experts}"
        )
    tokenizer = load_tokenizer(directory, config.vocab_size)
    template = ChatTemplate.load(directory)
    reader = PromptReader(request.prompts, request.mode, request.tokens, config, tokenizer, template, context)
    prompts = reader.read(data, progress)
    sha256s = [prompt.sha256 for prompt in prompts]
    grouped = group_duplicates(sha256s, [prompt.shingles for prompt in prompts])
    splits = split_by_group(grouped.groups, sha256s)
    entries = [
        PromptEntry(
            sha256=prompt.sha256, split=split, group=group, chunk=None, first_row=0, rows=0,
            prompt_tokens=prompt.prompt_tokens,
        )
        for prompt, split, group in zip(prompts, splits, grouped.groups, strict=True)
    ]  # fmt: skip
    model = RecordedModel(
        fingerprint=model_fingerprint(checkpoint), name=directory.resolve().name, layers=config.num_hidden_layers,
        experts=config.num_experts, top_k=config.num_experts_per_tok, hidden=config.hidden_size, vocab=config.vocab_size,
    )  # fmt: skip
    manifest = Manifest(
        model=model,
        mode=request.mode,
        tokens=request.tokens,
        precision=precision.value,
        isa=isa.chosen(),
        source=Source(name=request.prompts.name, sha256=hashlib.sha256(data).hexdigest()),
        split_by="prompt",
        captured=CAPTURED,
        chunk_rows=request.chunk_rows,
        duplicates=grouped.duplicates,
        prompts=tuple(entries),
    )
    return RecordingPlan(tuple(prompts), manifest)
