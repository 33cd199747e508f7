"""Saved sessions: the whole state of an H2OCache in one safetensors file.

The tensors of layer i are `layers.<i>.<name>`, as they are in memory. The file's metadata has one
entry, JSON: everything that is no tensor (`save` puts it together), a SHA-256 of each tensor, and
one of itself. Equal caches make equal files, byte for byte.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import reprlib
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from h2o_kv._C import Budget, EvictionPolicy, version
from h2o_kv.hf.budgets import BudgetEvent
from h2o_kv.hf.memory import LayerState
from h2o_kv.hf.settings import OPTIONS, Settings, model_shape
from h2o_kv.models import DTYPES, resolve_device

if TYPE_CHECKING:
    from h2o_kv.hf.cache import H2OCache

__all__ = ["FORMAT_VERSION", "SessionError", "load", "save"]

_T = TypeVar("_T")

_FORMAT = "h2o-kv session"
# To be raised with every change that this code would misread.
FORMAT_VERSION = 3
# Entry of the file's metadata; the only one, since safetensors writes several in random order.
_METADATA_KEY = "h2o_kv_session"

_HEADER = (
    *("format", "version", "library", "model", "policy", "options", "layers"),
    "budget_events",
)
# Entries that came with a version after the first, and what stands for them in older files.
_LATER: dict[str, tuple[int, Any]] = {"budget_events": (2, [])}
_LATER_OPTIONS: dict[str, tuple[int, Any]] = {"positions": (2, "original")}
_LAYER = ("columns_seen", "budget", "window", "device", "sha256")
_EVENT = ("position", "time", "old", "new", "max_evictions_per_step", "held_at")
_BUDGET = ("num_sink", "num_heavy", "num_recent")
_LATER_POLICY: dict[str, tuple[int, Any]] = {
    "score_rule": (3, "sum"),
    "score_decay": (3, 1.0),
    "score_seed": (3, 0),
    "score_queries": (3, 0),
    "score_pool": (3, 1),
    "pattern_stride": (3, 0),
    "pattern_columns": (3, 0),
    "read_slots": (3, 0),
    "read_page": (3, 1),
}
_POLICY = (
    *("num_heavy", "num_recent", "num_sink", "heavy_ratio", "recent_ratio", "gqa_reduce"),
    *_LATER_POLICY,
)

# Axes of each of a layer's STATE_TENSORS; those of one name have one size.
_SLOTS = ("batch", "num_kv_heads", "capacity")
_AXES: dict[str, tuple[str, ...]] = {
    "keys": (*_SLOTS, "head_dim"),
    "values": (*_SLOTS, "head_dim"),
    "scores": _SLOTS,
    "positions": _SLOTS,
    "tokens_seen": ("batch",),
    "row_budget": ("batch", "counts"),
    "row_target": ("batch", "counts and pace"),
    "last_evicted": ("batch", "num_kv_heads", "num_new"),
}
_OPTIONAL = {"row_budget", "row_target", "last_evicted"}


class SessionError(ValueError):
    """A cache that cannot be saved, or a file that cannot be loaded, as a session; says why."""


def save(
    file: str | os.PathLike[str],
    settings: Settings,
    states: Sequence[LayerState],
    events: Sequence[BudgetEvent],
) -> None:
    """Write the layers of a cache to `file`; see `H2OCache.save`."""
    path = Path(os.path.realpath(file))  # A link stays; the file that it leads to is replaced.
    if not path.parent.is_dir():
        raise FileNotFoundError(f"H2OCache.save: the folder must exist, got {path.parent}")
    if path.is_dir():
        raise IsADirectoryError(f"H2OCache.save: the file must not be a folder, got {path}")
    devices = [_device_name(state) for state in states]
    states = [
        replace(state, tensors={name: t.cpu().contiguous() for name, t in state.tensors.items()})
        for state in states
    ]
    with _refusing(f"H2OCache.save: {file}"):
        _check(states, settings)
    options = settings.options()
    header = {
        "format": _FORMAT,
        "version": FORMAT_VERSION,
        "library": version(),
        "model": model_shape(settings.config),
        "policy": _policies(settings),
        "options": {**options, "dtype": _dtype_name(options["dtype"])},
        "layers": [
            {
                "columns_seen": int(state.columns_seen),
                "budget": _attributes(state.budget, _BUDGET),
                "window": state.window,
                "device": device,
                "sha256": {name: _digest(tensor) for name, tensor in state.tensors.items()},
            }
            for state, device in zip(states, devices, strict=True)
        ],
        "budget_events": [_event_attributes(event) for event in events],
    }
    tensors = {
        _tensor_name(layer, name): tensor
        for layer, state in enumerate(states)
        for name, tensor in state.tensors.items()
    }
    _write(path, tensors, {_METADATA_KEY: _json({**header, "sha256": _json_digest(header)})})


def load(
    file: str | os.PathLike[str],
    model: Any,
    config: Any,
    cache_class: type[H2OCache],
    device: str | torch.device | None,
) -> H2OCache:
    """Make the cache that was saved to `file`; see `H2OCache.load`."""
    if device is not None:
        device = resolve_device(device, name="H2OCache.load: device")
    with open(file, "rb"):
        pass  # What the system says of a missing file is clear enough.
    # Ordinary tensors even under inference_mode, so that the cache can be used outside.
    with torch.inference_mode(False), torch.no_grad():
        with _refusing(f"H2OCache.load: {file}"), _opened(file) as content:
            header = _header(content.metadata())
            _check_model(header["model"], config)
            policy = _read_policies(header["policy"])
            options = _object("options", header["options"], OPTIONS)
            dtype = options["dtype"]
            cache = cache_class(model, policy, **{**options, "dtype": DTYPES.get(dtype, dtype)})
            states = _layer_states(content, header["layers"])
            cache._budget_events = _events(header["budget_events"])
            _check(states, cache._settings)
        for layer, state, saved in zip(cache.layers, states, header["layers"], strict=True):
            place = device or _former_device(saved["device"])
            moved = {name: tensor.to(place) for name, tensor in state.tensors.items()}
            layer.restore(replace(state, tensors=moved))
            if cache._budget_events:
                layer.held_at = cache._budget_events[-1].held_at
    return cache


# ---- The file.


def _write(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """Write beside `path`, then rename: who opens `path` finds the old file or the whole new one."""
    partial = path.with_name(f".partial-{secrets.token_hex(8)}")
    partial.touch(exist_ok=False)
    try:
        mode = partial.stat().st_mode
        save_file(tensors, partial, metadata=metadata)
        partial.chmod(mode)  # Later safetensors put a file there that its owner alone can read.
        with partial.open("rb+") as stream:
            os.fsync(stream.fileno())
        os.replace(partial, path)
    except BaseException as error:
        partial.unlink(missing_ok=True)
        if isinstance(error, SafetensorError):  # So it calls a full disk.
            raise OSError(f"H2OCache.save: {path} cannot be written: {error}") from error
        raise


@contextmanager
def _refusing(where: str) -> Iterator[None]:
    """Make a SessionError that says `where` of each error that values can lead to."""
    try:
        yield
    except (TypeError, ValueError, RecursionError) as error:
        raise SessionError(f"{where}: {str(error).removeprefix('H2OCache: ')}") from error


@contextmanager
def _opened(file: str | os.PathLike[str]) -> Iterator[Any]:
    with _asking_safetensors():
        content = safe_open(file, framework="pt")
    with content:
        yield content


@contextmanager
def _asking_safetensors() -> Iterator[None]:
    try:
        yield
    except Exception as error:  # Of several kinds, and other ones in other releases.
        raise ValueError(f"must be a file that safetensors reads, got: {error}") from error


def _header(metadata: dict[str, str] | None) -> dict[str, Any]:
    text = (metadata or {}).get(_METADATA_KEY)
    if text is None:
        raise ValueError(
            f'must be a saved session, got a safetensors file without metadata "{_METADATA_KEY}"'
        )
    try:
        header = json.loads(text, parse_constant=_no_constant, parse_float=_finite)
    except ValueError as error:
        raise ValueError(f"header must be JSON, got: {error}") from error
    if not isinstance(header, dict) or header.get("format") != _FORMAT:
        raise ValueError(f'header must have format "{_FORMAT}", got {reprlib.repr(header)}')
    written = _number("version", header.get("version"))
    if not 1 <= written <= FORMAT_VERSION:
        raise ValueError(
            f"version must be in 1..{FORMAT_VERSION}, the latest that h2o-kv {version()} reads, got "
            f"{written}, written by h2o-kv {reprlib.repr(header.get('library'))}"
        )
    _check_digest("header", header.pop("sha256", None), _json_digest(header))
    _fill_in(header, _LATER, written)
    _fill_in(header.get("options"), _LATER_OPTIONS, written)
    policy = header.get("policy")
    for one in policy if isinstance(policy, list) else [policy]:
        _fill_in(one, _LATER_POLICY, written)
    return _object("header", header, _HEADER)


def _no_constant(name: str) -> float:
    raise ValueError(f"numbers must be finite, got {name}")


def _finite(text: str) -> float:
    number = float(text)
    return number if math.isfinite(number) else _no_constant(text)


def _fill_in(entries: Any, later: dict[str, tuple[int, Any]], written: int) -> None:
    """Add what the version that was written did not have yet; what is no object is left to others."""
    if not isinstance(entries, dict):
        return
    for key, (version_of_it, absent) in later.items():
        if written < version_of_it:
            entries.setdefault(key, absent)


def _layer_states(content: Any, layers: Any) -> list[LayerState]:
    """The layers of a file, each tensor as its checksum says."""
    if not isinstance(layers, list):
        raise ValueError(f"layers must be a list, got {reprlib.repr(layers)}")
    states = []
    for i, layer in enumerate(layers):
        with _refusing(f"layer {i}"):
            states.append(_layer_state(content, i, _object("header", layer, _LAYER)))
    with _asking_safetensors():
        stored = set(content.keys())
    unnamed = stored - {
        _tensor_name(i, name) for i, state in enumerate(states) for name in state.tensors
    }
    if unnamed:
        raise ValueError(f"header must name all tensors, got also {reprlib.repr(sorted(unnamed))}")
    return states


def _layer_state(content: Any, layer: int, header: dict[str, Any]) -> LayerState:
    budget, window, device = header["budget"], header["window"], header["device"]
    if budget is not None:
        budget = _made(Budget, "budget", budget, _BUDGET)
    if not (device is None or isinstance(device, str)):
        raise ValueError(f"device must be a name, got {reprlib.repr(device)}")
    digests, tensors = header["sha256"], {}
    if not isinstance(digests, dict):
        raise ValueError(f"sha256 must be an object, got {reprlib.repr(digests)}")
    for name, digest in digests.items():
        # Earlier safetensors put it on torch's default device.
        with _asking_safetensors(), torch.device("cpu"):
            stored = content.get_tensor(_tensor_name(layer, name))
        tensor = stored.clone()  # What was read may be the file itself, mapped into memory.
        _check_digest(name, digest, _digest(tensor))
        tensors[name] = tensor
    return LayerState(
        columns_seen=_number("columns_seen", header["columns_seen"]),
        budget=budget,
        window=None if window is None else _number("window", window),
        tensors=tensors,
    )


def _events(events: Any) -> list[BudgetEvent]:
    """The `budget_events` of a header."""
    if not isinstance(events, list):
        raise ValueError(f"budget_events must be a list, got {reprlib.repr(events)}")
    return [_event(_object("budget_events", event, _EVENT)) for event in events]


def _event(event: dict[str, Any]) -> BudgetEvent:
    if type(event["time"]) is not float:
        raise ValueError(f"time must be a number of seconds, got {reprlib.repr(event['time'])}")
    most, held_at = (
        None if event[name] is None else _number(name, event[name])
        for name in ("max_evictions_per_step", "held_at")
    )
    old, new = (_budgets(name, event[name]) for name in ("old", "new"))
    return BudgetEvent(
        _number("position", event["position"]), event["time"], old, new, most, held_at
    )


def _budgets(what: str, budgets: Any) -> tuple[Budget, ...]:
    if not isinstance(budgets, list):
        raise ValueError(f"{what} must be a list, got {reprlib.repr(budgets)}")
    return tuple(_made(Budget, what, budget, _BUDGET) for budget in budgets)


def _tensor_name(layer: int, name: str) -> str:
    return f"layers.{layer}.{name}"


# ---- Checksums. SHA-256 finds any damage, is in every Python, and is as fast as a disk with the
# instructions that processors have for it; it is no signature and keeps nobody from forging a file.


def _digest(tensor: Tensor) -> str:
    """Of dtype, shape and bytes of a contiguous CPU tensor."""
    digest = hashlib.sha256(f"{_dtype_name(tensor.dtype)} {list(tensor.shape)} ".encode())
    digest.update(tensor.view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _json_digest(value: dict[str, Any]) -> str:
    return hashlib.sha256(_json(value).encode()).hexdigest()


def _json(value: Any) -> str:
    """The one JSON text of a value."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _check_digest(what: str, stored: Any, actual: str) -> None:
    if stored != actual:
        raise ValueError(
            f"{what} must have the sha256 that was saved, {reprlib.repr(stored)}, got {actual}; the "
            "file is damaged"
        )


# ---- What a state can be. A file whose checksums are right may still be one that nothing wrote.


def _check(states: Sequence[LayerState], settings: Settings) -> None:
    """Raise ValueError unless a cache of these settings can hold these states, on the CPU."""
    num_layers = settings.config.num_hidden_layers
    if len(states) != num_layers:
        raise ValueError(f"layers must be num_hidden_layers = {num_layers}, got {len(states)}")
    for layer, state in enumerate(states):
        with _refusing(f"layer {layer}"):
            _check_layer(state, settings.dtype)
            _check_alike(state, states[0])


def _check_alike(state: LayerState, first: LayerState) -> None:
    if state.columns_seen != first.columns_seen:
        raise ValueError(
            f"columns_seen must be those of layer 0 = {first.columns_seen}, got "
            f"{state.columns_seen}; a forward stopped half-way"
        )
    seen, of_first = (one.tensors.get("tokens_seen") for one in (state, first))
    if seen is not None and of_first is not None and not torch.equal(seen, of_first):
        raise ValueError(
            f"tokens_seen must be those of layer 0 = {reprlib.repr(of_first.tolist())}, got "
            f"{reprlib.repr(seen.tolist())}"
        )


def _check_layer(state: LayerState, dtype: torch.dtype | None) -> None:
    tensors, columns = state.tensors, state.columns_seen
    if not tensors:
        if columns > 0:
            raise ValueError(f"columns_seen must be 0 where there are no tensors, got {columns}")
        return
    capacity = _check_layout(tensors, dtype)["capacity"]

    seen, positions = tensors["tokens_seen"], tensors["positions"]
    rule = f"tokens_seen must be >= 0 and <= columns_seen = {columns}"
    _check_all((seen >= 0) & (seen <= columns), seen, rule)
    for name in ("positions", "last_evicted"):
        if name in tensors:
            numbers = tensors[name]
            rule = f"{name} must be >= -1 and < tokens_seen of their row"
            _check_all((numbers >= -1) & (numbers < seen[:, None, None]), numbers, rule)
    ordered = positions.sort(-1).values
    before, after = ordered[..., :-1], ordered[..., 1:]
    _check_all((after > before) | (after < 0), after, "positions of a row and KV head must differ")

    if state.budget is None:
        if columns > 0:
            raise ValueError(f"budget must be given where columns_seen > 0, got {columns} and None")
    elif state.budget.total > capacity:
        raise ValueError(f"budget must be <= capacity = {capacity} in all, got {state.budget!r}")
    if "row_budget" in tensors:
        budgets = tensors["row_budget"]
        rule = f"row_budget must be >= 0 each and <= capacity = {capacity} in all"
        _check_all((budgets >= 0).all(1) & (budgets.sum(1) <= capacity), budgets, rule)
    if "row_target" in tensors:
        _check_move(tensors.get("row_budget"), tensors["row_target"])


def _check_move(budgets: Tensor | None, targets: Tensor) -> None:
    if budgets is None:
        raise ValueError("row_budget must be given where row_target is, got none")
    rule = "row_target must be >= 0 each and >= 1 in all"
    _check_all((targets >= 0).all(1) & (targets[:, :3].sum(1) >= 1), targets, rule)
    above = budgets - targets[:, :3]
    alike = (above[:, 0] == 0) & (above[:, 2] == 0)
    rule = "row_target must have num_sink and num_recent of row_budget, and no more num_heavy"
    _check_all(alike & (above[:, 1] >= 0), targets, rule)
    rule = "row_target must have a pace >= 1 where row_budget has more num_heavy"
    _check_all((above[:, 1] == 0) | (targets[:, 3] >= 1), targets, rule)


def _check_layout(tensors: dict[str, Tensor], dtype: torch.dtype | None) -> dict[str, int]:
    """Raise unless the tensors of a layer fit each other; else the size of each axis."""
    if not _AXES.keys() - _OPTIONAL <= tensors.keys() <= _AXES.keys():
        raise ValueError(
            f"tensors must be {sorted(_AXES)}, of which {sorted(_OPTIONAL)} may be missing, got "
            f"{reprlib.repr(sorted(tensors))}"
        )
    dtype = dtype or tensors["keys"].dtype
    if dtype not in DTYPES.values():
        raise ValueError(f"keys must be of a floating-point dtype, got {dtype}")
    score_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    dtypes = {"keys": dtype, "values": dtype, "scores": score_dtype}
    sizes = {"counts": 3, "counts and pace": 4}
    for name, axes in _AXES.items():
        if name not in tensors:
            continue
        tensor, wanted = tensors[name], dtypes.get(name, torch.int32)
        if tensor.dtype != wanted:
            raise ValueError(f"{name} must be {wanted}, got {tensor.dtype}")
        if tensor.ndim == len(axes):
            sizes = {**dict(zip(axes, tensor.shape, strict=True)), **sizes}
        shape = [sizes.get(axis, "any") for axis in axes]
        if list(tensor.shape) != shape:
            raise ValueError(
                f"{name} must be [{', '.join(axes)}] = {shape}, got {list(tensor.shape)}"
            )
    empty = [axis for axis in _AXES["keys"] if axis != "batch" and sizes[axis] == 0]
    if empty:
        raise ValueError(f"{', '.join(empty)} must be >= 1, got 0")
    return sizes


def _check_all(ok: Tensor, values: Tensor, rule: str) -> None:
    """Raise ValueError with the rule and the first of `values` that is not `ok`."""
    if not ok.all():
        where = (~ok).nonzero()[0].tolist()
        raise ValueError(f"{rule}, got {values[tuple(where)].tolist()} at {where}")


def _check_model(saved: Any, config: Any) -> None:
    ours = json.loads(_json(model_shape(config)))  # As it comes back from a file.
    saved = _object("model", saved, ours)
    differ = [name for name in ours if saved[name] != ours[name]]
    if differ:
        was, got = (
            ", ".join(f"{name}={reprlib.repr(shape[name])}" for name in differ)
            for shape in (saved, ours)
        )
        raise ValueError(f"config must be that of the model that was saved, {was}, got {got}")


def _object(what: str, value: Any, keys: Iterable[str]) -> dict[str, Any]:
    """The value, if it is an object with just these keys."""
    if not isinstance(value, dict) or value.keys() != set(keys):
        raise ValueError(f"{what} must have the keys {sorted(keys)}, got {reprlib.repr(value)}")
    return value


def _made(cls: Callable[..., _T], what: str, value: Any, keys: Iterable[str]) -> _T:
    """An object of the extension module, from its attributes."""
    try:
        return cls(**_object(what, value, keys))
    except (OverflowError, RuntimeError) as error:  # A number or a string that C++ cannot hold.
        raise ValueError(f"{what} must be one that can be, got {reprlib.repr(value)}") from error


def _number(what: str, value: Any) -> int:
    """The value, if it is a whole number that a tensor can hold."""
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError(f"{what} must be an integer >= 0, got {reprlib.repr(value)}")
    return value


# ---- As the header has them.


def _policies(settings: Settings) -> Any:
    """The policy, or a list of those of the rows."""
    if settings.row_policies is None:
        return settings.policy.arguments
    return [policy.arguments for policy in settings.row_policies]


def _read_policies(policy: Any) -> EvictionPolicy | list[EvictionPolicy]:
    if isinstance(policy, list):
        return [_made(EvictionPolicy, "policy", one, _POLICY) for one in policy]
    return _made(EvictionPolicy, "policy", policy, _POLICY)


def _attributes(value: Any, names: Iterable[str]) -> dict[str, Any] | None:
    return None if value is None else {name: getattr(value, name) for name in names}


def _event_attributes(event: BudgetEvent) -> dict[str, Any]:
    old, new = (
        [_attributes(budget, _BUDGET) for budget in rows] for rows in (event.old, event.new)
    )
    return {**{name: getattr(event, name) for name in _EVENT}, "old": old, "new": new}


def _dtype_name(dtype: torch.dtype | None) -> str | None:
    return None if dtype is None else str(dtype).removeprefix("torch.")


def _device_name(state: LayerState) -> str | None:
    keys = state.tensors.get("keys")
    return None if keys is None else str(keys.device)


def _former_device(name: str | None) -> torch.device:
    try:
        return resolve_device(name or "cpu")
    except ValueError:
        return torch.device("cpu")
