#!/usr/bin/env python3
"""Makes of a small GGUF model the folder that mlx-lm loads: the tests that run mlx-lm need the model in that form.

    tools/gguf_to_mlx.py MODEL.gguf FOLDER

Only what the test model is: architecture llama, quantised to Q4_0, Q4_1 or Q8_0, a byte-level BPE tokenizer with the
pre-tokenizer "smollm". The weights keep their bits. Needs mlx, gguf and tokenizers.
"""

from __future__ import annotations

import json
import pathlib
import statistics
import sys
from typing import Any

import gguf
import mlx.core as mx
import tokenizers

GROUP_SIZE = 32  # of all three GGUF types

NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def rotary_halves(rows: mx.array, heads: int) -> mx.array:
    """GGUF stores the rows of a head as pairs that rotate together; mlx-lm wants all first ones, then all second ones."""
    pairs = rows.reshape(heads, -1, 2, *rows.shape[1:])
    return mx.moveaxis(pairs, 2, 1).reshape(rows.shape)


def converted(weights: dict[str, mx.array], heads: int, kv_heads: int) -> dict[str, mx.array]:
    result = {}
    for name, value in weights.items():  # blk.3.attn_q.weight, .scales, .biases; token_embd.weight
        *block, module, part = name.split(".")
        if module in ("attn_q", "attn_k"):
            value = rotary_halves(value, heads if module == "attn_q" else kv_heads)
        layer = f"model.layers.{block[1]}." if block else ""
        result[f"{layer}{NAMES[module]}.{part}"] = value
    return result


def quantization_of(weights: dict[str, mx.array]) -> dict[str, Any]:
    """As mlx-lm's config has it: the bits of most weights, and by name those that have others."""
    bits = {
        name.removesuffix(".scales"): 32 * weights[name.removesuffix("scales") + "weight"].shape[-1]
        // (GROUP_SIZE * scales.shape[-1])
        for name, scales in weights.items()
        if name.endswith(".scales")
    }  # fmt: skip
    usual = statistics.mode(bits.values())
    others = {name: {"group_size": GROUP_SIZE, "bits": n} for name, n in bits.items() if n != usual}
    return {"group_size": GROUP_SIZE, "bits": usual, **others}


def config_of(fields: dict[str, Any], weights: dict[str, mx.array]) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "hidden_size": fields["llama.embedding_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_attention_heads": fields["llama.attention.head_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "rms_norm_eps": fields["llama.attention.layer_norm_rms_epsilon"],
        "rope_theta": fields["llama.rope.freq_base"],
        "max_position_embeddings": fields["llama.context_length"],
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "tie_word_embeddings": "lm_head.weight" not in weights,
        "quantization": quantization_of(weights),
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
    }


def tokenizer_of(fields: dict[str, Any]) -> tokenizers.Tokenizer:
    tokens = fields["tokenizer.ggml.tokens"]
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.BPE(
            vocab={token: i for i, token in enumerate(tokens)},
            merges=[tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]],
        )
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([
        tokenizers.pre_tokenizers.Digits(individual_digits=True),
        tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False),
    ])  # fmt: skip
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens([
        tokenizers.AddedToken(token, special=True, normalized=False)
        for token, kind in zip(tokens, fields["tokenizer.ggml.token_type"])
        if kind == gguf.TokenType.CONTROL
    ])  # fmt: skip
    return tokenizer


def write_json(path: pathlib.Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def main() -> None:
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    source, folder = sys.argv[1], pathlib.Path(sys.argv[2])
    fields = {key: field.contents() for key, field in gguf.GGUFReader(source).fields.items()}
    kind = (fields["general.architecture"], fields["tokenizer.ggml.model"], fields.get("tokenizer.ggml.pre"))
    if kind != ("llama", "gpt2", "smollm"):
        sys.exit(f"{source}: architecture, tokenizer and pre-tokenizer must be llama, gpt2, smollm, but are {kind}")

    heads, kv_heads = (fields[f"llama.attention.head_count{suffix}"] for suffix in ("", "_kv"))
    weights = converted(mx.load(source), heads, kv_heads)
    config = config_of(fields, weights)
    folder.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    write_json(folder / "config.json", config)
    tokenizer_of(fields).save(str(folder / "tokenizer.json"))
    tokens = fields["tokenizer.ggml.tokens"]
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": tokens[config["bos_token_id"]],
            "eos_token": tokens[config["eos_token_id"]],
            "chat_template": fields["tokenizer.chat_template"],
        },
    )


if __name__ == "__main__":
    main()
