"""A tiny checkpoint, made by transformers, for the tests that need a whole model folder."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

# Before anything imports torch: threads that sleep while they wait. Spinning ones decode seedling at 107 tok/s instead of 28
# on two idle cores, but at 4 instead of 34 where seven processes share them; tests must run there too.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

ADDED_TOKENS = (  # text, special; as in Qwen3.5
    ("<|endoftext|>", True), ("<|im_start|>", True), ("<|im_end|>", True), ("<think>", False), ("</think>", False),
)  # fmt: skip
VOCAB_SIZE = 512  # rows of the embedding; the tokenizer has fewer ids, as in the releases
TRAINING_TEXT = (
    "def quicksort(items):\n    if len(items) < 2:\n        return items\n    pivot = items[0]\n",
    "Der Zug nach Zürich fährt um 7:45 Uhr von Gleis 3. Où est la gare? 東京は晴れです。",
    "The quick brown fox jumps over the lazy dog and then the dog jumps over the fox again and again.",
)
# The shape of Qwen3.5's, without its media and tools: past thoughts are dropped, the last answer's are kept.
CHAT_TEMPLATE = """\
{%- for message in messages %}
    {%- if message.role == 'system' and not loop.first %}
        {{- raise_exception('System message must be at the beginning.') }}
    {%- endif %}
    {%- set content = message.content %}
    {%- if message.role == 'assistant' and '</think>' in content %}
        {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {{- '<think>\\n' if enable_thinking is defined and enable_thinking else '<think>\\n\\n</think>\\n\\n' }}
{%- endif %}
"""


def make_tokenizer() -> Tokenizer:
    """A byte-level BPE with all 256 bytes, about 130 merges and the chat markers."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(TRAINING_TEXT, trainer)
    tokenizer.add_tokens(
        [AddedToken(text, special=special, normalized=False) for text, special in ADDED_TOKENS]
    )
    return tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return make_tokenizer()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with config, weights (BF16), tokenizer and template: 4 layers of width 32, 8 experts, top-2. Do not change it."""
    directory = tmp_path_factory.mktemp("models") / "tiny"
    save_tiny_model(directory)
    return directory


def save_tiny_model(directory: Path) -> None:
    import torch
    from transformers import Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig

    tokenizer = make_tokenizer()
    config = Qwen3_5MoeTextConfig(
        vocab_size=VOCAB_SIZE, hidden_size=32, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, max_position_embeddings=2048, linear_num_key_heads=2, linear_num_value_heads=4,
        linear_key_head_dim=8, linear_value_head_dim=8, moe_intermediate_size=16, shared_expert_intermediate_size=16,
        num_experts=8, num_experts_per_tok=2, eos_token_id=tokenizer.token_to_id("<|endoftext|>"),
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
    )  # fmt: skip
    torch.manual_seed(0)
    model = Qwen3_5MoeForCausalLM(config)
    for (
        parameter
    ) in model.parameters():  # wider than the default 0.02, so that logits differ and texts are not one token
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    model.to(torch.bfloat16).save_pretrained(directory)
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE)
