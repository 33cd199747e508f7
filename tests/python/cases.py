"""Caches of a few slots, worked by hand: what `h2o_evict` must do with them.

One row, one KV head; the score type is float32. Read a case as: slots hold `positions` with
`scores`, the `new` tokens (position, score) join, `victims` leave in this order, and afterwards the
slots hold `positions_after` with `scores_after`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

INF, NAN = math.inf, math.nan


@dataclass(frozen=True)
class EvictCase:
    name: str
    positions: tuple[int, ...]
    scores: tuple[float, ...]
    new: tuple[tuple[int, float], ...]
    counts: tuple[int, int, int]
    victims: tuple[int, ...]
    positions_after: tuple[int, ...]
    scores_after: tuple[float, ...]


EVICT_CASES = (
    EvictCase(
        # The window is 9..11, the heavy ones are 1, 3, 5; 8 has the least of what is unprotected.
        name="the_lowest_unprotected_score_leaves_and_its_slot_is_overwritten",
        positions=(1, 3, 5, 8, 9, 10),
        scores=(2.6, 1.75, 1.22, 0.38, 0.35, 0.3),
        new=((11, 0.2),),
        counts=(0, 3, 3),
        victims=(8,),
        positions_after=(1, 3, 5, 11, 9, 10),
        scores_after=(2.6, 1.75, 1.22, 0.2, 0.35, 0.3),
    ),
    EvictCase(
        name="nobody_leaves_while_there_is_room_and_the_lowest_empty_slot_is_taken",
        positions=(4, -1, 2, -1, 3, -1),
        scores=(0.5, 0.0, 0.25, 0.0, 1.0, 0.0),
        new=((5, 0.1), (6, 0.2)),
        counts=(0, 3, 3),
        victims=(),
        positions_after=(4, 5, 2, 6, 3, -1),
        scores_after=(0.5, 0.1, 0.25, 0.2, 1.0, 0.0),
    ),
    EvictCase(
        # 0 is the lowest of all, but a sink; 4 and 5 are recent.
        name="sinks_and_the_recent_window_never_leave",
        positions=(0, 1, 2, 3, 4, 5),
        scores=(0.0, 9.0, 8.0, 7.0, 0.1, 0.1),
        new=((6, 0.1),),
        counts=(1, 2, 3),
        victims=(3,),
        positions_after=(0, 1, 2, 6, 4, 5),
        scores_after=(0.0, 9.0, 8.0, 0.1, 0.1, 0.1),
    ),
    EvictCase(
        name="of_equal_scores_the_smaller_position_leaves",
        positions=(5, 3, 4, 2, 7, 6),
        scores=(1.0, 1.0, 1.0, 1.0, 1.0, 1.0),
        new=((8, 1.0), (9, 1.0)),
        counts=(0, 4, 2),
        victims=(2, 3),
        positions_after=(5, 8, 4, 9, 7, 6),
        scores_after=(1.0, 1.0, 1.0, 1.0, 1.0, 1.0),
    ),
    EvictCase(
        name="minus_zero_equals_zero",
        positions=(3, 2, 1, 0, 4, 5),
        scores=(-0.0, 0.0, -0.0, 0.0, 0.0, 0.0),
        new=((6, 0.0),),
        counts=(0, 5, 1),
        victims=(0,),
        positions_after=(3, 2, 1, 6, 4, 5),
        scores_after=(-0.0, 0.0, -0.0, 0.0, 0.0, 0.0),
    ),
    EvictCase(
        # NaN, NaN, -inf, -1: NaN before every number, and among NaN the smaller position.
        name="nan_is_the_lowest_of_all",
        positions=(0, 1, 2, 3, 4, 5),
        scores=(INF, NAN, -INF, NAN, -1.0, 2.0),
        new=(),
        counts=(0, 1, 1),
        victims=(1, 3, 2, 4),
        positions_after=(0, -1, -1, -1, -1, 5),
        scores_after=(INF, 0.0, 0.0, 0.0, 0.0, 2.0),
    ),
    EvictCase(
        name="without_a_recent_window_a_new_token_may_leave_at_once",
        positions=(0, 1, 2, 3),
        scores=(4.0, 3.0, 2.0, 1.0),
        new=((4, 0.5), (5, 2.5)),
        counts=(0, 4, 0),
        victims=(4, 3),
        positions_after=(0, 1, 2, 5),
        scores_after=(4.0, 3.0, 2.0, 2.5),
    ),
    EvictCase(
        # StreamingLLM: 0 and 1 are sinks, the window is 4..6.
        name="without_heavy_slots_scores_do_not_matter",
        positions=(0, 1, 2, 3, 4, 5),
        scores=(0.0, 0.0, 90.0, 80.0, 0.0, 0.0),
        new=((6, 0.0),),
        counts=(2, 0, 3),
        victims=(3, 2),
        positions_after=(0, 1, 6, -1, 4, 5),
        scores_after=(0.0, 0.0, 0.0, 0.0, 0.0, 0.0),
    ),
    EvictCase(
        # The window ends at the largest position present: 9 in slot 0, so 8 and 9 are recent.
        name="a_cache_is_cut_to_a_smaller_budget",
        positions=(9, 2, 8, 5, -1, 6),
        scores=(0.0, 0.75, 0.0, 0.25, 0.0, 0.5),
        new=(),
        counts=(0, 1, 2),
        victims=(5, 6),
        positions_after=(9, 2, 8, -1, -1, -1),
        scores_after=(0.0, 0.75, 0.0, 0.0, 0.0, 0.0),
    ),
    EvictCase(
        # Freed are the slots 1 and 2, then 4 is empty: 7, 8 and 9 take them in this order.
        name="new_tokens_take_freed_slots_first_and_then_empty_ones",
        positions=(6, 3, 2, 5, -1, -1),
        scores=(1.0, 0.25, 0.5, 2.0, 0.0, 0.0),
        new=((7, 0.5), (8, 1.5), (9, 2.5)),
        counts=(0, 2, 3),
        victims=(3, 2),
        positions_after=(6, 7, 8, 5, 9, -1),
        scores_after=(1.0, 0.5, 1.5, 2.0, 2.5, 0.0),
    ),
    EvictCase(
        name="more_new_tokens_than_the_cache_can_hold",
        positions=(-1, 0),
        scores=(0.0, 1.5),
        new=((1, 0.5), (2, 3.0), (3, 1.0), (4, 0.0)),
        counts=(0, 1, 1),
        victims=(1, 3, 0),
        positions_after=(4, 2),
        scores_after=(0.0, 3.0),
    ),
)
