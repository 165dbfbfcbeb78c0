#!/usr/bin/env python3
"""Makes this folder from the full conformance traces (recorded from mlx-lm 0.32.2 on mlx 0.32.4, CPU).

    python3 make_subset.py FULL_FOLDER

Needs nothing but Python. CHOSEN says which cases of each family are taken: patterns of their names, in the manner of a
shell. Arrays keep their names; only those that a chosen case uses are copied.
"""
import fnmatch
import json
import pathlib
import shutil
import struct
import sys

CHOSEN = {
    "kv": ["kv_alias5_*", "kv_alias255_fork", "kv_empty", "kv_boundary_257", "kv_prefill_decode*", "kv_trim_bfloat16",
           "kv_trim_to_zero_s1", "kv_trim_exact_256", "kv_trim_negative", "kv_masks_window", "kv_masks_s1",
           "kv_reload_float16", "kv_save_load_s1", "kv_single_tokens", "kv_copy_independent", "fuzz_kv_1"],
    "chunked": ["chunk_front_trim", "chunk_trim", "chunk_reload_after_front", "chunk_reload_then_trim",
                "chunk_decode_small_chunk", "chunk_save_load", "chunk_empty"],
    "concatenate": ["cat_alias_fork", "cat_trim_s1", "cat_reload_s1", "cat_masks_window_s1", "cat_empty_reload",
                    "fuzz_cat_0"],
    "quantized": ["q_alias_returned_arrays_stay", "q32b4_trim_s1", "q32b4_reload_s1", "odd_bits_*_d128",
                  "to_quantized_g64_b2_bfloat16", "nbytes_empty_g32_b4", "to_quantized_empty"],
    "masks": ["*"],
    "rope": ["*_o5", "*_olist3"],
    "arrays": ["*"],
    "rotating": ["rot_alias5_6_*", "rot8k0_multi_after_wrap", "rot8k0_prompt_longer", "rot8k0_window_*",
                 "rot8k0_trim_*", "rot8k0_wrap_decode_bfloat16", "rot8k4_*", "rot_big300_4_255", "fuzz_rot9k1_6"],
    "cache_list": ["batch_flow", "mixed_*", "nested", "quantized_child", "fuzz_list_0"],
    "batch_kv": ["bkv_alias_fork", "bkv_left_padding", "bkv_prepare_left*", "bkv_right_padding*", "bkv_filter*",
                 "bkv_reload", "bkv_save_load", "bkv_trim*", "bkv_extract*", "bkv_extend_*empty*", "bkv_extend",
                 "bkv_merge_*d2", "fuzz_bkv_0"],
    "batch_rotating": ["brot8_wrap_*", "brot8_right_padding*", "brot8_extend_*", "brot8_merge_*d2", "brot8_filter*",
                       "brot8_extract*", "brot8_reload*", "brot8_trim", "brot8_upstream_*", "fuzz_brot5_0"],
    "quantized_sdpa": ["g32b4_*", "g64b8_B3*", "quantize_g64_b5_*", "quantize_g128_b3_*"],
    "prompt_cache_files": ["kv_metadata_*", "kv_trimmed_*", "kv_float16_*", "metadata_odd_keys_*", "kv_12_layers_v1_*",
                           "kv4_v1_*"],
}


def read_safetensors(path):
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8:8 + length])
    return {name: (t, data[8 + length + t["data_offsets"][0]:8 + length + t["data_offsets"][1]])
            for name, t in header.items() if name != "__metadata__"}


def write_safetensors(path, tensors):
    header, body = {}, b""
    for name in sorted(tensors):
        record, data = tensors[name]
        header[name] = {"dtype": record["dtype"], "shape": record["shape"],
                        "data_offsets": [len(body), len(body) + len(data)]}
        body += data
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + body)


def strings(value):
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from strings(item)


def main():
    full = pathlib.Path(sys.argv[1])
    here = pathlib.Path(__file__).resolve().parent
    index = {}
    for family, patterns in CHOSEN.items():
        cases = json.loads((full / f"{family}.json").read_text())
        chosen = [c for c in cases if any(fnmatch.fnmatchcase(c["name"], p) for p in patterns)]
        arrays = read_safetensors(full / f"{family}.safetensors")
        used = set(strings(chosen))
        write_safetensors(here / f"{family}.safetensors", {n: a for n, a in arrays.items() if n in used})
        (here / f"{family}.json").write_text(json.dumps(chosen, ensure_ascii=False, separators=(",", ":")) + "\n")
        index[family] = len(chosen)
        for case in chosen:
            if "file" in case:
                folder = here / "prompt_cache_files"
                folder.mkdir(exist_ok=True)
                shutil.copyfile(full / "prompt_cache_files" / case["file"], folder / case["file"])
    (here / "index.json").write_text(json.dumps(index, indent=1) + "\n")


if __name__ == "__main__":
    main()
