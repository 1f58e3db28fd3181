"""The list: the verified models, their sources, and their layouts.

``source`` is the package's name for pip, or "own" for a model rewritten after ``paper``. Sizes are small, so that
all of them run on a laptop: two or four processes, two layers, some dozen channels.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

Inputs = dict[str, dict[str, Any]]


def ids(length: int = 16, high: int = 96) -> dict[str, Any]:
    return {"shape": [length], "dtype": "int64", "high": high}


def real(*shape: int) -> dict[str, Any]:
    return {"shape": list(shape), "dtype": "float64"}


def label(high: int = 12) -> dict[str, Any]:
    return {"shape": [], "dtype": "int64", "high": high}


TEXT: Inputs = {"input_ids": ids(), "labels": {"like": "input_ids"}}
NOISE: Inputs = {"hidden_states": real(4, 8, 8), "timestep": label(1000), "target": real(4, 8, 8)}
TEXTUAL: Inputs = {**NOISE, "encoder_hidden_states": real(6, 24)}
GUIDED: Inputs = {**TEXTUAL, "pooled_projections": real(24)}
NOISY: Inputs = {"noisy": real(4, 8, 8), "t": label(1000), "y": label(), "noise": real(4, 8, 8)}
IMAGES: Inputs = {"images": real(3, 16, 16), "labels": label()}


@dataclass(frozen=True, slots=True)
class Listed:
    """One model: ``build`` is file:function in this folder; ``layout`` such as "tp2 pp2", "sp" for sequence parallel.

    ``batch`` sequences a step, ``micro`` in a microbatch; ``dtype`` None leaves the parameters as they are built.
    """

    name: str
    source: str
    build: str
    layout: str
    inputs: Inputs
    paper: str = ""
    dtype: str | None = "float64"
    batch: int = 8
    micro: int = 2

    @property
    def reference(self) -> str:
        file, function = self.build.split(":")
        return f"benchmarks.other_models.{file}:{function}"

    @property
    def version(self) -> str | None:
        """Of the package; "" for our own; None if it is not installed."""
        if self.source == "own":
            return ""
        try:
            return version(self.source)
        except PackageNotFoundError:
            return None

    def spec(self) -> dict[str, Any]:
        """The spec file's content."""
        axes = dict(re.findall(r"(tp|pp|dp|cp|ep)(\d+)", self.layout))
        spec: dict[str, Any] = {
            "mesh": {axis: int(size) for axis, size in axes.items()},
            "batch": {"global": self.batch, "micro": self.micro},
            "inputs": self.inputs,
        }
        if "sp" in self.layout.split():
            spec["tensor_parallel"] = {"sequence_parallel": True}
        if self.dtype is not None:
            spec["precision"] = {"parameters": self.dtype}
        return spec


CATALOGUE: tuple[Listed, ...] = (
    Listed("nn.Transformer, translation", "torch", "from_torch:seq2seq", "tp2 pp2", TEXT),
    Listed(
        "decoder: RoPE, RMSNorm, SwiGLU, 2 kv heads",
        "x-transformers",
        "from_x_transformers:llama_like",
        "tp2 pp2",
        TEXT,
    ),
    Listed(
        "decoder: ALiBi, its own loss", "x-transformers", "from_x_transformers:alibi", "tp2 pp2", {"input_ids": ids()}
    ),
    Listed("decoder: T5 bias, squared ReLU", "x-transformers", "from_x_transformers:relative_bias", "tp2", TEXT),
    Listed(
        "decoder: one kv head, QK norm, xPos, token shift",
        "x-transformers",
        "from_x_transformers:palm_like",
        "tp2 pp2",
        TEXT,
    ),
    Listed(
        "decoder: macaron, gated residual, talking heads", "x-transformers", "from_x_transformers:macaron", "tp2", TEXT
    ),
    Listed("encoder-decoder", "x-transformers", "from_x_transformers:encoder_decoder", "tp2 pp2", TEXT),
    Listed("encoder with a padding mask", "x-transformers", "from_x_transformers:masked_encoder", "tp2 sp", TEXT),
    Listed("ViT, sandwich norm", "x-transformers", "from_x_transformers:vit", "tp4", IMAGES),
    Listed("ViT", "vit-pytorch", "from_vit_pytorch:vit", "tp2 pp2", IMAGES),
    Listed("SimpleViT", "vit-pytorch", "from_vit_pytorch:simple_vit", "tp2 dp2", IMAGES),
    Listed("SimpleViT with QK norm", "vit-pytorch", "from_vit_pytorch:qk_norm", "tp4", IMAGES),
    Listed("SimpleViT with register tokens", "vit-pytorch", "from_vit_pytorch:registers", "tp2 pp2", IMAGES),
    Listed("SimpleViT with value residual", "vit-pytorch", "from_vit_pytorch:value_residual", "tp2", IMAGES),
    Listed("CaiT", "vit-pytorch", "from_vit_pytorch:cait", "tp2 pp2", IMAGES),
    Listed("DeepViT", "vit-pytorch", "from_vit_pytorch:deep_vit", "tp2", IMAGES),
    Listed("parallel ViT", "vit-pytorch", "from_vit_pytorch:parallel_vit", "tp2 pp2", IMAGES),
    Listed("ViT for small datasets", "vit-pytorch", "from_vit_pytorch:small_datasets", "pp2 dp2", IMAGES),
    Listed("CCT", "vit-pytorch", "from_vit_pytorch:cct", "tp2", IMAGES),
    Listed("CrossViT", "vit-pytorch", "from_vit_pytorch:cross_vit", "tp2", IMAGES),
    Listed("Twins-SVT", "vit-pytorch", "from_vit_pytorch:twins", "tp2", {"images": real(3, 32, 32), "labels": label()}),
    Listed(
        "ViViT", "vit-pytorch", "from_vit_pytorch:vivit", "tp2 pp2", {"video": real(3, 4, 16, 16), "labels": label()}
    ),
    Listed("ViT, QK norm, layer scale, registers", "timm", "from_timm:vit", "tp2 pp2", IMAGES),
    Listed("DeiT, distilled", "timm", "from_timm:deit_distilled", "tp2", IMAGES),
    Listed("BEiT", "timm", "from_timm:beit", "tp2 pp2", IMAGES),
    Listed("EVA", "timm", "from_timm:eva", "tp2 pp2", IMAGES),
    Listed("Swin", "timm", "from_timm:swin", "tp2", IMAGES),
    Listed("Swin v2", "timm", "from_timm:swin_v2", "tp2", IMAGES),
    Listed("CaiT", "timm", "from_timm:cait", "tp2 pp2", IMAGES),
    Listed("XCiT", "timm", "from_timm:xcit", "pp2 dp2", {"images": real(3, 32, 32), "labels": label()}),
    Listed("MLP-Mixer", "timm", "from_timm:mixer", "tp2 pp2", IMAGES),
    Listed("gMLP", "timm", "from_timm:gmlp", "tp2 pp2", IMAGES),
    Listed("ConvNeXt", "timm", "from_timm:convnext", "tp2 pp2", {"images": real(3, 32, 32), "labels": label()}),
    Listed("MetaFormer, pooling then attention", "timm", "from_timm:metaformer", "tp2", IMAGES),
    Listed("Pythia", "litgpt", "from_litgpt:pythia", "tp2 pp2", TEXT),
    Listed("Llama 3.2", "litgpt", "from_litgpt:llama3", "tp2 pp2", TEXT),
    Listed("Gemma 2", "litgpt", "from_litgpt:gemma2", "tp2", TEXT),
    Listed("Falcon", "litgpt", "from_litgpt:falcon", "tp2", TEXT),
    Listed("Mixtral", "litgpt", "from_litgpt:mixtral", "tp2", TEXT),
    Listed("Phi-2", "litgpt", "from_litgpt:phi2", "tp4", TEXT),
    Listed("OLMo 2", "litgpt", "from_litgpt:olmo2", "tp2 sp", TEXT),
    Listed("Llama 3", "torchtune", "from_torchtune:llama3", "tp2 pp2", TEXT),
    Listed("Llama 2 with LoRA", "torchtune", "from_torchtune:llama2_lora", "tp2", TEXT),
    Listed("Gemma", "torchtune", "from_torchtune:gemma", "tp2 pp2", TEXT),
    Listed("Gemma 2", "torchtune", "from_torchtune:gemma2", "tp2 sp", TEXT),
    Listed("Qwen 2, tied", "torchtune", "from_torchtune:qwen2", "tp2 pp2", TEXT),
    Listed("Mistral", "torchtune", "from_torchtune:mistral", "tp2", TEXT),
    Listed(
        "Whisper",
        "openai-whisper",
        "from_whisper:whisper",
        "tp2 pp2",
        {"mel": {"shape": [16, 24], "dtype": "float32"}, **TEXT},
        dtype=None,
    ),
    Listed("DiT", "diffusers", "from_diffusers:dit", "tp2 pp2", {**NOISE, "class_labels": label()}),
    Listed(
        "PixArt-alpha",
        "diffusers",
        "from_diffusers:pixart",
        "tp2",
        {"noisy": real(4, 8, 8), "caption": real(6, 24), "timestep": label(1000), "target": real(4, 8, 8)},
    ),
    Listed("Stable Diffusion 3", "diffusers", "from_diffusers:sd3", "tp2 pp2", GUIDED),
    Listed("Stable Diffusion 3.5", "diffusers", "from_diffusers:sd35", "tp2 dp2", GUIDED),
    Listed(
        "FLUX",
        "diffusers",
        "from_diffusers:flux",
        "tp2 pp2",
        {"noisy": real(16, 16), "text": real(6, 24), "pooled": real(24), "timestep": real(), "target": real(16, 16)},
    ),
    Listed("AuraFlow", "diffusers", "from_diffusers:auraflow", "tp2", TEXTUAL),
    Listed("Sana", "diffusers", "from_diffusers:sana", "tp2", TEXTUAL),
    Listed(
        "CogVideoX",
        "diffusers",
        "from_diffusers:cogvideox",
        "tp2 pp2",
        {
            "hidden_states": real(2, 4, 8, 8),
            "encoder_hidden_states": real(6, 24),
            "timestep": label(1000),
            "target": real(2, 4, 8, 8),
        },
    ),
    Listed("Mamba", "mambapy", "from_small_packages:mamba", "tp2 pp2", TEXT),
    Listed("Mamba, parallel scan", "mambapy", "from_small_packages:mamba_scan", "tp2", TEXT),
    Listed("Performer", "performer-pytorch", "from_small_packages:performer", "tp2 pp2", TEXT),
    Listed("Linformer", "linformer", "from_small_packages:linformer", "tp2", TEXT),
    Listed(
        "Routing Transformer, local heads",
        "routing-transformer",
        "from_small_packages:routing_transformer",
        "tp2 pp2",
        TEXT,
    ),
    Listed("local attention", "local-attention", "from_small_packages:local_transformer", "tp2 pp2", TEXT),
    Listed("hyper-connections", "hyper-connections", "from_small_packages:hyper_connections", "tp2", TEXT),
    Listed(
        "Conformer",
        "conformer",
        "from_small_packages:conformer",
        "tp2 pp2",
        {"features": real(16, 20), "labels": ids(16, 12)},
    ),
    Listed("Perceiver", "perceiver-pytorch", "from_small_packages:perceiver", "tp2", IMAGES),
    # its pseudo-inverse takes a maximum over the batch: a step is one microbatch
    Listed("Nyströmformer", "nystrom-attention", "from_small_packages:nystromformer", "tp2", TEXT, batch=4, micro=4),
    Listed("MLP-Mixer", "mlp-mixer-pytorch", "from_small_packages:mlp_mixer", "tp2", IMAGES),
    Listed("gMLP with tiny attention", "g-mlp-pytorch", "from_small_packages:g_mlp", "tp2", TEXT),
    Listed("PaLM", "PaLM-rlhf-pytorch", "from_small_packages:palm", "tp2 pp2", {"input_ids": ids(17)}),
    Listed("Titans, memory as context", "titans-pytorch", "from_small_packages:titans", "tp2", {"input_ids": ids(17)}),
    # a contrastive loss mixes the sequences of a batch: a step is one microbatch
    Listed(
        "CLIP",
        "open-clip-torch",
        "from_small_packages:open_clip",
        "tp2",
        {"images": real(3, 16, 16), "input_ids": ids()},
        batch=4,
        micro=4,
    ),
    Listed("minGPT-like, a lambda over the MLP", "own", "own_decoders:gpt_lambda", "tp2 pp2", TEXT, "GPT-2"),
    Listed("nanoGPT-like, tied head", "own", "own_decoders:gpt_tied", "tp2 pp2", TEXT, "GPT-2"),
    Listed(
        "Llama, complex RoPE in a plain attribute", "own", "own_decoders:llama", "tp2 pp2", TEXT, "Llama (2302.13971)"
    ),
    Listed("ALiBi, head by partial", "own", "own_decoders:alibi", "tp2 pp2", TEXT, "BLOOM (2211.05100)"),
    Listed("GPT-NeoX, parallel residual", "own", "own_decoders:gpt_neox", "tp2 sp", TEXT, "GPT-NeoX (2204.06745)"),
    Listed("Universal Transformer", "own", "own_decoders:universal", "tp2", TEXT, "1807.03819"),
    Listed("RetNet", "own", "own_mixers:retnet", "tp2 pp2", TEXT, "2307.08621"),
    Listed("S4D", "own", "own_mixers:s4d", "tp2", TEXT, "2206.11893"),
    Listed("Hyena", "own", "own_mixers:hyena", "tp2", TEXT, "2302.10866"),
    Listed("RWKV", "own", "own_mixers:rwkv", "tp2", TEXT, "2305.13048"),
    Listed("Performer, causal", "own", "own_mixers:performer", "tp4", TEXT, "2009.14794"),
    Listed("gMLP, causal", "own", "own_mixers:g_mlp", "tp2", TEXT, "2105.08050"),
    Listed("T5 v1.1", "own", "own_encoders:t5", "tp2 pp2", TEXT, "1910.10683"),
    Listed("DeBERTa", "own", "own_encoders:deberta", "tp2 pp2", TEXT, "2006.03654"),
    Listed("DeBERTa, output a dataclass", "own", "own_encoders:deberta_object", "tp2 dp2", TEXT, "2006.03654"),
    Listed(
        "Conformer",
        "own",
        "own_encoders:conformer",
        "tp2 pp2",
        {"features": real(16, 20), "labels": ids(16, 12)},
        "2005.08100",
    ),
    Listed(
        "wav2vec 2.0, weight norm",
        "own",
        "own_encoders:wav2vec",
        "tp2 pp2",
        {"wave": real(160), "labels": label()},
        "2006.11477",
    ),
    Listed("Perceiver IO", "own", "own_encoders:perceiver_io", "tp2", TEXT, "2107.14795"),
    Listed("DiT, adaLN-Zero", "own", "own_vision:dit", "tp2 pp2", NOISY, "2212.09748"),
    Listed("Swin", "own", "own_vision:swin", "tp2", IMAGES, "2103.14030"),
    Listed("MLP-Mixer", "own", "own_vision:mixer", "tp2 dp2", IMAGES, "2105.01601"),
    Listed("ViT with a forward hook", "own", "own_vision:vit_hook", "tp2 pp2", IMAGES, "2010.11929"),
    Listed("masked autoencoder", "own", "own_vision:mae", "tp2 pp2", {"images": real(3, 16, 16)}, "2111.06377"),
    Listed("Mixtral, a ModuleList of experts", "own", "own_experts:mixtral", "tp2 pp2", TEXT, "2401.04088"),
    Listed("Switch, experts in one einsum", "own", "own_experts:switch", "tp2", TEXT, "2101.03961"),
    Listed("Soft MoE", "own", "own_experts:soft_moe", "tp2", TEXT, "2308.00951"),
    Listed("LoRA by patched forwards", "own", "own_experts:lora_patched", "tp2 pp2", TEXT, "2106.09685"),
    Listed("heads in a Python loop", "own", "own_experts:head_by_head", "tp2 pp2", TEXT, "1706.03762"),
    Listed("keys of other layers", "own", "own_recent:cross_layer", "tp2 pp2", TEXT, "2405.12981"),
    Listed("Differential Transformer", "own", "own_recent:differential", "tp2 cp2", TEXT, "2410.05258"),
    Listed("nGPT", "own", "own_recent:unit_vectors", "tp2 pp2", TEXT, "2410.01131"),
    Listed("MegaByte", "own", "own_recent:patches_of_bytes", "tp2 cp2", TEXT, "2305.07185"),
    Listed("gated delta rule", "own", "own_recent:delta_rule", "tp2 pp2", TEXT, "2412.06464"),
    Listed("prediction of further tokens", "own", "own_recent:further_tokens", "tp2 dp2", TEXT, "2404.19737"),
    Listed("experts by their index in stacks", "own", "own_recent:experts_by_index", "dp2 ep2", TEXT, "2412.19437"),
    Listed("a block of experts, three times", "own", "own_recent:repeated_experts", "dp2 ep2", TEXT, "1909.11942"),
    Listed("DiT, patches over cp", "own", "own_vision:dit_over_cp", "tp2 cp2", NOISY, "2212.09748"),
)


def find(build: str) -> Listed:
    """The entry of this build, file:function."""
    return next(listed for listed in CATALOGUE if listed.build == build)
