"""Settings of a run, read from JSON by the C++ parser, under Python names.

Every check and every default is in ``csrc/h2o/config.cpp``; ``docs/config.md`` has a table of the
keys and ``configs/schema.json`` describes them for editors.
"""

import dataclasses
import os
from typing import Any, Literal, TypeVar

from h2o_kv import _C
from h2o_kv._C import EvictionPolicy

__all__ = ["Config", "ModelConfig", "RunConfig", "load_config", "parse_config"]

_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Which model runs.

    Attributes
    ----------
    name : str or None
        Folder, Hugging Face hub id or GGUF file; None is the model that ``h2o-kv`` uses when it is
        told none.
    dtype : {"auto", "float32", "float16", "bfloat16", "float64"}
        Of the weights and of the K and V caches; "auto" is what the checkpoint says.
    """

    name: str | None
    dtype: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig:
    """How text is generated.

    Attributes
    ----------
    prefill : {"one_shot", "streaming"}
        Whether the prompt is attended in full and selected from once, or comes in chunks that are
        evicted as they come.
    prefill_chunk : int
        Tokens a streaming prefill takes at a time; a one-shot prefill does not look at it.
    max_new_tokens : int
        Tokens to generate at most.
    seed : int
        Of the sampler.
    temperature : float
        0 is greedy; above 0 the logits are divided by it and a token is drawn.
    top_p : float
        Tokens are drawn from the smallest set whose probability is at least this, 0 < top_p <= 1.
    device : str
        "cpu", "cuda", "cuda:<index>", or "auto": CUDA where there is one.
    threads : int or None
        CPU threads; None leaves PyTorch's choice.
    """

    prefill: Literal["one_shot", "streaming"]
    prefill_chunk: int
    max_new_tokens: int
    seed: int
    temperature: float
    top_p: float
    device: str
    threads: int | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """What a config file says, with the defaults of the keys it leaves out.

    Attributes
    ----------
    model : ModelConfig
    policy : EvictionPolicy
    run : RunConfig
    """

    model: ModelConfig
    policy: EvictionPolicy
    run: RunConfig


def load_config(path: str | os.PathLike[str]) -> Config:
    """Read a config file.

    Parameters
    ----------
    path : str or os.PathLike
        JSON file.

    Returns
    -------
    Config

    Raises
    ------
    ValueError
        On a syntax error, an unknown or repeated key, a wrong type or a value out of range; the
        message names the file, the key and the value. If no file can have the name.
    OSError
        If the file cannot be read.
    """
    try:
        file = os.fsencode(path)
    except UnicodeEncodeError:
        file = b"\0"
    if b"\0" in file:
        raise ValueError(f"load_config: path must be a name that a file can have, got {path!r}")
    return _to_python(_C.load_config(file))


def parse_config(text: str, name: str = "config") -> Config:
    """Read a config from JSON text.

    Parameters
    ----------
    text : str
        JSON; ``"{}"`` is every default.
    name : str
        What messages call it.

    Returns
    -------
    Config

    Raises
    ------
    TypeError
        text or name is no string.
    ValueError
        As for `load_config`.

    Examples
    --------
    >>> from h2o_kv.config import parse_config
    >>> config = parse_config('{"policy": {"heavy": {"size": 64}, "recent": {"ratio": 0.1}}}')
    >>> config.policy
    EvictionPolicy(num_heavy=64, recent_ratio=0.1, num_sink=0, gqa_reduce="sum")
    >>> config.run.prefill
    'one_shot'
    """
    for argument, value in (("text", text), ("name", name)):
        if not isinstance(value, str):
            raise TypeError(f"parse_config: {argument} must be a string, got {value!r}")
    # A lone surrogate, which is in no JSON, is left to the parser; messages show it escaped.
    readable = name.replace("\0", "\\0").encode("utf-8", "backslashreplace").decode()
    return _to_python(_C.parse_config(text.encode("utf-8", "surrogatepass"), readable))


def _to_python(config: _C.Config) -> Config:
    return Config(
        model=_copy_fields(ModelConfig, config.model),
        policy=config.policy,
        run=_copy_fields(RunConfig, config.run),
    )


def _copy_fields(cls: type[_T], source: object) -> _T:
    # The attributes of the C++ struct have the names of the dataclass's fields.
    fields: Any = dataclasses.fields(cls)  # type: ignore[arg-type]
    return cls(**{field.name: getattr(source, field.name) for field in fields})
