"""Adapters for the conformance kit's tiny models, with the logits that mlx-lm gives. Run with mlx-lm 0.32.2, mlx 0.32.4:
python make_adapters.py KIT (the folder of models)."""

import json
import sys
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.tuner.utils import linear_to_lora_layers
from mlx_lm.utils import load_model

HERE = Path(__file__).parent
PROMPT = [8, 66, 37, 18, 60, 61, 58, 11, 33]
CASES = [
    ("lora_llama_q8_g32", "llama_q8_g32", "lora", ["self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj"]),
    ("lora_llama_bias_tied", "llama_bias_tied", "lora", ["self_attn.o_proj", "mlp.gate_proj", "model.embed_tokens"]),
    ("dora_llama_bias_tied", "llama_bias_tied", "dora", ["self_attn.q_proj", "self_attn.k_proj", "mlp.up_proj"]),
    ("dora_llama_q8_g32", "llama_q8_g32", "dora", ["self_attn.o_proj"]),
    ("full_llama_bias_tied", "llama_bias_tied", "full", ["input_layernorm", "v_proj"]),
    ("lora_mixtral", "mixtral", "lora", ["block_sparse_moe.gate", "block_sparse_moe.switch_mlp.up_proj"]),
    ("lora_phi3_plain", "phi3_plain", "lora", ["self_attn.qkv_proj", "mlp.gate_up_proj"]),
]


def main():
    kit = Path(sys.argv[1])
    for name, model_name, kind, keys in CASES:
        mx.random.seed(len(name))
        model, _ = load_model(kit / model_name)
        out = HERE / name
        out.mkdir(exist_ok=True)
        config = {"fine_tune_type": kind, "num_layers": 16}
        if kind == "full":
            weights = {
                k: v + 0.1 * mx.random.normal(v.shape)
                for k, v in tree_flatten(model.parameters())
                if any(key in k for key in keys) and "layers" in k
            }
        else:
            config["lora_parameters"] = {"rank": 4, "scale": 5.0, "dropout": 0.0, "keys": keys}
            linear_to_lora_layers(model, 16, config["lora_parameters"], use_dora=kind == "dora")
            weights = {
                k: 0.1 * mx.random.normal(v.shape) + (v if k.endswith(".m") else 0)
                for k, v in tree_flatten(model.parameters())
                if k.rsplit(".", 1)[-1] in ("lora_a", "lora_b", "m")
            }
        model.load_weights(list(weights.items()), strict=False)
        logits = model(mx.array([PROMPT]))[0]
        (out / "adapter_config.json").write_text(json.dumps(config, indent=1) + "\n")
        mx.save_safetensors(str(out / "adapters.safetensors"), weights)
        mx.save_safetensors(
            str(out / "expected.safetensors"), {"prompt": mx.array([PROMPT]), "logits": logits.astype(mx.float32)}
        )
        print(name, len(weights), sum(v.nbytes for v in weights.values()))


main()
