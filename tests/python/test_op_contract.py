"""What PyTorch expects of an operator: schema, Meta, autograd, aliasing, compile, registration."""

from __future__ import annotations

import doctest
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import h2o_kv
from h2o_kv import ops
from op_helpers import (
    CACHE_LAYOUTS,
    LAYOUTS,
    OPERATORS,
    State,
    Tokens,
    assert_bitwise,
    cache_laid_out,
    decode,
    is_emulated,
    laid_out,
    operator,
    pad,
    planted_tokens,
    random_state,
)

COUNTS = (1, 2, 3)

SCHEMAS = {
    "decode": "h2o::h2o_attention_decode(Tensor query, Tensor(a!) k_cache, Tensor(b!) v_cache, "
    "Tensor(c!) scores, Tensor(d!) positions, Tensor k_new, Tensor v_new, Tensor position_new, "
    "int num_sink, int num_heavy, int num_recent, *, str gqa_reduce='sum', float? scale=None, "
    "int chunk=1, Tensor? alibi_slopes=None) -> (Tensor output, Tensor evicted)",
    "evict": "h2o::h2o_evict(Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor(c!) scores, "
    "Tensor(d!) positions, Tensor k_new, Tensor v_new, Tensor scores_new, Tensor position_new, "
    "int num_sink, int num_heavy, int num_recent) -> Tensor evicted",
    "select": "h2o::h2o_prefill_select(Tensor query, Tensor key, Tensor position, int num_sink, "
    "int num_heavy, int num_recent, *, str gqa_reduce='sum', float? scale=None, "
    "Tensor? alibi_slopes=None) -> (Tensor selected, Tensor scores)",
}


def inputs(
    dtype: torch.dtype = torch.float32,
    layout: str = "contiguous",
    cache_layout: str = "contiguous",
    device: torch.device | str = "cpu",
    num: int = 5,
    batch: int = 2,
) -> tuple[State, Tokens]:
    """A cache in use, one slot above the budget, and tokens of which the first is padding."""
    state = random_state(batch, 2, 7, 16, dtype, newest=9).to(device)
    tokens = planted_tokens(batch, 4, 2, num, 16, dtype, start=9)
    if num > 1:
        tokens = pad(tokens, [[False] + [True] * (num - 1)] * batch)
    query, key, value = (laid_out(t.to(device), layout) for t in tokens[:3])
    view = cache_laid_out(state, cache_layout).state
    return view, Tokens(query, key, value, tokens.position.to(device))


def call_of(op: str, state: State, tokens: Tokens) -> tuple[Any, ...]:
    """The positional arguments of each operator."""
    query, key, value, position = tokens
    if op == "decode":
        return (query, *state, key, value, position, *COUNTS)
    if op == "evict":
        scores_new = torch.rand(key.shape[:3], device=key.device).to(state.scores.dtype)
        return (*state, key, value, scores_new, position, *COUNTS)
    return (query, key, position, *COUNTS)


def options_of(
    op: str, batch: int, device: torch.device | str, dtype: torch.dtype, num: int = 5
) -> dict[str, Any]:
    """Every keyword argument, with values that are not the defaults."""
    row_budget = torch.tensor([[0, 3, 1]] * batch, device=device)
    options: dict[str, Any] = {"row_budget": row_budget}
    if op != "evict":
        slopes = torch.linspace(0.1, 0.4, 4, device=device)
        options.update(alibi_slopes=slopes, gqa_reduce="max", scale=0.2)
    if op == "decode":
        options["chunk"] = 3
        like = torch.zeros(batch, 2, num, 16, dtype=dtype, device=device)
        options.update(k_evicted=like, v_evicted=laid_out(like, "transposed").clone())
    return options


def tensors_of(result: Any) -> tuple[Tensor, ...]:
    return (result,) if isinstance(result, Tensor) else tuple(result)


# --- schema and opcheck -------------------------------------------------------------------------


@pytest.mark.parametrize("op", OPERATORS)
def test_the_schema_only_gains_keyword_arguments_with_defaults(op: str) -> None:
    schema = operator(op).default._schema
    agreed = torch._C.parse_schema(SCHEMAS[op])
    assert schema.is_backward_compatible_with(agreed), schema
    assert all(a.kwarg_only for a in schema.arguments[len(agreed.arguments) :])
    mutated = {a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write}
    expected = set() if op == "select" else {"k_cache", "v_cache", "scores", "positions"}
    if op == "decode":
        expected |= {"k_evicted", "v_evicted"}
    assert mutated == expected


UTILITIES = (
    "test_schema",
    "test_autograd_registration",
    "test_faketensor",
    "test_aot_dispatch_static",
    "test_aot_dispatch_dynamic",
)


@pytest.mark.parametrize("op", OPERATORS)
@pytest.mark.parametrize(
    ("dtype", "layout", "cache_layout", "options"),
    [
        (torch.float32, "contiguous", "contiguous", False),
        (torch.bfloat16, "transposed", "interleaved", True),
        (torch.float16, "fused", "transposed", False),
        (torch.float64, "last_stride_2", "inside", True),
    ],
)
def test_opcheck(
    op: str,
    dtype: torch.dtype,
    layout: str,
    cache_layout: str,
    options: bool,
    device: torch.device,
) -> None:
    args = call_of(op, *inputs(dtype, layout, cache_layout, device))
    kwargs = options_of(op, 2, device, dtype) if options else {}
    results = torch.library.opcheck(operator(op).default, args, kwargs, test_utils=UTILITIES)
    assert set(results.values()) == {"SUCCESS"}, results


@pytest.mark.parametrize("op", OPERATORS)
def test_opcheck_with_inputs_that_require_grad(op: str) -> None:
    state, tokens = inputs()
    tokens = tokens._replace(query=tokens.query.clone().requires_grad_())
    if op == "evict":
        tokens = tokens._replace(key=tokens.key.clone().requires_grad_())
    results = torch.library.opcheck(
        operator(op).default, call_of(op, state, tokens), test_utils="test_autograd_registration"
    )
    assert results == {"test_autograd_registration": "SUCCESS"}


def test_the_examples_in_the_documentation_are_right() -> None:
    result = doctest.testmod(ops)
    assert result.attempted > 0
    assert result.failed == 0


# --- Meta ---------------------------------------------------------------------------------------


def to_meta(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device="meta")


@pytest.mark.parametrize("op", OPERATORS)
@pytest.mark.parametrize("layout", [*LAYOUTS, "expanded"])
@pytest.mark.parametrize("num", [0, 1, 5])
def test_meta_gives_sizes_strides_and_dtypes_of_the_real_result(
    op: str, layout: str, num: int, device: torch.device
) -> None:
    for dtype in (torch.float64, torch.bfloat16):
        if layout == "expanded":
            state, tokens = inputs(dtype, device=device, num=num)
            one = tokens.query[:, :1]
            tokens = tokens._replace(query=one.expand(2, 4, num, 16))
        else:
            state, tokens = inputs(dtype, layout, "interleaved", device, num)
        args, kwargs = call_of(op, state, tokens), options_of(op, 2, device, dtype, num)
        meta_kwargs = {k: to_meta(v) for k, v in kwargs.items()}
        meta = tensors_of(operator(op)(*(to_meta(a) for a in args), **meta_kwargs))
        real = tensors_of(operator(op)(*args, **kwargs))
        for own, true in zip(meta, real, strict=True):
            assert own.device.type == "meta"
            assert own.size() == true.size()
            assert own.dtype == true.dtype
            for size, stride, true_stride in zip(
                true.size(), own.stride(), true.stride(), strict=True
            ):  # of one element or none it means nothing
                assert stride == true_stride or size <= 1 or true.numel() == 0


def test_the_output_has_the_layout_of_the_query(device: torch.device) -> None:
    state, tokens = inputs(layout="transposed", device=device)
    output, _ = ops.attention_decode(tokens.query, *state, *tokens[1:], *COUNTS)
    assert output.stride() == tokens.query.stride()
    assert output.transpose(1, 2).is_contiguous()


# --- autograd -----------------------------------------------------------------------------------


def test_a_backward_pass_raises(device: torch.device) -> None:
    state, tokens = inputs(device=device)
    query = tokens.query.clone().requires_grad_()
    output, _ = ops.attention_decode(query, *state, *tokens[1:], *COUNTS)
    with pytest.raises(RuntimeError, match=r"::h2o_attention_decode.*not implemented"):
        output.sum().backward()
    _, scores = ops.prefill_select(query, tokens.key, tokens.position, *COUNTS)
    with pytest.raises(RuntimeError, match=r"::h2o_prefill_select.*not implemented"):
        scores.sum().backward()


@pytest.mark.parametrize("op", ["decode", "evict"])
def test_what_is_written_is_detached(op: str, device: torch.device) -> None:
    state, tokens = inputs(device=device)
    key, value = (tensor.clone().requires_grad_() for tensor in (tokens.key, tokens.value))
    result = operator(op)(*call_of(op, state, tokens._replace(key=key, value=value)))
    assert not any(tensor.requires_grad for tensor in state)
    # evict has no floating-point result that a backward pass could start from.
    assert any(tensor.requires_grad for tensor in tensors_of(result)) == (op == "decode")


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("op", OPERATORS)
def test_no_grad_and_inference_mode(op: str, mode: Any, device: torch.device) -> None:
    args = call_of(op, *inputs(device=device))
    copies = [a.clone() if isinstance(a, Tensor) else a for a in args]
    expected = tensors_of(operator(op)(*args))
    with mode():
        inside = [a.clone() if isinstance(a, Tensor) else a for a in copies]
        result = tensors_of(operator(op)(*inside))
    assert_bitwise(result, expected)
    assert not any(t.requires_grad for t in result)
    for own, other in zip(inside, args, strict=True):
        assert not isinstance(own, Tensor) or torch.equal(own.nan_to_num(), other.nan_to_num())


def test_inference_tensors_as_inputs(device: torch.device) -> None:
    with torch.inference_mode():
        args = call_of("decode", *inputs(device=device))
        expected = [a.clone() if isinstance(a, Tensor) else a for a in args]
    with torch.no_grad():
        operator("decode")(*args[:1], *(a.clone() for a in args[1:5]), *args[5:])
    for own, other in zip(args, expected, strict=True):
        assert not isinstance(own, Tensor) or torch.equal(own.nan_to_num(), other.nan_to_num())


@pytest.mark.parametrize("op", ["decode", "evict"])
def test_the_version_of_what_is_written_grows(op: str, device: torch.device) -> None:
    state, tokens = inputs(device=device)
    args, options = call_of(op, state, tokens), options_of(op, 2, device, torch.float32)
    tensors = [a for a in (*args, *options.values()) if isinstance(a, Tensor)]
    before = [tensor._version for tensor in tensors]
    operator(op)(*args, **options)
    written = {id(t) for t in state} | {id(options.get(f"{n}_evicted")) for n in "kv"}
    for tensor, version in zip(tensors, before, strict=True):
        assert (tensor._version > version) == (id(tensor) in written)


def test_autograd_notices_that_a_saved_tensor_was_written(device: torch.device) -> None:
    state, tokens = inputs(device=device)
    weight = torch.ones_like(state.scores).requires_grad_()
    loss = (weight * state.scores).sum()
    ops.attention_decode(tokens.query, *state, *tokens[1:], *COUNTS)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# --- aliasing -----------------------------------------------------------------------------------


def test_results_are_not_views_of_the_inputs(device: torch.device) -> None:
    for op in OPERATORS:
        args = call_of(op, *inputs(device=device))
        given = {a.untyped_storage().data_ptr() for a in args if isinstance(a, Tensor)}
        results = tensors_of(operator(op)(*args))
        pointers = [r.untyped_storage().data_ptr() for r in results]
        assert not given & set(pointers)
        assert len(set(pointers)) == len(pointers)


@pytest.mark.parametrize("cache_layout", CACHE_LAYOUTS)
@pytest.mark.parametrize("chunk", [1, 3])
def test_inputs_that_are_views_of_the_cache_are_read_before_it_is_written(
    cache_layout: str, chunk: int, device: torch.device
) -> None:
    start, _ = inputs(device=device)
    start.k_cache.nan_to_num_(0.5)
    start.v_cache.nan_to_num_(0.5)
    start.scores.copy_(torch.rand(start.scores.shape))
    start.positions.copy_(torch.arange(7))
    plain = start.clone()
    aliased = cache_laid_out(start, cache_layout).state
    for state, copied in ((plain, True), (aliased, False)):
        new: list[Tensor] = [
            state.v_cache[:, :, [0, 1, 2, 3]][:, :, :3] if copied else state.v_cache[:, :, :3],
            state.k_cache[:, :, 2:5],
            state.k_cache[:, :, 1:4],
            torch.arange(7, 10, device=device).expand(2, 3),
        ]
        new = [t.clone() for t in new] if copied else new
        result = ops.attention_decode(new[0], *state, *new[1:], *COUNTS, chunk=chunk)
        scores_new = state.scores[:, :, 2:5]
        position_new = state.positions[:, 0, :3].sort(-1).values + 20
        key, value = state.k_cache[:, :, :3], state.v_cache[:, :, 4:7]
        if copied:
            scores_new, key, value = scores_new.clone(), key.clone(), value.clone()
        left = ops.evict(*state, key, value, scores_new, position_new, *COUNTS)
        if copied:
            expected = [*result, left]
    assert_bitwise([*result, left, *aliased], [*expected, *plain])


def test_positions_of_the_cache_may_be_the_new_positions(device: torch.device) -> None:
    # Views of what is written, as position_new: read before the first write.
    results = []
    for copied in (True, False):
        state, tokens = inputs(device=device, num=3)
        state.positions.copy_(torch.arange(7))
        position = state.positions[:, 1, 4:7]
        position = position.clone() if copied else position
        result = ops.attention_decode(
            tokens.query.nan_to_num(), *state, *(t.nan_to_num() for t in tokens[1:3]), position,
            *COUNTS, chunk=2,
        )  # fmt: skip
        results.append([*result, *state])
    assert_bitwise(results[1], results[0])


def test_calls_from_several_threads(device: torch.device) -> None:
    def run(seed: int) -> list[Tensor]:
        state = random_state(1, 2, 70, 32, torch.float32, seed, newest=70, full=True)
        tokens = planted_tokens(1, 4, 2, 200, 32, torch.float32, seed, start=70)
        result = decode(state, tokens, (2, 30, 30), device, chunk=1 + seed % 2 * 9)
        return [*result, *state]

    alone = [run(seed) for seed in range(6)]
    with ThreadPoolExecutor(3) as pool:
        together = list(pool.map(run, range(6)))
    for own, expected in zip(together, alone, strict=True):
        assert_bitwise(own, expected)


# --- torch.compile ------------------------------------------------------------------------------


def decode_then_evict(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    scores: Tensor,
    positions: Tensor,
    key: Tensor,
    value: Tensor,
    position: Tensor,
) -> tuple[Tensor, ...]:
    """A step, a cut to a smaller budget, and what a program might do with the result."""
    state = (k_cache, v_cache, scores, positions)
    room = {"k_evicted": torch.zeros_like(key), "v_evicted": torch.zeros_like(value)}
    output, evicted = operator("decode")(
        query * 2, *state, key, value, position, 1, 2, 3, chunk=2, **room
    )
    none = key[:, :, :0]
    cut = operator("evict")(*state, none, none, scores[:, :, :0], position[:, :0], 1, 2, 1)
    largest = torch.where(positions >= 0, scores, 0).amax(-1)
    selected, selected_scores = operator("select")(query, key, position, 0, 2, 1)
    left = (evicted, room["k_evicted"] * 2, room["v_evicted"] * 2, cut)
    return output + 1, *left, largest, scores * 2, selected, selected_scores


@pytest.mark.parametrize(
    ("backend", "dynamic"), [("aot_eager", False), ("aot_eager", True), ("inductor", True)]
)
def test_compiled_equals_eager(backend: str, dynamic: bool, device: torch.device) -> None:
    if backend == "inductor" and is_emulated():
        pytest.skip("slow, and aot_eager has met everything that is the operators' own")
    torch._dynamo.reset()
    compiled = torch.compile(decode_then_evict, fullgraph=True, dynamic=dynamic, backend=backend)
    for num, batch, layout in ((5, 2, "contiguous"), (4, 3, "transposed")):
        state, tokens = inputs(layout=layout, device=device, num=num, batch=batch)
        query, *new = tokens
        other = state.clone()
        result = compiled(query, *state, *new)
        expected = decode_then_evict(query, *other, *new)
        assert_bitwise([*result, *state], [*expected, *other])
        assert (expected[1] >= 0).any()  # something left


def test_compiled_into_views(device: torch.device) -> None:
    """The caches are views that the compiled function makes itself, of one larger buffer."""
    torch._dynamo.reset()

    def step(
        buffer: Tensor, scores: Tensor, positions: Tensor, query: Tensor, *new: Tensor
    ) -> Tensor:
        state = (buffer[:, :, :, 0], buffer[:, :, :, 1], scores, positions)
        output: Tensor = operator("decode")(query, *state, *new, *COUNTS)[0]
        return output

    state, (query, *new) = inputs(device=device)
    buffer = torch.stack([state.k_cache, state.v_cache], 3)
    results = []
    for function in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        own = [buffer.clone(), state.scores.clone(), state.positions.clone()]
        results.append([function(*own, query, *new), *own])
    assert_bitwise(results[1], results[0])
    assert not torch.equal(results[0][2], state.scores)


def test_steps_while_filling_and_when_full_compile_once(device: torch.device) -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")

    @torch.compile(fullgraph=True, backend=counter)
    def step(query: Tensor, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        output, evicted = operator("decode")(query, *tensors, 1, 3, 4)
        return output, evicted

    state, eager = State.empty(1, 2, 8, 16).to(device), State.empty(1, 2, 8, 16).to(device)
    tokens = planted_tokens(1, 4, 2, 30, 16).to(device)
    for i in range(30):
        query, *new = tokens.columns(i, i + 1)
        result = step(query, *state, *new)
        expected = ops.attention_decode(query, *eager, *new, 1, 3, 4)
        assert_bitwise([*result, *state], [*expected, *eager])
    assert counter.frame_count == 1


# --- registration -------------------------------------------------------------------------------

_IMPORT_TWICE = """
import importlib, sys
import torch, h2o_kv
first = h2o_kv.LIBRARY_PATH
torch.ops.load_library(first)          # the same file again: nothing happens
importlib.reload(h2o_kv)
for name in [n for n in sys.modules if n.split(".")[0] == "h2o_kv" and n != "h2o_kv._C"]:
    del sys.modules[name]
sys.path.insert(0, sys.argv[1])        # a second copy of the package
try:
    import h2o_kv
except ImportError as error:
    assert "h2o_kv: torch.ops.h2o is registered already by" in str(error), error
    assert str(first) in str(error) and sys.argv[1] in str(error), error
else:
    raise SystemExit(f"imported {h2o_kv.__file__}")
torch.ops.h2o.h2o_evict.default        # the first copy still works
print("fine")
"""

_LOAD_SECOND_COPY = """
import sys
import torch, h2o_kv
try:
    torch.ops.load_library(sys.argv[1])
except (OSError, RuntimeError, ImportError):
    pass
torch.ops.h2o.h2o_evict.default
print("fine")
"""


def run_python(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script, *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


def test_a_second_copy_of_the_package_is_refused(tmp_path: Path) -> None:
    folder = Path(h2o_kv.__file__).parent
    shutil.copytree(folder, tmp_path / "h2o_kv", ignore=shutil.ignore_patterns("__pycache__"))
    done = run_python(_IMPORT_TWICE, str(tmp_path))
    assert (done.returncode, done.stdout) == (0, "fine\n"), done.stderr


def test_a_second_copy_of_the_library_does_not_end_the_process(tmp_path: Path) -> None:
    copy = shutil.copy(h2o_kv.LIBRARY_PATH, tmp_path / "libh2o.so")
    done = run_python(_LOAD_SECOND_COPY, str(copy))
    assert (done.returncode, done.stdout) == (0, "fine\n"), done.stderr


def test_a_stale_library_beside_the_package_does_no_harm(tmp_path: Path) -> None:
    # What the dynamic linker would take for the SONAME of libh2o.so, were that not loaded already.
    folder = Path(h2o_kv.__file__).parent
    shutil.copytree(folder, tmp_path / "h2o_kv", ignore=shutil.ignore_patterns("__pycache__"))
    major, minor, _ = h2o_kv.__version__.split(".")
    (tmp_path / f"h2o_kv/libh2o.so.{major}.{minor}").write_text("of an earlier build")
    script = (
        "import sys; sys.path.insert(0, sys.argv[1]); import h2o_kv; print(h2o_kv.LIBRARY_PATH)"
    )
    done = run_python(script, str(tmp_path))
    assert (done.returncode, done.stdout) == (0, f"{tmp_path}/h2o_kv/libh2o.so\n"), done.stderr
