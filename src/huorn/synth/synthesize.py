"""Writes a synthetic checkpoint: the exact layout of a release, filled with numbers of a seed."""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from huorn import __version__
from huorn.checkpoint.config import ModelConfig
from huorn.errors import UsageError
from huorn.files import PART_SUFFIX, write_atomically
from huorn.synth.disk_writer import DiskWriter
from huorn.synth.locality import check_overlap, localised, slow_share
from huorn.synth.numbers import NumberSource
from huorn.synth.presets import (
    FULL_ATTENTION_INTERVAL,
    Preset,
    config_json,
    find_preset,
    generation_config_json,
)
from huorn.synth.progress_state import STATE_FILE, SynthState
from huorn.synth.shard_file import ShardContent
from huorn.synth.tensors import SynthTensor, shards
from huorn.synth.tokenizer import tokenizer_config_json, tokenizer_json

INDEX_FILE = "model.safetensors.index.json"
MANIFEST_FILE = "huorn-manifest.json"
SLACK_BYTES = 64 << 20  # headers, index (6 MB in the 35B layout), tokenizer (6 MB), file system metadata

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class SynthReport:
    """What was written. `written_bytes` and `seconds` leave out shards that an earlier run had finished."""

    directory: Path
    preset: str
    layers: int
    seed: int
    shards: int
    tensors: int
    total_bytes: int
    written_bytes: int
    seconds: float

    @property
    def bytes_per_s(self) -> float:
        """Speed of this run."""
        return self.written_bytes / self.seconds if self.seconds else 0.0


def synthesize(
    preset: str,
    out: Path,
    layers: int | None,
    seed: int,
    progress: Progress,
    manifest: bool = False,
    overlap: float | None = None,
) -> SynthReport:
    """Write the checkpoint `preset` (its name) into the new or empty folder `out`; the same bytes on every machine.

    layers: None for as many as the release has. progress(bytes done, bytes in all) is called a few times a second.
    manifest: also write SHA-256 and size of every file to huorn-manifest.json, for `huorn verify`; reads nothing
    again but hashing 1.5 GB/s on one core may be what limits. overlap: the share of a token's experts that the next one is to
    use again, see locality.py; None leaves it at what random weights give.

    The index comes last, so an interrupted run leaves a folder that no loader takes for a checkpoint; the same call
    again keeps the shards that were finished. Raises UsageError: unknown preset, layers, seed or overlap out of range, a
    folder with other content, or too little disk, which is checked before anything is written.
    """
    kind = find_preset(preset)
    config = kind.with_layers(layers)
    if not 0 <= seed < 2**64:  # a longer one would only make every hash of a name slow
        raise UsageError(f"--seed {seed} is out of range; give 0 to {2**64 - 1}")
    if overlap is not None:
        check_overlap(overlap, preset, config)
    if out.exists() and not out.is_dir():
        raise UsageError(f"--out {out} is a file; give a new or empty folder")
    state = SynthState(preset, config.num_hidden_layers, seed, manifest, __version__, overlap)
    state.resume(out)
    written = sum((out / file).stat().st_size for file in state.finished)
    _check_free_disk(out, _least_bytes(kind, config.num_hidden_layers) - written)
    source = NumberSource(seed)
    plan = _plan(config, overlap)
    contents = {file: ShardContent(tensors, source) for file, tensors in plan.items()}
    todo = {file: content for file, content in contents.items() if file not in state.finished}
    total = sum(content.size for content in contents.values())
    to_write = sum(content.size for content in todo.values())
    _check_free_disk(out, to_write)

    start = time.perf_counter()
    source.prepare({kind for tensors in plan.values() for tensor in tensors for kind in tensor.kinds})
    try:
        out.mkdir(parents=True, exist_ok=True)
        state.save(out)
        small_files = _small_files(kind, config, seed, overlap)
        for name, text in small_files.items():
            write_atomically(out / name, text)
        _write_shards(out, todo, state, lambda done: progress(total - to_write + done, total))
        if manifest:
            write_atomically(out / MANIFEST_FILE, _manifest(small_files, contents, state))
        write_atomically(out / INDEX_FILE, _index(plan))
        (out / STATE_FILE).unlink()
    except OSError as error:
        raise UsageError(
            f"{out} can not be written ({error.strerror}); the same command continues later"
        ) from error
    return SynthReport(
        directory=out,
        preset=preset,
        layers=config.num_hidden_layers,
        seed=seed,
        shards=len(plan),
        tensors=sum(len(tensors) for tensors in plan.values()),
        total_bytes=total,
        written_bytes=to_write,
        seconds=time.perf_counter() - start,
    )


def _plan(config: ModelConfig, overlap: float | None) -> dict[str, list[SynthTensor]]:
    """File name -> tensors in file order."""
    plan = shards(config)
    if overlap is None:
        return plan
    slow = slow_share(overlap)
    return {file: [localised(tensor, config, slow) for tensor in tensors] for file, tensors in plan.items()}


def _write_shards(
    out: Path, todo: dict[str, ShardContent], state: SynthState, progress: Callable[[int], None]
) -> None:
    """Write each shard under a temporary name, give it its own, and note in `state` that it is finished."""
    done = 0

    def advance(count: int) -> None:
        nonlocal done
        done += count
        progress(done)

    progress(0)
    with DiskWriter() as writer:
        for file, content in todo.items():
            temporary = out / (file + PART_SUFFIX)
            checksum = writer.write(temporary, content.size, content.fill, advance, state.manifest)
            temporary.replace(out / file)
            state.finished[file] = checksum
            state.save(out)


def _least_bytes(kind: Preset, layers: int) -> int:
    """Lower bound on the bytes of all tensors, from the plans of one and two periods of layers.

    The plan of 4,096 layers of the 35B shape takes minutes and gigabytes: a disk too small is found without it.
    """
    period = FULL_ATTENTION_INTERVAL
    one, two = (
        sum(tensor.nbytes for tensors in shards(kind.with_layers(n)).values() for tensor in tensors)
        for n in (period, 2 * period)
    )
    return one + (layers // period - 1) * (two - one)


def _check_free_disk(out: Path, to_write: int) -> None:
    """Raises UsageError with what is needed and what is there, unless `to_write` bytes fit on the disk of `out`."""
    for part in out.glob(f"*{PART_SUFFIX}"):
        part.unlink()  # of an interrupted run; it is written anew
    existing = next(folder for folder in (out, *out.absolute().parents) if folder.exists())
    needed, free = to_write + SLACK_BYTES, shutil.disk_usage(existing).free
    if needed > free:
        raise UsageError(
            f"{out} needs {needed / 1e9:.1f} GB of disk, but {free / 1e9:.1f} GB are free; give --out another disk"
        )


def _small_files(preset: Preset, config: ModelConfig, seed: int, overlap: float | None) -> dict[str, str]:
    """Every file but shards, index and manifest: name -> text."""
    return {
        "config.json": json.dumps(config_json(preset, config, seed, overlap), indent=2),
        "generation_config.json": json.dumps(generation_config_json(config), indent=2),
        "tokenizer.json": tokenizer_json(config.vocab_size),
        "tokenizer_config.json": json.dumps(tokenizer_config_json(config.max_position_embeddings), indent=2),
    }


def _index(plan: dict[str, list[SynthTensor]]) -> str:
    """model.safetensors.index.json: which shard holds each tensor, in order of name."""
    homes = {tensor.name: file for file, tensors in plan.items() for tensor in tensors}
    size = sum(tensor.nbytes for tensors in plan.values() for tensor in tensors)
    return json.dumps({"metadata": {"total_size": size}, "weight_map": dict(sorted(homes.items()))}, indent=2)


def _manifest(small_files: dict[str, str], contents: dict[str, ShardContent], state: SynthState) -> str:
    """huorn-manifest.json: SHA-256 and size of every file but itself and the index."""
    files: dict[str, dict[str, object]] = {}
    for name, text in small_files.items():
        data = text.encode()
        files[name] = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data)}
    for name, content in contents.items():
        files[name] = {"sha256": state.finished[name], "size": content.size}
    return json.dumps({"files": dict(sorted(files.items()))}, indent=2)
