"""Every check of the operators: the whole sentence, the same on each device, and before any write."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from op_helpers import OPERATORS, State, bitwise_equal, operator, runs_cuda_operators

STATE = ("k_cache", "v_cache", "scores", "positions")
Arguments = dict[str, Any]


def arguments(op: str) -> Arguments:
    """A call that is right: batch 2, 4 query heads, 2 KV heads, capacity 6, 3 tokens, head_dim 8."""
    state = State.empty(2, 2, 6, 8, torch.float32)
    position = torch.arange(3).repeat(2, 1)
    query, key = torch.randn(2, 4, 3, 8), torch.randn(2, 2, 3, 8)
    counts = {"num_sink": 1, "num_heavy": 2, "num_recent": 3}
    if op == "select":
        return {"query": query, "key": key, "position": position, **counts}
    new: Arguments = {"k_new": key, "v_new": key + 1}
    if op == "decode":
        new["query"] = query
    else:
        new["scores_new"] = torch.rand(2, 2, 3)
    return {**state._asdict(), **new, "position_new": position, **counts}


@dataclass(frozen=True)
class Case:
    """One thing that is wrong: what is passed instead, and what is said, `{op}` being its name.

    where: "everywhere"; "memory" where strides and addresses exist, so not on Meta; "values" where
    the host can look at what tensors hold, so on the CPU.
    """

    ops: str
    message: str
    change: Callable[[Arguments], Arguments]
    error: type[Exception] = RuntimeError
    where: str = "everywhere"


def shared_cases() -> list[Case]:
    """Of the operators that have a cache."""
    kv, slots = "[batch, num_kv_heads, capacity, head_dim]", "[batch, num_kv_heads, capacity]"
    new = "[batch, num_kv_heads, num_new, head_dim]"
    both, big = "decode evict", 2**31
    return [
        Case(
            both,
            f"{{op}}: k_cache must be {kv}, got [2, 6, 8]",
            lambda a: {"k_cache": a["k_cache"][:, 0]},
        ),
        Case(
            both,
            f"{{op}}: v_cache must be {kv} = [2, 2, 6, 8], got [2, 2, 5, 8]",
            lambda a: {"v_cache": a["v_cache"][:, :, :5]},
        ),
        Case(
            both,
            f"{{op}}: scores must be {slots} = [2, 2, 6], got [2, 6]",
            lambda a: {"scores": a["scores"][:, 0]},
        ),
        Case(
            both,
            f"{{op}}: positions must be {slots} = [2, 2, 6], got [1, 2, 6]",
            lambda a: {"positions": a["positions"][:1]},
        ),
        Case(
            both,
            "{op}: head_dim must be in 1..512, got 513",
            lambda a: dict.fromkeys(("k_cache", "v_cache"), torch.zeros(2, 2, 6, 513)),
        ),
        Case(
            both,
            "{op}: head_dim must be in 1..512, got 0",
            lambda a: {name: a[name][..., :0] for name in ("k_cache", "v_cache")},
        ),
        Case(
            both,
            "{op}: num_kv_heads must be >= 1, got 0",
            lambda a: {name: a[name][:, :0] for name in STATE},
        ),
        Case(
            both,
            "{op}: capacity must be <= 2147483647, got 2147483648",
            lambda a: {
                name: a[name][:, :, :1].expand(2, 2, big, *a[name].shape[3:]) for name in STATE
            },
        ),
        Case(
            both,
            "{op}: k_cache must be float32, float16, bfloat16 or float64, got Int",
            lambda a: {"k_cache": a["k_cache"].int()},
        ),
        Case(
            both,
            "{op}: v_cache must be Half, got Float",
            lambda a: {"k_cache": a["k_cache"].half()},
        ),
        Case(
            both,
            "{op}: scores must be float32, got Double",
            lambda a: {"scores": a["scores"].double()},
        ),
        Case(
            both,
            "{op}: scores must be float32, got BFloat16",
            lambda a: {
                **{name: a[name].bfloat16() for name in ("k_cache", "v_cache", "scores")},
            },
        ),
        Case(
            both,
            "{op}: scores must be float64, got Float",
            lambda a: {name: a[name].double() for name in ("k_cache", "v_cache")},
        ),
        Case(
            both,
            "{op}: positions must be int32, got Long",
            lambda a: {"positions": a["positions"].long()},
        ),
        *(
            Case(
                both,
                f"{{op}}: {name} must have stride 1 in head_dim, since it is written in place, "
                "got strides [96, 48, 1, 6]",
                lambda a, name=name: {name: a[name].transpose(2, 3).contiguous().transpose(2, 3)},
                where="memory",
            )
            for name in ("k_cache", "v_cache")
        ),
        Case(
            both,
            "{op}: k_cache must not overlap itself, since it is written in place, "
            "got sizes [2, 2, 6, 8] and strides [0, 48, 8, 1]",
            lambda a: {"k_cache": a["k_cache"][:1].expand(2, 2, 6, 8)},
            where="memory",
        ),
        Case(
            both,
            "{op}: v_cache must not overlap itself, since it is written in place, "
            "got sizes [2, 2, 6, 8] and strides [96, 48, 4, 1]",
            lambda a: {"v_cache": torch.zeros(2 * 96).as_strided((2, 2, 6, 8), (96, 48, 4, 1))},
            where="memory",
        ),
        Case(
            both,
            "{op}: scores must not overlap itself, since it is written in place, "
            "got sizes [2, 2, 6] and strides [12, 0, 1]",
            lambda a: {"scores": a["scores"][:, :1].expand(2, 2, 6)},
            where="memory",
        ),
        Case(
            both,
            "{op}: positions must not overlap itself, since it is written in place, "
            "got sizes [2, 2, 6] and strides [0, 0, 0]",
            lambda a: {"positions": a["positions"][:1, :1, :1].expand(2, 2, 6)},
            where="memory",
        ),
        Case(
            both,
            "{op}: k_cache and v_cache must not share memory, since both are written in place",
            lambda a: {"v_cache": a["k_cache"]},
            where="memory",
        ),
        Case(
            both,
            "{op}: k_cache and v_cache must not share memory, since both are written in place",
            lambda a: overlapping(("k_cache", "v_cache"), (2, 2, 6, 8)),
            where="memory",
        ),
        *(
            Case(
                both,
                "{op}: k_cache and v_cache must not share memory, since both are written in place",
                lambda a, begin=begin: columns_of_one_buffer(begin),
                where="memory",
            )
            for begin in (0, 4)
        ),
        *(
            Case(
                both,
                f"{{op}}: {a_name} and {b_name} must not share memory, since both are written in "
                "place",
                lambda a, a_name=a_name, b_name=b_name: sharing(a_name, b_name),
                where="memory",
            )
            for a_name, b_name in (
                ("scores", "k_cache"),
                ("scores", "v_cache"),
                ("positions", "scores"),
                ("positions", "k_cache"),
                ("positions", "v_cache"),
            )
        ),
        Case(
            both,
            f"{{op}}: k_new must be {new}, got [2, 3, 8]",
            lambda a: {"k_new": a["k_new"][:, 0]},
        ),
        Case(
            both,
            f"{{op}}: k_new must be {new} = [2, 2, 3, 8], got [2, 1, 3, 8]",
            lambda a: {"k_new": a["k_new"][:, :1]},
        ),
        Case(
            both,
            f"{{op}}: v_new must be {new} = [2, 2, 3, 8], got [2, 2, 2, 8]",
            lambda a: {"v_new": a["v_new"][:, :, :2]},
        ),
        Case(
            both,
            "{op}: position_new must be [batch, num_new] = [2, 3], got [3]",
            lambda a: {"position_new": a["position_new"][0]},
        ),
        Case(
            both,
            "{op}: k_new must be float32, got BFloat16",
            lambda a: {"k_new": a["k_new"].bfloat16()},
        ),
        Case(
            both,
            "{op}: v_new must be float32, got Half",
            lambda a: {"v_new": a["v_new"].half()},
        ),
        Case(
            both,
            # Keys in float32 after the rotation under autocast, cache in bfloat16.
            "{op}: k_new must be BFloat16, got Float",
            lambda a: {name: a[name].bfloat16() for name in ("k_cache", "v_cache", "v_new")},
        ),
        Case(
            both,
            "{op}: position_new must be int32 or int64, got Float",
            lambda a: {"position_new": a["position_new"].float()},
        ),
        Case(
            both,
            "{op}: the budget num_sink + num_heavy + num_recent must be <= capacity, "
            "got 2 + 2 + 3 = 7, capacity=6",
            lambda a: {"num_sink": 2},
            ValueError,
        ),
        Case(
            both,
            "{op}: position_new must be < 2147483647, got 2147483647 in row 1, column 2",
            lambda a: {"position_new": torch.tensor([[0, 1, 2], [0, 1, 2**31 - 1]])},
            ValueError,
            "values",
        ),
        Case(
            both,
            "{op}: position_new must increase along a row, got 4 before 4 in row 1, column 2",
            lambda a: {"position_new": torch.tensor([[0, 1, 2], [4, -1, 4]])},
            ValueError,
            "values",
        ),
        Case(
            both,
            "{op}: position_new must increase along a row, got 5 before 3 in row 0, column 1",
            lambda a: {"position_new": torch.tensor([[5, 3, 6], [0, 1, 2]], dtype=torch.int32)},
            ValueError,
            "values",
        ),
    ]


def overlapping(names: tuple[str, str], sizes: tuple[int, ...]) -> Arguments:
    """Two dense tensors, the second of which begins in the middle of the first."""
    buffer = torch.zeros(2 * torch.Size(sizes).numel())
    count = torch.Size(sizes).numel()
    return {names[0]: buffer[:count].view(sizes), names[1]: buffer[3 : count + 3].view(sizes)}


def columns_of_one_buffer(begin: int) -> Arguments:
    """Caches that are columns of the same wider buffer, and so not dense; they overlap."""
    wide = torch.zeros(2, 2, 6, 16)
    return {"k_cache": wide[..., :8], "v_cache": wide[..., begin : begin + 8]}


def sharing(a_name: str, b_name: str) -> Arguments:
    """The two state tensors on the same memory."""
    sizes = {"k_cache": (2, 2, 6, 8), "v_cache": (2, 2, 6, 8)}
    buffer = torch.zeros(2 * 2 * 6 * 8)
    made = {}
    for name in (a_name, b_name):
        size = sizes.get(name, (2, 2, 6))
        dense = buffer[: torch.Size(size).numel()].view(size)
        made[name] = dense.view(torch.int32) if name == "positions" else dense
    return made


def room(**changed: Tensor | None) -> Callable[[Arguments], Arguments]:
    """Room for what leaves, some of it changed."""
    return lambda a: {f"{n}_evicted": torch.zeros(2, 2, 3, 8) for n in "kv"} | changed


def evicted_cases() -> list[Case]:
    new = "[batch, num_kv_heads, num_new, head_dim] = [2, 2, 3, 8]"
    together = "k_evicted and v_evicted must be given together"
    in_place = "since it is written in place"
    return [
        Case("decode", f"{{op}}: {together}, got k_evicted alone", room(v_evicted=None)),
        Case("decode", f"{{op}}: {together}, got v_evicted alone", room(k_evicted=None)),
        Case(
            "decode",
            f"{{op}}: k_evicted must be {new}, got [2, 2, 8]",
            room(k_evicted=torch.zeros(2, 2, 8)),
        ),
        Case(
            "decode",
            f"{{op}}: v_evicted must be {new}, got [2, 4, 3, 8]",
            room(v_evicted=torch.zeros(2, 4, 3, 8)),
        ),
        Case(
            "decode",
            "{op}: k_evicted must be float32, got BFloat16",
            room(k_evicted=torch.zeros(2, 2, 3, 8, dtype=torch.bfloat16)),
        ),
        Case(
            "decode",
            f"{{op}}: v_evicted must have stride 1 in head_dim, {in_place}, got strides "
            "[48, 24, 1, 3]",
            room(v_evicted=torch.zeros(2, 2, 8, 3).transpose(2, 3)),
            where="memory",
        ),
        Case(
            "decode",
            f"{{op}}: k_evicted must not overlap itself, {in_place}, got sizes [2, 2, 3, 8] and "
            "strides [24, 0, 8, 1]",
            room(k_evicted=torch.zeros(2, 1, 3, 8).expand(2, 2, 3, 8)),
            where="memory",
        ),
        Case(
            "decode",
            "{op}: v_evicted and k_evicted must not share memory, since both are written in place",
            lambda a: dict.fromkeys(("k_evicted", "v_evicted"), torch.zeros(2, 2, 3, 8)),
            where="memory",
        ),
        *(
            Case(
                "decode",
                f"{{op}}: {name} and {state} must not share memory, since both are written in "
                "place",
                lambda a, name=name, state=state: (
                    room()(a) | {name: a[state].view(-1)[: 2 * 2 * 3 * 8].view(2, 2, 3, 8)}
                ),
                where="memory",
            )
            for name in ("k_evicted", "v_evicted")
            for state in ("k_cache", "v_cache")
        ),
    ]


def decode_cases() -> list[Case]:
    query = "[batch, num_q_heads, num_new, head_dim]"
    return [
        Case(
            "decode",
            f"{{op}}: query must be {query}, got [4, 3, 8]",
            lambda a: {"query": a["query"][0]},
        ),
        Case(
            "decode",
            f"{{op}}: query must be {query} = [2, 4, 3, 8], got [2, 4, 2, 8]",
            lambda a: {"query": a["query"][:, :, :2]},
        ),
        Case(
            "decode",
            f"{{op}}: query must be {query} = [2, 4, 3, 8], got [1, 4, 3, 8]",
            lambda a: {"query": a["query"][:1]},
        ),
        Case(
            "decode",
            "{op}: query must be float32, got Double",
            lambda a: {"query": a["query"].double()},
        ),
        *evicted_cases(),
        Case("decode", "{op}: chunk must be >= 1, got 0", lambda a: {"chunk": 0}, ValueError),
        Case("decode", "{op}: chunk must be >= 1, got -4", lambda a: {"chunk": -4}, ValueError),
    ]


def evict_cases() -> list[Case]:
    sizes = "[batch, num_kv_heads, num_new]"
    return [
        Case(
            "evict",
            f"{{op}}: scores_new must be {sizes} = [2, 2, 3], got [2, 2, 2]",
            lambda a: {"scores_new": a["scores_new"][..., :2]},
        ),
        Case(
            "evict",
            "{op}: scores_new must be float32, got Half",
            lambda a: {"scores_new": a["scores_new"].half()},
        ),
    ]


def select_cases() -> list[Case]:
    key = "[batch, num_kv_heads, seq_len, head_dim]"
    long = (2, 1, 2**31, 8)
    return [
        Case(
            "select",
            "{op}: query must be [batch, num_q_heads, seq_len, head_dim], got [4, 3, 8]",
            lambda a: {"query": a["query"][0]},
        ),
        Case("select", f"{{op}}: key must be {key}, got [2, 3, 8]", lambda a: {"key": a["key"][0]}),
        Case(
            "select",
            f"{{op}}: key must be {key} = [2, 2, 3, 8], got [2, 2, 3, 4]",
            lambda a: {"key": a["key"][..., :4]},
        ),
        Case(
            "select",
            "{op}: position must be [batch, seq_len] = [2, 3], got [2, 2]",
            lambda a: {"position": a["position"][:, :2]},
        ),
        Case(
            "select",
            "{op}: head_dim must be in 1..512, got 513",
            lambda a: dict.fromkeys(("query", "key"), torch.zeros(2, 2, 3, 513)),
        ),
        Case(
            "select",
            "{op}: num_kv_heads must be >= 1, got 0",
            lambda a: {"key": a["key"][:, :0]},
        ),
        Case(
            "select",
            "{op}: seq_len must be <= 2147483647, got 2147483648",
            lambda a: {
                **dict.fromkeys(("query", "key"), torch.zeros(1, 1, 1, 1).expand(long)),
                "position": torch.zeros(1, 1, dtype=torch.int64).expand(2, 2**31),
            },
        ),
        Case(
            "select",
            "{op}: query must be float32, float16, bfloat16 or float64, got Long",
            lambda a: {name: a[name].long() for name in ("query", "key")},
        ),
        Case(
            "select",
            "{op}: key must be float32, got Half",
            lambda a: {"key": a["key"].half()},
        ),
        Case(
            "select",
            "{op}: position must be int32 or int64, got Short",
            lambda a: {"position": a["position"].short()},
        ),
        Case(
            "select",
            "{op}: position must increase along a row, got 2 before 1 in row 0, column 2",
            lambda a: {"position": torch.tensor([[0, 2, 1], [0, 1, 2]])},
            ValueError,
            "values",
        ),
        Case(
            "select",
            "{op}: position must be < 2147483647, got 8589934592 in row 0, column 0",
            lambda a: {"position": torch.tensor([[2**33, 2, 3], [0, 1, 2]])},
            ValueError,
            "values",
        ),
    ]


def number_cases() -> list[Case]:
    """Budgets, row budgets, query heads, scale, slopes: of all operators that take them."""
    every, attention = "decode evict select", "decode select"
    rule = "row_budget must have counts >= 0 with a sum in 1..6 in every row"
    cases = [
        Case(
            every,
            f"{{op}}: {name} must be in 0..2147483647, got {count}",
            lambda a, name=name, count=count: {name: count},
            ValueError,
        )
        for name in ("num_sink", "num_heavy", "num_recent")
        for count in (-1, 2**31)
    ]
    cases += [
        Case(
            every,
            f"{{op}}: {rule}, got {bad[0]}, {bad[1]}, {bad[2]} in row 1",
            lambda a, bad=bad: {"row_budget": torch.tensor([[1, 2, 3], bad])},
            ValueError,
            "values",
        )
        for bad in ([0, 0, 0], [-1, 3, 3], [3, -1, 3], [3, 3, -1], [3, 3, 1], [2**62, 2**62, 1])
    ]
    cases += [
        Case(
            attention,
            f"{{op}}: scale must be finite, got {value}",
            lambda a, value=value: {"scale": float(value)},
            ValueError,
        )
        for value in ("nan", "inf", "-inf")
    ]
    cases += [
        Case(
            attention,
            f"{{op}}: scale must be within float32's range, got {value}",
            lambda a, value=value: {"scale": float(value)},
            ValueError,
        )
        for value in ("1e+39", "-1e+300")
    ]
    cases += [
        Case(
            attention,
            f"{{op}}: alibi_slopes must be finite as float32, got {got} for query head 2",
            lambda a, bad=bad, dtype=dtype: {
                "alibi_slopes": torch.tensor([0.5, 0.25, bad, 0.125], dtype=dtype)
            },
            ValueError,
            "values",
        )
        for bad, dtype, got in (
            (math.nan, torch.float32, "nan"),
            (math.inf, torch.float32, "inf"),
            (-math.inf, torch.float64, "-inf"),
            (1e39, torch.float64, "1e+39"),
        )
    ]
    return [
        *cases,
        Case(
            every,
            "{op}: the budget num_sink + num_heavy + num_recent must be >= 1, got 0 + 0 + 0",
            lambda a: dict.fromkeys(("num_sink", "num_heavy", "num_recent"), 0),
            ValueError,
        ),
        Case(
            every,
            "{op}: row_budget must be [batch, 3] = [2, 3], got [3]",
            lambda a: {"row_budget": torch.tensor([1, 2, 3])},
        ),
        Case(
            every,
            "{op}: row_budget must be [batch, 3] = [2, 3], got [1, 3]",
            lambda a: {"row_budget": torch.tensor([[1, 2, 3]])},
        ),
        Case(
            every,
            "{op}: row_budget must be int32 or int64, got Float",
            lambda a: {"row_budget": torch.ones(2, 3)},
        ),
        Case(
            attention,
            "{op}: num_q_heads must be a multiple of num_kv_heads, got num_q_heads=3, num_kv_heads=2",
            lambda a: {"query": a["query"][:, :3]},
        ),
        Case(
            attention,
            "{op}: num_q_heads must be a multiple of num_kv_heads, got num_q_heads=0, num_kv_heads=2",
            lambda a: {"query": a["query"][:, :0]},
        ),
        Case(
            attention,
            '{op}: gqa_reduce must be one of "sum", "max", got "mean"',
            lambda a: {"gqa_reduce": "mean"},
            ValueError,
        ),
        Case(
            attention,
            "{op}: alibi_slopes must be float32 or float64, got Half",
            lambda a: {"alibi_slopes": torch.ones(4).half()},
        ),
        Case(
            attention,
            "{op}: alibi_slopes must be [num_q_heads] = [4], got [2]",
            lambda a: {"alibi_slopes": torch.ones(2)},
        ),
    ]


CASES = [
    pytest.param(op, case, id=f"{op}-{i}-{case.message[6:60]}")
    for i, case in enumerate(
        shared_cases() + decode_cases() + evict_cases() + select_cases() + number_cases()
    )
    for op in case.ops.split()
]


def moved(call: Arguments, device: torch.device) -> Arguments:
    """The tensors on another device with their strides; those that share memory still share it."""
    storages: dict[int, Tensor] = {}

    def move(tensor: Tensor) -> Tensor:
        if device.type == "meta":
            return torch.empty_strided(
                tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device
            )
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in storages:
            copy = torch.empty(0, dtype=torch.uint8).set_(storage).to(device)
            storages[storage.data_ptr()] = copy
        whole = storages[storage.data_ptr()].view(tensor.dtype)
        return whole.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())

    return {k: move(v) if isinstance(v, Tensor) else v for k, v in call.items()}


def run_wrong(
    op: str, case: Case, device: torch.device
) -> tuple[str, list[tuple[str, Tensor, Tensor]]]:
    """What the call raised, and name, memory before and memory after of the state tensors."""
    call = arguments(op)
    call.update(case.change(call))
    if device.type != "cpu":
        call = moved(call, device)
    written = [
        (name, memory(call[name]))
        for name in (*STATE, "k_evicted", "v_evicted")
        if call.get(name) is not None
    ]
    before = [tensor.clone() for _, tensor in written]
    with pytest.raises(case.error) as caught:
        operator(op)(**call)
    assert type(caught.value) is case.error
    after = [(name, old, new) for (name, new), old in zip(written, before, strict=True)]
    return str(caught.value), after


def memory(tensor: Tensor) -> Tensor:
    """All bytes of the storage that a tensor lies in."""
    if tensor.is_meta:
        return torch.empty(0, dtype=torch.int32)
    return torch.empty(0, dtype=torch.int32, device=tensor.device).set_(tensor.untyped_storage())


@pytest.mark.parametrize("op", OPERATORS)
def test_the_call_that_the_cases_spoil_is_right(op: str) -> None:
    result = operator(op)(**arguments(op))
    assert (result if op == "evict" else result[0]).shape[0] == 2


@pytest.mark.parametrize(("op", "case"), CASES)
def test_wrong_call_raises_before_it_writes(op: str, case: Case, device: torch.device) -> None:
    if case.where == "values" and runs_cuda_operators(device):
        pytest.skip("values of tensors are looked at on the CPU alone")
    message, states = run_wrong(op, case, device)
    assert message == case.message.format(op=OPERATORS[op])
    for name, before, after in states:
        assert bitwise_equal(before, after), f"{name} was written"


@pytest.mark.parametrize(("op", "case"), [p for p in CASES if p.values[1].where == "everywhere"])
def test_meta_says_the_same_sentence(op: str, case: Case) -> None:
    message, _ = run_wrong(op, case, torch.device("meta"))
    assert message == case.message.format(op=OPERATORS[op])


DEVICES = [
    *((op, name, "k_cache") for op in ("decode", "evict") for name in (*STATE[1:], "k_new")),
    *((op, name, "k_cache") for op in ("decode", "evict") for name in ("v_new", "position_new")),
    *((op, "row_budget", "k_cache") for op in ("decode", "evict")),
    ("decode", "query", "k_cache"),
    ("decode", "k_evicted", "k_cache"),
    ("decode", "v_evicted", "k_cache"),
    ("decode", "alibi_slopes", "query"),
    ("evict", "scores_new", "k_cache"),
    ("select", "key", "query"),
    ("select", "position", "query"),
    ("select", "alibi_slopes", "query"),
    ("select", "row_budget", "query"),
]


@pytest.mark.parametrize(("op", "name", "other"), DEVICES)
def test_tensors_on_two_devices_are_refused(
    op: str, name: str, other: str, device: torch.device
) -> None:
    call = arguments(op)
    if op != "evict":
        call["alibi_slopes"] = torch.ones(4)
    if op == "decode":
        call.update(room()(call))
    call["row_budget"] = torch.tensor([[1, 2, 3]] * 2)
    call = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in call.items()}
    before = [call[state].clone() for state in STATE if state in call]
    call[name] = call[name].to("meta")
    with pytest.raises(RuntimeError) as caught:
        operator(op)(**call)
    place = f"got meta and {call['k_cache' if op != 'select' else 'query'].device}"
    assert str(caught.value) == f"{OPERATORS[op]}: {name} must be on the device of {other}, {place}"
    for old, state in zip(before, (s for s in STATE if s in call), strict=True):
        assert state == name or bitwise_equal(old, call[state])


@pytest.mark.parametrize("op", ["decode", "evict"])
def test_batch_0_is_checked_too(op: str) -> None:
    call = arguments(op)
    call = {k: v[:0] if isinstance(v, Tensor) else v for k, v in call.items()}
    call["num_sink"] = 5
    with pytest.raises(ValueError, match=r"must be <= capacity, got 5 \+ 2 \+ 3 = 10, capacity=6"):
        operator(op)(**call)


def test_a_wrong_row_budget_in_the_last_row_writes_no_other_row() -> None:
    call = arguments("decode")
    call["row_budget"] = torch.tensor([[1, 2, 3], [1, 2, 4]])
    with pytest.raises(ValueError, match="in row 1"):
        operator("decode")(**call)
    assert (call["positions"] == -1).all()
    assert (call["scores"] == 0).all()
    assert call["k_cache"].isnan().all()
