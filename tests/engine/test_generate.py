"""The decode loop against the plainest one there is: a new state and the whole sequence in one forward for every token."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from huorn.engine import prefix
from huorn.engine.generate import Generation
from huorn.engine.sampling import SamplingSettings
from huorn.engine.session import Session
from huorn.engine.tokenizer import encode
from huorn.errors import UsageError
from huorn.model.precision import Precision
from huorn.model.state import DecodeState
from huorn.schedule import shapes

PROMPT = "def quicksort(items):"


@pytest.fixture(scope="module")
def session(tiny_model: Path) -> Session:
    return Session.open(tiny_model, context=256, threads=1, precision=Precision.F32)


def plain_greedy(session: Session, prompt_ids: list[int], count: int) -> list[int]:
    ids = list(prompt_ids)
    for _ in range(count):
        state = DecodeState.new(session.config, len(ids), Precision.F32)
        ids.append(int(session.decoder.forward(torch.tensor(ids), state)[-1].argmax()))
        if ids[-1] in session.stop_ids:
            break
    return ids[len(prompt_ids) :]


def run(session: Session, text: str, max_tokens: int = 24, **options: object) -> Generation:
    sampling = options.pop("sampling", SamplingSettings())
    generation = Generation(session, encode(session.tokenizer, text), sampling, max_tokens, **options)  # type: ignore[arg-type]
    assert "".join(generation) == generation.stats.text
    return generation


@pytest.mark.parametrize("prompt", [PROMPT, "a", "日本", "x" * 40])
@pytest.mark.parametrize("chunk", [1, 7, 512])
def test_greedy_text_is_that_of_the_plain_loop(
    session: Session, monkeypatch: pytest.MonkeyPatch, prompt: str, chunk: int
) -> None:
    monkeypatch.setattr("huorn.engine.generate.PREFILL_CHUNK", chunk)
    want = plain_greedy(session, encode(session.tokenizer, prompt), 24)
    stats = run(session, prompt).stats
    assert stats.text == session.tokenizer.decode(want)
    assert stats.completion_tokens == len(want)
    assert stats.prompt_tokens == len(encode(session.tokenizer, prompt))
    assert stats.finish_reason == ("stop" if want[-1] in session.stop_ids else "length")


def test_stats_are_filled(session: Session) -> None:
    stats = run(session, PROMPT).stats
    assert stats.completion_tokens == 24
    assert stats.prefill_tok_s is not None
    assert stats.decode_tok_s is not None
    assert stats.ttft_s is not None
    assert min(stats.prefill_tok_s, stats.decode_tok_s, stats.ttft_s) > 0
    assert stats.peak_rss_bytes > 50_000_000  # torch alone takes more


def test_what_was_not_timed_is_none(session: Session) -> None:
    one, none = run(session, PROMPT, 1).stats, run(session, PROMPT, 0).stats
    assert (one.completion_tokens, one.decode_tok_s) == (1, None)
    assert (none.completion_tokens, none.decode_tok_s, none.ttft_s, none.text) == (0, None, None, "")


def test_an_end_token_ends_it(session: Session) -> None:
    ids = plain_greedy(session, encode(session.tokenizer, PROMPT), 24)
    end = ids[5]
    stats = run(session, PROMPT, stop_ids=frozenset([end])).stats
    first = ids.index(end)
    assert stats.finish_reason == "stop"
    assert stats.completion_tokens == first + 1
    assert stats.text == session.tokenizer.decode(ids[:first])


def test_stop_strings_cut_the_text(session: Session) -> None:
    text = run(session, PROMPT).stats.text
    for start, length in ((3, 1), (6, 4), (2, 9)):
        stop = text[start : start + length]
        stats = run(session, PROMPT, stop=["never in it", stop]).stats
        assert stats.text == text[: text.find(stop)]
        assert stats.finish_reason == "stop"


def test_what_a_stop_string_held_back_comes_at_the_end(session: Session) -> None:
    text = run(session, PROMPT).stats.text
    assert run(session, PROMPT, stop=[text[-3:] + " and more"]).stats.text == text


def test_the_context_ends_it(session: Session) -> None:
    stats = run(session, "x y " * 60, 1000, stop_ids=frozenset()).stats
    assert stats.prompt_tokens + stats.completion_tokens == 256
    assert stats.finish_reason == "length"


def test_the_same_seed_gives_the_same_text(session: Session) -> None:
    def text(seed: int) -> str:
        return run(
            session, PROMPT, sampling=SamplingSettings(temperature=1.0, top_p=0.9, seed=seed)
        ).stats.text

    assert text(1) == text(1)
    assert len({text(seed) for seed in range(4)}) > 1


def test_repetition_penalty_covers_the_prompt(session: Session) -> None:
    """With a huge penalty no token of prompt or answer comes a second time."""
    ids = encode(session.tokenizer, PROMPT)
    generation = Generation(session, ids, SamplingSettings(repetition_penalty=1e6), 60, stop_ids=frozenset())
    answer = list(generation._tokens())
    assert len(set(answer)) == 60
    assert not set(answer) & set(ids)


@pytest.mark.parametrize("when", [0, 1, 3])
def test_cancel_keeps_what_there_is(session: Session, when: int) -> None:
    generation = Generation(
        session, encode(session.tokenizer, PROMPT), SamplingSettings(), 24, stop_ids=frozenset()
    )
    if when == 0:
        generation.cancel()
    pieces = []
    for piece in generation:
        pieces.append(piece)
        if len(pieces) == when:
            generation.cancel()
    assert generation.stats.finish_reason == "cancelled"
    assert len(pieces) in (when, when + 1)  # + 1: what a stop string or an unfinished character held back
    assert generation.stats.completion_tokens <= 24


@pytest.mark.parametrize(
    ("ids", "max_tokens", "message"),
    [([], 5, "prompt is empty"), ([1], -1, "--max-tokens is -1"), ([1] * 256, 5, "256 tokens, which leaves no room"),
     ([1] * 300, 5, r"300 tokens, which leaves no room in a context of 256.*up to 2048")],
)  # fmt: skip
def test_bad_requests(session: Session, ids: list[int], max_tokens: int, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Generation(session, ids, SamplingSettings(), max_tokens)


def test_chunks_cover_the_prompt_and_stop_at_the_cut() -> None:
    from huorn.engine.generate import _chunks

    assert shapes.PREFILL_CHUNK == 512
    assert list(_chunks(0, None, 1100)) == [(0, 512), (512, 1024), (1024, 1100)]
    assert list(_chunks(10, 600, 700)) == [(10, 522), (522, 600), (600, 700)]
    assert list(_chunks(600, 600, 700)) == [(600, 700)]
    assert list(_chunks(650, 600, 700)) == [(650, 700)]


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


class TestPrefixState:
    """Going back must give the logits of a new state. F32, so an equal sequence of chunks gives equal bits."""

    def logits(self, session: Session, ids: list[int]) -> torch.Tensor:
        return session.new_state().read(ids).full()

    def test_goes_on_from_the_end(self, session: Session) -> None:
        state = session.new_state()
        state.read([1, 2, 3])
        assert state.rewind([1, 2, 3, 4]) == 3
        torch.testing.assert_close(
            state.read([4]).full(), self.logits(session, [1, 2, 3, 4]), rtol=1e-4, atol=1e-4
        )

    def test_goes_back_to_the_mark(self, session: Session) -> None:
        state = session.new_state()
        state.read([1, 2, 3])
        state.mark()
        state.read([9, 9, 9, 9])
        assert state.rewind([1, 2, 3, 4]) == 3
        torch.testing.assert_close(
            state.read([4]).full(), self.logits(session, [1, 2, 3, 4]), rtol=1e-4, atol=1e-4
        )
        assert state.rewind([1, 2, 3, 4, 5]) == 4

    def test_starts_anew_when_nothing_fits(self, session: Session) -> None:
        state = session.new_state()
        state.read([1, 2, 3])
        state.mark()
        state.read([4])
        for ids in ([1, 2], [1, 2, 3][:3], [2, 2, 3, 4, 5]):
            assert state.rewind(ids) == 0
            torch.testing.assert_close(state.read(ids).full(), self.logits(session, ids), rtol=0, atol=0)
            state.read([7])

    def test_one_token_is_left_to_read(self, session: Session) -> None:
        state = session.new_state()
        state.read([1, 2, 3])
        assert state.rewind([1, 2, 3]) == 0

    def test_an_interrupt_anywhere_in_reading_is_undone(
        self, session: Session, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The worst moment: the state has moved on, and what was read is not noted yet."""
        state = session.new_state()
        state.read([1, 2, 3])
        monkeypatch.setattr(prefix, "_Point", interrupt)
        with pytest.raises(KeyboardInterrupt):
            state.read([8, 9])
        monkeypatch.undo()
        assert state.rewind([1, 2, 3, 4]) == 3
        logits = self.logits(session, [1, 2, 3, 4])
        torch.testing.assert_close(state.read([4]).full(), logits, rtol=1e-4, atol=1e-4)

    def test_a_failed_forward_changes_nothing(self, session: Session) -> None:
        state = session.new_state()
        state.read([1, 2, 3])
        with pytest.raises(UsageError, match="not in the vocabulary"):
            state.read([100_000])
        assert state.rewind([1, 2, 3, 4]) == 3
        torch.testing.assert_close(
            state.read([4]).full(), self.logits(session, [1, 2, 3, 4]), rtol=1e-4, atol=1e-4
        )
