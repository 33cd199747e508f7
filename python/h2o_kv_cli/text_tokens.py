"""Token ids of text and text of token ids, with as little loaded as the model's files allow."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from h2o_kv_cli import UserError, one_line

__all__ = ["GrowingText", "TextTokenizer", "chat_tokens", "open_tokenizer"]

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


@dataclass(frozen=True, kw_only=True)
class TextTokenizer:
    """A model's tokenizer.

    Attributes
    ----------
    encode : callable
        Token ids of a text, with the special tokens that the model puts around it.
    decode : callable
        Text of token ids, special tokens left out.
    """

    encode: Callable[[str], list[int]]
    decode: Callable[[Sequence[int]], str]


def open_tokenizer(model: str | None, *, chat: bool = False) -> TextTokenizer:
    """The tokenizer of a model.

    Parameters
    ----------
    model : str, optional
        A folder, a GGUF file or a hub id; None is the installed default model. A folder with
        tokenizer.json is read without torch and transformers, in a tenth of a second.
    chat : bool
        Wrap the text in the model's chat template; only transformers renders these.

    Raises
    ------
    UserError
        There is no such model, or it has no tokenizer that can be read, or no chat template.
    """
    if model is not None and not chat:
        folder = Path(model).expanduser()
        if (folder / "tokenizer.json").is_file() and not _adds_tokens_in_python(folder):
            return _open_file(folder / "tokenizer.json")
    from h2o_kv.models import ModelLoadError, load_tokenizer

    try:
        tokenizer: Any = load_tokenizer(model)
    except ModelLoadError as error:
        raise UserError(one_line(error)) from error
    if chat:
        chat_tokens(tokenizer, "")  # without a template it fails here, before anything is read

    def encode(text: str) -> list[int]:
        return chat_tokens(tokenizer, text) if chat else list(tokenizer(text)["input_ids"])

    def decode(token_ids: Sequence[int]) -> str:
        return str(
            tokenizer.decode(
                list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
        )

    return TextTokenizer(encode=encode, decode=decode)


def chat_tokens(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a user's message in the chat template of a tokenizer of transformers.

    Raises
    ------
    UserError
        There is no chat template.
    """
    if not tokenizer.chat_template:
        raise UserError("--chat needs a model with a chat template; this one has none")
    messages = [{"role": "user", "content": text}]
    rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
    return list(rendered["input_ids"])


class GrowingText:
    """Text of tokens that come one by one.

    A character may take several tokens, and a word may be written otherwise at the start of a text
    than inside it; so each piece is the difference of two texts that both begin a little earlier.

    Parameters
    ----------
    decode : callable
        Of a `TextTokenizer`.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._token_ids: list[int] = []
        # Of the tokens: where the two texts begin, and what has been handed out.
        self._start = self._shown = 0

    def __len__(self) -> int:
        return len(self._token_ids)

    def add(self, token_id: int) -> str:
        """Take a token; the text that it completes, which may be empty."""
        self._token_ids.append(token_id)
        before = self._decode(self._token_ids[self._start : self._shown])
        text = self._decode(self._token_ids[self._start :])
        if len(text) <= len(before) or text.endswith(_INCOMPLETE):
            return ""
        self._start, self._shown = self._shown, len(self._token_ids)
        return text[len(before) :]

    def finish(self) -> str:
        """The rest: pieces of a character that never came whole."""
        before = self._decode(self._token_ids[self._start : self._shown])
        text = self._decode(self._token_ids[self._start :])
        self._start = self._shown = len(self._token_ids)
        return text[len(before) :]


def _open_file(file: Path) -> TextTokenizer:
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # of no kind of its own
        raise UserError(f"cannot read {file}: {one_line(error)}") from error
    # A file may say so; transformers does it only when it is asked to.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return TextTokenizer(
        encode=lambda text: list(tokenizer.encode(text).ids),
        decode=lambda token_ids: str(tokenizer.decode(list(token_ids), skip_special_tokens=True)),
    )


def _adds_tokens_in_python(folder: Path) -> bool:
    """Whether special tokens around a text may be none of tokenizer.json's business."""
    try:
        config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    # What is no object is for transformers to refuse.
    return not isinstance(config, dict) or bool(
        config.get("add_bos_token") or config.get("add_eos_token")
    )
