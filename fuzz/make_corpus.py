#!/usr/bin/env python3
"""Writes seeds for the fuzz targets: small files, right in form, that reach every branch of a parser.

usage: make_corpus.py DIR
"""
import json
import pathlib
import struct
import sys

DATA = pathlib.Path(__file__).parent.parent / "tests" / "data" / "storage"
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


def text(value: str) -> bytes:
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw


def entry(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def gguf(entries: list, tensors: list, version: int = 3, alignment: int = 32) -> bytes:
    """tensors: (name, dims innermost first, type, data)"""
    data, infos = b"", b""
    for name, dims, kind, content in tensors:
        data += b"\0" * (-len(data) % alignment)
        infos += text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, len(data))
        data += content
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(entries)) + b"".join(entries) + infos
    return head + b"\0" * (-len(head) % alignment) + data


def llama(kind: int, block: bytes, items: int) -> bytes:
    """A one-layer llama whose query rows are one block each."""
    def count(key, value):
        return entry("llama." + key, 4, struct.pack("<I", value))

    entries = [
        entry("general.architecture", 8, text("llama")), count("block_count", 1), count("embedding_length", items),
        count("feed_forward_length", 4), count("attention.head_count", 1), count("context_length", 8),
        entry("llama.attention.layer_norm_rms_epsilon", 6, struct.pack("<f", 1e-5)),
        entry("tokenizer.ggml.model", 8, text("gpt2")),
        entry("tokenizer.ggml.tokens", 9, struct.pack("<IQ", 8, 2) + text("a") + text("b")),
        entry("tokenizer.ggml.token_type", 9, struct.pack("<IQ2i", 5, 2, 1, 3)),
        entry("tokenizer.ggml.eos_token_id", 4, struct.pack("<I", 1)),
        entry("llama.attention.key_length", 4, struct.pack("<I", 2)),
    ]
    return gguf(entries, [
        ("token_embd.weight", [items, 1], 1, bytes(2 * items)),
        ("blk.0.attn_q.weight", [items, 2], kind, block * 2),
        ("rope_freqs.weight", [1], 0, struct.pack("<f", 1.0)),
    ])


def safetensors(header, data: bytes, pad: int = 0) -> bytes:
    raw = json.dumps(header).encode() + b" " * pad
    return struct.pack("<Q", len(raw)) + raw + data


def seeds() -> dict:
    every_value = [entry(f"v{kind}", kind, struct.pack("<" + form, 1)) for kind, form in NUMBERS.items()]
    every_value += [entry(f"a{kind}", 9, struct.pack("<IQ2" + form, kind, 2, 1, 1)) for kind, form in NUMBERS.items()]
    every_value += [entry("s", 8, text("x")), entry("as", 9, struct.pack("<IQ", 8, 2) + text("a") + text("")),
                    entry("general.alignment", 4, struct.pack("<I", 64))]
    files = {
        "gguf/values": gguf(every_value, [("t", [2, 3], 0, bytes(24)), ("u", [32], 2, bytes(18))], alignment=64),
        "gguf/version2": gguf([], [("t", [1], 24, b"x")], version=2),
        "gguf/empty": gguf([], []),
        "safetensors/empty": safetensors({}, b""),
        "safetensors/two": safetensors(
            {"__metadata__": {"k": "v"}, "a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
             "b": {"dtype": "BOOL", "shape": [2, 2], "data_offsets": [8, 12]}}, bytes(12), pad=3),
        "safetensors/odd": safetensors(
            {"__metadata__": None, "s": {"dtype": "I64", "shape": [], "data_offsets": [0, 8]},
             "z": {"dtype": "F8_E4M3", "shape": [0, 3], "data_offsets": [8, 8]},
             "f": {"dtype": "F4", "shape": [8], "data_offsets": [8, 12]}}, bytes(12)),
        "json/config": b'{"a": Infinity, "b": [-Infinity, NaN], "c": "NaN \\" \\\\", "d": {"__float__": "NaN"}}',
        "json/tokens": b'{"x": 1.5, "added_tokens": [{"id": 1, "content": "<s>", "y": {"id": 2}}, null], "m": [true]}',
    }
    for name, kind, items, size in [("q4_0", 2, 32, 18), ("q4_1", 3, 32, 20), ("q8_0", 8, 32, 34),
                                    ("q4_k", 12, 256, 144), ("q5_k", 13, 256, 176), ("f16", 1, 4, 8), ("bf16", 30, 4, 8)]:
        files[f"gguf/llama_{name}"] = llama(kind, bytes(range(size)), items)
    keys, one = {"dtype": "F32", "shape": [1, 1, 1, 1]}, {"dtype": "I32", "shape": [], "data_offsets": [8, 12]}
    pair = [keys | {"data_offsets": [0, 4]}, keys | {"data_offsets": [4, 8]}]
    files["prompt_cache/current"] = safetensors(
        {"0.0": pair[0], "0.1": pair[1], "0.2": one,
         "__metadata__": {"0.k": "v", "1.0": "KVCache", "2.0": '{"reprise":1,"layers":{"0":{"state":{"keep":4}}}}',
                          "2.1.0": "0.2", "2.1.1": "scalar"}}, bytes(8) + struct.pack("<i", 1))
    files["prompt_cache/list"] = safetensors(
        {"0.0.0.0": pair[0], "0.0.0.1": pair[1], "0.0.0.2": one,
         "0.0.1": {"dtype": "I32", "shape": [7], "data_offsets": [12, 40]},
         "__metadata__": {"1.0": "CacheList", "2.0": "", "2.1.0": "0.0.0.2", "2.1.1": "scalar", "2.2.0": "0.0.1",
                          "2.2.1": "string"}}, bytes(8) + struct.pack("<8i", 1, *map(ord, "KVCache")))
    for name, meta in {"KVCache": [], "RotatingKVCache": ["0", "8", "1", "1"], "ChunkedKVCache": ["4", "0"]}.items():
        metas = {f"0.0.{i}": text for i, text in enumerate(meta)} or {"0.0": ""}
        files[f"prompt_cache/legacy_{name}"] = safetensors(
            {"0.0": pair[0], "0.1": pair[1], "__metadata__": metas | {"1.k": "v", "2.0": name}}, bytes(8))
    for length in (600, 2400):  # the head of a file as other programs write it
        files[f"gguf/head_{length}"] = (DATA / "tiny_llama.gguf").read_bytes()[:length]
    return files


def main() -> None:
    for name, content in seeds().items():
        path = pathlib.Path(sys.argv[1]) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


if __name__ == "__main__":
    main()
