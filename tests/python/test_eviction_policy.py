"""EvictionPolicy and Budget as Python sees them."""

import copy
import pickle
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from h2o_kv import EvictionPolicy
from h2o_kv._C import Budget

MAX_TOKENS = 2**31 - 1

counts = st.integers(0, MAX_TOKENS)
ratios = st.floats(0, 1, exclude_min=True)


@st.composite
def policies(draw: st.DrawFn) -> EvictionPolicy:
    arguments: dict[str, Any] = {"num_sink": draw(counts)}
    arguments["gqa_reduce"] = draw(st.sampled_from(["sum", "max"]))
    for kind in ("heavy", "recent"):
        if draw(st.booleans()):
            arguments[f"num_{kind}"] = draw(st.integers(1, MAX_TOKENS))
        else:
            arguments[f"{kind}_ratio"] = draw(ratios)
    return EvictionPolicy(**arguments)


def refused(message: str) -> str:
    return f"^{re.escape(message)}$"


def test_properties_are_what_was_given() -> None:
    policy = EvictionPolicy(num_heavy=20, num_recent=30, num_sink=4, gqa_reduce="max")
    assert (policy.num_heavy, policy.num_recent, policy.num_sink) == (20, 30, 4)
    assert (policy.heavy_ratio, policy.recent_ratio) == (None, None)
    assert policy.gqa_reduce == "max"
    assert not policy.has_ratio


def test_ratios_are_what_was_given() -> None:
    policy = EvictionPolicy(heavy_ratio=0.1, recent_ratio=1)
    assert (policy.heavy_ratio, policy.recent_ratio) == (0.1, 1.0)
    assert (policy.num_heavy, policy.num_recent, policy.num_sink) == (None, None, 0)
    assert policy.gqa_reduce == "sum"
    assert policy.has_ratio


def test_a_budget_has_names_and_unpacks() -> None:
    budget = EvictionPolicy(num_heavy=20, recent_ratio=0.1, num_sink=4).resolve(300)
    assert (budget.num_sink, budget.num_heavy, budget.num_recent) == (4, 20, 30)
    assert budget.total == 54
    num_sink, num_heavy, num_recent = budget
    assert (num_sink, num_heavy, num_recent) == (4, 20, 30)
    assert len(budget) == 3
    assert repr(budget) == "Budget(num_sink=4, num_heavy=20, num_recent=30)"


def test_budgets_are_equal_when_every_count_is() -> None:
    budget = Budget(num_sink=1, num_heavy=2, num_recent=3)
    same = EvictionPolicy(num_sink=1, num_heavy=2, num_recent=3).budget()
    assert budget == same
    assert hash(budget) == hash(same)
    for other in (Budget(num_sink=1), Budget(num_sink=3, num_heavy=2, num_recent=1), (1, 2, 3)):
        assert budget != other
    assert Budget() == Budget(num_sink=0, num_heavy=0, num_recent=0)


@pytest.mark.parametrize(
    ("ratio", "prompt_len", "tokens"),
    [
        (0.29, 100, 29),  # 0.29 * 100 < 29 in binary
        (0.57, 100, 57),
        (0.1, 1500, 150),
        (0.2, 4, 1),
        (0.1, 0, 1),
        (1.0, 7, 7),
    ],
)
def test_a_ratio_is_rounded_down_to_at_least_one(
    ratio: float, prompt_len: int, tokens: int
) -> None:
    heavy = EvictionPolicy(heavy_ratio=ratio, num_recent=0)
    assert tuple(heavy.resolve(prompt_len)) == (0, tokens, 0)
    recent = EvictionPolicy(num_heavy=0, recent_ratio=ratio)
    assert tuple(recent.resolve(prompt_len)) == (0, 0, tokens)


@settings(deadline=None)
@given(permille=st.integers(1, 1000), prompt_len=st.integers(0, 1_000_000))
def test_decimal_ratios_are_exact(permille: int, prompt_len: int) -> None:
    policy = EvictionPolicy(heavy_ratio=permille / 1000, num_recent=0)
    assert policy.resolve(prompt_len).num_heavy == max(1, permille * prompt_len // 1000)


def test_budget_needs_counts() -> None:
    with pytest.raises(ValueError, match=r"^EvictionPolicy: budget\(\) must be asked of a policy"):
        EvictionPolicy(heavy_ratio=0.1, num_recent=1).budget()


@settings(deadline=None)
@given(policy=policies())
def test_repr_evaluates_to_the_policy(policy: EvictionPolicy) -> None:
    assert eval(repr(policy), {"EvictionPolicy": EvictionPolicy}) == policy


def test_repr_is_readable() -> None:
    policy = EvictionPolicy(heavy_ratio=0.1, num_recent=64)
    assert repr(policy) == (
        'EvictionPolicy(heavy_ratio=0.1, num_recent=64, num_sink=0, gqa_reduce="sum")'
    )


@settings(deadline=None)
@given(policy=policies())
def test_copies_and_pickles_are_equal(policy: EvictionPolicy) -> None:
    copies = [copy.copy(policy), copy.deepcopy(policy)]
    copies += [pickle.loads(pickle.dumps(policy, protocol)) for protocol in (2, 5)]
    for other in copies:
        assert other == policy
        assert hash(other) == hash(policy)
    budget = policy.resolve(100)
    assert copy.deepcopy(budget) == budget
    assert pickle.loads(pickle.dumps(budget)) == budget


def test_a_pickle_names_the_public_class() -> None:
    policy = EvictionPolicy(num_heavy=1, num_recent=1)
    assert type(policy).__module__ == "h2o_kv"
    assert b"h2o_kv._C" not in pickle.dumps(policy)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ((), "EvictionPolicy: a pickled state must have 15 items, got 0"),
        (
            (-1, 1, 0, None, None, "sum", "sum", 1.0, 0, 0, 1, 0, 0, 0, 1),
            "EvictionPolicy: num_heavy must be >= 0, got -1",
        ),
    ],
)
def test_a_pickle_is_checked(state: tuple[Any, ...], message: str) -> None:
    policy = EvictionPolicy.__new__(EvictionPolicy)
    with pytest.raises(ValueError, match=refused(message)):
        policy.__setstate__(state)


def test_a_pickled_budget_is_checked() -> None:
    budget = Budget.__new__(Budget)
    message = "Budget: a pickled state must have 3 items, got 1"
    with pytest.raises(ValueError, match=refused(message)):
        budget.__setstate__((1,))  # type: ignore[arg-type]


def test_policies_differ_when_an_option_does() -> None:
    variants = [
        EvictionPolicy(num_heavy=1, num_recent=2),
        EvictionPolicy(num_heavy=2, num_recent=1),
        EvictionPolicy(num_heavy=1, num_recent=2, num_sink=1),
        EvictionPolicy(num_heavy=1, num_recent=2, gqa_reduce="max"),
        EvictionPolicy(heavy_ratio=1, num_recent=2),
        EvictionPolicy(num_heavy=1, recent_ratio=0.5),
        EvictionPolicy(num_heavy=1, recent_ratio=0.25),
    ]
    assert len(set(variants)) == len(variants)
    assert variants[0] != (1, 2, 0, None, None, "sum")


@pytest.mark.parametrize("name", ["num_heavy", "num_sink", "gqa_reduce", "has_ratio", "extra"])
def test_a_policy_cannot_be_changed(name: str) -> None:
    policy = EvictionPolicy(num_heavy=1, num_recent=2)
    with pytest.raises(AttributeError):
        setattr(policy, name, 3)
    with pytest.raises(AttributeError):
        setattr(policy.budget(), name, 3)
    assert policy == EvictionPolicy(num_heavy=1, num_recent=2)


def test_arguments_have_to_be_named() -> None:
    message = "arguments must be given by keyword, as in"
    with pytest.raises(
        TypeError, match=refused(f"EvictionPolicy: {message} num_heavy=..., got 2 without one")
    ):
        EvictionPolicy(128, 128)  # type: ignore[call-arg]
    with pytest.raises(
        TypeError, match=refused(f"Budget: {message} num_sink=..., got 3 without one")
    ):
        Budget(1, 2, 3)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("keyword", "nearest"),
    [
        ("heavy", "num_heavy"),
        ("sink", "num_sink"),
        ("recent_ration", "recent_ratio"),
        ("gqa", "gqa_reduce"),
        ("xyzzy", None),
    ],
)
def test_an_unknown_keyword_is_told_with_the_nearest_one(keyword: str, nearest: str | None) -> None:
    message = (
        "EvictionPolicy: keywords must be among num_heavy, num_recent, num_sink, heavy_ratio, "
        "recent_ratio, gqa_reduce, score_rule, score_decay, score_seed, score_queries, score_pool, "
        f"pattern_stride, pattern_columns, read_slots, read_page, got {keyword}"
    )
    if nearest is not None:
        message += f"; did you mean {nearest}?"
    with pytest.raises(TypeError, match=refused(message)):
        EvictionPolicy(**{"num_recent": 1, keyword: 1})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^Budget: keywords must be among num_sink, .*, got heavy"):
        Budget(heavy=1)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_heavy": -1}, "num_heavy must be >= 0, got -1"),
        ({"num_recent": -1}, "num_recent must be >= 0, got -1"),
        ({"num_sink": -1}, "num_sink must be >= 0, got -1"),
        ({"num_heavy": 2**31}, "num_heavy must be <= 2147483647, got 2147483648"),
        ({"num_sink": 2**70}, f"num_sink must be <= 2147483647, got {2**70}"),
        ({"num_sink": -(2**70)}, f"num_sink must be >= 0, got {-(2**70)}"),
        (
            {"num_heavy": None},
            "exactly one of num_heavy and heavy_ratio must be given, got neither",
        ),
        ({"heavy_ratio": 0.5}, "exactly one of num_heavy and heavy_ratio must be given, got both"),
        (
            {"num_recent": None},
            "exactly one of num_recent and recent_ratio must be given, got neither",
        ),
        (
            {"recent_ratio": 0.5},
            "exactly one of num_recent and recent_ratio must be given, got both",
        ),
        (
            {"num_heavy": None, "heavy_ratio": 0.0},
            "heavy_ratio must be > 0 and <= 1, got 0",
        ),
        (
            {"num_heavy": None, "heavy_ratio": 20},
            "heavy_ratio must be > 0 and <= 1, got 20",
        ),
        (
            {"num_recent": None, "recent_ratio": float("nan")},
            "recent_ratio must be > 0 and <= 1, got nan",
        ),
        (
            {"num_recent": None, "recent_ratio": float("inf")},
            "recent_ratio must be > 0 and <= 1, got inf",
        ),
        (
            {"num_heavy": 0, "num_recent": 0},
            "num_sink + num_heavy + num_recent must be >= 1, got 0",
        ),
        (
            {"score_rule": "random", "score_seed": 2**63},
            f"score_seed must be <= 2147483647, got {2**63}",
        ),
        ({"score_rule": "random", "score_seed": -1}, "score_seed must be >= 0, got -1"),
        ({"score_queries": 2**31}, "score_queries must be <= 2147483647, got 2147483648"),
        ({"score_pool": 2**31 + 1}, "score_pool must be <= 2147483647, got 2147483649"),
        ({"read_slots": 2**31}, "read_slots must be <= 2147483647, got 2147483648"),
        ({"gqa_reduce": "mean"}, 'gqa_reduce must be one of "sum", "max", got "mean"'),
    ],
)
def test_a_bad_value_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=refused(f"EvictionPolicy: {message}")):
        EvictionPolicy(**{"num_heavy": 1, "num_recent": 1, **arguments})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_heavy": True}, "num_heavy must be an integer, got True (bool)"),
        ({"num_heavy": 4.0}, "num_heavy must be an integer, got 4.0 (float)"),
        ({"num_recent": "4"}, "num_recent must be an integer, got '4' (str)"),
        ({"num_sink": None}, "num_sink must be an integer, got None (NoneType)"),
        ({"heavy_ratio": True}, "heavy_ratio must be a number, got True (bool)"),
        ({"heavy_ratio": "0.1"}, "heavy_ratio must be a number, got '0.1' (str)"),
        ({"recent_ratio": [0.1]}, "recent_ratio must be a number, got [0.1] (list)"),
        ({"gqa_reduce": None}, "gqa_reduce must be a string, got None (NoneType)"),
        ({"gqa_reduce": b"sum"}, "gqa_reduce must be a string, got b'sum' (bytes)"),
    ],
)
def test_a_wrong_type_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=refused(f"EvictionPolicy: {message}")):
        EvictionPolicy(**{"num_heavy": 1, "num_recent": 1, **arguments})


def test_an_error_inside_a_number_is_passed_on() -> None:
    class Broken:
        def __index__(self) -> int:
            raise RuntimeError("no index today")

        def __float__(self) -> float:
            raise RuntimeError("no float today")

    with pytest.raises(RuntimeError, match="no index today"):
        EvictionPolicy(num_heavy=Broken(), num_recent=1)
    with pytest.raises(RuntimeError, match="no float today"):
        EvictionPolicy(heavy_ratio=Broken(), num_recent=1)


def test_anything_with_an_index_counts() -> None:
    class Seven:
        def __index__(self) -> int:
            return 7

    policy = EvictionPolicy(num_heavy=Seven(), num_recent=1)
    assert policy.num_heavy == 7
    assert policy.resolve(Seven()).num_heavy == 7


@pytest.mark.parametrize(
    ("prompt_len", "error", "message"),
    [
        (-1, ValueError, "prompt_len must be >= 0, got -1"),
        (2**31, ValueError, "prompt_len must be <= 2147483647, got 2147483648"),
        (1.0, TypeError, "prompt_len must be an integer, got 1.0 (float)"),
        (True, TypeError, "prompt_len must be an integer, got True (bool)"),
    ],
)
def test_a_bad_prompt_length_is_refused(
    prompt_len: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=refused(f"EvictionPolicy: {message}")):
        EvictionPolicy(heavy_ratio=0.1, recent_ratio=0.1).resolve(prompt_len)


@pytest.mark.parametrize("name", ["num_sink", "num_heavy", "num_recent"])
def test_a_bad_budget_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=refused(f"Budget: {name} must be >= 0, got -1")):
        Budget(**{name: -1})
    message = f"Budget: {name} must be an integer, got 1.5 (float)"
    with pytest.raises(TypeError, match=refused(message)):
        Budget(**{name: 1.5})  # type: ignore[arg-type]
