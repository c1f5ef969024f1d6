"""A working byte-level BPE of any size for a synthetic checkpoint: every text round-trips and every id is a token.

The release's own vocabulary is not copied. Its special tokens keep their names and ids, since chat templates and servers
name them; all other tokens are two to four letters put together in the order of how common the letters are in English,
which spends about one token per three letters.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from typing import Any

# Names and order of the release's added tokens; True = special, left out when text is decoded for a reader.
SPECIAL_TOKENS = {
    "<|endoftext|>": True,
    "<|im_start|>": True,
    "<|im_end|>": True,
    "<|object_ref_start|>": True,
    "<|object_ref_end|>": True,
    "<|box_start|>": True,
    "<|box_end|>": True,
    "<|quad_start|>": True,
    "<|quad_end|>": True,
    "<|vision_start|>": True,
    "<|vision_end|>": True,
    "<|vision_pad|>": True,
    "<|image_pad|>": True,
    "<|video_pad|>": True,
    "<tool_call>": False,
    "</tool_call>": False,
    "<|fim_prefix|>": False,
    "<|fim_middle|>": False,
    "<|fim_suffix|>": False,
    "<|fim_pad|>": False,
    "<|repo_name|>": False,
    "<|file_sep|>": False,
    "<tool_response>": False,
    "</tool_response>": False,
    "<think>": False,
    "</think>": False,
    "<|audio_start|>": True,
    "<|audio_end|>": True,
    "<tts_pad>": True,
    "<tts_text_bos>": True,
    "<tts_text_eod>": True,
    "<tts_text_bos_single>": True,
    "<|audio_pad|>": True,
}
# The release pads 248,077 tokens to 248,320 embedding rows. A random model picks any of them, so each gets a name here.
RELEASE_VOCAB_SIZE, RELEASE_UNUSED = 248_320, 243
# Words with the space before them, digits one by one, runs of marks, line ends, other white space.
SPLIT_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LETTERS = "etaoinshrdlcumwfgypbvkjxqz"  # by frequency in English
SPACE = "\u0120"  # how byte-level BPE writes a space

CHAT_TEMPLATE = """\
{%- for message in messages %}
    {%- if message.role not in ['system', 'user', 'assistant'] %}
        {{- raise_exception('Unexpected message role.') }}
    {%- endif %}
    {%- if message.role == 'system' and not loop.first %}
        {{- raise_exception('System message must be at the beginning.') }}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.content is string %}
        {{- message.content | trim }}
    {%- else %}
        {%- for part in message.content %}
            {%- if part.type != 'text' %}
                {{- raise_exception('This checkpoint has no vision tower.') }}
            {%- endif %}
            {{- part.text }}
        {%- endfor %}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- else %}
        {{- '<think>\\n' }}
    {%- endif %}
{%- endif %}
"""


def special_token_id(token: str, vocab_size: int) -> int:
    """Id of one of SPECIAL_TOKENS in a vocabulary of `vocab_size` rows (248,046 for <|im_end|> in the release)."""
    return _base_size(vocab_size) + list(SPECIAL_TOKENS).index(token)


def tokenizer_json(vocab_size: int) -> str:
    """Text of tokenizer.json with ids 0 to vocab_size - 1, each a token.

    `vocab_size` is at least 289: 256 bytes and 33 special tokens.
    """
    base = _base_size(vocab_size)
    merges = list(islice(_merges(), base - 256))
    vocab = [*_byte_characters(), *(left + right for left, right in merges)]
    added = [
        *SPECIAL_TOKENS.items(),
        *((f"<|unused_{n}|>", True) for n in range(vocab_size - base - len(SPECIAL_TOKENS))),
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    split = {"type": "Split", "pattern": {"Regex": SPLIT_PATTERN}, "behavior": "Isolated", "invert": False}
    document = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_added_token(base + n, text, special) for n, (text, special) in enumerate(added)],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
        "post_processor": byte_level,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: n for n, token in enumerate(vocab)},
            "merges": [f"{left} {right}" for left, right in merges],
        },
    }
    return json.dumps(document, ensure_ascii=False)


def tokenizer_config_json(context: int) -> dict[str, Any]:
    """tokenizer_config.json: special tokens by role, context length and the chat template."""
    return {
        "add_bos_token": False,
        "add_prefix_space": False,
        "bos_token": None,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "model_max_length": context,
        "pad_token": "<|endoftext|>",
        "tokenizer_class": "Qwen2Tokenizer",
        "unk_token": None,
    }


def _base_size(vocab_size: int) -> int:
    """Ids before the special tokens: 248,044 in the release; smaller vocabularies have no unused ids at the end."""
    unused = RELEASE_UNUSED if vocab_size == RELEASE_VOCAB_SIZE else 0
    return vocab_size - len(SPECIAL_TOKENS) - unused


def _merges() -> Iterator[tuple[str, str]]:
    """Pairs of tokens that BPE joins, most common first: 702 pairs, 18,252 threes, 474,552 fours."""
    starts = SPACE + LETTERS
    pairs = [
        (a, b)
        for _, a, b in sorted((starts.index(a) + LETTERS.index(b), a, b) for a in starts for b in LETTERS)
    ]
    yield from pairs
    joined = [a + b for a, b in pairs]
    inner = [pair for pair in joined if SPACE not in pair]
    yield from ((pair, letter) for letter in LETTERS for pair in joined)
    for total in range(len(joined) + len(inner) - 1):
        for n in range(max(0, total - len(inner) + 1), min(total, len(joined) - 1) + 1):
            yield joined[n], inner[total - n]


def _byte_characters() -> list[str]:
    """The printable character that stands for each byte 0 to 255: itself where printable, else one from U+0100 on."""
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def _added_token(token_id: int, text: str, special: bool) -> dict[str, Any]:
    return {
        "id": token_id,
        "content": text,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": special,
    }
