"""Every field of every configuration in a pipeline's folder: obeyed, or refused by name.

A field is obeyed where diffusers' or transformers' own class, which the pipeline is built of, takes it and the forward
that is run here does what it says. It is refused where this program would draw or train something else than the folder
says: conditions that nobody supplies, flow matching, statistics of latents that Stable Diffusion's pipeline leaves out.
A field that nobody knows is refused, unless it says nothing (null, false, zero, empty).

A value is of the type that the class annotates (`apps.diffusion.annotations`), or that the table names where the class
annotates none, or a wrong one. So what only the forward would trip on is refused where it stands.

`FIELDS` is held complete against the signatures of the installed classes by a test, and of tokenizers, which take any
keyword, against the names that the source of the installed class reads.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, get_args

import diffusers
from diffusers import __version__ as diffusers_version
from transformers import CLIPTextConfig
from transformers.tokenization_utils_base import VERY_LARGE_INTEGER

from apps.diffusion.annotations import annotated, fits, in_words, merged, one_of
from apps.diffusion.noise import Prediction
from apps.diffusion.samplers import CLASSES
from core.config import UserError

PIPELINES = (
    "StableDiffusionPipeline",
    "StableDiffusionImg2ImgPipeline",
    "StableDiffusionInpaintPipelineLegacy",
    "LatentConsistencyModelPipeline",
    "LatentConsistencyModelImg2ImgPipeline",
)
"""of model_index.json: pipelines whose text-to-image half is Stable Diffusion's"""


@dataclass(frozen=True)
class Field:
    """A field and the way it is taken.

    allowed  says of a value of its type whether it is obeyed
    instead  what a refusal says of the field
    type     by default the class's own; `Any` where `allowed` knows every value
    """

    allowed: Callable[[Any], bool]
    instead: str = ""
    type: Any = None


OBEYED = Field(lambda value: True)
"""the class takes it, or it describes the file and has no effect on what the module computes"""


def only(*values: Any, instead: str) -> Field:
    return Field(lambda value: value in values, instead, Any)


def nothing(instead: str) -> Field:
    """Refused with any value that says something."""
    return Field(lambda value: not value, instead, Any)


def typed(kind: Any) -> Field:
    """A field of a type that the class does not annotate, or annotates wrongly."""
    return Field(OBEYED.allowed, type=kind)


def positive(kind: Any = None) -> Field:
    """A number above 0, or several; null where the type has it."""
    return Field(lambda value: all(number > 0 for number in _numbers(value)), "numbers here are above 0", kind)


def at_least(least: int, why: str, kind: Any = None) -> Field:
    return Field(lambda value: value >= least, f"{why}; give {least} or more", kind)


def share() -> Field:
    """A number of 0 to 1, or several; null where the type has it."""
    return Field(lambda value: all(0 <= number <= 1 for number in _numbers(value)), "numbers here are 0 to 1")


def _numbers(value: Any) -> list[Any]:
    if isinstance(value, (list, tuple)):
        return [number for item in value for number in _numbers(item)]
    return [] if value is None else [value]


def _all(*names: str) -> dict[str, Field]:
    return dict.fromkeys(names, OBEYED)


_FLOW = "flow matching is not Stable Diffusion's noise"
_CLASSES = "a U-Net that is conditioned on classes wants labels, and prompts have none"
_ADDED = (
    "it is given sizes, images or second texts beside the prompt, as SDXL is, and Stable Diffusion v1 and v2 are not"
)
_WORDS = "words and their order of merging are those of the files beside it"
_UNSAVED = "it is an argument of the class, and none that is saved"
_CHATS = "prompts are no chats"
_FIXED = ("fixed_small", "fixed_small_log", "fixed_large", "fixed_large_log")
_STATISTICS = "Stable Diffusion v1 and v2 scale latents by scaling_factor alone"

UNET: dict[str, Field] = {
    "_class_name": only("UNet2DConditionModel", None, instead="Stable Diffusion v1 and v2 have a UNet2DConditionModel"),
    **_all(
        "in_channels", "out_channels", "center_input_sample", "flip_sin_to_cos", "freq_shift", "down_block_types",
        "mid_block_type", "up_block_types", "only_cross_attention", "block_out_channels", "layers_per_block", "dropout",
        "act_fn", "cross_attention_dim", "use_linear_projection", "upcast_attention",
        "resnet_time_scale_shift", "resnet_skip_time_act", "time_embedding_type", "time_embedding_dim",
        "time_embedding_act_fn", "timestep_post_act", "time_cond_proj_dim", "conv_in_kernel", "conv_out_kernel",
        "mid_block_only_cross_attention", "cross_attention_norm", "addition_embed_type_num_heads",
        "addition_time_embed_dim", "class_embeddings_concat", "projection_class_embeddings_input_dim",
    ),
    **dict.fromkeys(
        (
            "sample_size", "norm_num_groups", "norm_eps", "attention_head_dim", "num_attention_heads",
            "mid_block_scale_factor", "resnet_out_scale_factor",
        ),
        positive(),
    ),
    # the class annotates lists of lists only in part
    "transformer_layers_per_block": typed(int | list[int | list[int]]),
    "reverse_transformer_layers_per_block": typed(list[int | list[int]] | None),
    "downsample_padding": Field(lambda value: value in (0, 1), "known are 0 and 1, by which pictures halve exactly"),
    "encoder_hid_dim": nothing("the text's width is changed on the way, which Stable Diffusion v1 and v2 do not"),
    "encoder_hid_dim_type": nothing("the U-Net reads something else than the prompt's text"),
    "dual_cross_attention": nothing("the U-Net reads two texts, and a prompt is one"),
    "class_embed_type": nothing(_CLASSES),
    "num_class_embeds": nothing(_CLASSES),
    "addition_embed_type": nothing(_ADDED),
    "attention_type": only("default", instead="attention to boxes (GLIGEN) wants boxes, and prompts have none"),
    # what diffusers' moving average writes beside them
    **_all("decay", "inv_gamma", "min_decay", "optimization_step", "power", "update_after_step", "use_ema_warmup"),
}  # fmt: skip
VAE: dict[str, Field] = {
    "_class_name": only("AutoencoderKL", None, instead="Stable Diffusion v1 and v2 have an AutoencoderKL"),
    **_all(
        "in_channels", "out_channels", "down_block_types", "up_block_types", "block_out_channels", "layers_per_block",
        "act_fn", "latent_channels", "force_upcast", "use_quant_conv", "use_post_quant_conv",
        "mid_block_add_attention",
    ),
    "sample_size": positive(int | list[int]),  # the class reads lists, and annotates none
    **dict.fromkeys(("scaling_factor", "norm_num_groups"), positive()),
    "shift_factor": nothing(_STATISTICS),
    "latents_mean": nothing(_STATISTICS),
    "latents_std": nothing(_STATISTICS),
}  # fmt: skip
TEXT_ENCODER: dict[str, Field] = {
    **_all(
        "vocab_size", "hidden_size", "intermediate_size", "projection_dim", "num_hidden_layers",
        "max_position_embeddings", "hidden_act", "initializer_range", "initializer_factor", "pad_token_id",
        "bos_token_id",
        # of the file, and of heads and of generation, which a text tower has not
        "transformers_version", "dtype", "torch_dtype", "output_attentions", "output_hidden_states", "return_dict",
        "chunk_size_feed_forward", "is_encoder_decoder", "id2label", "label2id", "problem_type", "dropout",
        "tokenizer_class", "sep_token_id", "decoder_start_token_id", "forced_bos_token_id", "forced_eos_token_id",
        "bad_words_ids", "begin_suppress_tokens", "suppress_tokens", "cross_attention_hidden_size",
        "add_cross_attention", "diversity_penalty", "do_sample", "early_stopping", "encoder_no_repeat_ngram_size",
        "exponential_decay_length_penalty", "finetuning_task", "is_decoder", "length_penalty", "max_length",
        "min_length", "no_repeat_ngram_size", "num_beam_groups", "num_beams", "num_return_sequences", "output_scores",
        "prefix", "remove_invalid_values", "repetition_penalty", "return_dict_in_generate", "task_specific_params",
        "temperature", "tf_legacy_loss", "tie_encoder_decoder", "tie_word_embeddings", "top_k", "top_p", "torchscript",
        "typical_p", "use_bfloat16", "use_cache",
    ),
    "num_attention_heads": positive(),
    "layer_norm_eps": positive(float),  # null and lists, which the class annotates, end in its forward
    "eos_token_id": typed(int),
    "attention_dropout": share(),
    "architectures": Field(
        lambda value: not value or value == ["CLIPTextModel"], "Stable Diffusion v1 and v2 read CLIPTextModel"
    ),
    "model_type": only("clip_text_model", "clip", instead="Stable Diffusion v1 and v2 read a clip_text_model"),
    "use_attention_mask": nothing("the text encoder of Stable Diffusion reads the padding too"),
    "pruned_heads": nothing("heads are left out that the weights hold"),
    "quantization_config": nothing("weights of another program's quantization are not read"),
}  # fmt: skip
SCHEDULER: dict[str, Field] = {
    **_all(
        "beta_schedule", "clip_sample", "set_alpha_to_one", "steps_offset",
        "thresholding", "clip_sample_range", "sample_max_value", "timestep_spacing", "rescale_betas_zero_snr",
        "skip_prk_steps", "solver_order", "algorithm_type", "solver_type", "lower_order_final", "euler_at_final",
        "use_karras_sigmas", "use_exponential_sigmas", "use_beta_sigmas", "use_lu_lambdas", "final_sigmas_type",
        "lambda_min_clipped", "predict_x0", "disable_corrector", "solver_p", "interpolation_type", "timestep_type",
        "original_inference_steps", "timestep_scaling",
        "flow_shift", "time_shift_type",  # of flow matching, which use_flow_sigmas and the prediction decide on
    ),
    "prediction_type": only(
        *get_args(Prediction), instead=f"known are {', '.join(get_args(Prediction))} (flow matching is not)"
    ),
    "num_train_timesteps": at_least(1, "noise has timesteps"),
    **dict.fromkeys(("beta_start", "beta_end", "trained_betas", "dynamic_thresholding_ratio"), share()),
    **dict.fromkeys(("sigma_min", "sigma_max"), positive(float | None)),  # one class says "true or false"
    "shift_terminal": typed(float | None),
    "use_flow_sigmas": nothing(_FLOW),
    "use_dynamic_shifting": nothing(_FLOW),
    "variance_type": only(
        *(None, *_FIXED), instead=f"known are {', '.join(_FIXED)}; the U-Nets of Stable Diffusion predict no variance"
    ),
    # of diffusers before 0.10
    "tensor_format": only("pt", instead="tensors are torch's"),
    "timestep_values": nothing("timesteps follow from the number of steps"),
    "predict_epsilon": only(True, instead="say prediction_type sample instead"),
}  # fmt: skip
TOKENIZER: dict[str, Field] = {
    **dict.fromkeys(("bos_token", "eos_token", "unk_token", "pad_token"), typed(str | dict)),
    **dict.fromkeys(("cls_token", "mask_token", "sep_token"), typed(str | dict | None)),
    **dict.fromkeys(("added_tokens_decoder", "model_specific_special_tokens"), typed(dict[str, Any] | None)),
    "additional_special_tokens": typed(list[str | dict] | None),
    "extra_special_tokens": typed(list[str | dict] | dict[str, Any] | None),
    "model_input_names": typed(list[str]),
    **dict.fromkeys(("padding_side", "truncation_side"), typed(Literal["left", "right"])),
    **dict.fromkeys(
        ("model_max_length", "max_len"),
        at_least(2, "a prompt has a token of its beginning and its end", int | one_of[VERY_LARGE_INTEGER]),
    ),
    **_all(
        # of the file, of decoding, and what every call of the tokenizer says anew
        "clean_up_tokenization_spaces", "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output",
        "errors", "files_loaded", "is_local", "local_files_only", "max_length", "name_or_path", "pad_to_multiple_of",
        "pad_token_type_id", "processor_class", "special_tokens_map_file", "stride", "truncation_strategy", "use_fast",
        "verbose", "vocab_size",
    ),
    "tokenizer_class": only("CLIPTokenizer", "CLIPTokenizerFast", None, instead="prompts are cut by a CLIPTokenizer"),
    "backend": only("tokenizers", None, instead="CLIP's tokenizer is one of the library tokenizers"),
    "add_prefix_space": nothing("CLIP's tokenizer puts no space before a prompt"),
    "add_bos_token": Field(lambda value: value is not False, "each prompt begins with the token of its beginning"),
    "add_eos_token": Field(lambda value: value is not False, "each prompt ends with the token of its end"),
    "do_lower_case": Field(lambda value: value is not False, "CLIP's tokenizer reads lower case"),
    "split_special_tokens": nothing("special tokens in a prompt are read as such"),
    **dict.fromkeys(("auto_map", "trust_remote_code"), nothing("code in a folder is not run")),
    **dict.fromkeys(
        ("chat_control_tokens", "chat_template", "response_schema", "response_template"), nothing(_CHATS)
    ),
    **dict.fromkeys(
        (
            "gguf_file", "init_inputs", "merges", "merges_file", "tokenizer", "tokenizer_file", "tokenizer_object",
            "unk_id", "vocab", "vocab_file",
        ),
        nothing(_WORDS),
    ),
    **dict.fromkeys(
        (
            "fix_mistral_regex", "post_processor", "tokenizer_padding", "tokenizer_truncation", "_json_padding",
            "_json_truncation", "_spm_precompiled_charsmap",
        ),
        nothing(_UNSAVED),
    ),
}  # fmt: skip
INDEX: dict[str, Field] = {
    # components, whose classes `load_pipeline` compares; the safety checker is not run, as docs/diffusion.md says
    **_all(
        "unet", "vae", "text_encoder", "tokenizer", "scheduler", "safety_checker", "feature_extractor", "image_encoder",
        "requires_safety_checker",
    ),
}  # fmt: skip
FIELDS: dict[str, dict[str, Field]] = {
    "unet": UNET,
    "vae": VAE,
    "text_encoder": TEXT_ENCODER,
    "scheduler": SCHEDULER,
    "tokenizer": TOKENIZER,
    "model_index": INDEX,
}
"""configuration -> field -> how it is taken"""


@cache
def types(kind: str) -> dict[str, Any]:
    """Field -> type of the configuration `kind`, as the installed classes annotate it."""
    if kind == "scheduler":  # a scheduler may be made of another's configuration
        return merged([getattr(diffusers, name) for name in CLASSES.values()])
    known = {"unet": diffusers.UNet2DConditionModel, "vae": diffusers.AutoencoderKL, "text_encoder": CLIPTextConfig}
    return annotated(known[kind]) if kind in known else {}


def check_fields(kind: str, config: Mapping[str, Any], origin: object) -> None:
    """Raises UserError for a field of the configuration `kind` that is not obeyed, or whose value is of another type.

    Other names that begin with an underscore are the library's notes on the file.
    """
    table = FIELDS[kind]
    for name, value in config.items():
        field = table.get(name)
        if field is not None:
            _check_value(field, types(kind).get(name, Any) if field.type is None else field.type, name, value, origin)
        elif not name.startswith("_") and says_something(value):
            raise UserError(
                f"{origin}: {name} is {_shown(value)}, a field that is not known (diffusers {diffusers_version}); "
                "Stable Diffusion v1 and v2 have none of that name"
            )


def _check_value(field: Field, kind: Any, name: str, value: Any, origin: object) -> None:
    if not fits(value, kind):
        raise UserError(f"{origin}: {name} is {_shown(value)}; give {in_words(kind)}")
    if not field.allowed(value):
        raise UserError(f"{origin}: {name} is {_shown(value)}, which is not supported: {field.instead}")


def says_something(value: Any) -> bool:
    """Return whether a component or a field is there: not null, false, zero, empty, nor [null, null]."""
    return any(value) if isinstance(value, list) else bool(value)


def _shown(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 60 else f"{shown[:57]}…"
