"""--overlap: what the weights look like, that they do what they are for, and that bytes are as ever without it."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from huorn.bench import routing
from huorn.checkpoint.reader import Checkpoint
from huorn.checkpoint.verify import verify
from huorn.commands.synth import synth as command
from huorn.engine.fast_tier import Residency
from huorn.engine.session import Session
from huorn.errors import UsageError
from huorn.model.cpu_decoder import CpuDecoder
from huorn.model.state import DecodeState
from huorn.schedule.plan import Plan
from huorn.synth import disk_writer, presets
from huorn.synth.locality import HIGHEST, LOWEST, SLOW_SHARE, slow_share
from huorn.synth.synthesize import synthesize

RELEASE = presets.find_preset("qwen3.5-35b-a3b-fp8").config
SMALL = RELEASE.model_copy(
    update={
        "hidden_size": 512,
        "num_hidden_layers": 4,
        "layer_types": presets.layer_types(4),
        "num_attention_heads": 4,
        "head_dim": 64,
        "vocab_size": 520,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
    }
)
POPULAR, SLOW, FRESH = slice(0, 128), slice(128, 256), slice(256, None)


@pytest.fixture(scope="module", autouse=True)
def small_preset() -> Iterator[None]:
    """The 35B shape made small enough for a test: 18 MB."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(presets.PRESETS, "small", presets.Preset("small", SMALL))
        yield


def make(out: Path, overlap: float | None, **options: bool) -> Path:
    synthesize("small", out, None, 3, lambda done, total: None, overlap=overlap, **options)
    return out


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def alike(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("alike") / "model", 0.4)


def measured(folder: Path) -> routing.RoutingMeasurement:
    return routing.measure_routing(Session.open(folder, threads=1), lambda done, total: None)


# ---- what it does ----


def test_more_is_more(alike: Path, tmp_path: Path) -> None:
    """Four of 32 experts: 0.125 by chance. The calibration is for eight of 256, so only the order is looked at."""
    found = [
        measured(folder).overlap
        for folder in (
            make(tmp_path / "none", None), make(tmp_path / "low", 0.2), alike, make(tmp_path / "high", 0.6)
        )
    ]  # fmt: skip
    assert found[0] < 0.2
    for less, more in pairwise(found):
        assert more > less + 0.08, found


def test_what_is_measured_is_what_the_routers_chose(alike: Path) -> None:
    """The same tokens read in one piece, without a look at them on the way, are routed to the same experts."""
    decoder = Session.open(alike, threads=1).decoder
    assert isinstance(decoder, CpuDecoder)
    drawn, ids = routing._decode(routing._Observed.of(decoder), 3, 9, lambda done, total: None)
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(SMALL.vocab_size, (3, routing.PROMPT_TOKENS), generator=generator)
    answers = torch.tensor(drawn).view(9, 3).t()
    decoder.quick_pairs = False
    for prompt, answer, chosen in zip(prompts, answers, ids, strict=True):
        seen: list[NDArray[np.int32]] = []

        def plan(layer_ids: NDArray[np.int32], seen: list[NDArray[np.int32]] = seen) -> Plan:
            seen.append(layer_ids.copy())
            return Plan.per_pair(layer_ids)

        decoder.plan = plan  # type: ignore[method-assign]
        decoder.forward(torch.cat([prompt, answer]), DecodeState.new(SMALL, 40, decoder.precision))
        for layer in range(4):
            assert np.array_equal(seen[layer][routing.PROMPT_TOKENS :], chosen[:, layer])


def test_the_decode_does_not_repeat_itself(alike: Path) -> None:
    found = measured(alike)
    assert (found.sequences, found.tokens) == routing.IN_RAM
    drawn = found.sequences * found.tokens
    by_chance = SMALL.vocab_size * (1 - (1 - 1 / SMALL.vocab_size) ** drawn)
    assert found.different_tokens > by_chance / 2
    assert 0.25 < found.chance_hottest_quarter < found.hottest_quarter < 1


def test_a_model_that_does_not_fit_is_measured_on_fewer_tokens(alike: Path) -> None:
    steps: list[tuple[int, int]] = []
    session = Session.open(alike, threads=1, residency=Residency(slots=0.5))
    found = routing.measure_routing(session, lambda done, total: steps.append((done, total)))
    assert (found.sequences, found.tokens) == routing.FROM_DISK
    assert steps == [(n, found.tokens) for n in range(found.tokens + 1)]
    assert 0.2 < found.overlap < 0.7


# ---- what is in the files ----


def rms(part: Tensor) -> float:
    return part.double().square().mean().sqrt().item()


def expanded(checkpoint: Checkpoint, name: str) -> Tensor:
    """Codes times scales, block by block."""
    scales = checkpoint.tensor(f"{name}_scale_inv").double()
    codes = checkpoint.tensor(name).double()
    return (
        codes * scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[: codes.shape[0], : codes.shape[1]]
    )


def test_only_the_embedding_and_layer_0_write_to_the_two_blocks(alike: Path) -> None:
    checkpoint = Checkpoint.open(alike)
    embedding = checkpoint.tensor("embed_tokens.weight").double()
    assert (embedding[:, POPULAR] == 1).all()
    assert (embedding[:, SLOW] == 0).all()
    assert rms(embedding[:, FRESH]) == pytest.approx(1, rel=0.02)
    for layer in range(4):
        mixer = "self_attn.o_proj" if layer == 3 else "linear_attn.out_proj"
        names = [mixer, "mlp.shared_expert.down_proj", *(f"mlp.experts.{n}.down_proj" for n in (0, 7, 31))]
        for name in names:
            weight = expanded(checkpoint, f"layers.{layer}.{name}.weight")
            written = {
                "popular": rms(weight[POPULAR]),
                "slow": rms(weight[SLOW]),
                "fresh": rms(weight[FRESH]),
            }
            kept = "slow" if (layer, name) == (0, mixer) else "fresh"
            assert all(each < 1e-3 * written[kept] for block, each in written.items() if block != kept), name


def test_routers_keep_the_spread_of_their_logits(alike: Path) -> None:
    """1.5 is what they have without; the residual is as it was measured: 1, 0.93 and, at layer n, sqrt(1 + 0.6 n)."""
    checkpoint = Checkpoint.open(alike)
    for layer in range(4):
        weight = checkpoint.tensor(f"layers.{layer}.mlp.gate.weight").double()
        sizes = torch.full((512,), math.sqrt(1 + 0.6 * layer), dtype=torch.float64)
        sizes[POPULAR], sizes[SLOW] = 1.0, 0.93
        parts = (weight * sizes / rms(sizes)).square()
        assert parts.sum(1).mean().sqrt().item() == pytest.approx(1.5, rel=0.03)
        shares = [parts[:, block].sum().item() / parts.sum().item() for block in (POPULAR, SLOW)]
        assert shares[1] == pytest.approx(slow_share(0.4), rel=0.05)
        assert 0.03 < shares[0] < 0.12


def test_it_is_a_whole_checkpoint_that_says_what_it_is(tmp_path: Path) -> None:
    out = make(tmp_path / "model", 0.4, manifest=True)
    report = verify(out, None, lambda done, total: None)
    assert report.ok, report.problems
    assert json.loads((out / "config.json").read_text())["huorn_synthetic"]["overlap"] == 0.4


def test_same_request_same_bytes_however_they_are_cut(
    alike: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_writer, "CHUNK_BYTES", 4096)
    assert contents(make(tmp_path / "again", 0.4)) == contents(alike)
    assert contents(make(tmp_path / "other", 0.41)) != contents(alike)


def test_the_same_on_every_machine_and_without_the_option_as_before_there_was_one(
    alike: Path, tmp_path: Path
) -> None:
    """Pinned: benchmarks were taken on these bytes."""
    assert checksum(alike) == PINNED_ALIKE
    assert checksum(make(tmp_path / "none", None)) == PINNED_WITHOUT


def checksum(folder: Path) -> str:
    """Of all shards; config.json has the version in it."""
    shards = sorted(folder.glob("*.safetensors"))
    return hashlib.sha256(b"".join(shard.read_bytes() for shard in shards)).hexdigest()[:16]


# ---- how it is asked for ----


def test_share_rises_with_the_overlap_asked_for() -> None:
    assert [slow_share(asked) for asked in SLOW_SHARE] == list(SLOW_SHARE.values())
    shares = [slow_share(n / 100) for n in range(round(100 * LOWEST), round(100 * HIGHEST) + 1)]
    assert all(less < more for less, more in pairwise(shares))
    assert shares[0] > 0
    assert shares[-1] < 0.94


@pytest.mark.parametrize("wrong", [0.19, 0.61, -1.0, math.nan, math.inf])
def test_out_of_range_writes_nothing(tmp_path: Path, wrong: float) -> None:
    with pytest.raises(UsageError, match=r"--overlap .* is out of range; give 0.2 to 0.6"):
        make(tmp_path / "model", wrong)
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize("preset", ["tiny-fp8", "qwen3.5-35b-a3b-bf16"])
def test_presets_without_blocks_write_nothing(tmp_path: Path, preset: str) -> None:
    with pytest.raises(UsageError, match=f"can not be had with --preset {preset}; use qwen"):
        synthesize(preset, tmp_path / "model", 1, 0, lambda done, total: None, overlap=0.3)
    assert not (tmp_path / "model").exists()


def test_another_overlap_does_not_continue_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(disk_writer.DiskWriter, "write", interrupted)
        with pytest.raises(KeyboardInterrupt):
            make(tmp_path / "model", 0.3)
    for other in (None, 0.4):
        with pytest.raises(UsageError, match=r"unfinished run with .*overlap 0\.3"):
            make(tmp_path / "model", other)


def run_command(out: Path, overlap: float | None, measure: bool, report: Path) -> None:
    command("small", out, 2, 0, False, overlap, measure, report)


def test_the_command_says_what_came_of_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_command(tmp_path / "model", 0.3, True, tmp_path / "report.json")
    said, report = capsys.readouterr().out, json.loads((tmp_path / "report.json").read_text())
    assert report["overlap"] == 0.3
    assert f"overlap {report['routing']['overlap']:.3f} (asked for 0.3)" in said
    assert f"hottest quarter {report['routing']['hottest_quarter']:.3f}" in said


@pytest.mark.parametrize(("overlap", "measure"), [(None, True), (0.3, False)])
def test_the_command_does_not_measure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], overlap: float | None, measure: bool
) -> None:
    run_command(tmp_path / "model", overlap, measure, tmp_path / "report.json")
    assert "hottest" not in capsys.readouterr().out
    assert json.loads((tmp_path / "report.json").read_text())["routing"] is None


def test_an_interrupted_measurement_leaves_the_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(routing, "measure_routing", interrupted)
    run_command(tmp_path / "model", 0.3, True, tmp_path / "report.json")
    assert capsys.readouterr().err.endswith("not measured\n")
    assert json.loads((tmp_path / "report.json").read_text())["routing"] is None
    assert Checkpoint.open(tmp_path / "model").config.num_hidden_layers == 2


PINNED_ALIKE = "b0aead1a4d1159af"
PINNED_WITHOUT = "6052472ea571d6ee"
