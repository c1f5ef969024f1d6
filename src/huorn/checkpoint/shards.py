"""Which safetensors files make up a checkpoint folder, and why another kind of folder is not one."""

from __future__ import annotations

from pathlib import Path

from huorn.checkpoint.config import read_json
from huorn.checkpoint.safetensors_file import SafetensorsFile
from huorn.errors import CheckpointError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


def refuse_other_kinds(directory: Path) -> None:
    """Raises CheckpointError when `directory` is no checkpoint folder: and what would be right."""
    wanted = "a checkpoint is a folder with config.json and model.safetensors or its shards"
    try:
        if not directory.exists():
            raise CheckpointError(f"{directory} does not exist; {wanted}")
        if not directory.is_dir():
            is_gguf = directory.suffix == ".gguf" or _starts_with(directory, b"GGUF")
            raise CheckpointError(
                f"{directory} is a {'GGUF file' if is_gguf else 'file'}, not a folder; {wanted}"
            )
        names = sorted(path.name for path in directory.iterdir())
    except OSError as error:
        raise CheckpointError(f"{directory} can not be opened: {error.strerror}") from error
    if not names:
        raise CheckpointError(f"{directory} is empty; {wanted}")
    if "bank_loader.py" in names:
        raise CheckpointError(f"{directory} is a bank of expert predictors, not a model; {wanted}")
    if SINGLE not in names and INDEX not in names:
        _refuse_without_weights(directory, names, wanted)
    if "config.json" not in names:
        raise CheckpointError(f"{directory} has no config.json; {wanted}")


def _refuse_without_weights(directory: Path, names: list[str], wanted: str) -> None:
    for suffixes, kind in (((".gguf",), "GGUF files"), ((".bin", ".pt", ".pth"), "pickled weights")):
        found = [name for name in names if name.endswith(suffixes)]
        if found:
            raise CheckpointError(
                f"{directory} holds {kind} ({found[0]}), which huorn does not open; {wanted}"
            )
    shards = [name for name in names if name.endswith(".safetensors")]
    if shards:
        raise CheckpointError(f"{directory} holds {shards[0]} but no {INDEX}; fetch the index")
    raise CheckpointError(f"{directory} has neither {SINGLE} nor {INDEX}; {wanted}")


def promised_tensors(directory: Path) -> dict[str, set[str] | None]:
    """Shard file name -> names of the tensors that the index puts there; None for a lone model.safetensors.

    Raises CheckpointError for a damaged index and for one whose shard names would leave the folder.
    """
    path = directory / INDEX
    if not path.exists():
        return {SINGLE: None}
    shard_of = read_json(path).get("weight_map")
    if not isinstance(shard_of, dict) or not shard_of:
        raise CheckpointError(f"{path} has no weight_map object; fetch the file again")
    promised: dict[str, set[str]] = {}
    for name, shard in shard_of.items():
        if not isinstance(shard, str):
            raise CheckpointError(f"{path} puts {name} into {shard!r}, which is no file name")
        promised.setdefault(shard, set()).add(name)
    for shard, names in promised.items():
        if not _is_plain_name(shard):
            raise CheckpointError(
                f"{path} puts {min(names)} into {shard!r}; "
                "a shard is a plain *.safetensors name inside the folder"
            )
    if SINGLE not in promised and (directory / SINGLE).exists():
        raise CheckpointError(
            f"{directory} holds {SINGLE} and an index of other shards; remove the stale one"
        )
    return dict(sorted(promised.items()))


def open_shard(directory: Path, shard: str, promised: set[str] | None) -> SafetensorsFile:
    """Opens one shard and compares it with the index. Raises CheckpointError naming file and tensor."""
    path = directory / shard
    if not path.is_file():
        what = "is not a regular file" if path.exists() else "is missing"
        says = f"; the index puts {min(promised)} there" if promised else ""
        raise CheckpointError(f"{path} {what}{says}")
    file = SafetensorsFile(path)
    if promised is not None:
        absent, strange = promised - file.infos.keys(), file.infos.keys() - promised
        if absent:
            raise CheckpointError(f"{path} does not hold {min(absent)}, which the index puts there")
        if strange:
            raise CheckpointError(f"{path} holds {min(strange)}, which the index does not put there")
    return file


def _is_plain_name(shard: str) -> bool:
    """Whether `shard` names a file of the folder itself. It may be a symbolic link, as in a hub cache."""
    separators = any(c in shard for c in "/\\:")
    return shard.isprintable() and not separators and shard.endswith(".safetensors") and shard[0] != "."


def _starts_with(path: Path, magic: bytes) -> bool:
    with path.open("rb") as file:
        return file.read(len(magic)) == magic
