"""Decoding when only a part of the experts may be in memory: slots against mapped files, each in a memory cgroup of one size.

    sudo python benchmarks/limited_decode.py --model DIR [--share 0.5,0.25] [--rounds 3] [--json FILE]

A round runs every arm once, in turn: `slots` is huorn with --memory at the limit; `plain`, `random`, `ahead` and `huge` leave the
experts to the page cache with that advice (huorn bench decode --mapped). The files are dropped from the page cache before each
run, since pages that another process read are charged to nobody. Needs the right to make a group below the memory controller.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

from huorn.bench.memory_group import MemoryGroup
from huorn.checkpoint.reader import Checkpoint
from huorn.engine.tokenizer import load_tokenizer
from huorn.machine.page_cache import drop_pages
from huorn.memory import checkpoint_budget, format_bytes
from huorn.model.precision import Precision

CONTEXT = 512
ARMS = ("slots", "plain", "random", "ahead", "huge")


def run(arm: str, folder: Path, limit: int, tokens: int) -> dict[str, float]:
    """One process of one arm; what `huorn bench decode --json` says."""
    drop_pages(folder.glob("*.safetensors"))
    group = MemoryGroup(limit)
    with tempfile.NamedTemporaryFile(suffix=".json") as out:
        how = ["--memory", str(limit)] if arm == "slots" else ["--mapped", arm]
        command = [
            str(Path(sys.executable).with_name("huorn")), "bench", "decode", "--model", str(folder), "--repeats", "1",
            "--context", str(CONTEXT), "--prompt-tokens", "16", "--max-tokens", str(tokens), "--no-yardstick",
            "--json", out.name, *how,
        ]  # fmt: skip
        try:
            subprocess.run(
                command, check=True, capture_output=True, preexec_fn=lambda: group.tasks.write_text("0")
            )
        finally:
            group.close()
        return dict(json.loads(Path(out.name).read_text()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--share", default="0.5,0.25")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--arms", default=",".join(ARMS))
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    checkpoint = Checkpoint.open(options.model)
    load_tokenizer(options.model, checkpoint.config.vocab_size)  # part of what the program takes
    budget = checkpoint_budget(checkpoint, CONTEXT, Precision.BF16, False, threads=2)
    results: dict[str, dict[str, list[dict[str, float]]]] = {}
    for share in options.share.split(","):
        limit = budget.resident_bytes + round(float(share) * budget.mapped_bytes)
        print(f"{share} of the experts allowed: {format_bytes(limit)}", flush=True)
        found: dict[str, list[dict[str, float]]] = {arm: [] for arm in options.arms.split(",")}
        for _ in range(options.rounds):
            for arm in found:
                found[arm].append(run(arm, options.model, limit, options.tokens))
                last = found[arm][-1]
                print(
                    f"  {arm:7} {last['decode_tok_s']:.2f} tok/s, prefill {last['prefill_tok_s']:.1f}",
                    flush=True,
                )
        for arm, runs in found.items():
            print(f"{arm:7} median {median(run['decode_tok_s'] for run in runs):.2f} tok/s")
        results[share] = found
        if options.json:
            options.json.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
