"""An opened checkpoint: everything that requests share."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer

from huorn.assets import EMBEDDED_MODEL
from huorn.checkpoint.config import ModelConfig, read_config, read_json
from huorn.checkpoint.reader import Checkpoint
from huorn.engine.fast_tier import FastTier, Residency
from huorn.engine.forecaster import Forecaster
from huorn.engine.open_decoder import open_cpu_decoder
from huorn.engine.prefix import PrefixState
from huorn.engine.template import ChatTemplate
from huorn.engine.tokenizer import load_tokenizer
from huorn.errors import CheckpointError, UsageError
from huorn.experts.cache import ExpertCache
from huorn.experts.warm import checkpoint_identity, save_warm
from huorn.machine.facts import allowed_cores, usable_cores
from huorn.machine.limits import cpu_quota
from huorn.memory import format_bytes
from huorn.model.backend import Backend, LanguageModel
from huorn.model.load import load_decoder
from huorn.model.precision import Precision
from huorn.model.state import state_bytes
from huorn.model.tables import LmHead

DEFAULT_CONTEXT = 4096


@dataclass(frozen=True)
class Session:
    """A model that is ready to run, with the limits that its requests share."""

    directory: Path
    config: ModelConfig
    tokenizer: Tokenizer
    template: ChatTemplate | None
    backend: Backend
    decoder: LanguageModel
    tier: FastTier | None  # what is in RAM; None for the reference backend
    cache: ExpertCache | None  # where experts are in slots
    forecaster: Forecaster | None  # and a bank says what is used next
    warm: Path | None  # the file that `close` writes
    remark: str | None  # why the bank beside the model is not used
    context: int  # tokens, prompt and answer together
    threads: int
    stop_ids: frozenset[int]

    @classmethod
    def open(
        cls, directory: Path | None, context: int | None = None, threads: int | None = None,
        precision: Precision = Precision.BF16, backend: Backend = "cpu", lm_head: LmHead = "two-pass",
        residency: Residency | None = None,
    ) -> Session:  # fmt: skip
        """Open the checkpoint in `directory`, the embedded model when it is None.

        `context` None is 4096 tokens or what the model was made for, whichever is less; `threads` None is every core this
        process may use. `backend` is cpu (native kernels) or reference (PyTorch, the oracle). `lm_head` two-pass leaves the
        embedding and the BF16 weights of the output head in the file, where they are large; full holds them in RAM. `residency`
        limits the memory that all takes. What is cheap to check is checked before weights are loaded. Raises UsageError,
        CheckpointError.
        """
        directory = existing_model(directory)
        threads = checked_threads(threads)
        checkpoint = Checkpoint.open(directory)
        context = checked_context(context, checkpoint.config)
        tokenizer = load_tokenizer(directory, checkpoint.config.vocab_size)
        template = ChatTemplate.load(directory)
        # The kernels have threads of their own; torch, which then only samples, would spin against them.
        torch.set_num_threads(threads if backend == "reference" else 1)
        asked, opened = residency or Residency(), None
        decoder: LanguageModel
        if backend == "cpu":
            opened = open_cpu_decoder(checkpoint, asked, context, precision, threads, lm_head)
            decoder = opened.decoder
        elif asked.asked:
            raise UsageError("--memory and --slots need the native kernels: use --backend cpu")
        else:
            decoder = load_decoder(checkpoint, precision)
        return cls(
            directory=directory,
            config=checkpoint.config,
            tokenizer=tokenizer,
            template=template,
            backend=backend,
            decoder=decoder,
            tier=None if opened is None else opened.tier,
            cache=None if opened is None else opened.cache,
            forecaster=None if opened is None else opened.forecaster,
            warm=asked.warm,
            remark=None if opened is None else opened.remark,
            context=context,
            threads=threads,
            stop_ids=_stop_ids(directory, checkpoint.config, tokenizer),
        )

    @property
    def remarks(self) -> tuple[str, ...]:
        """What a user should know about how the model was opened."""
        found = [] if self.tier is None or self.tier.remark is None else [self.tier.remark]
        if self.remark is not None:
            found.append(self.remark)
        if self.cache is not None and not self.cache.direct:
            found.append("direct reads are not possible here: experts are read through the page cache")
        if self.warm is not None and self.cache is None:
            found.append("--warm has nothing to do: no experts are in slots")
        return tuple(found)

    def close(self) -> None:
        """Write down what the cache found worth keeping, where --warm names a file. UsageError when it can not be written."""
        if self.warm is not None and self.cache is not None:
            save_warm(self.warm, checkpoint_identity(self.cache.store.checkpoint), self.cache.policy.scores())

    def new_state(self) -> PrefixState:
        """Return an empty state with room for `context` tokens. Raises UsageError when the machine has no memory for it."""
        try:
            return PrefixState(self.decoder, self.context, self.forecaster)
        except (RuntimeError, MemoryError) as error:  # torch's allocator raises the former
            kv, recurrent = self.state_bytes()
            raise UsageError(
                f"a context of {self.context} tokens needs {format_bytes(kv + recurrent)} of memory, "
                "which this machine does not give: lower --context"
            ) from error

    def state_bytes(self) -> tuple[int, int]:
        """Return (KV cache, recurrent state) in bytes for `context` tokens."""
        return state_bytes(self.config, self.context, self.decoder.precision)


def text_problems(directory: Path) -> list[str]:
    """One sentence for each file beside the weights that `Session.open` would refuse: tokenizer, its config, chat template.

    Raises CheckpointError when config.json or generation_config.json can not be used.
    """
    config = read_config(directory)
    problems: dict[str, None] = {}  # both read tokenizer_config.json
    for opens in (
        lambda: _stop_ids(directory, config, load_tokenizer(directory, config.vocab_size)),
        lambda: ChatTemplate.load(directory),
    ):
        try:
            opens()
        except CheckpointError as error:
            problems[str(error)] = None
    return list(problems)


def existing_model(directory: Path | None) -> Path:
    """The folder of a checkpoint, the embedded model's for None. Raises UsageError when there is none."""
    if directory is None:
        if not (EMBEDDED_MODEL / "config.json").is_file():
            raise UsageError("this installation has no embedded model: name a checkpoint folder with --model")
        return EMBEDDED_MODEL
    if not directory.is_dir():
        state = "is a file" if directory.exists() else "does not exist"
        raise UsageError(f"--model {directory} {state}: name the folder of a checkpoint")
    return directory


def checked_threads(threads: int | None) -> int:
    """Threads asked for, or every core this process may use. Raises UsageError."""
    allowed = allowed_cores()
    if threads is None:
        return usable_cores(allowed, cpu_quota())
    if not 1 <= threads <= allowed:
        raise UsageError(
            f"--threads is {threads}, but it must be from 1 to {allowed}, the cores this process may use"
        )
    return threads


def checked_context(context: int | None, config: ModelConfig) -> int:
    """Tokens asked for, or 4096, or what the model was made for if that is less. Raises UsageError."""
    longest = config.max_position_embeddings
    if context is None:
        return min(DEFAULT_CONTEXT, longest)
    if not 1 <= context <= longest:
        raise UsageError(
            f"--context is {context}, but it must be from 1 to {longest}, the longest this model was made for"
        )
    return context


def _stop_ids(directory: Path, config: ModelConfig, tokenizer: Tokenizer) -> frozenset[int]:
    """Ids that end an answer: those of the configs, and the tokenizer's eos_token (<|im_end|> in chat models)."""
    ids = set(config.eos_token_ids)
    path = directory / "tokenizer_config.json"
    token = read_json(path).get("eos_token") if path.is_file() else None
    text = token.get("content") if isinstance(token, dict) else token
    token_id = tokenizer.token_to_id(text) if isinstance(text, str) else None
    return frozenset(ids if token_id is None else ids | {token_id})
