"""A Stable Diffusion pipeline: three modules as diffusers and transformers have them, a tokenizer, a noise schedule.

`load_pipeline` (loading.py) reads a diffusers folder or a single file; nothing comes from a network, and nothing in a
file is executed (safetensors only). `save_pipeline` writes a folder that `StableDiffusionPipeline.from_pretrained`
loads, aside and renamed when whole.

transformers 5 names the text encoder's tensors without the prefix `text_model.` that every checkpoint before it has.
Folders are read with or without, and written with it, which transformers 4 and 5 both load.

Shapes: B images, H x W pixels, h x w latents (a pixel size over the VAE's factor), C latent channels, L tokens of a
prompt, D width of the text encoder.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL, UNet2DConditionModel
from diffusers import __version__ as diffusers_version
from torch import Tensor, nn
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

from apps.diffusion.fields import PIPELINES, check_fields, says_something
from apps.diffusion.modules import VAE, TextEncoder, UNet
from apps.diffusion.noise import Prediction, Schedule, first_line, own_scheduler, prediction_of
from apps.diffusion.samplers import CLASSES
from apps.diffusion.text import check_text
from core.config import UserError
from core.quant import Architecture, QuantizedWeight, is_quantized, load_quantized, save_quantized, stored_bytes
from core.weights import Weights, index_of, read_json, write_json, write_safetensors

TEXT_PREFIX = "text_model."
INDEX = "model_index.json"
EMBEDDED = Path(__file__).parent / "demo" / "pipeline"
"""the small pipeline that comes with this program"""
# Component -> stem of its files of weights.
_STEMS = {"unet": "diffusion_pytorch_model", "vae": "diffusion_pytorch_model", "text_encoder": "model"}
_COMPONENTS = {
    "unet": ["diffusers", "UNet2DConditionModel"],
    "vae": ["diffusers", "AutoencoderKL"],
    "text_encoder": ["transformers", "CLIPTextModel"],
    "tokenizer": ["transformers", "CLIPTokenizer"],
    "scheduler": ["diffusers", "DDIMScheduler"],
}
# Names of the VAE's attention before diffusers 0.13.
_FORMER_ATTENTION = {"query": "to_q", "key": "to_k", "value": "to_v", "proj_attn": "to_out.0"}


@dataclass
class Pipeline:
    """The modules that make pictures of prompts. They may be changed, cast, quantized or moved as any module."""

    unet: UNet
    vae: VAE
    text_encoder: TextEncoder
    tokenizer: CLIPTokenizer
    schedule: Schedule
    """the scheduler_config.json, as it is read and written"""

    @property
    def prediction_type(self) -> Prediction:
        return prediction_of(self.schedule)

    @property
    def num_train_timesteps(self) -> int:
        return own_scheduler(self.schedule).config.num_train_timesteps

    @property
    def guidance_width(self) -> int | None:
        """Width of the embedding of guidance that a distilled U-Net takes; None: it takes none."""
        return self.unet.config.time_cond_proj_dim

    @property
    def scaling_factor(self) -> float:
        """Latents of the VAE, times this, are what the U-Net sees."""
        return self.vae.config.scaling_factor

    @property
    def factor(self) -> int:
        """Pixels of a latent's side."""
        return 2 ** (len(self.vae.config.block_out_channels) - 1)

    @property
    def latent_channels(self) -> int:
        return self.vae.config.latent_channels

    @property
    def image_size(self) -> tuple[int, int]:
        """(height, width) of the pictures it was trained on, in pixels."""
        height, width = sides_of(self.unet.config.sample_size)
        return height * self.factor, width * self.factor

    @property
    def modules(self) -> dict[str, Any]:
        return {"unet": self.unet, "vae": self.vae, "text_encoder": self.text_encoder}

    @property
    def stored_bytes(self) -> int:
        """Bytes of the modules' parameters and buffers."""
        return sum(map(stored_bytes, self.modules.values()))

    def configs(self) -> dict[str, Any]:
        """The modules' configurations and the schedule, as JSON can hold them."""
        described = {name: _plain_config(module.config) for name, module in self.modules.items()}
        return described | {"schedule": dict(self.schedule)}

    def to(self, *args: Any, **kwargs: Any) -> Pipeline:
        """Move or cast the three modules, as `nn.Module.to`."""
        for module in self.modules.values():
            nn.Module.to(module, *args, **kwargs)  # diffusers' own warns of modules to be kept in fp32, naming none
        return self

    def tokenize(self, prompts: Sequence[str]) -> Tensor:
        """Token ids int64 [B, L], cut and filled up to the tokenizer's length.

        Raises UserError for what is no text, and for a token that the text encoder has not.
        """
        for prompt in prompts:
            check_text(prompt)
        length = min(self.tokenizer.model_max_length, self.text_encoder.config.max_position_embeddings)
        ids_BL = _token_ids(self.tokenizer, prompts, length)
        largest, known = int(ids_BL.max()) if ids_BL.numel() else 0, self.text_encoder.config.vocab_size
        if largest >= known:
            raise UserError(
                f"the tokenizer reads {self.tokenizer.convert_ids_to_tokens(largest)!r} in a prompt, as token "
                f"{largest}, and the text encoder has {known} tokens; give both of one model, or leave the word out"
            )
        return ids_BL

    def encode_prompts(self, prompts: Sequence[str]) -> Tensor:
        """Text embeddings [B, L, D]: the last hidden state after its norm."""
        return self.text_encoder(self.tokenize(prompts).to(self.text_encoder.device))[0]

    def check(self, origin: object) -> Pipeline:
        """Raises UserError unless the parts fit each other."""
        check_fit(self.modules, origin)
        return self


def check_fit(modules: Mapping[str, Any], origin: object) -> None:
    """Raises UserError unless `unet`, `vae` and `text_encoder` fit each other."""
    unet, vae, text = (modules[name].config for name in ("unet", "vae", "text_encoder"))
    latents = vae.latent_channels
    if (unet.in_channels, unet.out_channels) != (latents, latents):
        raise UserError(
            f"{origin}: the U-Net takes {unet.in_channels} channels and makes {unet.out_channels}, the VAE's "
            f"latents have {latents}; give a text-to-image model (those for inpainting have 9) with its own VAE"
        )
    if unet.cross_attention_dim != text.hidden_size:
        raise UserError(
            f"{origin}: the U-Net reads texts of width {unet.cross_attention_dim}, the text encoder makes "
            f"{text.hidden_size}; give the text encoder it was trained with (768 in v1, 1024 in v2)"
        )


def _token_ids(tokenizer: CLIPTokenizer, prompts: Sequence[str], length: int) -> Tensor:
    return tokenizer(
        list(prompts), padding="max_length", truncation=True, max_length=length, return_tensors="pt"
    ).input_ids


def sides_of(sample_size: Any) -> tuple[int, int]:
    """(height, width) of a U-Net's latents: diffusers takes one number for a square, or both.

    Raises UserError for anything else.
    """
    sides = sample_size if isinstance(sample_size, (list, tuple)) else (sample_size, sample_size)
    if len(sides) != 2 or not all(isinstance(side, int) and side > 0 for side in sides):
        raise UserError(f"the U-Net's sample_size is {sample_size!r}; give a number of latents, or [height, width]")
    return sides[0], sides[1]


# --- modules from their configurations --------------------------------------------------------------------------------


def build_unet(config: Mapping[str, Any]) -> UNet:
    return UNet2DConditionModel.from_config(dict(config))


def build_vae(config: Mapping[str, Any]) -> VAE:
    return AutoencoderKL.from_config(dict(config))


def build_text_encoder(config: Mapping[str, Any]) -> TextEncoder:
    return CLIPTextModel(CLIPTextConfig.from_dict(dict(config)))


def without_gaps(component: str, config: Mapping[str, Any], origin: object) -> dict[str, Any]:
    """A module's configuration with what it leaves out, as the module's class has it.

    Raises UserError for one that says what is not obeyed.
    """
    check_fields(component, config, origin)
    if component == "text_encoder":
        with _making(component, origin):
            return CLIPTextConfig.from_dict(dict(config)).to_dict()
    kind = {"unet": UNet2DConditionModel, "vae": AutoencoderKL}[component]
    return {name: p.default for name, p in signature(kind.__init__).parameters.items() if name != "self"} | {**config}


_BUILD = {"unet": build_unet, "vae": build_vae, "text_encoder": build_text_encoder}


def build_meta(component: str, config: Mapping[str, Any], origin: object) -> Any:
    """The module `component` of a configuration, without memory.

    Raises UserError for a configuration that makes no such module, or that says what is not obeyed.
    """
    check_fields(component, config, origin)
    with _making(component, origin), torch.device("meta"):
        return _BUILD[component](config)


@contextmanager
def _making(component: str, origin: object) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # the classes raise whatever a value that they do not expect leads to
        raise UserError(f"{origin}: its configuration makes no {component} ({first_line(error)})") from error


def fill(module: nn.Module, tensors: Mapping[str, Tensor], dtype: torch.dtype, origin: object) -> None:
    """Give a module without memory its weights, copied and cast.  None is initialised twice.

    Raises UserError unless names and shapes agree exactly.
    """
    check_names(
        origin,
        {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()},
        {name: tuple(tensor.shape) for name, tensor in tensors.items()},
    )
    module.load_state_dict({name: tensors[name].to(dtype, copy=True) for name in tensors}, assign=True)
    _make_buffers(module)
    module.eval()


def _make_buffers(module: nn.Module) -> None:
    """Make the buffers that are in no file: CLIP's positions."""
    for name, buffer in list(module.named_buffers()):
        if buffer.is_meta:
            assert name.endswith("position_ids"), name
            module.get_submodule(name.rpartition(".")[0]).position_ids = torch.arange(buffer.shape[1])[None]


def check_names(origin: object, expected: Mapping[str, tuple[int, ...]], given: Mapping[str, tuple[int, ...]]) -> None:
    """Raises UserError unless both hold the same names with the same shapes."""
    missing, unknown = sorted(set(expected) - set(given)), sorted(set(given) - set(expected))
    other = [name for name in sorted(set(expected) & set(given)) if tuple(given[name]) != tuple(expected[name])]
    said = [f"lacks {some(missing)}"] if missing else []
    said += [f"holds {some(unknown)}, which the model has not"] if unknown else []
    said += [f"has {other[0]} of shape {list(given[other[0]])} and not {list(expected[other[0]])}"] if other else []
    if said:
        raise UserError(f"{origin} {'; '.join(said)}; give the whole weights of the model that its config names")


def some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


# --- reading ----------------------------------------------------------------------------------------------------------


def load_folder(
    folder: Path, dtype: torch.dtype, prediction_type: Prediction | None, tokenizer: str | Path | None
) -> Pipeline:
    """Load a diffusers folder; see `apps.diffusion.loading.load_pipeline`."""
    if not (folder / INDEX).is_file():
        raise UserError(f"{folder} holds no {INDEX}; give a diffusers folder of Stable Diffusion")
    index = read_json(folder / INDEX)
    check_index(index, folder)
    schedule = read_schedule(folder, index)
    if prediction_type not in (None, prediction_of(schedule)):
        raise UserError(contradiction(folder, prediction_of(schedule), prediction_type))
    return Pipeline(
        **{component: _load_module(folder / component, component, dtype) for component in _STEMS},
        tokenizer=load_tokenizer(folder / "tokenizer" if tokenizer is None else Path(tokenizer)),
        schedule=schedule,
    ).check(folder)


def contradiction(origin: object, said: str, given: str | None) -> str:
    return (
        f"{origin} predicts {said}, and --prediction-type {given} was given (of training --noise.prediction); "
        "leave it out"
    )


def check_index(index: Mapping[str, Any], folder: Path) -> None:
    """Raises UserError for a model_index.json of another pipeline than Stable Diffusion's."""
    kind = index.get("_class_name", PIPELINES[0])
    if "XL" in str(kind) or says_something(index.get("text_encoder_2")):
        raise UserError(f"{folder} is SDXL ({kind}), which is not supported; give Stable Diffusion v1 or v2")
    if kind not in PIPELINES:
        raise UserError(f"{folder} is a {kind}; give a folder of Stable Diffusion v1 or v2 ({PIPELINES[0]})")
    for component, named in _COMPONENTS.items():
        given = index.get(component)
        if component != "scheduler" and given != named and not (component == "tokenizer" and _is_tokenizer(given)):
            raise UserError(
                f"{folder} is a {kind} whose {component} is {_class_of(given)}; "
                f"Stable Diffusion v1 and v2 have a {named[1]}"
            )
    check_fields("model_index", index, folder / INDEX)


def read_schedule(folder: Path, index: Mapping[str, Any]) -> Schedule:
    """The scheduler_config.json of a pipeline's folder, of the class that the folder's `index` names, as in diffusers.

    Raises UserError for noise that is not Stable Diffusion's.
    """
    path = folder / "scheduler" / "scheduler_config.json"
    stored = {"_class_name": "DDIMScheduler"} | read_json(path)
    check_schedule(stored, path)
    named = index.get("scheduler")
    if not says_something(named):
        return stored
    return check_schedule(stored | {"_class_name": _class_of(named)}, folder / INDEX)


def check_schedule(stored: Schedule, origin: object) -> Schedule:
    """The schedule itself.  Raises UserError for one that the samplers cannot begin with."""
    kind = stored["_class_name"]
    if kind not in CLASSES.values():
        raise UserError(
            f"{origin} is of {kind}; the noise of Stable Diffusion is that of {', '.join(CLASSES.values())}"
        )
    check_fields("scheduler", stored, origin)
    scheduler = own_scheduler(stored, origin)
    if len(scheduler.betas) != scheduler.config.num_train_timesteps:
        raise UserError(
            f"{origin}: trained_betas has {len(scheduler.betas)} numbers, and num_train_timesteps is "
            f"{scheduler.config.num_train_timesteps}; give one a timestep"
        )
    return stored


def _is_tokenizer(given: Any) -> bool:
    return given == ["transformers", "CLIPTokenizerFast"]


def _class_of(given: Any) -> str:
    return str(given[-1]) if isinstance(given, list) and given and given[-1] else "missing"


def _load_module(folder: Path, component: str, dtype: torch.dtype) -> Any:
    config = read_json(folder / "config.json")
    if is_quantized(folder):
        return load_quantized(folder, architecture=_architecture(component)).to(dtype)
    tensors = present_names(component, Weights(folder, _stem_in(folder, _STEMS[component])))
    module = build_meta(component, config, folder / "config.json")
    fill(module, tensors, dtype, folder)
    return module


def _architecture(component: str) -> Architecture:
    def build(folder: Path) -> nn.Module:
        module = build_meta(component, read_json(folder / "config.json"), folder / "config.json")
        _make_buffers(module)
        return module

    return Architecture(build)


def _stem_in(folder: Path, stem: str) -> str:
    """The plain weights, or else those of the variant fp16."""
    for variant in ("", ".fp16"):
        if (folder / f"{stem}{variant}.safetensors").is_file() or index_of(folder, stem + variant).is_file():
            return stem + variant
    if any(folder.glob(f"{stem}*.bin")) or any(folder.glob("pytorch_model*.bin")):
        raise UserError(f"{folder} holds pickled weights (.bin) only; give a folder with {stem}.safetensors")
    raise UserError(f"{folder} holds no {stem}.safetensors; give a complete diffusers folder")


class _Renamed(Mapping[str, Tensor]):
    """A mapping under other names; each tensor is read when it is asked for."""

    def __init__(self, tensors: Mapping[str, Tensor], names: Mapping[str, str]):
        self._tensors, self._names = tensors, names

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[self._names[name]]

    def __iter__(self) -> Any:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def present_names(component: str, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """The tensors under the names that the installed libraries give them, whatever they are called in older folders."""
    if component == "text_encoder":
        stored = [name for name in tensors if not name.endswith("embeddings.position_ids")]
        return _Renamed(tensors, {name.removeprefix(TEXT_PREFIX): name for name in stored})
    if component == "vae":
        return _Renamed(tensors, {_present_attention(name): name for name in tensors})
    return tensors


def _present_attention(name: str) -> str:
    before, dot, kind = name.rpartition(".")
    stem, _, last = before.rpartition(".")
    known = ".mid_block.attentions." in f".{name}" and last in _FORMER_ATTENTION
    return f"{stem}.{_FORMER_ATTENTION[last]}{dot}{kind}" if known else name


def load_tokenizer(folder: Path) -> CLIPTokenizer:
    """Raises UserError for a folder without one, and for one that says what is not obeyed, or that cuts no prompt."""
    if (folder / "tokenizer_config.json").is_file():
        check_fields("tokenizer", read_json(folder / "tokenizer_config.json"), folder / "tokenizer_config.json")
    try:
        tokenizer = CLIPTokenizer.from_pretrained(folder, local_files_only=True)
        _token_ids(tokenizer, ["a"], min(tokenizer.model_max_length, 77))
        return tokenizer
    except Exception as error:  # the class raises whatever a value that it does not expect leads to
        raise UserError(f"{folder} holds no CLIP tokenizer ({first_line(error)}); copy the folder again") from error


# --- writing ----------------------------------------------------------------------------------------------------------


def save_pipeline(pipeline: Pipeline, out: str | Path, dtype: torch.dtype | None = None, replace: bool = False) -> Path:
    """Write a diffusers folder, aside and then renamed.

    dtype    of the weights in the files; by default each module's own, as for quantized modules, whose folders are
             this program's (`load_pipeline` reads them, diffusers does not)
    replace  an earlier pipeline in `out`, whose other files stay. Until all is in place the folder holds no
             model_index.json, so that nothing loads a mixture

    Returns `out`. Raises UserError where `out` holds something and `replace` is not asked for.
    """
    out = Path(out)
    check_free(out, replace)
    out.parent.mkdir(parents=True, exist_ok=True)
    aside = out.with_name(f".{out.name}.part")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()
    try:
        for component, module in pipeline.modules.items():
            _save_module(component, module, aside / component, dtype)
        _save_tokenizer(pipeline.tokenizer, aside / "tokenizer")
        (aside / "scheduler").mkdir()
        write_json(aside / "scheduler" / "scheduler_config.json", dict(pipeline.schedule))
        write_json(aside / INDEX, _index(pipeline))
        _put(aside, out)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return out


def check_free(out: Path, replace: bool = False) -> None:
    """Raises UserError unless a pipeline may be written there."""
    if out.exists() and not out.is_dir():
        raise UserError(f"{out} is a file; name a folder to write")
    if not replace and out.exists() and any(out.iterdir()):
        raise UserError(f"{out} exists already; choose another folder, or remove it")


def _index(pipeline: Pipeline) -> dict[str, Any]:
    return {
        "_class_name": PIPELINES[0],
        "_diffusers_version": diffusers_version,
        **_COMPONENTS,
        "scheduler": ["diffusers", pipeline.schedule["_class_name"]],
        "safety_checker": [None, None],
        "feature_extractor": [None, None],
        "requires_safety_checker": False,
    }


def _put(aside: Path, out: Path) -> None:
    if not out.exists():
        os.replace(aside, out)
        return
    (out / INDEX).unlink(missing_ok=True)
    for component in _COMPONENTS:
        shutil.rmtree(out / component, ignore_errors=True)
        os.replace(aside / component, out / component)
    os.replace(aside / INDEX, out / INDEX)


def _save_module(component: str, module: Any, folder: Path, dtype: torch.dtype | None) -> None:
    folder.mkdir()
    if has_quantized(module):
        save_quantized(module, folder)
    else:
        prefix = TEXT_PREFIX if component == "text_encoder" else ""
        tensors = {f"{prefix}{name}": tensor for name, tensor in stored_state(module, dtype).items()}
        write_safetensors(tensors, folder / f"{_STEMS[component]}.safetensors")
    if component == "text_encoder":
        # transformers 5 loads what the file holds, diffusers fp32: one word makes a plain load of both agree.
        written = {"architectures": ["CLIPTextModel"], "dtype": "float32"}
        write_json(folder / "config.json", _plain_config(module.config) | written)
    else:
        module.save_config(folder)


def has_quantized(module: nn.Module) -> bool:
    return any(isinstance(parameter, QuantizedWeight) for parameter in module.parameters())


def _plain_config(config: Any) -> dict[str, Any]:
    """The configuration that a class of transformers or diffusers is built from."""
    described = config.to_dict() if hasattr(config, "to_dict") else dict(config)
    return {name: value for name, value in described.items() if name not in ("dtype", "torch_dtype")}


def stored_state(module: nn.Module, dtype: torch.dtype | None) -> dict[str, Tensor]:
    """The module's tensors as they are written: on the CPU, dense, in `dtype` or their own."""
    return {name: _stored(tensor, dtype) for name, tensor in module.state_dict().items()}


def _stored(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    return tensor.detach().to("cpu", dtype if tensor.is_floating_point() else None).contiguous()


def _save_tokenizer(tokenizer: CLIPTokenizer, folder: Path) -> None:
    """With vocab.json and merges.txt too, which transformers 4 reads."""
    tokenizer.save_pretrained(folder)
    model = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]) + "\n", encoding="utf-8")
    (folder / "vocab.json").write_text(json.dumps(model["vocab"], ensure_ascii=False), encoding="utf-8")
