"""What a table of the paper runs and what the paper has there: configs/paper/<table>.json, checked."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, TypeAlias, TypeVar

from common import ROOT
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, field_validator

from h2o_kv.eval import TASKS
from h2o_kv.eval.caches import PREFILLS
from h2o_kv.models import DTYPES
from h2o_kv.parity import MODES
from h2o_kv.policies import POLICIES

FOLDER = ROOT / "configs" / "paper"
VARIANTS = ("small", "paper")

Ratio: TypeAlias = Annotated[float, Field(gt=0, le=1)]
Count: TypeAlias = Annotated[int, Field(ge=1)]
Name: TypeAlias = str | int | float


class TableError(ValueError):
    """A config or an option will not do; the message is one line."""


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


def _known(name: str, names: Iterable[str]) -> str:
    if name not in names:
        raise ValueError(f"must be one of {', '.join(names)}")
    return name


class PaperValue(_Part):
    """A number of the paper.

    Attributes
    ----------
    of : dict
        Names of our result that it stands beside: all of these, where a result has more.
    value : float
    unit : str
        As in the result.
    model : str or None
        On which the paper measured; None where what we have of the paper does not say.
    source : str
        The paper and the place in it.
    """

    of: dict[str, Name] = Field(min_length=1)
    value: float
    unit: str
    model: str | None
    source: str = Field(pattern=r"^arXiv 2306\.14048, .+")


class Variant(_Part):
    """What every variant says: on which models, in which precision, on which device.

    Attributes
    ----------
    models : tuple of (str or None)
        Folders, GGUF files or hub ids; None is the installed default model.
    dtype, device : str
    """

    models: tuple[str | None, ...] = Field(min_length=1, strict=False)
    dtype: str = "float32"
    device: str = "cpu"

    @field_validator("dtype")
    @classmethod
    def _dtype(cls, value: str) -> str:
        return _known(value, DTYPES)


class QualityTask(_Part):
    """A task of `h2o_kv.eval`.

    Attributes
    ----------
    name : str
    metric : str
        Of its lines of results, or "perplexity".
    shots : int
    prompt_tokens, new_tokens : int, tokens
    limit : int or None
        First examples; None = all.
    """

    name: str
    metric: str
    shots: Annotated[int, Field(ge=0, le=10)] = 0
    prompt_tokens: Count = 512
    new_tokens: Count = 64
    limit: Count | None = None

    @field_validator("name")
    @classmethod
    def _name(cls, value: str) -> str:
        return _known(value, TASKS)


class QualityVariant(Variant):
    """Policies at budgets on tasks.

    Attributes
    ----------
    tasks : tuple of QualityTask
    policies : tuple of str
    ratios : tuple of float
        Slots, as parts of each example's tokens.
    prefills : tuple of str
    """

    tasks: tuple[QualityTask, ...] = Field(min_length=1, strict=False)
    policies: tuple[str, ...] = Field(min_length=1, strict=False)
    ratios: tuple[Ratio, ...] = Field(min_length=1, strict=False)
    prefills: tuple[str, ...] = Field(("streamed",), min_length=1, strict=False)

    @field_validator("policies")
    @classmethod
    def _policies(cls, values: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(_known(value, POLICIES) for value in values)

    @field_validator("prefills")
    @classmethod
    def _prefills(cls, values: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(_known(value, PREFILLS) for value in values)


class QuantisedVariant(QualityVariant):
    """Quality with K and V in so many bits."""

    kv_bits: tuple[Literal[4, 8, 16], ...] = Field(min_length=1, strict=False)


class ThroughputVariant(Variant):
    """Generation under the full cache and under H2O.

    Attributes
    ----------
    lengths : tuple of (int, int), tokens
        Of the prompts, and generated.
    texts : str or None
        JSONL file below the data folder whose `field` has the prompts, cut to their first tokens and
        padded on the left; None = pieces of one long text, all of them of full length.
    field : str
    ratio : float
        H2O's slots, as a part of prompt and generated tokens.
    batch : int
        Of the fixed batch.
    max_batch : int
        The largest that is tried.
    memory : str
        That the largest batch must fit in: bytes, or with KB, MB or GB.
    repeats : int
        Rounds that count.
    """

    lengths: tuple[Annotated[tuple[Count, Count], Field(strict=False)], ...] = Field(
        min_length=1, strict=False
    )
    texts: str | None = None
    field: str = "article"
    ratio: Ratio
    batch: Count
    max_batch: Count
    memory: str
    repeats: Count = 3

    @field_validator("memory")
    @classmethod
    def _memory(cls, value: str) -> str:
        parse_bytes(value)
        return value


class SparsityVariant(Variant):
    """Attention statistics of the full cache over one text.

    Attributes
    ----------
    text : str
        File below the data folder.
    tokens : int
    row_stride : int
        Of the rows that are sorted one by one.
    """

    text: str
    tokens: Annotated[int, Field(ge=32)]
    row_stride: Count = 8


class StreamingVariant(Variant):
    """A text longer than the context, token after token, positions rolling.

    Attributes
    ----------
    texts : tuple of str
        Files below the data folder, one after the other.
    caches : tuple of str
        Of `stream_book.py`.
    budget, sinks : int, tokens
    tokens : int
        Stop after so many.
    every : int
        Tokens between two results.
    block, chunk : int
        Tokens of a forward, and those that join together; 1 is the paper's step.
    """

    texts: tuple[str, ...] = Field(min_length=1, strict=False)
    caches: tuple[Literal["full", "streaming_llm", "h2o"], ...] = Field(min_length=1, strict=False)
    budget: Count
    sinks: Annotated[int, Field(ge=0)] = 4
    tokens: Count
    every: Count
    block: Count = 256
    chunk: Count = 1


_V = TypeVar("_V", bound=Variant)


class Variants(_Part, Generic[_V]):
    """What runs on the small model that is at hand, and what the paper ran.

    Attributes
    ----------
    small, paper : Variant
    """

    small: _V
    paper: _V


class _Table(_Part):
    """A table or figure.

    Attributes
    ----------
    kind : str
        Which module runs it.
    title : str
    variants : Variants
    paper_values : tuple of PaperValue
    notes : tuple of str
        What must be known to compare; they stand under the table.
    """

    title: str
    notes: tuple[str, ...] = Field((), strict=False)
    paper_values: tuple[PaperValue, ...] = Field((), strict=False)


class ParityBudgets(_Part):
    """The official scripts' flags.

    Attributes
    ----------
    modes : tuple of str
        Of `h2o_kv.parity`.
    ratios : dict of str to (float, float)
        By policy: heavy and recent parts of an example.
    """

    modes: tuple[str, ...] = Field(min_length=1, strict=False)
    ratios: dict[str, Annotated[tuple[float, float], Field(strict=False)]]

    @field_validator("modes")
    @classmethod
    def _modes(cls, values: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(_known(value, MODES) for value in values)

    @field_validator("ratios")
    @classmethod
    def _ratios(cls, values: dict[str, tuple[float, float]]) -> dict[str, tuple[float, float]]:
        for name in values:
            _known(name, POLICIES)
        return values


class QualityTable(_Table):
    """Accuracy, ROUGE or perplexity of policies.

    Attributes
    ----------
    parity : ParityBudgets or None
        For `--parity`.
    one_sided : tuple of str
        Policies whose smallest and largest loss against the full cache is a result, too.
    """

    kind: Literal["quality"]
    parity: ParityBudgets | None = None
    one_sided: tuple[str, ...] = Field((), strict=False)
    variants: Variants[QualityVariant]

    @field_validator("one_sided")
    @classmethod
    def _one_sided(cls, values: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(_known(value, POLICIES) for value in values)


class QuantisedTable(_Table):
    """Quality with quantised caches, which there are none of yet."""

    kind: Literal["quantised"]
    variants: Variants[QuantisedVariant]


class ThroughputTable(_Table):
    """Latency, throughput and memory."""

    kind: Literal["throughput"]
    variants: Variants[ThroughputVariant]


class SparsityTable(_Table):
    """Where attention lies."""

    kind: Literal["sparsity"]
    variants: Variants[SparsityVariant]


class StreamingTable(_Table):
    """Perplexity of a long stream."""

    kind: Literal["streaming"]
    variants: Variants[StreamingVariant]


Table: TypeAlias = QualityTable | QuantisedTable | ThroughputTable | SparsityTable | StreamingTable
_TABLE: TypeAdapter[Table] = TypeAdapter(Annotated[Table, Field(discriminator="kind")])


def table_names() -> list[str]:
    """The tables that there are: the names of the files."""
    return sorted(file.stem for file in FOLDER.glob("*.json"))


def load_table(file: Path) -> Table:
    """Read and check a config.

    Raises
    ------
    TableError
        The file cannot be read or is no JSON, or a key is missing, unknown or has a value that will not
        do; the message names file, key and value.
    """
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise TableError(f"{file}: {error.strerror}") from error
    except ValueError as error:
        raise TableError(f"{file}: must be JSON: {error}") from error
    try:
        return _TABLE.validate_python(found)
    except ValidationError as error:
        raise TableError(f"{file}: {_first(error)}") from error


def _first(error: ValidationError) -> str:
    """The first thing that is wrong: key, rule and value."""
    wrong: Any = error.errors(include_url=False)[0]
    if wrong["type"].startswith("union_tag"):
        return f"kind: must be one of {', '.join(_KINDS)}, got {wrong['input'].get('kind')!r}"
    # The first place is the kind of the table.
    key = ".".join(map(str, wrong["loc"][1:])) or "the file"
    rule = wrong["msg"].removeprefix("Value error, ")
    shown = "nothing" if wrong["type"] == "missing" else repr(wrong["input"])
    return f"{key}: {rule[0].lower()}{rule[1:]}, got {shown:.200}"


_KINDS = ("quality", "quantised", "throughput", "sparsity", "streaming")
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}


def parse_bytes(text: str) -> int:
    """Bytes of "600MB"; without a unit they are bytes.

    Raises
    ------
    ValueError
        It is no positive number with one of these units.

    Examples
    --------
    >>> parse_bytes("1.5GB"), parse_bytes("2048")
    (1500000000, 2048)
    """
    number = text.rstrip("KMGB")
    try:
        size = int(float(number) * _UNITS[text[len(number) :]])
    except (KeyError, ValueError, OverflowError):
        size = 0
    if size < 1:
        raise ValueError('must be a number of bytes, or one with KB, MB or GB, as "16GB"')
    return size
