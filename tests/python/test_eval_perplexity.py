"""Perplexity, KL divergence and agreement of segments."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from h2o_kv import EvictionPolicy, H2OCache
from h2o_kv.eval import EvalError, TaskSpec, make_task, settings
from h2o_kv.eval.perplexity import compare_logits, documents
from h2o_kv.hf import cache_kwarg
from model_files import TEXT, tiny_llama, tiny_tokenizer


def test_a_comparison_by_hand() -> None:
    teacher = torch.tensor([[0.5, 0.5], [0.9, 0.1]], dtype=torch.float64).log()
    ours = torch.tensor([[0.25, 0.75], [0.6, 0.4]], dtype=torch.float64).log() + 3
    got = compare_logits(teacher, ours, torch.tensor([1, 0]))
    assert got.nll == pytest.approx(-(math.log(0.75) + math.log(0.6)) / 2)
    first = 0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75)
    second = 0.9 * math.log(0.9 / 0.6) + 0.1 * math.log(0.1 / 0.4)
    assert got.kl == pytest.approx((first + second) / 2)
    # The first of equals is the most likely: tokens 0 and 1, then 0 and 0.
    assert got.agreement == 0.5


def test_articles_are_documents() -> None:
    text = " \n = One = \n\n Text . \n = = Part = = \n More . \n = Two words = \n End . \n"
    assert documents(text) == [
        " ",
        " = One = \n\n Text . \n = = Part = = \n More . ",
        " = Two words = \n End . \n",
    ]
    assert documents("A book.\nIts end.") == ["A book.\nIts end."]


def test_segments_are_scored_with_a_fresh_cache_each(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    model = tiny_llama(tokenizer)
    file = tmp_path / "books" / "pg14263_katrine.txt"
    file.parent.mkdir()
    file.write_text(TEXT, encoding="utf-8")
    task = make_task(TaskSpec("pg14263", tmp_path, prompt_tokens=9, new_tokens=7), tokenizer)
    ids = tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    assert len(task) == len(ids) // 16 >= 2
    assert task.options == {"prompt_tokens": 9, "new_tokens": 7}
    wanted = settings(["full", "h2o"], [0.5], ["streamed", "one_shot"])
    results = {(one.example, one.setting): one.fields for one in task.run(model, [0, 1], wanted)}
    assert len(results) == 2 * 3
    for (index, setting), fields in results.items():
        segment = ids[16 * index : 16 * index + 16]
        with torch.no_grad():
            full = model(torch.tensor([segment])).logits[0, 8:15].double().log_softmax(-1)
        model.set_attn_implementation("h2o")
        logits = full
        if setting.policy == "h2o":
            cache = H2OCache(model.config, EvictionPolicy(num_heavy=4, num_recent=4))
            seen, rows = 0, []
            while seen < 15:
                new = 9 if seen == 0 and setting.prefill == "one_shot" else 1
                part = torch.tensor([segment[seen : seen + new]])
                with torch.no_grad():
                    rows.append(model(part, **{cache_kwarg(model): cache}).logits[0, -1])
                seen += new
            logits = torch.stack(rows[-7:]).double().log_softmax(-1)
            assert (fields["seen"], fields["kept"]) == ([15], [8])
        model.set_attn_implementation("sdpa")
        metrics = fields["metrics"]
        nll = -logits.gather(1, torch.tensor(segment[9:])[:, None]).mean()
        assert metrics["nll"] == pytest.approx(float(nll), abs=1e-4)
        kl = (full.exp() * (full - logits)).sum(1).mean()
        assert metrics["kl"] == pytest.approx(float(kl), abs=1e-4)
        agree = (full.argmax(1) == logits.argmax(1)).double().mean()
        assert metrics["agreement"] == pytest.approx(float(agree))
        assert (metrics["kl"] > 0.01) == (setting.policy == "h2o")


def test_no_segment_reaches_into_the_next_document(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    articles = [f" = {name} = \n {TEXT}" for name in ("One", "Two")]
    file = tmp_path / "wikitext" / "wikitext2_raw_test.txt"
    file.parent.mkdir()
    file.write_text("\n".join(articles), encoding="utf-8")
    task = make_task(TaskSpec("wikitext2", tmp_path, prompt_tokens=20, new_tokens=11), tokenizer)
    lengths = [len(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in articles]
    assert len(task) == sum(length // 31 for length in lengths)
    for number in (0, len(task) // 2):
        text = tokenizer.decode(task._segments[number].context)  # type: ignore[attr-defined]
        assert text.startswith(" = ")


def test_bad_lengths_are_named(tmp_path: Path) -> None:
    spec = TaskSpec("wikitext2", tmp_path, prompt_tokens=0)
    with pytest.raises(EvalError, match="prompt and new tokens must be >= 1, got 0 and 64"):
        make_task(spec, tiny_tokenizer())
    with pytest.raises(EvalError, match="wikitext2_raw_test.txt: No such file"):
        make_task(TaskSpec("wikitext2", tmp_path), tiny_tokenizer())
