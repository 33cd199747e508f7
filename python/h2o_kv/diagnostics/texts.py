"""Tokens as text: what class a token is of, and which tokens a piece of text is."""

from __future__ import annotations

import unicodedata
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import Any

__all__ = ["TOKEN_CLASSES", "decode", "find_span", "token_classes", "token_texts"]

TOKEN_CLASSES = ("sink", "punctuation", "content")
"""The first tokens of a text; white space, punctuation, symbols and special tokens; all others."""

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


def decode(tokenizer: Any, ids: Sequence[int]) -> str:
    """Text of token ids, special tokens included."""
    return str(tokenizer.decode(list(ids), clean_up_tokenization_spaces=False))


def token_texts(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """Text of each token for itself."""
    return [decode(tokenizer, [token]) for token in ids]


def token_classes(tokenizer: Any, ids: Sequence[int], *, sinks: int = 4) -> list[str]:
    """The class of each token, one of TOKEN_CLASSES.

    Parameters
    ----------
    tokenizer : transformers.PreTrainedTokenizerBase
    ids : sequence of int
        A text from its start.
    sinks : int
        So many first tokens are sinks, whatever they say.
    """
    special = set(tokenizer.all_special_ids)

    def class_of(position: int, token: int, text: str) -> str:
        if position < sinks:
            return "sink"
        marks = all(unicodedata.category(c)[0] in "PSZC" for c in text if c != _INCOMPLETE)
        # Half a letter is no mark: of tokens that end or begin inside one, nothing else is known.
        whole = _INCOMPLETE not in text
        return "punctuation" if token in special or (marks and whole) else "content"

    texts = token_texts(tokenizer, ids)
    return [class_of(i, *pair) for i, pair in enumerate(zip(ids, texts, strict=True))]


def find_span(tokenizer: Any, ids: Sequence[int], text: str, *, name: str) -> tuple[int, int]:
    """The tokens that hold a piece of text.

    Parameters
    ----------
    tokenizer : transformers.PreTrainedTokenizerBase
    ids : sequence of int
    text : str
        Must be in the text of the ids exactly once.
    name : str
        What errors call the piece.

    Returns
    -------
    first, last : int
        The tokens first .. last - 1; those at its ends may hold more than the piece.

    Raises
    ------
    ValueError
        The piece is empty, or not there, or there more than once.
    """
    whole = decode(tokenizer, ids)
    if not text:
        raise ValueError(f"{name} must not be empty, got ''")
    starts = [i for i in range(len(whole)) if whole.startswith(text, i)]
    if not starts:
        raise ValueError(f"{name} must be a piece of the prompt, got {text!r}")
    spans = [_tokens_of(tokenizer, ids, start, start + len(text)) for start in starts]
    if len(spans) > 1:
        places = ", ".join(f"{first}:{last}" for first, last in spans)
        raise ValueError(
            f"{name} must be in the prompt once, got {text!r}, which is the tokens {places}"
        )
    return spans[0]


def _tokens_of(tokenizer: Any, ids: Sequence[int], start: int, stop: int) -> tuple[int, int]:
    """Tokens whose text touches the characters start .. stop - 1."""
    counts = range(len(ids) + 1)
    # A character that is not complete yet counts for the first, and does not for the second.
    first = bisect_right(counts, start, key=lambda n: len(decode(tokenizer, ids[:n]))) - 1
    last = bisect_left(
        counts, stop, key=lambda n: len(decode(tokenizer, ids[:n]).rstrip(_INCOMPLETE))
    )
    return first, last
