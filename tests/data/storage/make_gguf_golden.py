#!/usr/bin/env python3
"""Makes tiny_llama.gguf and tiny_llama.expected.safetensors beside this script.

The GGUF file is a two-layer llama with a tensor of every type that Reprise reads, its blocks random bits. Of the types
with K, the first layer has blocks whose scales float16 cannot hold, the second has none. The other file holds each tensor in float32 as the `gguf` package dequantises it, under Hugging Face's name and row order.

Made with Python 3.11, gguf 0.19.0, numpy 2.4, safetensors 0.8.
usage: make_gguf_golden.py
"""
import pathlib

import numpy as np
from gguf import GGMLQuantizationType as T
from gguf import GGML_QUANT_SIZES, GGUFWriter, quants
from safetensors.numpy import save_file

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FFN, VOCAB = 256, 2, 1, 16, 32, 8
HERE = pathlib.Path(__file__).parent
random = np.random.default_rng(20)

# GGUF name, Hugging Face name, rows, columns, type, heads whose rows GGUF interleaves
TENSORS = [
    ("token_embd.weight", "model.embed_tokens.weight", VOCAB, HIDDEN, T.Q8_0, 0),
    ("output_norm.weight", "model.norm.weight", 0, HIDDEN, T.F32, 0),
    ("output.weight", "lm_head.weight", VOCAB, HIDDEN, T.F16, 0),
    ("rope_freqs.weight", "model.rope_freqs.weight", 0, HEAD_DIM // 2, T.F32, 0),
    ("blk.0.attn_norm.weight", "model.layers.0.input_layernorm.weight", 0, HIDDEN, T.F32, 0),
    ("blk.0.attn_q.weight", "model.layers.0.self_attn.q_proj.weight", HEADS * HEAD_DIM, HIDDEN, T.Q4_K, HEADS),
    ("blk.0.attn_q.bias", "model.layers.0.self_attn.q_proj.bias", 0, HEADS * HEAD_DIM, T.F32, HEADS),
    ("blk.0.attn_k.weight", "model.layers.0.self_attn.k_proj.weight", KV_HEADS * HEAD_DIM, HIDDEN, T.Q5_K, KV_HEADS),
    ("blk.0.attn_v.weight", "model.layers.0.self_attn.v_proj.weight", KV_HEADS * HEAD_DIM, HIDDEN, T.Q8_0, 0),
    ("blk.0.attn_output.weight", "model.layers.0.self_attn.o_proj.weight", HIDDEN, HEADS * HEAD_DIM, T.Q4_0, 0),
    ("blk.0.ffn_norm.weight", "model.layers.0.post_attention_layernorm.weight", 0, HIDDEN, T.F32, 0),
    ("blk.0.ffn_gate.weight", "model.layers.0.mlp.gate_proj.weight", FFN, HIDDEN, T.Q4_1, 0),
    ("blk.0.ffn_up.weight", "model.layers.0.mlp.up_proj.weight", FFN, HIDDEN, T.Q5_K, 0),
    ("blk.0.ffn_down.weight", "model.layers.0.mlp.down_proj.weight", HIDDEN, FFN, T.BF16, 0),
    ("blk.1.attn_norm.weight", "model.layers.1.input_layernorm.weight", 0, HIDDEN, T.F32, 0),
    ("blk.1.attn_q.weight", "model.layers.1.self_attn.q_proj.weight", HEADS * HEAD_DIM, HIDDEN, T.Q2_K, HEADS),
    ("blk.1.attn_k.weight", "model.layers.1.self_attn.k_proj.weight", KV_HEADS * HEAD_DIM, HIDDEN, T.Q3_K, KV_HEADS),
    ("blk.1.attn_v.weight", "model.layers.1.self_attn.v_proj.weight", KV_HEADS * HEAD_DIM, HIDDEN, T.Q4_K, 0),
    ("blk.1.attn_output.weight", "model.layers.1.self_attn.o_proj.weight", HIDDEN, HEADS * HEAD_DIM, T.Q5_0, 0),
    ("blk.1.ffn_norm.weight", "model.layers.1.post_attention_layernorm.weight", 0, HIDDEN, T.F32, 0),
    ("blk.1.ffn_gate.weight", "model.layers.1.mlp.gate_proj.weight", FFN, HIDDEN, T.Q5_K, 0),
    ("blk.1.ffn_up.weight", "model.layers.1.mlp.up_proj.weight", FFN, HIDDEN, T.Q6_K, 0),
    ("blk.1.ffn_down.weight", "model.layers.1.mlp.down_proj.weight", HIDDEN, FFN, T.Q5_1, 0),
]
# Where each block keeps its float16 numbers: first byte, count.
HALVES = {T.Q4_0: (0, 1), T.Q4_1: (0, 2), T.Q5_0: (0, 1), T.Q5_1: (0, 2), T.Q8_0: (0, 1), T.IQ4_NL: (0, 1),
          T.Q2_K: (80, 2), T.Q3_K: (108, 1), T.Q4_K: (0, 2), T.Q5_K: (0, 2), T.Q6_K: (208, 1)}


def random_blocks(kind: T, rows: int, columns: int, with_large: bool) -> np.ndarray:
    items, size = GGML_QUANT_SIZES[kind]
    blocks = random.integers(0, 256, (rows * columns // items, size), dtype=np.uint8)
    first, count = HALVES[kind]
    halves = random.normal(0, 0.02, (len(blocks), count)).astype(np.float16)
    halves[0, 0] = np.float16(3e-7)  # a subnormal
    halves[1, 0] = np.float16(0)
    if with_large:
        halves[2, 0] = np.float16(3e4)
    blocks[:, first : first + 2 * count] = halves.view(np.uint8)
    return blocks.reshape(rows, -1)


def split_halves(rows: np.ndarray, heads: int) -> np.ndarray:
    half = rows.shape[0] // heads // 2
    return rows.reshape(heads, half, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def main() -> None:
    writer = GGUFWriter(HERE / "tiny_llama.gguf", "llama")
    writer.add_block_count(2)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HEAD_DIM)
    writer.add_value_length(HEAD_DIM)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_rope_freq_base(500000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(["<unk>", "<s>", "</s>", "<0x0A>", "\u2581a", "b", "\u2581ab", "<eot>"])
    writer.add_token_scores([0.0, 0.0, 0.0, 0.0, -1.0, -2.0, -0.5, 0.0])
    writer.add_token_types([2, 3, 3, 6, 1, 1, 1, 3])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_eot_token_id(7)
    writer.add_unk_token_id(0)
    writer.add_add_bos_token(True)
    writer.add_add_space_prefix(False)
    writer.add_chat_template("{{ messages[0].content }}")

    expected = {}
    for gguf_name, hf_name, rows, columns, kind, heads in TENSORS:
        if kind in HALVES:
            blocks = random_blocks(kind, rows, columns, kind in (T.Q4_K, T.Q5_K) and gguf_name.startswith("blk.0"))
            writer.add_tensor(gguf_name, blocks, raw_dtype=kind)
            values = quants.dequantize(blocks, kind)
        else:
            values = random.normal(0, 1, (rows, columns) if rows else (columns,)).astype(np.float32)
            if kind == T.F16:
                writer.add_tensor(gguf_name, values.astype(np.float16))
                values = values.astype(np.float16).astype(np.float32)
            elif kind == T.BF16:
                bits = quants.quantize(values, kind)
                writer.add_tensor(gguf_name, bits, raw_dtype=kind)
                values = quants.dequantize(bits, kind)
            else:
                writer.add_tensor(gguf_name, values)
        expected[hf_name] = np.ascontiguousarray(split_halves(values, heads) if heads else values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    save_file(expected, HERE / "tiny_llama.expected.safetensors")


if __name__ == "__main__":
    main()
