"""Peak memory of saving and loading, of an import from Hugging Face and of an export.

    python benchmarks/checkpoint/memory.py --gigabytes 1

Each action runs in a process of its own; its peak is that of resident memory beyond what the same
process has after its imports, and beyond the tensors that it saves or fills. Pages of mapped files
count, although the system may drop them.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file

HIDDEN, FFN, VOCABULARY = 1024, 4096, 32000

PEAK = """
import sys, torch
from mcore.cli.main import main
from mcore.checkpoint import AsyncSaver, CheckpointReader, load, save
def ones(megabytes):
    return {f"w{i}": torch.ones(1024, 1024) for i in range(int(float(megabytes) / 4.194304))}
def peak():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmHWM")) * 1024 / 1e6
before = peak()
"""
IMPORT = (
    'main(["convert", "hf-to-mcore", "--no-logits", "--hf", sys.argv[1], "--save", sys.argv[2]])'
)
EXPORT = (
    'main(["convert", "mcore-to-hf", "--no-logits", "--load", sys.argv[1], "--hf", sys.argv[2]])'
)
SAVE = """
tensors = ones(sys.argv[2])
before = peak()
save(sys.argv[1], 1, tensors, {})
"""
LOAD_ALL = """
tensors = ones(sys.argv[2])
before = peak()
load(sys.argv[1], tensors)
"""
SAVE_ASYNC = """
tensors = ones(sys.argv[2])
saver = AsyncSaver()
before = peak()
for iteration in range(3):
    saver.save(sys.argv[1], iteration, tensors, {})
saver.close()
print("staging", saver.staging_bytes / 1e6)
"""
LOAD = """
reader = CheckpointReader(sys.argv[1])
mine = [key for key in reader.keys() if ".layers.0." in key or ".layers.1." in key]
records = reader.metadata.tensors
state = {key: torch.zeros(records[key].shape) for key in mine}
print("part", sum(tensor.nbytes for tensor in state.values()) / 1e6)
load(sys.argv[1], state, allow_missing=True)
"""


def make_model(folder: Path, gigabytes: float) -> float:
    """A Llama in several safetensors files; returns its megabytes."""
    layer = HIDDEN * (4 * HIDDEN + 3 * FFN)
    layers = max(2, round((gigabytes * 1e9 / 4 - 2 * VOCABULARY * HIDDEN) / layer))
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_hidden_layers": layers,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(config))
    weight_map: dict[str, str] = {}
    total = 0
    for number in range(-1, layers):
        part = ends() if number < 0 else one_layer(number)
        name = f"model-{number + 2:05d}-of-{layers + 1:05d}.safetensors"
        save_file(part, folder / name, {"format": "pt"})
        weight_map |= dict.fromkeys(part, name)
        total += sum(tensor.nbytes for tensor in part.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return total / 1e6


def ends() -> dict[str, torch.Tensor]:
    return {
        "model.embed_tokens.weight": torch.randn(VOCABULARY, HIDDEN),
        "model.norm.weight": torch.ones(HIDDEN),
        "lm_head.weight": torch.randn(VOCABULARY, HIDDEN),
    }


def one_layer(number: int) -> dict[str, torch.Tensor]:
    shapes = {
        **{f"self_attn.{name}_proj.weight": (HIDDEN, HIDDEN) for name in "qkvo"},
        "mlp.gate_proj.weight": (FFN, HIDDEN),
        "mlp.up_proj.weight": (FFN, HIDDEN),
        "mlp.down_proj.weight": (HIDDEN, FFN),
        "input_layernorm.weight": (HIDDEN,),
        "post_attention_layernorm.weight": (HIDDEN,),
    }
    return {f"model.layers.{number}.{name}": torch.randn(shape) for name, shape in shapes.items()}


def peak_of(program: str, *words: Path | float) -> str:
    code = f'{PEAK}{program}\nprint("peak", peak() - before)'
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, words)], capture_output=True, text=True, check=True
    )
    lines = [line.split() for line in done.stdout.splitlines()]
    return ", ".join(
        f"{line[0]} {float(line[1]):.0f} MB"
        for line in lines
        if line[0] in ("part", "staging", "peak")
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Peak memory of conversion and loading.")
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--dir", type=Path, help="where to write; the system's temporary folder")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(dir=args.dir))
    try:
        for name, program in (("save", SAVE), ("load", LOAD_ALL), ("async saves", SAVE_ASYNC)):
            root = folder / ("async" if program is SAVE_ASYNC else "state")
            print(f"{name}:", peak_of(program, root, 1e3 * args.gigabytes))
        (folder / "hf").mkdir()
        megabytes = make_model(folder / "hf", args.gigabytes)
        print(f"model {megabytes:.0f} MB in fp32")
        print("import:", peak_of(IMPORT, folder / "hf", folder / "ckpt"))
        print("export:", peak_of(EXPORT, folder / "ckpt", folder / "out"))
        print("two layers loaded:", peak_of(LOAD, folder / "ckpt"))
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
