"""An adversarial bank: every probability p of another one becomes 1 - p, so that what is least likely looks likeliest.

    python benchmarks/invert_bank.py BANK OUT

For `huorn bench pairs --predictor OUT`: forecasts that are wrong on purpose must cost next to nothing and change no token.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from safetensors.torch import load_file, save_file

from huorn.predictor.bank_files.bank_loader import CONFIG, MODEL


def invert(bank: Path, out: Path) -> None:
    """sigmoid(-(a z + b)) = 1 - sigmoid(a z + b)."""
    out.mkdir(parents=True)
    shutil.copyfile(bank / CONFIG, out / CONFIG)
    tensors = load_file(bank / MODEL)
    save_file(
        {name: -tensor if name in ("a", "b") else tensor for name, tensor in tensors.items()}, out / MODEL
    )


if __name__ == "__main__":
    invert(Path(sys.argv[1]), Path(sys.argv[2]))
