"""The engines of bench_engines.py, all alike: a prompt, then runs of decode steps that are timed.

`start(prompt)` runs a prompt, `run(token_ids)` as many steps as there are ids and gives their `Run`,
`greedy(prompt, n)` the n most likely tokens after a prompt. Those that choose their tokens themselves
only count the ids.
"""

from __future__ import annotations

import ctypes
import json
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from common import Spread
from engines import EngineUnavailable, OpenVINOSession, need

from h2o_kv import EvictionPolicy
from h2o_kv.generation import CacheSession, CacheSpec, resolve_policy
from h2o_kv.models import load_model


@dataclass(frozen=True, kw_only=True)
class Run:
    """What a run of decode steps took.

    Attributes
    ----------
    step_ms : Spread
        Milliseconds of a step.
    prefill_s : float
        Seconds of the prompt before it.
    resident_mb : float, optional
        Memory of the process, where it is the engine's alone.
    """

    step_ms: Spread
    prefill_s: float
    resident_mb: float | None = None


class PythonEngine:
    """`h2o_kv.generation`: transformers' model under a full cache or an `H2OCache`.

    Parameters
    ----------
    folder : str
        Of the model.
    dtype : str
    threads : int
    share : float, optional
        Part of the prompt that is kept, half of it heavy; None is transformers' full cache.
    """

    def __init__(self, folder: str, dtype: str, threads: int, share: float | None) -> None:
        torch.set_num_threads(threads)
        self._model, _ = load_model(folder, dtype=dtype)
        self._policy = share and EvictionPolicy(heavy_ratio=share / 2, recent_ratio=share / 2)
        self._session: CacheSession | None = None

    def start(self, prompt: Sequence[int]) -> torch.Tensor:
        """Run a prompt; the logits of the token after it."""
        self._session = None  # its cache goes before another is made
        policy = resolve_policy(self._policy, len(prompt)) if self._policy else None
        self._session = CacheSession(self._model, CacheSpec(label="h2o", policy=policy))
        return self._session.prefill(prompt)

    def run(self, token_ids: Sequence[int]) -> Run:
        """Feed tokens."""
        assert self._session is not None
        done = len(self._session.step_ms)
        for token in token_ids:
            self._session.feed(token)
        return Run(
            step_ms=Spread.of(self._session.step_ms[done:]), prefill_s=self._session.prefill_s
        )

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        """The most likely tokens after a prompt."""
        tokens = [int(self.start(prompt).argmax())]
        assert self._session is not None
        while len(tokens) < count:
            tokens.append(int(self._session.feed(tokens[-1]).argmax()))
        return tokens


class LlamaCppEngine:
    """llama.cpp with its full cache in float16, flash attention on, and its other defaults.

    `llama_decode` is timed, with the logits of one token. Every run begins after the prompt again.

    Parameters
    ----------
    gguf : str
    context : int
        Tokens that there must be room for.
    threads : int

    Raises
    ------
    EngineUnavailable
        llama-cpp-python is not installed.
    """

    def __init__(self, gguf: str, context: int, threads: int) -> None:
        need("llama_cpp", "llama.cpp")
        import llama_cpp

        self._api: Any = llama_cpp
        # Kept: the library calls it as long as the process lives.
        self._quiet = llama_cpp.llama_log_callback(lambda level, text, data: None)
        llama_cpp.llama_log_set(self._quiet, ctypes.c_void_p())
        llama_cpp.llama_backend_init()
        model = llama_cpp.llama_model_load_from_file(
            gguf.encode(), llama_cpp.llama_model_default_params()
        )
        if not model:
            raise RuntimeError(f"llama.cpp cannot load {gguf}")
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = context
        params.n_threads = params.n_threads_batch = threads
        params.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED
        self._context = llama_cpp.llama_init_from_model(model, params)
        if not self._context:
            raise RuntimeError(f"llama.cpp cannot make a context of {context} tokens")
        self._batch = llama_cpp.llama_n_batch(self._context)  # a short context has a smaller one
        self._vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._prompt_tokens = 0
        self._prefill_s = 0.0

    def start(self, prompt: Sequence[int]) -> None:
        """Run a prompt."""
        self._api.llama_memory_clear(self._memory, True)
        parts = [prompt[i : i + self._batch] for i in range(0, len(prompt), self._batch)]
        self._prefill_s = sum(self._decode(part) for part in parts)
        self._prompt_tokens = len(prompt)

    def run(self, token_ids: Sequence[int]) -> Run:
        """Feed tokens."""
        self._api.llama_memory_seq_rm(self._memory, 0, self._prompt_tokens, -1)
        return Run(
            step_ms=Spread.of([1000 * self._decode([token]) for token in token_ids]),
            prefill_s=self._prefill_s,
        )

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        """The most likely tokens after a prompt."""
        self.start(prompt)
        tokens = [self._most_likely()]
        while len(tokens) < count:
            self._decode(tokens[-1:])
            tokens.append(self._most_likely())
        return tokens

    def _decode(self, token_ids: Sequence[int]) -> float:
        """Seconds of the model's call."""
        array = (self._api.llama_token * len(token_ids))(*token_ids)
        batch = self._api.llama_batch_get_one(array, len(token_ids))
        start = time.perf_counter()
        status = self._api.llama_decode(self._context, batch)
        self._api.llama_synchronize(self._context)
        seconds = time.perf_counter() - start
        if status != 0:
            raise RuntimeError(f"llama_decode: status {status}")
        return seconds

    def _most_likely(self) -> int:
        logits = self._api.llama_get_logits_ith(self._context, -1)
        return max(range(self._vocabulary), key=logits.__getitem__)


class OpenVINOEngine:
    """OpenVINO GenAI; see `engines.OpenVINOSession`.

    Its keys and values are in a precision of its own.

    Parameters
    ----------
    gguf : str
        With float16 weights: of the floating-point types it reads no other.
    dtype : str
        What it computes in.
    new_tokens : int
        Steps of all runs together.
    threads : int
    share : float, optional
        Part of the prompt that its cache eviction keeps; None is its full cache.

    Raises
    ------
    EngineUnavailable
        It is not installed.
    """

    def __init__(
        self, gguf: str, dtype: str, new_tokens: int, threads: int, share: float | None
    ) -> None:
        need("openvino_genai", "OpenVINO GenAI")
        self._options: dict[str, Any] = {
            "gguf": gguf,
            "precision": {"float32": "f32", "bfloat16": "bf16"}[dtype],
            "new_tokens": new_tokens + 1,  # the prompt gives one
            "threads": threads,
        }
        self._share = share
        self._session: OpenVINOSession | None = None

    def start(self, prompt: Sequence[int]) -> None:
        """Run a prompt."""
        self._session = None
        budget = self._share and OpenVINOSession.slots(self._share * len(prompt))
        self._session = OpenVINOSession(prompt_tokens=len(prompt), budget=budget, **self._options)
        self._session.prefill(prompt)

    def run(self, token_ids: Sequence[int]) -> Run:
        """Run as many steps."""
        assert self._session is not None
        steps = [self._session.step() for _ in token_ids]
        return Run(step_ms=Spread.of(steps), prefill_s=self._session.prefill_s)


class ProgramEngine:
    """The C++ program `h2o-generate`, which runs the prompt before every run.

    Parameters
    ----------
    program : str
        Its path.
    folder : str
        Of the model.
    dtype : str
    threads : int
    share : float, optional
        Part of the prompt that is kept, half of it heavy; None is its full cache.

    Raises
    ------
    EngineUnavailable
        There is no such program.
    """

    def __init__(
        self, program: str, folder: str, dtype: str, threads: int, share: float | None
    ) -> None:
        if not Path(program).is_file():
            raise EngineUnavailable(f"h2o-generate is left out: there is no {program}")
        self._command = [program, "--model", folder, "--dtype", dtype, "--threads", str(threads)]
        self._share = share
        self._prompt: list[int] = []

    def start(self, prompt: Sequence[int]) -> None:
        """Remember a prompt."""
        self._prompt = list(prompt)

    def run(self, token_ids: Sequence[int]) -> Run:
        """Run the prompt, and as many steps after the first new token."""
        done = self._generate(len(token_ids) + 1)[-1]
        step = done["step_ms"]
        return Run(
            step_ms=Spread(step["median"], step["p10"], step["p90"]),
            prefill_s=done["prefill_s"],
            resident_mb=done["resident_mb"],
        )

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        """The most likely tokens after a prompt."""
        self.start(prompt)
        return [e["token"] for e in self._generate(count) if e["event"] == "token"]

    def _generate(self, count: int) -> list[dict[str, Any]]:
        """The events of a run of the program."""
        with tempfile.TemporaryDirectory() as folder:
            tokens, policy = Path(folder, "tokens.json"), Path(folder, "policy.json")
            tokens.write_text(json.dumps({"tokens": [self._prompt]}))
            cache = ["--full"]
            if self._share is not None:
                half = {"ratio": self._share / 2}
                policy.write_text(json.dumps({"policy": {"heavy": half, "recent": half}}))
                cache = ["--policy", str(policy)]
            options = ["--tokens", str(tokens), "--max-new-tokens", str(count), "--ignore-eos"]
            ran = subprocess.run([*self._command, *options, *cache], capture_output=True, text=True)
        if ran.returncode != 0:
            raise RuntimeError(f"h2o-generate: {ran.stderr.strip() or ran.returncode}")
        events = [json.loads(line) for line in ran.stdout.splitlines()]
        if not events or events[-1]["event"] != "done":
            raise RuntimeError('h2o-generate: its last line must be "done"')
        return events
