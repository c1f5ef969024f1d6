"""Text as it is generated: whole characters only, cut at stop strings."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from tokenizers import Tokenizer

from huorn.errors import UsageError


def byte_level_alphabet() -> dict[str, int]:
    """Return the character -> byte table of byte-level BPE (GPT-2's bytes_to_unicode, inverted).

    Printable Latin-1 bytes stand for themselves; the 68 others follow from U+0100 on, in byte order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    table = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(0x100) if byte not in printable)
    table.update((chr(0x100 + place), byte) for place, byte in enumerate(others))
    return table


class StreamDecoder:
    """Turns token ids into text, one id at a time, in time that does not grow with the text.

    The pieces joined are exactly `tokenizer.decode(all ids)`. A character whose bytes are spread over several tokens appears in
    the piece of its last token; U+FFFD appears only where the model really wrote bytes that are no UTF-8, or, from `flush`,
    for a character that was never finished. Special tokens (such as <|im_end|>) give no text.
    """

    _ALPHABET = byte_level_alphabet()

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._special = {
            token_id for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special
        }
        # Python's replacement rule equals the one of the tokenizers library (Unicode 15, 3.9: one U+FFFD per maximal subpart).
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """Return the text that `token_id` completes; empty when its last character is still unfinished."""
        return self._utf8.decode(self._bytes_of(token_id))

    def flush(self) -> str:
        """Return U+FFFD for a character left unfinished at the end, else nothing."""
        return self._utf8.decode(b"", final=True)

    def _bytes_of(self, token_id: int) -> bytes:
        token = self._tokenizer.id_to_token(token_id)
        if token is None or token_id in self._special:
            return b""  # models pad their vocabulary: the last ids of the embedding stand for no token
        try:
            return bytes(self._ALPHABET[character] for character in token)
        except KeyError:  # an added token written in plain text outside the alphabet
            return token.encode()


class StopStrings:
    """Cuts streamed text before the stop string that is complete first.

    Which one that is depends on the text alone, not on how it was cut into pieces: the stop string that ends earliest; of
    several that end at the same character, the longest. Text that may still become a stop string is held back.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if any(not stop for stop in stops):
            raise UsageError("--stop is empty, but it must hold at least one character")
        self._stops = tuple(stops)
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """Return (text that is certain now, whether a stop string was found). After True nothing more comes."""
        text = self._held + text
        found = [(place + len(stop), place) for stop in self._stops if (place := text.find(stop)) >= 0]
        if found:
            self._held = ""
            return text[: min(found)[1]], True
        keep = len(text) - self._undecided(text)
        self._held = text[keep:]
        return text[:keep], False

    def flush(self) -> str:
        """Return the text held back, at the end of the generation."""
        held, self._held = self._held, ""
        return held

    def _undecided(self, text: str) -> int:
        """Return the length of the longest end of `text` that begins a stop string."""
        longest = max((len(stop) for stop in self._stops), default=1) - 1
        lengths = range(min(longest, len(text)), 0, -1)
        return next((n for n in lengths if any(stop.startswith(text[-n:]) for stop in self._stops)), 0)
