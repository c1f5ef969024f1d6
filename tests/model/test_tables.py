"""The decoder with its tables in the file: the same logits and tokens as with both in RAM, tied or not, and less memory."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from huorn import _native
from huorn.assets import EMBEDDED_MODEL
from huorn.checkpoint.reader import Checkpoint
from huorn.checkpoint.row_table import RowTable
from huorn.engine.generate import Generation
from huorn.engine.sampling import SamplingSettings
from huorn.engine.session import Session
from huorn.engine.tokenizer import encode
from huorn.errors import CheckpointError
from huorn.kernels.isa import ALL, available
from huorn.model import tables
from huorn.model.cpu_decoder import CpuDecoder, Sequences
from huorn.model.cpu_load import load_cpu_decoder, stored_bytes
from huorn.model.precision import Precision
from huorn.model.state import DecodeState
from huorn.model.tables import Tables
from huorn.model.two_pass_head import TwoPassHead

PROMPT = "def quicksort(items):"


@pytest.fixture(params=ALL)
def isa(request: pytest.FixtureRequest) -> str:
    if request.param not in available():
        pytest.skip(f"this CPU has no {request.param}")
    return str(request.param)


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables of any size count as large."""
    monkeypatch.setattr(tables, "LARGE_BYTES", 0)


def tied(folder: Path) -> Path:
    """seedling without a head of its own."""
    shutil.copytree(EMBEDDED_MODEL, folder)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    del tensors["lm_head.weight"]
    save_file(tensors, path, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["tie_word_embeddings"] = config["text_config"]["tie_word_embeddings"] = True
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def in_f32(folder: Path) -> Path:
    """seedling with both tables stored in F32, off the BF16 grid."""
    shutil.copytree(EMBEDDED_MODEL, folder)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for name in ("lm_head.weight", "model.language_model.embed_tokens.weight"):
        tensors[name] = tensors[name].float() * 1.001
    save_file(tensors, path, metadata={"format": "pt"})
    return folder


def decoders(folder: Path, isa: str) -> tuple[CpuDecoder, CpuDecoder]:
    """(two-pass, full)."""
    opened = []
    for two_pass in (True, False):
        checkpoint = Checkpoint.open(folder)
        how = Tables(checkpoint.config, two_pass=two_pass, by_row=two_pass)
        opened.append(load_cpu_decoder(checkpoint, Precision.BF16, _native.Runtime(2, isa), tables=how))
    assert [decoder.lm_head_kind for decoder in opened] == ["two-pass", "full"]
    return opened[0], opened[1]


@pytest.mark.parametrize("make", [lambda folder: EMBEDDED_MODEL, tied, in_f32], ids=["own", "tied", "f32"])
def test_logits_and_tokens_are_equal(make: Callable[[Path], Path], isa: str, tmp_path: Path) -> None:
    two_pass, full = decoders(make(tmp_path / "model"), isa)
    assert isinstance(two_pass.embedding, RowTable)
    ids = torch.randint(0, 4096, (90,), generator=torch.Generator().manual_seed(1))
    ids[10:20] = ids[0]  # rows asked for twice
    states = [[DecodeState.new(two_pass.config, 200, Precision.BF16) for _ in range(3)] for _ in range(2)]
    ours, theirs = (
        decoder.forward(ids, state[0], all_logits=True)
        for decoder, state in zip((two_pass, full), states, strict=True)
    )
    assert torch.equal(ours, theirs)
    for token, last in ((70, False), (3, True)):
        parts = [ids[:5], ids[5:6], ids[6 : 6 + token]]
        for other, one in zip(
            two_pass.next_tokens(Sequences(parts, states[0])), full.next_tokens(Sequences(parts, states[1])), strict=True
        ):  # fmt: skip
            found = other.largest(7)
            assert found.ids is not None
            assert torch.equal(found.logits, one.full()[found.ids])
            assert int(found.ids[found.logits.argmax()]) == int(one.full().argmax())
            assert not last or torch.equal(other.full(), one.full())
    for mine, yours in zip(*states, strict=True):
        assert mine.position == yours.position


def test_a_next_token_keeps_its_logits(isa: str) -> None:
    """They are computed when asked for: what is decoded in between must not show."""
    two_pass, full = decoders(EMBEDDED_MODEL, isa)
    for decoder in (two_pass, full):
        state = DecodeState.new(decoder.config, 50, Precision.BF16)
        token = decoder.next_token(torch.tensor([5, 6, 7]), state)
        decoder.next_token(torch.tensor([100, 200]), state)
        again = decoder.forward(torch.tensor([5, 6, 7]), DecodeState.new(decoder.config, 50, Precision.BF16))
        assert torch.equal(token.full(), again[0])


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingSettings(),
        SamplingSettings(repetition_penalty=1.3, presence_penalty=0.3, frequency_penalty=0.1),
        SamplingSettings(temperature=0.9, top_k=20, top_p=0.95, repetition_penalty=1.1, seed=7),
        SamplingSettings(temperature=0.8, top_p=0.9, seed=7),
    ],
    ids=["greedy", "penalties", "top-k", "top-p"],
)
def test_256_tokens_of_seedling(large: None, sampling: SamplingSettings) -> None:
    texts = []
    for kind in ("two-pass", "full"):
        session = Session.open(None, context=512, threads=2, lm_head=kind)  # type: ignore[arg-type]
        assert session.decoder.lm_head_kind == kind
        generation = Generation(
            session, encode(session.tokenizer, PROMPT), sampling, 256, stop_ids=frozenset()
        )
        texts.append(list(generation._tokens()))
        head = session.decoder.head  # type: ignore[attr-defined]
        if isinstance(head, TwoPassHead):
            whole = sampling.temperature > 0 and sampling.top_k == 0
            assert (head.counts.tokens, head.counts.full_products) == ((0, 256) if whole else (256, 0))
    assert len(texts[0]) == 256
    assert texts[0] == texts[1]


def test_what_is_held_in_ram(large: None, tmp_path: Path) -> None:
    config = Checkpoint.open(EMBEDDED_MODEL).config
    coded = config.vocab_size * (config.hidden_size + 8)
    stored = 2 * config.vocab_size * config.hidden_size
    for folder, saved in ((EMBEDDED_MODEL, 2 * stored - coded), (tied(tmp_path / "tied"), stored - coded)):
        checkpoint = Checkpoint.open(folder)
        needs = [
            stored_bytes(checkpoint, Tables.of(checkpoint, Precision.BF16, kind))[0]
            for kind in ("full", "two-pass")
        ]
        assert abs(needs[0] - needs[1] - saved) < 3 * 4096
        decoder = load_cpu_decoder(checkpoint, Precision.BF16, _native.Runtime(1, available()[-1]))
        assert decoder.lm_head_kind == "two-pass"


def test_two_passes_only_where_they_gain(monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = Checkpoint.open(EMBEDDED_MODEL)
    stored = 2 * checkpoint.config.vocab_size * checkpoint.config.hidden_size

    def two_pass(precision: Precision = Precision.BF16) -> bool:
        return Tables.of(checkpoint, precision).two_pass

    assert not two_pass()  # 2 MB
    monkeypatch.setattr(tables, "LARGE_BYTES", stored + 1)
    assert not two_pass()
    monkeypatch.setattr(tables, "LARGE_BYTES", stored)
    assert two_pass()
    assert not two_pass(Precision.F32)
    assert not Tables.of(checkpoint, Precision.BF16, "full").two_pass
    monkeypatch.setattr(checkpoint, "stored_dtype", lambda name: "F8_E4M3")
    assert not two_pass()


def test_only_the_embedding_in_the_file(isa: str) -> None:
    checkpoint = Checkpoint.open(EMBEDDED_MODEL)
    how = Tables(checkpoint.config, two_pass=False, by_row=True)
    ids = torch.tensor([4095, 0, 17, 0])
    for precision in Precision:
        runtime = _native.Runtime(1, isa)
        by_row = load_cpu_decoder(Checkpoint.open(EMBEDDED_MODEL), precision, runtime, tables=how)
        resident = load_cpu_decoder(
            Checkpoint.open(EMBEDDED_MODEL), precision, runtime, tables=replace(how, by_row=False)
        )
        ours, theirs = (
            decoder.forward(ids, DecodeState.new(checkpoint.config, 8, precision), all_logits=True)
            for decoder in (by_row, resident)
        )
        assert torch.equal(ours, theirs)


def test_a_damaged_row_of_the_embedding_changes_nothing(large: None, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(EMBEDDED_MODEL, folder)
    info = Checkpoint.open(folder).infos["model.language_model.embed_tokens.weight"]
    with info.file.open("r+b") as file:
        file.seek(info.start + 77 * 512)
        file.write(b"\xc0\x7f")
    decoder = load_cpu_decoder(Checkpoint.open(folder), Precision.BF16, _native.Runtime(1, available()[-1]))
    state = DecodeState.new(decoder.config, 50, Precision.BF16)
    decoder.next_token(torch.tensor([76, 78]), state)
    with pytest.raises(CheckpointError, match=r"embed_tokens\.weight holds NaN or infinity"):
        decoder.next_token(torch.tensor([5, 77]), state)
    assert state.position == 2
