"""A released bank: works without huorn, and no bit of it can change unseen."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from huorn.errors import UsageError
from huorn.predictor.bank_files.bank_loader import to_int8
from huorn.predictor.bank_files.spec import BaseModelShape, check_base
from huorn.predictor.evaluate import Evaluation
from huorn.predictor.release.card import SNIPPET
from huorn.predictor.release.export import PYTHON_FILES, release, released_source
from huorn.predictor.release.manifest import MANIFEST, manifest_text, sha256_file
from huorn.predictor.release.verify import verify_bank
from huorn.predictor.released import open_bank
from tests.predictor.conftest import Released

ROOT = Path(__file__).parents[2]
# What a bank's files may import: nothing of huorn, nor what huorn has besides.
ALONE = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("huorn", "numpy", "typer", "rich", "tokenizers", "jinja2", "matplotlib"):
            raise ModuleNotFoundError(name + " is not there")
sys.meta_path.insert(0, Refuse())
sys.path.insert(0, ".")
"""


@pytest.fixture
def copy(released: Released, tmp_path: Path) -> Path:
    return Path(shutil.copytree(released.folder, tmp_path / "bank"))


def run_alone(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", ALONE + code], cwd=folder, capture_output=True, text=True)


def test_the_snippet_of_the_card_runs_in_the_folder_without_huorn(copy: Path) -> None:
    done = run_alone(SNIPPET + "\nassert not any(name.startswith('huorn') for name in sys.modules)", copy)
    assert done.returncode == 0, done.stderr
    assert SNIPPET in (copy / "README.md").read_text()
    # And it is a check: with one expected number changed it fails.
    fixture = load_file(copy / "parity_fixture.safetensors")
    fixture["0.expected_probabilities"][1, 0, 3] += 1e-6
    save_file(fixture, copy / "parity_fixture.safetensors")
    assert "AssertionError" in run_alone(SNIPPET, copy).stderr


def test_all_sets_hold_without_huorn_and_the_int8_bank_is_made_there(copy: Path, released: Released) -> None:
    code = """
from bank_loader import load, to_int8
from reference_scorer import probabilities
import torch
from safetensors.torch import load_file
cfg, state = load('.')
fixture = load_file('parity_fixture.safetensors')
for n in range(9):
    raw = {k[2:]: v for k, v in fixture.items() if k.startswith(f'{n}.') and 'expected' not in k}
    p = probabilities(state, raw, cfg.base_model.num_experts, cfg.features.ema_beta)
    assert (p == fixture[f'{n}.expected_probabilities']).all(), n
torch.save(to_int8(state), 'int8.pt')
"""
    assert (done := run_alone(code, copy)).returncode == 0, done.stderr
    made, want = torch.load(copy / "int8.pt", weights_only=True), to_int8(released.bank)
    assert made.keys() == want.keys()
    assert all(torch.equal(made[name], want[name]) for name in want)


def test_first_step_and_warm_sets_differ_in_kind(released: Released) -> None:
    fixture = load_file(released.folder / "parity_fixture.safetensors")
    assert bool((fixture["8.prior"] == 0).all())
    assert bool((fixture["8.previous"] == -1).all())
    assert int(fixture["8.step"]) == 0
    for n in range(8):
        assert bool((fixture[f"{n}.prior"].sum(1) > 2).all())  # of 3, what 40 tokens leave
        assert int(fixture[f"{n}.step"]) > 0


def test_verify_finds_one_flipped_bit_in_any_file(copy: Path) -> None:
    assert verify_bank(copy).other_environment is None
    rng = random.Random(0)
    names = sorted(path.name for path in copy.iterdir())
    assert set(PYTHON_FILES) | {
        "LICENSE",
        "NOTICE",
        "README.md",
        "config.json",
        "model.safetensors",
        MANIFEST,
    } <= set(names)
    for name in names:
        whole = (copy / name).read_bytes()
        for place in {0, len(whole) - 1, *(rng.randrange(len(whole)) for _ in range(12))}:
            data = bytearray(whole)
            data[place] ^= 1 << rng.randrange(8)
            (copy / name).write_bytes(data)
            with pytest.raises(UsageError) as caught:
                verify_bank(copy)
            assert name in str(caught.value), (name, place)
        (copy / name).write_bytes(whole)
        (copy / name).rename(copy / "away")
        with pytest.raises(UsageError) as caught:
            verify_bank(copy)
        assert name in str(caught.value)
        (copy / "away").rename(copy / name)
    assert verify_bank(copy).files == len(names)


def test_every_flipped_byte_of_the_manifest_is_found(copy: Path) -> None:
    whole = (copy / MANIFEST).read_bytes()
    for place in range(len(whole)):
        data = bytearray(whole)
        data[place] ^= 0x10
        (copy / MANIFEST).write_bytes(data)
        with pytest.raises(UsageError, match=MANIFEST):
            verify_bank(copy)


def seal(folder: Path, bank: object, **changes: object) -> None:
    """Writes a manifest that fits the files as they are now."""
    old = json.loads((folder / MANIFEST).read_text())
    hashes = {name: sha256_file(folder / name) for name in old["files"]}
    more = {name: old[name] for name in ("environment", "gate", "sources")} | changes
    (folder / MANIFEST).write_text(manifest_text(hashes, to_int8(bank), more))  # type: ignore[arg-type]


def test_other_scores_with_right_hashes_are_another_environment(copy: Path) -> None:
    fixture = load_file(copy / "parity_fixture.safetensors")
    fixture["4.expected_scores"][0, 0, 0] += 0.25
    save_file(fixture, copy / "parity_fixture.safetensors")
    seal(copy, open_bank(copy), environment={"torch": "9.9", "cpu": "abacus"})
    words = verify_bank(copy).other_environment
    assert words is not None
    assert words.startswith("other environment")
    assert "0.25" in words
    assert "torch 9.9 on abacus" in words


def test_files_of_a_bank_are_never_executed(copy: Path) -> None:
    for name in PYTHON_FILES:
        (copy / name).write_text("raise SystemExit('executed')\n")
    seal(copy, open_bank(copy))
    verify_bank(copy)


def test_damage_behind_right_hashes_is_named(copy: Path, released: Released) -> None:
    model = load_file(copy / "model.safetensors")
    for change, words in (
        ({"b_in": model["b_in"][:, 1:].contiguous()}, "b_in is"),
        ({"b_in": model["b_in"].float()}, "b_in is"),
        ({"strange": model["b_in"].clone()}, "unknown tensor strange"),
        ({"a": torch.full_like(model["a"], float("nan"))}, "a holds NaN"),
    ):
        save_file(model | change, copy / "model.safetensors")
        with pytest.raises(UsageError, match=words):
            open_bank(copy)
    save_file({name: value for name, value in model.items() if name != "w_out"}, copy / "model.safetensors")
    with pytest.raises(UsageError, match="lacks tensor w_out"):
        open_bank(copy)
    config = json.loads((copy / "config.json").read_text())
    for change, words in (
        ({"schema": "other v7"}, "'other v7'.*'huorn expert predictor v1'"),
        ({"heads": config["heads"] | {"layers": [3, 0]}}, "must ascend"),
        ({"heads": config["heads"] | {"trunk": "many"}}, "heads.trunk"),
        ({"more": 1}, "more"),
        ({"base_model": config["base_model"] | {"experts_per_token": 10**6}}, "more than num_experts"),
        ({"base_model": config["base_model"] | {"repo": "a\n## b"}}, "repo"),
        ({"heads": config["heads"] | {"horizons": [1, 4, 10**9]}}, "must not pass"),
        ({"features": config["features"] | {"uncaptured_logits": [99]}}, "uncaptured_logits"),
    ):
        (copy / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(UsageError, match=words):
            open_bank(copy)
    for text in ("[" * 100_000, "{", "", "[]", '"x"'):
        (copy / "config.json").write_text(text)
        with pytest.raises(UsageError):
            open_bank(copy)


def test_what_is_no_file_is_not_waited_for(copy: Path) -> None:
    for name, look in ((MANIFEST, verify_bank), ("config.json", open_bank), ("model.safetensors", open_bank)):
        whole = (copy / name).read_bytes()
        (copy / name).unlink()
        os.mkfifo(copy / name)
        with pytest.raises(UsageError, match="regular file"):
            look(copy)
        (copy / name).unlink()
        (copy / name).write_bytes(whole)


def test_check_base_tells_a_fine_tune_by_both_hashes(released: Released) -> None:
    base = released.bank.config.base_model
    check_base(released.bank.config, base)
    with pytest.raises(ValueError, match=f"{base.fingerprint}, this model has {'12' * 32}"):
        check_base(released.bank.config, base.model_copy(update={"fingerprint": "12" * 32}))
    for name in BaseModelShape.model_fields:
        if name not in ("repo", "revision", "fingerprint"):
            with pytest.raises(ValueError, match=name):
                check_base(released.bank.config, base.model_copy(update={name: 4097}))


def test_the_gate_stops_what_is_not_right(
    released: Released, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huorn.predictor.release.export as export

    def one_bit_less(tensors: dict[str, torch.Tensor]) -> bytes:
        tensors = {name: tensor.clone() for name, tensor in tensors.items()}
        if "w_in" in tensors:
            tensors["w_in"].view(torch.int16)[0, 0, 0] ^= 1
        return original(tensors)

    original = export.save
    monkeypatch.setattr(export, "save", one_bit_less)
    with pytest.raises(UsageError, match="w_in is not byte for byte"):
        release(released.bank, released.evaluation, tmp_path / "bank", "")
    monkeypatch.setattr(export, "save", original)
    worse = Evaluation(
        **{**vars(released.evaluation), "recall": json.loads(json.dumps(released.evaluation.recall))}
    )
    worse.recall["int8"]["test"]["mean"]["8"] -= 0.01
    with pytest.raises(UsageError, match="below BF16"):
        release(released.bank, worse, tmp_path / "bank", "")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "there").mkdir()
    with pytest.raises(UsageError, match="exists"):
        release(released.bank, released.evaluation, tmp_path / "there", "")


def test_released_sources_and_licence_are_those_of_the_project(released: Released) -> None:
    assert (released.folder / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()
    for name in PYTHON_FILES:
        text = (released.folder / name).read_text()
        assert text == released_source(name)
        assert "from huorn" not in text
        assert "import huorn" not in text
    assert oct((released.folder / "model.safetensors").stat().st_mode & 0o777) == oct(
        (released.folder / "README.md").stat().st_mode & 0o777
    )


def test_the_card_says_what_was_measured(released: Released) -> None:
    card, test = (released.folder / "README.md").read_text(), released.evaluation.recall["bf16"]["test"]
    for layer in ("0", "3", "6"):
        row = next(line for line in card.splitlines() if line.startswith(f"| {layer} |"))
        assert row.split("|")[2].strip() == f"{test[layer]['8']:.3f}"
    assert "0, 3, 6" in card
    assert "Made-up numbers." in card
    assert released.bank.config.base_model.fingerprint in card
