"""The native backend against transformers: F32 to rounding, BF16 no worse than transformers' own BF16, FP8 through its expansion.

What each number means stands in test_f32.py and test_bf16.py, which ask the same of the reference decoder.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig

from huorn import _native
from huorn.assets import EMBEDDED_MODEL
from huorn.checkpoint.reader import Checkpoint
from huorn.errors import CheckpointError
from huorn.kernels.isa import ALL, available
from huorn.model.cpu_decoder import CpuDecoder
from huorn.model.cpu_experts import MappedTable, ResidentTable
from huorn.model.cpu_load import load_cpu_decoder
from huorn.model.precision import Precision
from huorn.model.state import DecodeState

from .fp8_checkpoint import write_fp8_checkpoint
from .oracle import (
    CASES,
    Case,
    difference,
    oracle_logits,
    random_cuts,
    random_model,
    random_tokens,
    save,
    token_errors,
)
from .test_fp8 import CASE as FP8_CASE

TOLERANCE = 2e-5
TOKENS = 150
GREEDY = 64


@pytest.fixture(scope="module", params=ALL)
def isa(request: pytest.FixtureRequest) -> str:
    if request.param not in available():
        pytest.skip(f"this CPU has no {request.param}")
    return str(request.param)


def opened(folder: Path, precision: Precision, isa: str, mapped: bool = False) -> CpuDecoder:
    checkpoint = Checkpoint.open(folder)
    table = MappedTable(checkpoint) if mapped else None
    return load_cpu_decoder(checkpoint, precision, _native.Runtime(2, isa), table)


def run_pieces(decoder: CpuDecoder, tokens: Tensor, lengths: Sequence[int]) -> Tensor:
    """Logits f32 [T, V] of a fresh sequence fed in pieces of these lengths, which add up to T."""
    state = DecodeState.new(decoder.config, len(tokens), decoder.precision)
    return torch.cat(
        [decoder.forward(piece, state, all_logits=True) for piece in tokens.split(list(lengths))]
    )


# ---- F32 ----


@dataclass(frozen=True)
class Oracle:
    """A model on disk, tokens, transformers' logits for them, and what it goes on with after 20 of them."""

    folder: Path
    tokens: Tensor
    logits: Tensor
    greedy: list[int]


@pytest.fixture(scope="module")
def oracles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Oracle]:
    return {case.name: oracle_of(case, tmp_path_factory.mktemp("model")) for case in CASES}


def oracle_of(case: Case, folder: Path) -> Oracle:
    model, tokens = random_model(case), random_tokens(case, TOKENS)
    greedy = model.generate(
        tokens[None, :20],
        attention_mask=torch.ones(1, 20),
        max_new_tokens=GREEDY,
        do_sample=False,
        pad_token_id=0,
        use_cache="full_attention" in case.config().layer_types,  # its cache can not hold linear layers alone
    )[0, 20:]
    return Oracle(save(model, folder), tokens, oracle_logits(model, tokens), greedy.tolist())


@pytest.fixture(scope="module")
def f32_decoders(isa: str, oracles: dict[str, Oracle]) -> dict[str, CpuDecoder]:
    return {name: opened(oracle.folder, Precision.F32, isa) for name, oracle in oracles.items()}


@pytest.mark.parametrize("name", [case.name for case in CASES])
class TestF32:
    def test_logits(self, f32_decoders: dict[str, CpuDecoder], oracles: dict[str, Oracle], name: str) -> None:
        decoder, oracle = f32_decoders[name], oracles[name]
        whole = run_pieces(decoder, oracle.tokens, [TOKENS])
        assert difference(whole, oracle.logits) <= TOLERANCE
        for seed in range(2):  # and to the bit however it is cut
            lengths = random_cuts(TOKENS, seed)
            assert torch.equal(run_pieces(decoder, oracle.tokens, lengths), whole), lengths

    def test_greedy_tokens(
        self, f32_decoders: dict[str, CpuDecoder], oracles: dict[str, Oracle], name: str
    ) -> None:
        decoder, oracle = f32_decoders[name], oracles[name]
        state = DecodeState.new(decoder.config, 20 + GREEDY, Precision.F32)
        ours = [decoder.forward(oracle.tokens[:20], state)[-1].argmax()]
        while len(ours) < GREEDY:
            ours.append(decoder.forward(ours[-1].view(1), state)[-1].argmax())
        assert torch.stack(ours).tolist() == oracle.greedy
        assert len(set(oracle.greedy)) > 8, "a model that repeats itself compares little"


# ---- BF16 ----


@dataclass(frozen=True)
class Rounded:
    """Models of one shape in BF16 on disk, tokens, F32 logits of the same weights, and errors of transformers' BF16."""

    folders: list[Path]
    tokens: list[Tensor]
    references: list[Tensor]
    theirs: Tensor


@pytest.fixture(scope="module")
def rounded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Rounded]:
    return {case.name: rounded_of(case, tmp_path_factory.mktemp("bf16")) for case in CASES}


def rounded_of(case: Case, folder: Path) -> Rounded:
    made = Rounded([], [], [], torch.empty(0))
    theirs = []
    for seed in range(2 if case.name == "seedling-like" else 4):
        variant = replace(case, seed=case.seed + 100 * seed)
        model, tokens = random_model(variant).to(torch.bfloat16), random_tokens(variant, 96)
        made.folders.append(save(model, folder / str(seed)))
        made.tokens.append(tokens)
        made.references.append(oracle_logits(copy.deepcopy(model).float(), tokens))
        theirs.append(token_errors(oracle_logits(model, tokens), made.references[-1]))
    return replace(made, theirs=torch.cat(theirs))


@pytest.mark.parametrize("name", [case.name for case in CASES])
def test_bf16_error_is_at_most_that_of_transformers(rounded: dict[str, Rounded], isa: str, name: str) -> None:
    made = rounded[name]
    ours = torch.cat(
        [
            token_errors(run_pieces(opened(folder, Precision.BF16, isa), tokens, [64, 1, 2, 29]), reference)
            for folder, tokens, reference in zip(made.folders, made.tokens, made.references, strict=True)
        ]
    )
    assert ours.mean() <= made.theirs.mean()
    assert 0 < ours.median() <= made.theirs.median()


@pytest.fixture(scope="module")
def seedling_f32() -> tuple[Qwen3_5MoeForCausalLM, Tensor]:
    """The shipped model as transformers holds it, its FP8 codes times scales in F32, and tokens."""
    config = json.loads((EMBEDDED_MODEL / "config.json").read_text())["text_config"]
    text = Qwen3_5MoeTextConfig(**config)
    text._attn_implementation = text._experts_implementation = "eager"
    model = Qwen3_5MoeForCausalLM(text).float().eval()
    checkpoint = Checkpoint.open(EMBEDDED_MODEL)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            short = name.removeprefix("model.")
            if name.endswith(("gate_up_proj", "experts.down_proj")):
                layer = int(short.split(".")[1])
                for number, place in enumerate(parameter):
                    expert = checkpoint.expert(layer, number)
                    both = (expert.gate, expert.up) if name.endswith("gate_up_proj") else (expert.down,)
                    place.copy_(torch.cat([weight.expand() for weight in both]))
            elif parameter.dim() == 2:
                parameter.copy_(checkpoint.weight(short).expand())
            else:
                parameter.copy_(checkpoint.tensor(short).float())
    return model, torch.randint(0, text.vocab_size, (160,), generator=torch.Generator().manual_seed(4))


@pytest.fixture(scope="module")
def seedling_logits(seedling_f32: tuple[Qwen3_5MoeForCausalLM, Tensor]) -> tuple[Tensor, Tensor]:
    """Transformers in F32, and the errors of its BF16 run."""
    model, tokens = seedling_f32
    reference = oracle_logits(model, tokens)
    return reference, token_errors(oracle_logits(copy.deepcopy(model).to(torch.bfloat16), tokens), reference)


def test_seedling_f32(
    seedling_f32: tuple[Qwen3_5MoeForCausalLM, Tensor], seedling_logits: tuple[Tensor, Tensor], isa: str
) -> None:
    tokens = seedling_f32[1]
    ours = run_pieces(opened(EMBEDDED_MODEL, Precision.F32, isa), tokens, [100, 1, 59])
    assert difference(ours, seedling_logits[0]) <= TOLERANCE


def test_seedling_bf16_error_is_at_most_that_of_transformers(
    seedling_f32: tuple[Qwen3_5MoeForCausalLM, Tensor], seedling_logits: tuple[Tensor, Tensor], isa: str
) -> None:
    (reference, theirs), tokens = seedling_logits, seedling_f32[1]
    ours = token_errors(
        run_pieces(opened(EMBEDDED_MODEL, Precision.BF16, isa), tokens, [100, 1, 59]), reference
    )
    assert ours.mean() <= theirs.mean()
    assert 0 < ours.median() <= theirs.median()


# ---- layouts, and experts in RAM or in the mapped files ----


@dataclass(frozen=True)
class Stored:
    """One checkpoint on disk with tokens and the F32 logits of its weights."""

    folder: Path
    tokens: Tensor
    reference: Tensor


@pytest.fixture(scope="module")
def fp8(tmp_path_factory: pytest.TempPathFactory) -> Stored:
    model, folder = random_model(FP8_CASE), tmp_path_factory.mktemp("fp8")
    write_fp8_checkpoint(model, folder)
    tokens = random_tokens(FP8_CASE, 90)
    return Stored(folder, tokens, oracle_logits(model, tokens))


BF16_CASE = CASES[0]


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Stored:
    """BF16, experts one by one, as transformers writes it."""
    model = random_model(BF16_CASE).to(torch.bfloat16)
    tokens = random_tokens(BF16_CASE, 90)
    folder = save(model, tmp_path_factory.mktemp("single"))
    return Stored(folder, tokens, oracle_logits(model.float(), tokens))


@pytest.fixture(scope="module")
def fused(single: Stored, tmp_path_factory: pytest.TempPathFactory) -> Stored:
    """The same weights with the experts of a layer in two tensors, as in the BF16 release."""
    tensors = load_file(single.folder / "model.safetensors")
    experts = BF16_CASE.config().num_experts
    assert any(".experts.0." in name for name in tensors)
    for layer in range(len(BF16_CASE.config().layer_types)):
        stem = f"model.layers.{layer}.mlp.experts."
        parts = {
            part: [tensors.pop(f"{stem}{n}.{part}_proj.weight") for n in range(experts)]
            for part in ("gate", "up", "down")
        }
        both = [torch.cat(pair) for pair in zip(parts["gate"], parts["up"], strict=True)]
        tensors[stem + "gate_up_proj"] = torch.stack(both)
        tensors[stem + "down_proj"] = torch.stack(parts["down"])
    folder = tmp_path_factory.mktemp("fused")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text((single.folder / "config.json").read_text())
    return replace(single, folder=folder)


def resident_and_mapped(folder: Path, isa: str) -> tuple[CpuDecoder, CpuDecoder]:
    resident, mapped = (opened(folder, Precision.BF16, isa, mapped) for mapped in (False, True))
    assert isinstance(resident.experts, ResidentTable)
    assert isinstance(mapped.experts, MappedTable)
    return resident, mapped


@pytest.mark.parametrize("layout", ["fp8", "single", "fused"])
def test_mapped_experts_give_the_bits_of_resident_ones(
    request: pytest.FixtureRequest, isa: str, layout: str
) -> None:
    stored: Stored = request.getfixturevalue(layout)
    resident, mapped = resident_and_mapped(stored.folder, isa)
    expected = run_pieces(resident, stored.tokens, [90])
    for lengths in ([90], [1, 2, 70, 1, 16]):
        assert torch.equal(run_pieces(mapped, stored.tokens, lengths), expected), lengths
        assert torch.equal(run_pieces(resident, stored.tokens, lengths), expected), lengths
    # rounding sends a few tokens to other experts; a wrong weight would show in every token
    assert float(token_errors(expected, stored.reference).median()) < 0.02


def test_fused_experts_give_the_bits_of_single_ones(single: Stored, fused: Stored, isa: str) -> None:
    assert Checkpoint.open(fused.folder).layout.fused_experts
    assert not Checkpoint.open(single.folder).layout.fused_experts
    one, other = (
        run_pieces(opened(stored.folder, Precision.BF16, isa), single.tokens, [90])
        for stored in (single, fused)
    )
    assert torch.equal(one, other)


def test_fp8_f32(fp8: Stored, isa: str) -> None:
    decoder = opened(fp8.folder, Precision.F32, isa)
    for lengths in ([90], [2, 70, *[1] * 18]):
        assert difference(run_pieces(decoder, fp8.tokens, lengths), fp8.reference) <= TOLERANCE


@pytest.fixture(scope="module")
def fp8_theirs(fp8: Stored, tmp_path_factory: pytest.TempPathFactory) -> Tensor:
    """Errors of transformers' BF16 run on the FP8 model's expansion."""
    model = random_model(FP8_CASE)
    write_fp8_checkpoint(model, tmp_path_factory.mktemp("again"))  # makes model the F32 expansion
    return token_errors(oracle_logits(model.to(torch.bfloat16), fp8.tokens), fp8.reference)


def test_fp8_bf16_error_is_at_most_that_of_transformers(fp8: Stored, fp8_theirs: Tensor, isa: str) -> None:
    ours = token_errors(run_pieces(opened(fp8.folder, Precision.BF16, isa), fp8.tokens, [90]), fp8.reference)
    assert ours.mean() <= fp8_theirs.mean()
    assert 0 < ours.median() <= fp8_theirs.median()


@pytest.mark.parametrize("mapped", [True, False], ids=["mapped", "resident"])
def test_a_nan_code_in_an_expert(fp8: Stored, tmp_path: Path, mapped: bool) -> None:
    """Resident experts are refused when they are read, mapped ones before the first use, which changes nothing."""
    for file in fp8.folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    for expert in range(FP8_CASE.config().num_experts):
        name = f"model.language_model.layers.2.mlp.experts.{expert}.down_proj.weight"
        info = Checkpoint.open(tmp_path).infos[name]
        with info.file.open("r+b") as file:
            file.seek(info.start + info.nbytes - 1)
            file.write(b"\xff")
    wrong = r"layers\.2\.mlp\.experts\.\d+\.down_proj\.weight"
    if not mapped:
        with pytest.raises(CheckpointError, match=wrong):
            opened(tmp_path, Precision.BF16, available()[-1], mapped)
        return
    decoder = opened(tmp_path, Precision.BF16, available()[-1], mapped)
    state = DecodeState.new(decoder.config, 90, Precision.BF16)
    conv, recurrent = state.conv, state.recurrent
    with pytest.raises(CheckpointError, match=wrong):
        decoder.forward(fp8.tokens[:10], state)
    assert (state.position, state.conv, state.recurrent) == (0, conv, recurrent)
