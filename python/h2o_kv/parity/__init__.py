"""H2O as the official scripts ran it, beside our own order: parity modes.

The paper's tables come from five programs that differ in what is attended, when tokens leave and in
what a budget counts (docs/parity.md). Each is a `ParityMode` here, a small value whose budget is in the
units of its script:

    mode = parity.UtilsHH(heavy_ratio=0.1, recent_ratio=0.1)
    trace = mode.replay(logits, prompt_len=64)             # on recorded attention, row by row
    with mode.running(model) as options:                   # in an unmodified transformers model
        model.generate(**inputs, **options)
    logits = mode.score_forward(model, ids, prompt_lengths=64)  # to score examples with

`mode.py` is what they share; `caching.py` has those that drop tokens, `flexgen.py` FlexGen's,
`masking.py` is the attention function "h2o_parity" of those that mask, `utils_hh.py` and `lm_eval.py`.
Written from a description of FMInference/H2O (commit ac75c2a), whose code has no licence: none of it is
here.
"""

from __future__ import annotations

from h2o_kv.parity.caching import CachingMode, Fixed, RealDrop, RealDropRolling
from h2o_kv.parity.flexgen import FlexGen
from h2o_kv.parity.lm_eval import LmEvalLocal, LmEvalOracle
from h2o_kv.parity.masking import PARITY_ATTENTION, MaskingMode, register
from h2o_kv.parity.mode import Counts, ParityMode, ParityTrace
from h2o_kv.parity.utils_hh import UtilsHH

register()

MODES: dict[str, type[ParityMode]] = {
    mode.name: mode
    for mode in (
        Fixed,
        RealDrop,
        RealDropRolling,
        FlexGen,
        UtilsHH,
        LmEvalLocal,
        LmEvalOracle,
    )
}
"""The modes that there are, by name."""


def from_ratios(
    name: str, heavy_ratio: float = 0.1, recent_ratio: float = 0.1, length: int = 0
) -> ParityMode:
    """The mode of this name with a budget of these parts, as `ParityMode.from_ratios` has it.

    Parameters
    ----------
    name : str
        One of MODES.
    heavy_ratio, recent_ratio : float
        Parts of the prompt (lm_eval: of the example), 0..1.
    length : int
        Its tokens. Only modes whose budget is in tokens look at it: fixed, real_drop,
        real_drop_rolling.

    Raises
    ------
    ValueError
        There is no such mode, or the mode has no such budget.

    Examples
    --------
    >>> from h2o_kv import parity
    >>> parity.from_ratios("real_drop", 0.1, 0.2, length=40)
    RealDrop(hh_size=4, recent_size=8)
    >>> parity.from_ratios("utils_hh", 0.1, 0.2).counts(40)
    Counts(num_heavy=4, num_recent=8)
    """
    if name not in MODES:
        raise ValueError(f"parity mode must be one of {', '.join(MODES)}, got {name!r}")
    return MODES[name].from_ratios(heavy_ratio, recent_ratio, length)


__all__ = [
    "MODES",
    "PARITY_ATTENTION",
    "CachingMode",
    "Counts",
    "Fixed",
    "FlexGen",
    "LmEvalLocal",
    "LmEvalOracle",
    "MaskingMode",
    "ParityMode",
    "ParityTrace",
    "RealDrop",
    "RealDropRolling",
    "UtilsHH",
    "from_ratios",
]
