"""What eviction did to a text: attention statistics, dropped attention, eviction logs, explanations.

docs/diagnostics.md says what each number means and how it misleads.
"""

from h2o_kv.diagnostics.departures import STAYED, Departures
from h2o_kv.diagnostics.distribution import Distribution
from h2o_kv.diagnostics.dropped import DroppedMass, DroppedSummary, kl_by_dropped, summarise
from h2o_kv.diagnostics.eviction_log import EvictionLog
from h2o_kv.diagnostics.explain import Explanation, Span, explain
from h2o_kv.diagnostics.freeze import lifetimes, promotions, slot_ages
from h2o_kv.diagnostics.replay import PolicyReplay, Replay, replay
from h2o_kv.diagnostics.statistics import (
    AttentionStatistics,
    LayerStatistics,
    attention_statistics,
)
from h2o_kv.diagnostics.steps import ObservedStep, Victim, observed_steps
from h2o_kv.diagnostics.teacher import AttentionObserver, Teacher, register
from h2o_kv.diagnostics.texts import find_span, token_classes, token_texts

__all__ = [
    "STAYED",
    "AttentionObserver",
    "AttentionStatistics",
    "Departures",
    "Distribution",
    "DroppedMass",
    "DroppedSummary",
    "EvictionLog",
    "Explanation",
    "LayerStatistics",
    "ObservedStep",
    "PolicyReplay",
    "Replay",
    "Span",
    "Teacher",
    "Victim",
    "attention_statistics",
    "explain",
    "find_span",
    "kl_by_dropped",
    "lifetimes",
    "observed_steps",
    "promotions",
    "register",
    "replay",
    "slot_ages",
    "summarise",
    "token_classes",
    "token_texts",
]

register()
