"""Metrics of texts: ROUGE and Self-BLEU by their libraries, and counts of repetition."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from h2o_kv.eval.data import EvalError

__all__ = ["distinct", "longest_repeat", "rouge", "self_bleu"]

_ROUGE = ("rouge1", "rouge2", "rougeL")


def rouge(text: str, references: Sequence[str]) -> dict[str, float]:
    """F-measures of ROUGE-1, ROUGE-2 and ROUGE-L with stemming, of the best reference each.

    C.-Y. Lin, "ROUGE", 2004, by the package rouge-score.

    Raises
    ------
    EvalError
        rouge-score is missing.
    """
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ImportError as error:
        raise EvalError("ROUGE needs rouge-score: pip install 'h2o-kv[eval]'") from error
    scores: dict[str, Any] = RougeScorer(list(_ROUGE), use_stemmer=True).score_multi(
        list(references), text
    )
    return {name: float(scores[name].fmeasure) for name in _ROUGE}


def self_bleu(texts: Sequence[str]) -> float:
    """Mean BLEU of each text against all others, 0 to 100: the higher, the more alike they are.

    Zhu et al., "Texygen", arXiv 1802.01886, with sentence BLEU-4 of the package sacrebleu.

    Raises
    ------
    EvalError
        sacrebleu is missing, or there are fewer than two texts.
    """
    if len(texts) < 2:
        raise EvalError(f"Self-BLEU needs at least two texts, got {len(texts)}")
    try:
        from sacrebleu import sentence_bleu
    except ImportError as error:
        raise EvalError("Self-BLEU needs sacrebleu: pip install 'h2o-kv[eval]'") from error
    scores = [
        sentence_bleu(text, [*texts[:place], *texts[place + 1 :]]).score
        for place, text in enumerate(texts)
    ]
    return float(sum(scores) / len(scores))


def distinct(text: str, n: int) -> float:
    """Different n-grams of words, as a part of all (Li et al., arXiv 1510.03055); 1 if there are none.

    >>> distinct("a b a b", 2)
    0.6666666666666666
    """
    grams = _grams(text.split(), n)
    return len(set(grams)) / len(grams) if grams else 1.0


def longest_repeat(text: str) -> int:
    """Words of the longest n-gram that comes twice or more; 0 if no word does.

    >>> longest_repeat("the cat sat on the cat sat")
    3
    """
    words = text.split()
    # If one of n words comes twice, so does one of n - 1.
    low, high = 0, len(words)
    while low < high:
        middle = (low + high + 1) // 2
        counts = Counter(_grams(words, middle))
        if counts and counts.most_common(1)[0][1] > 1:
            low = middle
        else:
            high = middle - 1
    return low


def _grams(words: Sequence[str], n: int) -> list[tuple[str, ...]]:
    return [tuple(words[start : start + n]) for start in range(len(words) - n + 1)]
