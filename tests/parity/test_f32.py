"""F32 against transformers in F32: the same logits however a prompt is cut, and the same greedy tokens.

"Within 2e-5" is max |ours - theirs| / max |theirs| over the logits of all positions. transformers itself is up to 1e-5
away from the same models computed in float64.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from transformers import Qwen3_5MoeForCausalLM

from huorn.checkpoint.reader import Checkpoint
from huorn.model.decoder import Decoder
from huorn.model.load import load_decoder
from huorn.model.precision import Precision
from huorn.model.state import DecodeState

from .oracle import (
    CASES,
    difference,
    oracle_logits,
    random_cuts,
    random_model,
    random_tokens,
    run_pieces,
    save,
)

TOLERANCE = 2e-5
TOKENS = 150  # two whole chunks of the delta rule and a ragged one


@dataclass(frozen=True)
class Pair:
    """One model in both implementations, with tokens and the oracle's logits for them."""

    theirs: Qwen3_5MoeForCausalLM
    ours: Decoder
    tokens: Tensor
    logits: Tensor


@pytest.fixture(scope="module", params=CASES, ids=lambda case: case.name)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    model = random_model(request.param)
    directory = save(model, tmp_path_factory.mktemp("model"))
    tokens = random_tokens(request.param, TOKENS)
    decoder = load_decoder(Checkpoint.open(directory), Precision.F32)
    return Pair(model, decoder, tokens, oracle_logits(model, tokens))


def test_one_shot(pair: Pair) -> None:
    assert difference(run_pieces(pair.ours, pair.tokens, [TOKENS]), pair.logits) <= TOLERANCE


@pytest.mark.parametrize("seed", range(4))
def test_any_cut(pair: Pair, seed: int) -> None:
    lengths = random_cuts(TOKENS, seed)
    assert difference(run_pieces(pair.ours, pair.tokens, lengths), pair.logits) <= TOLERANCE, lengths


@pytest.mark.parametrize("prompt", [1, 2, 3, 4, 100])
def test_decode_after_prefill(pair: Pair, prompt: int) -> None:
    """Prompts shorter than the convolution are where others failed while long ones worked."""
    count = prompt + 20
    logits = run_pieces(pair.ours, pair.tokens[:count], [prompt] + [1] * 20)
    assert difference(logits, pair.logits[:count]) <= TOLERANCE


def test_last_logits_only(pair: Pair) -> None:
    state = DecodeState.new(pair.ours.config, TOKENS, Precision.F32)
    logits = pair.ours.forward(pair.tokens, state)
    assert logits.shape == (1, pair.ours.config.vocab_size)
    assert difference(logits[0], pair.logits[-1]) <= TOLERANCE


def test_greedy_tokens(pair: Pair) -> None:
    prompt, count = pair.tokens[:20], 64
    theirs = pair.theirs.generate(
        prompt[None],
        attention_mask=torch.ones(1, 20),
        max_new_tokens=count,
        do_sample=False,
        pad_token_id=0,
        use_cache=pair.ours.config.num_full_layers > 0,  # its cache can not hold linear layers alone
    )[0, 20:]
    state = DecodeState.new(pair.ours.config, 20 + count, Precision.F32)
    ours = [pair.ours.forward(prompt, state)[-1].argmax()]
    while len(ours) < count:
        ours.append(pair.ours.forward(ours[-1].view(1), state)[-1].argmax())
    assert torch.stack(ours).tolist() == theirs.tolist()
    assert len(set(theirs.tolist())) > 8, "a model that repeats itself compares little"


def test_expanding_on_use_changes_nothing(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> None:
    directory = save(pair.theirs, tmp_path_factory.mktemp("stored"))
    stored = load_decoder(Checkpoint.open(directory), Precision.F32, expand_limit_bytes=0)
    assert stored.lm_head.expanded is None
    assert difference(run_pieces(stored, pair.tokens[:70], [66, 1, 3]), pair.logits[:70]) <= TOLERANCE
