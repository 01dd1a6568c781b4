"""Single-file .safetensors checkpoints of Stable Diffusion v1 and v2, read and written without a network.

Reading, in order:
1. The layout, v1 (CLIP) or v2 (OpenCLIP), by the names of the text encoder's tensors.
2. The topology, from the configuration in the header where this program wrote the file, else off the shapes.
3. What the model predicts: from what the caller says, the header (modelspec.prediction_type), a tensor `v_pred`, or a
   configuration beside the file (NAME.yaml with `parameterization: "v"`). A v1 file that says nothing predicts the
   noise; a v2 file that says nothing is refused, because both kinds are about and look alike.
4. Every tensor, once. Those that are missing, unknown or of another shape are named. What is known and not used: the
   schedule's tables, EMA copies (unless they are asked for), and of OpenCLIP the last block and the projection.

A file holds no tokenizer; it is taken from the folder of any pipeline of the same version.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from apps.diffusion.formats.ldm_names import CLIP, OPEN_CLIP, UNET, Names, stored_names, to_file
from apps.diffusion.formats.topology import text_config, unet_config, vae_config
from apps.diffusion.noise import Prediction, Schedule, prediction_of
from apps.diffusion.noise import schedule as stable_diffusion
from apps.diffusion.pipeline import (
    Pipeline,
    build_meta,
    check_names,
    check_schedule,
    contradiction,
    fill,
    has_quantized,
    load_tokenizer,
    stored_state,
)
from apps.diffusion.shapes import Shape
from core.config import UserError
from core.files import replacing
from core.weights import Weights, write_safetensors

_CONFIG = "megalith.config"
_PREDICTS = "modelspec.prediction_type"
_SPEC_NAMES: dict[str, Prediction] = {"epsilon": "epsilon", "v": "v_prediction"}
# Names of the text encoder as transformers 5 has it, written by converters that did not mind: without `text_model.`
_CLIP_BARE = re.compile(r"^cond_stage_model\.transformer\.(embeddings|encoder|final_layer_norm)\.")
# Present in published checkpoints, and needed for nothing here.
_UNUSED = re.compile(
    r"(betas|alphas_cumprod(_prev)?|sqrt_\w+|log_one_minus_\w+|posterior_\w+|lvlb_weights|logvar|scale_factor"
    r"|global_step|v_pred|ztsnr|model_ema\..+|first_stage_model\.(loss|model_ema)\..+"
    r"|cond_stage_model\.transformer\.(text_model\.)?embeddings\.position_ids"
    r"|cond_stage_model\.(model\.)?(logit_scale|text_projection|attn_mask))"
)


def load_single_file(
    path: str | Path,
    tokenizer: str | Path | None,
    prediction_type: Prediction | None = None,
    dtype: torch.dtype = torch.float32,
    ema: bool = False,
) -> Pipeline:
    """The pipeline of a checkpoint, its modules in eval mode on the CPU.

    tokenizer        folder with vocab.json and merges.txt or tokenizer.json, or a pipeline's folder that holds one
    prediction_type  where the file does not say it
    ema              take the averaged weights of the U-Net, which training checkpoints carry beside the others

    Raises UserError for a file of something else, for one that is not whole, and where the file contradicts
    `prediction_type` or leaves it open.
    """
    path = Path(path)
    tensors, header = _opened(path)
    open_clip = _is_open_clip(tensors, path)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    shape = _stored_shape(header, path)
    if shape is None:
        schedule = _schedule(path, tensors, header, prediction_type, open_clip)
        shape = _shape_of(shapes, schedule, open_clip, path)
    elif prediction_type not in (None, prediction_of(shape.schedule)):
        raise UserError(contradiction(path, prediction_of(shape.schedule), prediction_type))
    configs = {"unet": shape.unet, "vae": shape.vae, "text_encoder": shape.text_encoder}
    modules = {component: build_meta(component, config, path) for component, config in configs.items()}
    names = {
        component: stored_names(component, module.state_dict(), configs[component], open_clip)
        for component, module in modules.items()
    }
    _check(path, modules, names, shapes)
    if ema:
        names["unet"] = _averaged(path, names["unet"], shapes)
    for component, module in modules.items():
        fill(module, _Read(tensors, names[component]), dtype, path)
    return Pipeline(**modules, tokenizer=_tokenizer(path, tokenizer, open_clip), schedule=shape.schedule).check(path)


class _Read(Mapping[str, Tensor]):
    """Tensors by our names, each made from the file's when it is asked for."""

    def __init__(self, tensors: Mapping[str, Tensor], names: Names):
        self._tensors, self._names = tensors, names

    def __getitem__(self, name: str) -> Tensor:
        stored = self._names[name]
        return stored.read(self._tensors[stored.key])

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


# --- what a file is ---------------------------------------------------------------------------------------------------


def _opened(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Mapped tensors under the published names, and the header's text."""
    if path.suffix != ".safetensors":
        raise UserError(f"{path} is no .safetensors file; .ckpt and .pt files hold pickles and are not opened")
    if not path.is_file():
        raise UserError(f"{path} does not exist; give a .safetensors checkpoint or a diffusers folder")
    weights = Weights(path.parent, path.stem)
    try:
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
    except SafetensorError as error:
        raise UserError(f"{path} is not a safetensors file ({error}); copy it again") from error
    return {_CLIP_BARE.sub(rf"{CLIP}\1.", name): tensor for name, tensor in weights.items()}, header


def _is_open_clip(tensors: Mapping[str, Tensor], path: Path) -> bool:
    """Raises UserError for what is neither v1 nor v2."""
    starts = {name.partition(".")[0] for name in tensors}
    if "conditioner" in starts:
        raise UserError(f"{path} is a checkpoint of SDXL; Stable Diffusion v1 and v2 are supported")
    if any(".lora_" in name or name.startswith("lora_") for name in tensors):
        raise UserError(f"{path} is a LoRA; give the model as weights and this file as --lora")
    if not any(name.startswith(UNET) for name in tensors):
        raise UserError(f"{path} holds no U-Net (no key begins with {UNET}); give a whole Stable Diffusion checkpoint")
    if any(name.startswith(OPEN_CLIP) for name in tensors):
        return True
    if any(name.startswith(CLIP) for name in tensors):
        return False
    raise UserError(f"{path} holds no text encoder of Stable Diffusion v1 or v2; give a whole checkpoint")


def _stored_shape(header: Mapping[str, str], path: Path) -> Shape | None:
    if _CONFIG not in header:
        return None
    try:
        stored = json.loads(header[_CONFIG])
        schedule = stable_diffusion(**stored.pop("schedule"))
        if not all(isinstance(config, dict) for config in stored.values()):
            raise ValueError("a configuration is no object")
        return Shape(**stored, schedule=check_schedule(schedule, path))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(
            f"{path}: {_CONFIG} in its header describes no model ({error}); write the file again"
        ) from error


def _shape_of(shapes: Mapping[str, tuple[int, ...]], schedule: Schedule, open_clip: bool, path: Path) -> Shape:
    unet, vae = unet_config(shapes, open_clip, path), vae_config(shapes, path)
    if open_clip and prediction_of(schedule) == "v_prediction":  # trained at 768 px; its attention overflows in fp16
        unet, vae = unet | {"sample_size": 96, "upcast_attention": True}, vae | {"sample_size": 768}
    return Shape(unet, vae, text_config(shapes, open_clip, path), schedule)


def _schedule(
    path: Path, tensors: Mapping[str, Tensor], header: Mapping[str, str], given: Prediction | None, open_clip: bool
) -> Schedule:
    """Raises UserError where nothing says what a v2 model predicts, and where the file says something else."""
    said = _said(path, tensors, header)
    if given and said and given != said:
        raise UserError(contradiction(path, said, given))
    predicts = given or said or (None if open_clip else "epsilon")
    if predicts is None:
        raise UserError(
            f"{path} does not say what its U-Net predicts; give --prediction-type v_prediction (v2 and v2.1 at 768 px) "
            "or epsilon (v2-base at 512 px), of training --noise.prediction"
        )
    return stable_diffusion(prediction_type=predicts, rescale_betas_zero_snr="ztsnr" in tensors)


def _said(path: Path, tensors: Mapping[str, Tensor], header: Mapping[str, str]) -> Prediction | None:
    if _PREDICTS in header and header[_PREDICTS] in _SPEC_NAMES:
        return _SPEC_NAMES[header[_PREDICTS]]
    if "v_pred" in tensors:
        return "v_prediction"
    beside = path.with_suffix(".yaml")
    if beside.is_file():
        is_v = re.search(r"""^\s*parameterization:\s*["']?v["']?\s*$""", beside.read_text("utf-8"), re.MULTILINE)
        return "v_prediction" if is_v else "epsilon"
    return None


# --- its tensors ------------------------------------------------------------------------------------------------------


def _check(
    path: Path, modules: Mapping[str, Any], names: Mapping[str, Names], shapes: Mapping[str, tuple[int, ...]]
) -> None:
    """Every key is used exactly once, or known not to be."""
    expected: dict[str, tuple[int, ...]] = {}
    for component, module in modules.items():
        for name, tensor in module.state_dict().items():
            stored = names[component][name]
            expected[stored.key] = stored.shape(tuple(tensor.shape))
    blocks = len(modules["text_encoder"].encoder.layers)
    spare = f"{OPEN_CLIP}transformer.resblocks.{blocks}."
    used = {
        key: shape
        for key, shape in shapes.items()
        if key in expected or not (_UNUSED.fullmatch(key) or key.startswith(spare))
    }
    # A 1 x 1 convolution may stand as a matrix, in files that were converted from one.
    for key in expected.keys() & used.keys():
        if expected[key][-2:] == (1, 1) and used[key] == expected[key][:-2]:
            used[key] = expected[key]
    check_names(path, expected, used)


def _averaged(path: Path, names: Names, shapes: Mapping[str, tuple[int, ...]]) -> Names:
    """Where the averaged weights stand: under the same names without dots."""
    found = {
        name: replace(stored, key="model_ema." + stored.key.removeprefix("model.").replace(".", ""))
        for name, stored in names.items()
    }
    if missing := [stored.key for stored in found.values() if stored.key not in shapes]:
        raise UserError(f"{path} holds no averaged weights ({missing[0]} and {len(missing) - 1} more); leave --ema out")
    return found


def _tokenizer(path: Path, folder: str | Path | None, open_clip: bool) -> Any:
    if folder is None:
        raise UserError(
            f"{path} holds no tokenizer; give --tokenizer DIR, the tokenizer folder of any Stable Diffusion pipeline "
            "(vocab.json and merges.txt, 1.5 MB)"
        )
    folder = Path(folder)
    tokenizer = load_tokenizer(folder / "tokenizer" if (folder / "tokenizer").is_dir() else folder)
    if open_clip and "!" in tokenizer.get_vocab():
        tokenizer.pad_token = "!"  # token 0, with which OpenCLIP fills up
    return tokenizer


# --- writing ----------------------------------------------------------------------------------------------------------


def save_single_file(pipeline: Pipeline, path: str | Path, dtype: torch.dtype | None = None) -> Path:
    """Write a checkpoint, aside and then renamed: v2's layout for text encoders with GELU, else v1's.

    dtype  of the weights in the file; by default each module's own

    Raises UserError for a path that is taken or does not end in .safetensors, and for quantized weights.
    """
    path = Path(path)
    if path.suffix != ".safetensors":
        raise UserError(f"{path} does not end in .safetensors; name it so")
    if path.exists():
        raise UserError(f"{path} exists already; choose another name, or remove it")
    if any(map(has_quantized, pipeline.modules.values())):
        raise UserError("a single file holds plain weights, and these are quantized; write a folder, or convert first")
    open_clip = pipeline.text_encoder.config.hidden_act == "gelu"
    entries: dict[str, Tensor] = {}
    for component, module in pipeline.modules.items():
        state = stored_state(module, dtype)
        names = stored_names(component, state, module.config, open_clip)
        entries |= {key: tensor.contiguous() for key, tensor in to_file(names, state).items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as aside:
        write_safetensors(entries, aside, _header(pipeline, open_clip))
    return path


def _header(pipeline: Pipeline, open_clip: bool) -> dict[str, str]:
    predicts = {ours: theirs for theirs, ours in _SPEC_NAMES.items()}.get(pipeline.prediction_type)
    height, width = pipeline.image_size
    version = f"v2-{height}" + ("-v" if predicts == "v" else "") if open_clip else "v1"
    header = {
        "format": "pt",
        "modelspec.sai_model_spec": "1.0.0",
        "modelspec.architecture": f"stable-diffusion-{version}",
        "modelspec.implementation": "https://github.com/huggingface/diffusers",
        "modelspec.title": "Stable Diffusion",
        "modelspec.resolution": f"{width}x{height}",
        _CONFIG: json.dumps(pipeline.configs()),
    }
    return header | ({_PREDICTS: predicts} if predicts else {})
