"""Tiny model folders and GGUF files with a real tokenizer, made on the spot."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

TEXT = (
    "In the beginning God created the heaven and the earth. And the earth was without form, and "
    "void; and darkness was upon the face of the deep. And the Spirit of God moved upon the face "
    "of the waters. And God said, Let there be light: and there was light. "
)
_UNKNOWN, _BEGIN, _END = "<unk>", "<s>", "</s>"
CHAT_TEMPLATE = "{% for m in messages %}<s>{{ m['content'] }}{% endfor %}"


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE of 320 tokens; 0, 1 and 2 are the special ones."""
    tokenizer = Tokenizer(models.BPE(unk_token=_UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=[_UNKNOWN, _BEGIN, _END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator([TEXT] * 4, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token=_UNKNOWN,
        bos_token=_BEGIN,
        eos_token=_END,
        # transformers 4 would add token_type_ids, which no model here takes.
        model_input_names=["input_ids", "attention_mask"],
    )


def tiny_llama(tokenizer: Any) -> Any:
    """Llama with 2 layers, 4 query heads, 2 KV heads, and weights that make attention peaked."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.3,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config).eval()


def save_tiny_model(folder: Path) -> Path:
    """Write a model folder as `save_pretrained` does; returns it."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    tiny_llama(tokenizer).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def write_tiny_gguf(file: Path) -> Any:
    """Write the tiny llama as a GGUF file in float32; returns the model that is in it."""
    import gguf

    tokenizer = tiny_tokenizer()
    model = tiny_llama(tokenizer)
    config = model.config
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_name("tiny")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_vocab_size(config.vocab_size)

    bpe = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(sorted(bpe["vocab"], key=bpe["vocab"].get))
    writer.add_token_types(
        [gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * (len(tokenizer) - 3)
    )
    writer.add_token_merges([" ".join(merge) for merge in bpe["merges"]])
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)

    for name, tensor in model.state_dict().items():
        array = tensor.numpy()
        if "q_proj" in name:
            array = _gguf_rows(array, config.num_attention_heads)
        if "k_proj" in name:
            array = _gguf_rows(array, config.num_key_value_heads)
        writer.add_tensor(_gguf_name(name), np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def _gguf_rows(weight: Any, num_heads: int) -> Any:
    """Reorder rows: GGUF's llama rotates neighbouring pairs, transformers the two halves."""
    rows, columns = weight.shape
    halves = weight.reshape(num_heads, 2, rows // num_heads // 2, columns)
    return halves.swapaxes(1, 2).reshape(rows, columns)


def _gguf_name(name: str) -> str:
    names = {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "model.layers": "blk",
    }
    for theirs, gguf_name in names.items():
        name = name.replace(theirs, gguf_name)
    return name
