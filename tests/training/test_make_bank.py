"""Prompts of a bank: one piece of each document that is long enough, the same whatever the order of the documents."""

from __future__ import annotations

import json
from pathlib import Path

from training.make_bank import LEAST_CHARACTERS, PIECE_CHARACTERS, pieces


def test_pieces(tmp_path: Path) -> None:
    texts = [
        f"{n} head of the file\n" + "".join(f"line {n} {i}\n" for i in range(n * 40)) for n in range(2, 32)
    ]
    short = ["x" * (LEAST_CHARACTERS - 1)]
    for folder, order in (("a", texts + short), ("b", [*reversed(texts), *short])):
        (tmp_path / folder).mkdir()
        for name, some in (("documents.jsonl", order[:20]), ("heldout.jsonl", order[20:])):
            (tmp_path / folder / name).write_text("".join(json.dumps({"text": text}) + "\n" for text in some))
    found = pieces(tmp_path / "a", 100)
    assert found == pieces(tmp_path / "b", 100)
    got = [json.loads(line)["text"] for line in found]
    assert len(got) == len(texts) == len(set(got))
    for text in got:
        whole = next(one for one in texts if text in one)
        assert LEAST_CHARACTERS <= len(text) <= PIECE_CHARACTERS
        assert whole.index(text) == 0 or whole[whole.index(text) - 1] == "\n"
        assert not (len(whole) > 3 * PIECE_CHARACTERS and text.endswith(whole[:20]))
    assert pieces(tmp_path / "a", 5) == found[:5]
