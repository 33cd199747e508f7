"""Train the two tiny language models that stand in for OPT and GPT-NeoX in the tests.

Random weights attend almost evenly, so that any eviction policy looks right on them. Trained
weights have what H2O lives on: peaked attention, heavy hitters and sinks. Each model takes minutes
on two cores and fits in a megabyte (float16 on disk, float32 when loaded):

    python tests/models/train_tiny_models.py --text tinyshakespeare.txt

The text is any plain UTF-8 file of about a megabyte in the public domain; it is read here and is
not part of the repository. Its last 5 % is held out. The same text, seed, thread count and library
versions give the same weights; another machine may differ in the last bits and drift from there.

Every training sequence opens with ``<s>``, as the tokenizer writes it. ``</s>`` never occurs, so
``generate`` always runs to ``max_new_tokens``. ``<pad>`` is never a real token.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    AutoModelForCausalLM,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    PreTrainedModel,
    set_seed,
)

VOCAB_SIZE = 512
PAD, BOS, EOS = 0, 1, 2
SPECIAL_TOKENS = ["<pad>", "<s>", "</s>"]
MAX_POSITIONS = 512
# Logit of the planted sink by model type. e^6 is about 400, as much as all other positions together
# at the start; GPT-NeoX ends with larger logits and would drown that.
SINK_LOGIT = {"opt": 6.0, "gpt_neox": 9.0}
SINK_LENGTH = 4.0  # so long that what the layers add to the first token hardly turns it
HELD_OUT_FRACTION = 0.05
MAX_FILE_BYTES = 1_000_000


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """How long and how hard to train.

    Attributes
    ----------
    steps : int
        Optimizer steps.
    tokens_per_step : int
        Tokens in one batch, whatever the sequence length.
    seq_len : int
        Tokens in a sequence until ``long_from``.
    long_from : float
        Fraction of the steps after which sequences are ``MAX_POSITIONS`` long, so that every
        learned position is trained.
    learning_rate : float
        Peak of the cosine, after a linear warm-up over the first 5 % of the steps.
    weight_decay : float
        Of the weight matrices; embeddings, biases and norms have none.
    """

    steps: int = 2500
    tokens_per_step: int = 2048
    seq_len: int = 256
    long_from: float = 0.75
    learning_rate: float = 4e-3
    weight_decay: float = 0.1

    def seq_len_at(self, step: int) -> int:
        """Sequence length of a step, in tokens."""
        return self.seq_len if step < self.long_from * self.steps else MAX_POSITIONS

    def learning_rate_at(self, step: int) -> float:
        """Learning rate of a step: linear warm-up, then a cosine down to a hundredth."""
        warm_up = max(1, self.steps // 20)
        if step < warm_up:
            return self.learning_rate * (step + 1) / warm_up
        progress = (step - warm_up) / max(1, self.steps - warm_up)
        return self.learning_rate * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * progress)))


@dataclass(frozen=True, kw_only=True)
class AttentionShape:
    """How peaked the attention of each layer is, as means over heads, queries and sequences.

    Only queries in the second half of a sequence count, so that there is enough to choose from.
    Even attention scores 0.2, 0.2 and about 0.003 (sequences of 512).

    Attributes
    ----------
    top_share : list of float
        Attention mass in the 20 % of positions that weigh most for that query, per layer.
    heavy_share : list of float
        Of the mass these queries give to the first half of the sequence, the share that falls on
        the same 20 % of its positions for all of them: the heavy hitters, per layer.
    first_share : list of float
        Attention mass on the first position, per layer.
    """

    top_share: list[float]
    heavy_share: list[float]
    first_share: list[float]


def opt_model() -> PreTrainedModel:
    """An untrained OPT: 4 layers, 4 heads of 24, learned positions, tied embeddings."""
    return OPTForCausalLM(
        OPTConfig(
            vocab_size=VOCAB_SIZE,
            hidden_size=96,
            num_hidden_layers=4,
            num_attention_heads=4,
            ffn_dim=256,
            max_position_embeddings=MAX_POSITIONS,
            dropout=0.0,
            init_std=0.06,  # wide: at 0.02 the first hundreds of steps only grow the weights
            pad_token_id=PAD,
            bos_token_id=BOS,
            eos_token_id=EOS,
        )
    )


def gpt_neox_model() -> PreTrainedModel:
    """An untrained GPT-NeoX: 3 layers, 4 heads of 32, a quarter rotary, parallel residual."""
    return GPTNeoXForCausalLM(
        GPTNeoXConfig(
            vocab_size=VOCAB_SIZE,
            hidden_size=128,
            num_hidden_layers=3,
            num_attention_heads=4,
            intermediate_size=160,
            max_position_embeddings=MAX_POSITIONS,
            initializer_range=0.04,
            rope_parameters={
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.25,
            },
            use_parallel_residual=True,
            pad_token_id=PAD,
            bos_token_id=BOS,
            eos_token_id=EOS,
        )
    )


ARCHITECTURES = {"tiny_opt": opt_model, "tiny_gpt_neox": gpt_neox_model}


@dataclass(frozen=True, kw_only=True)
class Held:
    """Weights that training may not move: a view into a parameter and what it holds."""

    view: torch.Tensor
    value: torch.Tensor

    @torch.no_grad()
    def restore(self) -> None:
        """Write the value again, after an optimizer step."""
        self.view.copy_(self.value)


def plant_sink(model: PreTrainedModel) -> list[Held]:
    """Give half of the heads of an untrained model a sink on the first token, in place.

    Large models grow such a sink over billions of tokens; left alone for minutes, these two settle
    on line ends and capitals instead. So the first token is held at a long vector along one
    direction, one dimension of the keys of these heads at seeing that direction, and the same
    dimension of their queries at a constant that asks for it. A query that finds nothing else then
    rests on the first token; how often that is, the other dimensions learn.

    Returns
    -------
    list of Held
        The weights concerned; training restores them after each step.

    Raises
    ------
    ValueError
        If the model is neither OPT nor GPT-NeoX.
    """
    config = model.config
    if config.model_type not in SINK_LOGIT:
        raise ValueError(
            f"plant_sink: model type must be one of {sorted(SINK_LOGIT)}, got {config.model_type!r}"
        )
    hidden, num_heads = config.hidden_size, config.num_attention_heads
    head_dim = hidden // num_heads
    direction = torch.randn(hidden)
    direction = (direction - direction.mean()) / direction.std(correction=0)  # as a norm leaves it
    strength = math.sqrt(SINK_LOGIT[config.model_type] * math.sqrt(head_dim))
    first_token = SINK_LENGTH * direction
    key_row = strength * direction / hidden

    held: list[Held] = []
    if isinstance(model, OPTForCausalLM):
        positions = model.model.decoder.embed_positions
        held.append(Held(view=positions.weight.data[positions.offset], value=first_token))
        projections = [
            (layer.self_attn.q_proj, layer.self_attn.k_proj) for layer in model.model.decoder.layers
        ]
        row_pairs = [(head * head_dim, head * head_dim) for head in range(num_heads)]
    else:
        held.append(Held(view=model.gpt_neox.embed_in.weight.data[BOS], value=first_token))
        fused = [layer.attention.query_key_value for layer in model.gpt_neox.layers]
        projections = [(linear, linear) for linear in fused]
        # The rows of each head are its query, its key and its value.
        starts = [3 * head * head_dim for head in range(num_heads)]
        row_pairs = [(start, start + head_dim) for start in starts]

    last = head_dim - 1  # never a rotary dimension, so the sink is as strong at any distance
    for query, key in projections:
        for query_start, key_start in row_pairs[: num_heads // 2]:
            query_weight, query_bias = query.weight.data, query.bias.data
            key_weight, key_bias = key.weight.data, key.bias.data
            held += [
                Held(view=query_weight[query_start + last], value=torch.zeros(hidden)),
                Held(view=query_bias[query_start + last], value=torch.tensor(strength)),
                Held(view=key_weight[key_start + last], value=key_row),
                Held(view=key_bias[key_start + last], value=torch.tensor(0.0)),
            ]
    for weights in held:
        weights.restore()
    return held


def train_tokenizer(text: str) -> Tokenizer:
    """Byte-level BPE of 512 tokens that opens every text with ``<s>``; any UTF-8 text encodes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(text.splitlines(keepends=True), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", BOS)]
    )
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write ``tokenizer.json`` and the settings with which ``AutoTokenizer`` opens it."""
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": SPECIAL_TOKENS[PAD],
        "bos_token": SPECIAL_TOKENS[BOS],
        "eos_token": SPECIAL_TOKENS[EOS],
        "padding_side": "left",
        "model_max_length": MAX_POSITIONS,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def encode(tokenizer: Tokenizer, text: str) -> torch.Tensor:
    """Token ids of a text without ``<s>``: [seq_len], int64."""
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    return torch.tensor(ids, dtype=torch.int64)


def with_bos(windows: torch.Tensor) -> torch.Tensor:
    """Put ``<s>`` before every window: [batch, seq_len - 1] to [batch, seq_len]."""
    bos = torch.full((windows.shape[0], 1), BOS, dtype=windows.dtype)
    return torch.cat([bos, windows], dim=1)


def batches(
    tokens: torch.Tensor, schedule: Schedule, generator: torch.Generator
) -> Iterator[torch.Tensor]:
    """Random windows of the text, one [batch, seq_len] int64 tensor a step."""
    for step in range(schedule.steps):
        seq_len = schedule.seq_len_at(step)
        batch = max(1, schedule.tokens_per_step // seq_len)
        starts = torch.randint(tokens.numel() - seq_len, (batch, 1), generator=generator)
        yield with_bos(tokens[starts + torch.arange(seq_len - 1)])


def make_optimizer(model: PreTrainedModel, schedule: Schedule) -> torch.optim.AdamW:
    """AdamW that decays the weight matrices of the layers only."""
    decayed: list[torch.nn.Parameter] = []
    free: list[torch.nn.Parameter] = []
    for name, parameter in model.named_parameters():
        is_matrix = parameter.ndim == 2 and "embed" not in name
        (decayed if is_matrix else free).append(parameter)
    return torch.optim.AdamW(
        [
            {"params": decayed, "weight_decay": schedule.weight_decay},
            {"params": free, "weight_decay": 0.0},
        ],
        lr=schedule.learning_rate,
        betas=(0.9, 0.95),
    )


def train(
    model: PreTrainedModel,
    tokens: torch.Tensor,
    *,
    schedule: Schedule,
    seed: int,
    console: Console,
    title: str,
) -> float:
    """Plant the sink, train in place on ``tokens`` [num_tokens] and return the seconds it took."""
    held = plant_sink(model)
    generator = torch.Generator().manual_seed(seed)
    optimizer = make_optimizer(model, schedule)
    model.train()
    began = time.perf_counter()
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.3f} nats/token"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(title, total=schedule.steps, loss=math.log(VOCAB_SIZE))
        smooth = math.log(VOCAB_SIZE)
        for step, input_ids in enumerate(batches(tokens, schedule, generator)):
            for group in optimizer.param_groups:
                group["lr"] = schedule.learning_rate_at(step)
            loss = model(input_ids=input_ids, labels=input_ids, use_cache=False).loss
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            for weights in held:
                weights.restore()
            smooth += 0.05 * (loss.item() - smooth)
            progress.update(task, advance=1, loss=smooth)
    model.eval()
    return time.perf_counter() - began


def held_out_windows(tokens: torch.Tensor, *, count: int) -> torch.Tensor:
    """Up to ``count`` consecutive windows, each opened by ``<s>``: [count, 512] int64."""
    window = MAX_POSITIONS - 1
    count = min(count, tokens.numel() // window)
    if count < 1:
        raise ValueError(
            f"the held-out text must have at least {window} tokens, got {tokens.numel()}; "
            "give a longer --text"
        )
    return with_bos(tokens[: count * window].view(count, window))


@torch.no_grad()
def bits_per_character(
    model: PreTrainedModel, windows: torch.Tensor, tokenizer: Tokenizer
) -> float:
    """Negative log2-likelihood of ``windows`` [count, seq_len] per character they decode to."""
    characters = sum(len(tokenizer.decode(row)) for row in windows[:, 1:].tolist())
    nats = 0.0
    for start in range(0, windows.shape[0], 8):
        input_ids = windows[start : start + 8]
        loss = model(input_ids=input_ids, labels=input_ids, use_cache=False).loss
        nats += loss.item() * input_ids[:, 1:].numel()
    return nats / math.log(2) / characters


@torch.no_grad()
def attention_shape(model: PreTrainedModel, windows: torch.Tensor) -> AttentionShape:
    """Measure the attention of a model with eager attention over ``windows`` [count, seq_len]."""
    seq_len = windows.shape[1]
    half = seq_len // 2
    visible = torch.arange(half + 1, seq_len + 1)
    rank = torch.arange(seq_len)
    in_top = rank < (0.2 * visible).ceil().unsqueeze(1)  # [num_queries, seq_len]
    num_heavy = math.ceil(0.2 * half)

    sums: list[list[float]] = []
    for start in range(0, windows.shape[0], 2):
        input_ids = windows[start : start + 2]
        attentions = model(input_ids=input_ids, output_attentions=True, use_cache=False).attentions
        rows = []
        for layer in attentions:  # [batch, num_q_heads, seq_len, seq_len]
            late = layer[:, :, half:].float()
            top = (late.sort(dim=-1, descending=True).values * in_top).sum(-1).mean()
            columns = late[..., :half].sum(dim=2)
            heavy = columns.topk(num_heavy, dim=-1).values.sum(-1) / columns.sum(-1)
            rows += [top.item(), heavy.mean().item(), late[..., 0].mean().item()]
        sums.append([value * input_ids.shape[0] for value in rows])
    means = [sum(column) / windows.shape[0] for column in zip(*sums, strict=True)]
    return AttentionShape(top_share=means[0::3], heavy_share=means[1::3], first_share=means[2::3])


def load(folder: Path) -> PreTrainedModel:
    """Open a saved model as the tests do: float32, eager attention."""
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", local_files_only=True
    ).eval()


def save(model: PreTrainedModel, tokenizer: Tokenizer, folder: Path) -> None:
    """Write weights (float16), configuration (which asks for float32 on loading) and tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    model.half().save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)
    config_file = folder / "config.json"
    config = json.loads(config_file.read_text())
    config["dtype"] = "float32"
    config_file.write_text(json.dumps(config, indent=2) + "\n")
    save_tokenizer(tokenizer, folder)
    for file in folder.iterdir():
        if file.stat().st_size >= MAX_FILE_BYTES:
            raise ValueError(
                f"{file} must be smaller than {MAX_FILE_BYTES} bytes, got {file.stat().st_size}"
            )


def sample(folder: Path, tokenizer: Tokenizer, *, seed: int) -> str:
    """A short text from the saved model, to look at."""
    model = load(folder)
    set_seed(seed)
    prompt = torch.tensor([tokenizer.encode("KING RICHARD:\n").ids])
    output = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=100,
        do_sample=True,
        temperature=0.7,
    )
    return str(tokenizer.decode(output[0].tolist()))


@dataclass(frozen=True, kw_only=True)
class Report:
    """What was measured on the saved files of one model."""

    folder: Path
    num_parameters: int
    bits_untrained: float
    bits_trained: float
    untrained: AttentionShape
    trained: AttentionShape
    seconds: float
    schedule: Schedule

    def table(self) -> Table:
        """The numbers as a table for the terminal."""
        table = Table(
            title=f"{self.folder.name}: {self.num_parameters:,} parameters, "
            f"{self.bits_trained:.3f} bits per character (untrained {self.bits_untrained:.3f})"
        )
        table.add_column("layer")
        for name in ("top 20 % of positions", "heavy 20 % of keys", "first position"):
            table.add_column(f"{name}\n(untrained)", justify="right")
        for layer in range(len(self.trained.top_share)):
            cells = [
                f"{getattr(self.trained, field)[layer]:.3f} "
                f"({getattr(self.untrained, field)[layer]:.3f})"
                for field in ("top_share", "heavy_share", "first_share")
            ]
            table.add_row(str(layer), *cells)
        return table

    def readme(self, *, text_name: str, source: str, seed: int) -> str:
        """The README of the folder."""
        shape = self.trained
        columns = zip(shape.top_share, shape.heavy_share, shape.first_share, strict=True)
        rows = "\n".join(
            f"| {layer} | {top:.3f} | {heavy:.3f} | {first:.3f} |"
            for layer, (top, heavy, first) in enumerate(columns)
        )
        return README.format(
            name=self.folder.name,
            architecture={"tiny_opt": "OPT", "tiny_gpt_neox": "GPT-NeoX"}[self.folder.name],
            parameters=self.num_parameters,
            text_name=text_name,
            source=source,
            seed=seed,
            steps=self.schedule.steps,
            tokens=self.schedule.tokens_per_step,
            bits=self.bits_trained,
            bits_untrained=self.bits_untrained,
            rows=rows,
        )


README = """# {name}

A tiny trained {architecture} language model ({parameters:,} parameters) for the tests. It knows
nothing but the look of its text; what counts is that its attention is peaked, with heavy
hitters and sinks, which random weights do not have.

```python
from pathlib import Path
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

folder = Path("tests/models/{name}")
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
tokenizer = AutoTokenizer.from_pretrained(folder)
prompt = tokenizer("KING RICHARD:\\n", return_tensors="pt", return_token_type_ids=False)
print(tokenizer.decode(model.generate(**prompt, max_new_tokens=50)[0], skip_special_tokens=True))
```

- Weights: float16 on disk, float32 when loaded. At most 512 positions.
- Tokens: byte-level BPE of 512, `<pad>` 0, `<s>` 1 (opens every text), `</s>` 2 (never occurs, so
  generation runs to `max_new_tokens`). The tokenizer pads on the left.
- Made by `python tests/models/train_tiny_models.py --text {text_name} --seed {seed}`
  ({steps} steps of {tokens} tokens, minutes on two cores).
- Text: {source}. Only the weights and the 512-token vocabulary
  are kept here, under the licence of this repository. The last 5 % of the text was held out.

Measured on the held-out text: {bits:.3f} bits per character (untrained {bits_untrained:.3f}).
Attention of the queries in the second half of 512 tokens (even attention: 0.2, 0.2, 0.003). Half
of the heads were given a sink on the first token (`plant_sink` in the script); how far they use it
was learned:

| layer | mass in each query's top 20 % | share of the heaviest 20 % of keys | mass on position 0 |
|---|---|---|---|
{rows}
"""


def make_model(
    name: str,
    *,
    tokenizer: Tokenizer,
    tokens: torch.Tensor,
    held_out: torch.Tensor,
    schedule: Schedule,
    seed: int,
    out: Path,
    console: Console,
) -> Report:
    """Train, save and measure one model.

    Parameters
    ----------
    name : str
        A key of ``ARCHITECTURES``, also the name of the folder made under ``out``.
    tokenizer : tokenizers.Tokenizer
        Saved beside the weights.
    tokens, held_out : torch.Tensor
        Token ids of the training and the held-out text, [num_tokens] int64.
    schedule : Schedule
        How long and how hard to train.
    seed : int
        Of the first weights and of the batches.
    out : Path
        Where the folder goes; files in it are written over.
    console : rich.console.Console
        Gets the progress bar.

    Raises
    ------
    ValueError
        If the held-out text is shorter than one window or a file is a megabyte or more.
    """
    windows = held_out_windows(held_out, count=32)
    set_seed(seed)
    model = ARCHITECTURES[name]()
    model.eval()
    bits_untrained = bits_per_character(model, windows, tokenizer)
    model.set_attn_implementation("eager")
    untrained = attention_shape(model, windows[:8])
    model.set_attn_implementation("sdpa")
    seconds = train(model, tokens, schedule=schedule, seed=seed, console=console, title=name)

    folder = out / name
    save(model, tokenizer, folder)
    saved = load(folder)
    return Report(
        folder=folder,
        num_parameters=sum(parameter.numel() for parameter in saved.parameters()),
        bits_untrained=bits_untrained,
        bits_trained=bits_per_character(saved, windows, tokenizer),
        untrained=untrained,
        trained=attention_shape(saved, windows[:8]),
        seconds=seconds,
        schedule=schedule,
    )


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    default = Schedule()
    parser = argparse.ArgumentParser(
        description="Train the tiny OPT and GPT-NeoX models of the tests and measure them.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--text", type=Path, required=True, help="UTF-8 text, public domain")
    parser.add_argument(
        "--source",
        default="Tiny Shakespeare (excerpts from the plays, public domain)",
        help="what the text is, for the README",
    )
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parent, help="the model folders go here"
    )
    parser.add_argument("--model", choices=[*ARCHITECTURES, "all"], default="all")
    parser.add_argument("--steps", type=int, default=default.steps, help="optimizer steps")
    parser.add_argument("--learning-rate", type=float, default=default.learning_rate)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    parser.add_argument(
        "--quick", action="store_true", help="10 steps: shows that the script runs; needs --out"
    )
    arguments = parser.parse_args()
    if arguments.steps < 1:
        parser.error(f"--steps must be >= 1, got {arguments.steps}")
    if arguments.threads < 1:
        parser.error(f"--threads must be >= 1, got {arguments.threads}")
    if arguments.quick and arguments.out.resolve() == Path(__file__).resolve().parent:
        parser.error("--quick must not write over the trained models: give another --out")
    return arguments


def main() -> None:
    """Train, save and measure the models that the command line names."""
    arguments = parse_arguments()
    console = Console()
    torch.set_num_threads(arguments.threads)
    schedule = Schedule(steps=arguments.steps, learning_rate=arguments.learning_rate)
    if arguments.quick:
        schedule = replace(schedule, steps=10, tokens_per_step=1024)

    text = arguments.text.read_text(encoding="utf-8")
    cut = int(len(text) * (1 - HELD_OUT_FRACTION))
    tokenizer = train_tokenizer(text[:cut])
    tokens, held_out = encode(tokenizer, text[:cut]), encode(tokenizer, text[cut:])
    console.print(
        f"{arguments.text.name}: {len(text):,} characters, {tokens.numel():,} tokens to train on, "
        f"{held_out.numel():,} held out, {cut / tokens.numel():.2f} characters per token"
    )
    names = list(ARCHITECTURES) if arguments.model == "all" else [arguments.model]
    for name in names:
        report = make_model(
            name,
            tokenizer=tokenizer,
            tokens=tokens,
            held_out=held_out,
            schedule=schedule,
            seed=arguments.seed,
            out=arguments.out,
            console=console,
        )
        readme = report.readme(
            text_name=arguments.text.name, source=arguments.source, seed=arguments.seed
        )
        (report.folder / "README.md").write_text(readme)
        console.print(report.table())
        for file in sorted(report.folder.iterdir()):
            console.print(f"  {file.name:28} {file.stat().st_size:>9,} bytes")
        console.print(f"  trained in {report.seconds:.0f} s; a sample:", style="bold")
        console.print(sample(report.folder, tokenizer, seed=arguments.seed), markup=False)


if __name__ == "__main__":
    main()
