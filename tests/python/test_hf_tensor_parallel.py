"""H2OCache under transformers' tensor parallelism: each rank keeps the KV heads that it has."""

from __future__ import annotations

import pytest

from tensor_parallel import (
    POLICIES,
    check_equals_one_process,
    check_is_not_shared_out,
    one_process,
    two_ranks,
)


@pytest.mark.parametrize("budget", POLICIES)
@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
def test_two_ranks_equal_one_process(family: str, budget: str) -> None:
    check_equals_one_process(family, budget)


def test_budgets_keep_different_tokens_and_heads_differ() -> None:
    """Else equal ranks would prove little."""
    for family in ("llama", "gpt_neox"):
        layers = {budget: one_process(family, budget)["layers"] for budget in POLICIES}
        assert [layers[budget][0]["positions"].shape[2] for budget in POLICIES] == [100, 6, 8]
        for budget in ("fifth", "eight"):
            heads = layers[budget][0]["positions"][0].sort().values
            assert len({tuple(head.tolist()) for head in heads}) > 1


def test_opt_is_not_shared_out() -> None:
    check_is_not_shared_out("opt")


def test_heads_that_cannot_be_shared_out_are_the_model_s_error() -> None:
    """Three KV heads on two ranks; it comes before there is any cache."""
    for rank in two_ranks():
        assert rank["odd heads", "error"].startswith("RuntimeError: shape ")
