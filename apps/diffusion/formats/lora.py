"""LoRA files, in and out: small matrices whose product is added to a weight.

    W' = W + scale (alpha / r) up down        up [O, r], down [r, I], r the rank        Hu et al. 2021, arXiv:2106.09685

Two layouts:

    diffusers   `unet.PATH.lora_A.weight` (down) and `lora_B` (up), `text_encoder.…`; alpha in the header, under
                lora_adapter_metadata; without it alpha is the rank. Older files say lora.down, lora_linear_layer.down
                or processor.to_q_lora.down
    kohya       `lora_unet_PATH.lora_down.weight`, `lora_up.weight` and a tensor `alpha`, dots of the path written as
                underscores, `lora_te_text_model_…` for the text encoder; without alpha it is the rank

The text encoder's paths have `text_model.` in front in both, as transformers 4 had them; in memory they have not.
A path in underscores is ambiguous, so paths are looked up among the model's own modules, by which a file that was made
for another model is found out too: every matrix is checked against the weight it is for.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from apps.diffusion.pipeline import TEXT_PREFIX, Pipeline
from core.config import UserError
from core.files import replacing
from core.quant import QuantizedWeight
from core.weights import write_safetensors

Layout = Literal["diffusers", "kohya"]

_METADATA = "lora_adapter_metadata"
_KOHYA = {"unet": "lora_unet_", "text_encoder": "lora_te_text_model_"}
_KINDS = {
    "lora_A": "down",
    "lora.down": "down",
    "lora_down": "down",
    "lora_linear_layer.down": "down",
    "lora_B": "up",
    "lora.up": "up",
    "lora_up": "up",
    "lora_linear_layer.up": "up",
}
_SUFFIX = re.compile(r"\.(lora_A|lora_B|lora\.down|lora\.up|lora_down|lora_up|lora_linear_layer\.(?:down|up))\.weight$")
_FORMER = re.compile(r"^(.*)\.processor\.(to_q|to_k|to_v|to_out)_lora\.(down|up)\.weight$")
_OTHER_KINDS = ("hada_", "lokr_", "dora_scale", "lora_magnitude_vector", "lora_mid", "oft_", "norm.w_norm")


@dataclass(frozen=True)
class Pair:
    """One weight's addend: down [r, I] and up [O, r], of a convolution [r, I, k, k] and [O, r, 1, 1]; alpha."""

    down: Tensor
    up: Tensor
    alpha: float

    @property
    def rank(self) -> int:
        return self.down.shape[0]

    def delta(self, scale: float = 1.0, dtype: torch.dtype = torch.float32) -> Tensor:
        """The addend [O, I, …] to the weight."""
        up, down = self.up.to(dtype), self.down.to(dtype)
        return (scale * self.alpha / self.rank) * (up.flatten(1) @ down.flatten(1)).view(len(up), *down.shape[1:])


Lora = dict[str, Pair]
"""`unet.PATH` or `text_encoder.PATH` of a module -> its pair."""


# --- reading ----------------------------------------------------------------------------------------------------------


def load_lora(path: str | Path, pipeline: Pipeline) -> Lora:
    """The pairs of a file for this pipeline, either layout.

    Raises UserError for a file of something else, for one that is not whole, and for one that was made for another
    model: the first module is named that is missing or of another shape.
    """
    path = Path(path)
    tensors, header = _opened(path)
    targets = _targets(pipeline)
    pieces: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        module, kind = _split(key, path)
        pieces.setdefault(module, {})[kind] = tensor
    is_kohya = any(module.startswith(("lora_unet_", "lora_te")) for module in pieces)
    paths = _kohya_paths(targets) if is_kohya else {name: name for name in targets}
    alphas = _alphas_of(header, path)
    lora: Lora = {}
    for module, parts in pieces.items():
        name = paths.get(module if is_kohya else _present_path(module))
        if name is None:
            raise UserError(f"{path} was made for another model: it changes {module}, which this one has not")
        if not {"down", "up"} <= parts.keys():
            raise UserError(f"{path} lacks one of the two matrices of {module}; copy it again")
        rank = parts["down"].shape[0]
        alpha = float(parts["alpha"]) if "alpha" in parts else alphas(name, rank)
        lora[name] = _checked(Pair(parts["down"], parts["up"], alpha), targets[name], module, path)
    return lora


def _opened(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    if path.suffix != ".safetensors" or not path.is_file():
        raise UserError(f"{path} is no .safetensors file; give a LoRA in that format (pickles are not opened)")
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except SafetensorError as error:
        raise UserError(f"{path} is truncated or no safetensors file ({error}); copy it again") from error


def _split(key: str, path: Path) -> tuple[str, str]:
    """(module as the file names it; down, up or alpha).  Raises UserError for what is no part of a LoRA."""
    if other := [kind for kind in _OTHER_KINDS if kind in key]:
        raise UserError(
            f"{path} is no plain LoRA ({key} is of the kind {other[0].strip('._')}); give one of up and down"
        )
    if key.endswith(".alpha"):
        return key.removesuffix(".alpha"), "alpha"
    if former := _FORMER.match(key):
        module, part, kind = former.groups()
        return f"{module}.{part}{'.0' if part == 'to_out' else ''}", kind
    if suffix := _SUFFIX.search(key):
        return key[: suffix.start()], _KINDS[suffix[1]]
    raise UserError(f"{path} holds {key}, which is no part of a LoRA; give a LoRA of Stable Diffusion")


def _targets(pipeline: Pipeline) -> dict[str, Tensor]:
    """`unet.PATH` and `text_encoder.PATH` of what a LoRA can change -> its weight."""
    return {
        f"{component}.{name}": module.weight
        for component in ("unet", "text_encoder")
        for name, module in pipeline.modules[component].named_modules()
        if isinstance(module, nn.Linear | nn.Conv2d)
    }


def _kohya_paths(targets: Mapping[str, Any]) -> dict[str, str]:
    return {_kohya_name(name): name for name in targets} | {
        _kohya_name(name).replace("lora_te_", "lora_te1_"): name for name in targets
    }


def _kohya_name(name: str) -> str:
    component, _, path = name.partition(".")
    return _KOHYA[component] + path.replace(".", "_")


def _present_path(module: str) -> str:
    component, _, path = module.partition(".")
    return f"{component}.{path.removeprefix(TEXT_PREFIX)}" if component == "text_encoder" else module


def _alphas_of(header: Mapping[str, str], path: Path) -> Any:
    """A function (module, rank) -> alpha, by PEFT's configuration in the header; without one alpha is the rank."""
    if _METADATA not in header:
        return lambda name, rank: float(rank)
    try:
        settings = json.loads(header[_METADATA])
        if not isinstance(settings, dict):
            raise ValueError("it is no object")
    except ValueError as error:
        raise UserError(f"{path}: {_METADATA} in its header is not readable ({error})") from error

    def alpha(name: str, rank: int) -> float:
        component, _, module = name.partition(".")
        patterns = settings.get(f"{component}.alpha_pattern") or {}
        given = settings.get(f"{component}.lora_alpha", rank)
        for pattern, value in patterns.items():
            if module == pattern.removeprefix(TEXT_PREFIX) or module.endswith(f".{pattern}"):
                given = value
                break
        # rank-stabilized adapters are scaled by alpha / sqrt(r) (Kalajdzievski 2023, arXiv:2312.03732)
        return float(given) * (math.sqrt(rank) if settings.get(f"{component}.use_rslora") else 1.0)

    return alpha


def _checked(pair: Pair, weight: Tensor, module: str, path: Path) -> Pair:
    out, inner = weight.shape[0], tuple(weight.shape[1:])
    down, up = tuple(pair.down.shape), tuple(pair.up.shape)
    if len(inner) == 3 and len(down) == 2 and inner[1:] == (1, 1):  # a convolution of 1 x 1, stored as a matrix
        return _checked(Pair(pair.down[..., None, None], pair.up[..., None, None], pair.alpha), weight, module, path)
    if len(inner) == 1 and down[2:] == (1, 1):  # and the other way round
        return _checked(Pair(pair.down.flatten(1), pair.up.flatten(1), pair.alpha), weight, module, path)
    if down[1:] != inner or up[0] != out or up[1] != down[0] or any(size != 1 for size in up[2:]):
        raise UserError(
            f"{path} was made for another model: {module} has matrices {list(up)} and {list(down)}, and its weight is "
            f"{list(weight.shape)}"
        )
    return pair


# --- using ------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def merge_lora(pipeline: Pipeline, lora: Lora, scale: float = 1.0) -> None:
    """Add the products to the pipeline's weights, in at least fp32.

    Raises UserError for quantized weights, before any is changed.
    """
    targets = _targets(pipeline)
    if any(isinstance(targets[name], QuantizedWeight) for name in lora):
        raise UserError(
            "quantized weights take no LoRA; merge it first (megalith diffusion convert --lora), then quantize"
        )
    for name, pair in lora.items():
        weight = targets[name]
        wide = torch.float64 if weight.dtype == torch.float64 else torch.float32
        weight.copy_(weight.to(wide) + pair.delta(scale, wide).to(weight.device))


# --- writing ----------------------------------------------------------------------------------------------------------


def save_lora(lora: Lora, path: str | Path, layout: Layout = "diffusers", dtype: torch.dtype | None = None) -> Path:
    """Write a LoRA file, aside and then renamed.

    dtype  of the matrices in the file; by default their own

    Raises UserError for a path that is taken or does not end in .safetensors.
    """
    path = Path(path)
    if path.suffix != ".safetensors":
        raise UserError(f"{path} does not end in .safetensors; name it so")
    if path.exists():
        raise UserError(f"{path} exists already; choose another name, or remove it")
    tensors, header = _in_kohya(lora) if layout == "kohya" else _in_diffusers(lora)
    ready = {
        name: tensor.detach().to("cpu", None if name.endswith(".alpha") else dtype).contiguous()
        for name, tensor in tensors.items()
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as aside:
        write_safetensors(ready, aside, header)
    return path


def _in_diffusers(lora: Lora) -> tuple[dict[str, Tensor], dict[str, str]]:
    tensors: dict[str, Tensor] = {}
    settings: dict[str, Any] = {}
    for component in ("unet", "text_encoder"):
        pairs = {name.partition(".")[2]: pair for name, pair in lora.items() if name.startswith(f"{component}.")}
        prefix = f"{component}.{TEXT_PREFIX}" if component == "text_encoder" else f"{component}."
        for module, pair in pairs.items():
            tensors[f"{prefix}{module}.lora_A.weight"] = pair.down
            tensors[f"{prefix}{module}.lora_B.weight"] = pair.up
        if pairs:
            settings |= {f"{component}.{name}": value for name, value in _peft_settings(pairs).items()}
    return tensors, {_METADATA: json.dumps(settings, indent=2, sort_keys=True)}


def _peft_settings(pairs: Mapping[str, Pair]) -> dict[str, Any]:
    """The fields that PEFT's LoraConfig takes.  Module names end the paths, with and without `text_model.`"""
    ranks = {module: len(pair.down) for module, pair in pairs.items()}
    rank = Counter(ranks.values()).most_common(1)[0][0]
    alpha = Counter(pair.alpha for pair in pairs.values()).most_common(1)[0][0]
    return {
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": sorted(pairs),
        "rank_pattern": {module: own for module, own in ranks.items() if own != rank},
        "alpha_pattern": {module: pair.alpha for module, pair in pairs.items() if pair.alpha != alpha},
    }


def _in_kohya(lora: Lora) -> tuple[dict[str, Tensor], dict[str, str]]:
    tensors: dict[str, Tensor] = {}
    for name, pair in lora.items():
        key = _kohya_name(name)
        tensors |= {f"{key}.lora_down.weight": pair.down, f"{key}.lora_up.weight": pair.up}
        tensors[f"{key}.alpha"] = torch.tensor(pair.alpha)
    ranks, alphas = {len(pair.down) for pair in lora.values()}, {pair.alpha for pair in lora.values()}
    header = {"ss_network_module": "networks.lora", "modelspec.sai_model_spec": "1.0.0"}
    if len(ranks) == len(alphas) == 1:
        header |= {"ss_network_dim": str(ranks.pop()), "ss_network_alpha": str(alphas.pop())}
    return tensors, header
