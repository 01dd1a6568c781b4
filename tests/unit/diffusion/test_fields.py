"""Every field of a folder's configurations is obeyed or refused by name, and the table of them is complete."""

import ast
import dataclasses
import inspect
import json
import shutil
import textwrap
from pathlib import Path

import diffusers
import pytest
import torch
from diffusers import AutoencoderKL, StableDiffusionPipeline, UNet2DConditionModel
from safetensors.torch import load_file, save_file
from transformers import CLIPTextConfig, CLIPTokenizer

from apps.diffusion.__main__ import APP
from apps.diffusion.fields import FIELDS, OBEYED, check_fields
from apps.diffusion.generate import PictureJob, Sampling, generate
from apps.diffusion.loading import load_pipeline
from apps.diffusion.noise import fields_of
from apps.diffusion.pipeline import save_pipeline
from apps.diffusion.samplers import CLASSES
from apps.diffusion.shapes import SHAPES
from core.config import UserError, run_command
from tests.support.diffusion_training import tiny_pipeline, write_pictures


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    torch.set_num_threads(1)
    return save_pipeline(tiny_pipeline(), tmp_path_factory.mktemp("fields") / "weights")


@pytest.fixture
def copy(folder, tmp_path) -> Path:
    return shutil.copytree(folder, tmp_path / "copy")


def edit(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def init_fields(kind: type) -> set[str]:
    return set(inspect.signature(kind.__init__).parameters) - {"self", "args", "kwargs"}


def keywords_read(function: object) -> set[str]:
    """Names that a function of `**kwargs` takes out of them, and those of its own parameters."""
    taken = set(inspect.signature(function).parameters) - {"self", "cls", "args", "kwargs"}
    for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(function)))):
        match node:
            case ast.Call(
                func=ast.Attribute(value=ast.Name(id=owner), attr="pop" | "get" | "setdefault"),
                args=[ast.Constant(value=str(name)), *_],
            ) if owner.endswith("kwargs"):
                taken.add(name)
            case ast.Subscript(value=ast.Name(id=owner), slice=ast.Constant(value=str(name))) if owner.endswith(
                "kwargs"
            ):
                taken.add(name)
            case ast.Compare(
                left=ast.Constant(value=str(name)), ops=[ast.In() | ast.NotIn()], comparators=[ast.Name(id=owner)]
            ) if owner.endswith("kwargs"):
                taken.add(name)
    return taken


def tokenizer_fields() -> set[str]:
    """What the installed tokenizer reads of its configuration, which goes through functions of `**kwargs`."""
    readers = [kind.__init__ for kind in CLIPTokenizer.__mro__ if "kwargs" in inspect.signature(kind).parameters]
    readers.append(CLIPTokenizer.convert_to_native_format)
    taken = set(CLIPTokenizer.SPECIAL_TOKENS_ATTRIBUTES).union(*map(keywords_read, readers))
    # This one's own parameters are of its caller.
    loaded = CLIPTokenizer._from_pretrained
    return taken | keywords_read(loaded) - set(inspect.signature(loaded).parameters)


def test_the_table_is_complete() -> None:
    """A new version of diffusers or transformers with a new field fails here, and not in a picture."""
    text = {name for name in CLIPTextConfig().to_dict() if not name.startswith("_")}
    schedulers = set().union(*(fields_of(getattr(diffusers, kind)) for kind in CLASSES.values()))
    wanted = {
        "unet": init_fields(UNet2DConditionModel),
        "vae": init_fields(AutoencoderKL),
        "text_encoder": text,
        "scheduler": schedulers,
        "tokenizer": tokenizer_fields(),
        "model_index": init_fields(StableDiffusionPipeline),
    }
    assert {"model_max_length", "add_bos_token", "chat_template", "vocab", "trust_remote_code"} < wanted["tokenizer"]
    for kind, names in wanted.items():
        assert names
        assert not names - set(FIELDS[kind]), f"fields of {kind} that nobody decided on"


def test_what_is_refused_says_why_and_what_says_nothing_is_taken() -> None:
    for kind, table in FIELDS.items():
        for name, field in table.items():
            assert (field.allowed is OBEYED.allowed) == (not field.instead), (kind, name)
        check_fields(kind, {"_note": 1, "of_a_later_version": None, "and_another": False}, "it")
        with pytest.raises(UserError, match="of_a_later_version is 'gated', a field that is not known"):
            check_fields(kind, {"of_a_later_version": "gated"}, "it")


REFUSED = [
    ("unet/config.json", {"class_embed_type": "timestep"}, "class_embed_type is 'timestep'"),
    ("unet/config.json", {"num_class_embeds": 4}, "num_class_embeds is 4"),
    ("unet/config.json", {"dual_cross_attention": True}, "dual_cross_attention is True"),
    ("unet/config.json", {"addition_embed_type": "text_time"}, "addition_embed_type is 'text_time'"),
    ("unet/config.json", {"encoder_hid_dim_type": "image_proj"}, "encoder_hid_dim_type is 'image_proj'"),
    ("unet/config.json", {"attention_type": "gated"}, "attention_type is 'gated'"),
    ("unet/config.json", {"sample_size": [8, 8, 8]}, "[8, 8, 8]; give a whole number or [a whole number, a whole"),
    (
        "unet/config.json",
        {"sample_size": [8, -8]},
        "sample_size is [8, -8], which is not supported: numbers here are ab",
    ),
    ("unet/config.json", {"norm_eps": "x"}, "unet/config.json: norm_eps is 'x'; give a number"),
    ("unet/config.json", {"norm_eps": -1e-5}, "norm_eps is -1e-05, which is not supported: numbers here are above 0"),
    ("unet/config.json", {"downsample_padding": 1.5}, "downsample_padding is 1.5; give a whole number"),
    ("unet/config.json", {"downsample_padding": 2}, "downsample_padding is 2, which is not supported: known are 0 and"),
    ("unet/config.json", {"attention_head_dim": -1}, "attention_head_dim is -1, which is not supported"),
    ("unet/config.json", {"timestep_post_act": -1}, "timestep_post_act is -1; give a text or null"),
    ("unet/config.json", {"center_input_sample": "false"}, "center_input_sample is 'false'; give true or false"),
    ("unet/config.json", {"reverse_transformer_layers_per_block": ["a"]}, "['a']; give a list of whole numbers or li"),
    ("vae/config.json", {"scaling_factor": [1, 2]}, "vae/config.json: scaling_factor is [1, 2]; give a number"),
    ("vae/config.json", {"scaling_factor": float("nan")}, "scaling_factor is nan; give a number"),
    ("text_encoder/config.json", {"output_hidden_states": "x"}, "output_hidden_states is 'x'; give true or false"),
    ("text_encoder/config.json", {"eos_token_id": [1, 2]}, "eos_token_id is [1, 2]; give a whole number"),
    ("text_encoder/config.json", {"layer_norm_eps": None}, "layer_norm_eps is None; give a number"),
    ("text_encoder/config.json", {"num_attention_heads": 3}, "its configuration makes no text_encoder"),
    ("tokenizer/tokenizer_config.json", {"model_max_length": {}}, "model_max_length is {}; give a whole number"),
    ("tokenizer/tokenizer_config.json", {"model_max_length": 0}, "model_max_length is 0, which is not supported"),
    ("tokenizer/tokenizer_config.json", {"added_tokens_decoder": 1.5}, "added_tokens_decoder is 1.5; give an object"),
    ("tokenizer/tokenizer_config.json", {"added_tokens_decoder": {"a": 1}}, "holds no CLIP tokenizer"),
    ("tokenizer/tokenizer_config.json", {"pad_token": None}, "pad_token is None; give a text or an object"),
    ("tokenizer/tokenizer_config.json", {"padding_side": "x"}, "padding_side is 'x'; give 'left' or 'right'"),
    ("scheduler/scheduler_config.json", {"num_train_timesteps": -1}, "num_train_timesteps is -1, which is not supp"),
    ("scheduler/scheduler_config.json", {"beta_start": "x"}, "beta_start is 'x'; give a number"),
    ("scheduler/scheduler_config.json", {"beta_end": 1.5}, "beta_end is 1.5, which is not supported: numbers here"),
    ("scheduler/scheduler_config.json", {"trained_betas": [0.1, 0.2]}, "trained_betas has 2 numbers, and num_train"),
    ("scheduler/scheduler_config.json", {"timestep_spacing": "x"}, "'x'; give 'leading' or 'trailing' or 'linspace'"),
    ("unet/config.json", {"norm_num_groups": 0}, "norm_num_groups is 0, which is not supported: numbers here are abo"),
    ("unet/config.json", {"norm_num_groups": 3}, "its configuration makes no unet (num_channels"),
    ("unet/config.json", {"down_block_types": [1, 2]}, "down_block_types is [1, 2]; give a list of texts"),
    ("vae/config.json", {"act_fn": ["silu"]}, "act_fn is ['silu']; give a text"),
    ("text_encoder/config.json", {"vocab_size": "x"}, "vocab_size is 'x'; give a whole number"),
    ("text_encoder/config.json", {"dtype": [1, 2]}, "dtype is [1, 2]; give a text or null"),
    ("unet/config.json", {"_class_name": "UNet3DConditionModel"}, "_class_name is 'UNet3DConditionModel'"),
    ("vae/config.json", {"_class_name": "AutoencoderKLTemporalDecoder"}, "_class_name is 'AutoencoderKLTempor"),
    ("vae/config.json", {"shift_factor": 0.1}, "shift_factor is 0.1"),
    ("vae/config.json", {"latents_mean": [0.1, 0, 0, 0]}, "latents_mean is [0.1, 0, 0, 0]"),
    ("text_encoder/config.json", {"use_attention_mask": True}, "use_attention_mask is True"),
    ("text_encoder/config.json", {"architectures": ["CLIPTextModelWithProjection"]}, "architectures is"),
    ("scheduler/scheduler_config.json", {"prediction_type": "flow_prediction"}, "prediction_type is 'flow_predict"),
    ("scheduler/scheduler_config.json", {"use_flow_sigmas": True}, "use_flow_sigmas is True"),
    ("scheduler/scheduler_config.json", {"_class_name": "FlowMatchEulerDiscreteScheduler"}, "is of FlowMatchEuler"),
    ("scheduler/scheduler_config.json", {"variance_type": "learned_range"}, "variance_type is 'learned_range'"),
    ("scheduler/scheduler_config.json", {"beta_schedule": "sigmoid"}, "DDIMScheduler refuses it (sigmoid"),
    ("tokenizer/tokenizer_config.json", {"auto_map": {"AutoTokenizer": ["evil.T", None]}}, "auto_map is"),
    ("tokenizer/tokenizer_config.json", {"tokenizer_class": "T5Tokenizer"}, "tokenizer_class is 'T5Tokenizer'"),
    ("tokenizer/tokenizer_config.json", {"add_bos_token": False}, "add_bos_token is False"),
    ("tokenizer/tokenizer_config.json", {"add_prefix_space": True}, "add_prefix_space is True"),
    ("tokenizer/tokenizer_config.json", {"vocab": {"a": 0}}, "vocab is {'a': 0}"),
    ("tokenizer/tokenizer_config.json", {"_json_padding": {"length": 3}}, "_json_padding is {'length': 3}"),
    ("tokenizer/tokenizer_config.json", {"trust_remote_code": True}, "trust_remote_code is True"),
    ("tokenizer/tokenizer_config.json", {"backend": "sentencepiece"}, "backend is 'sentencepiece'"),
    ("model_index.json", {"scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"]}, "is of FlowMatchEuler"),
    ("model_index.json", {"_class_name": "StableDiffusionXLPipeline"}, "is SDXL (StableDiffusionXLPipeline)"),
    ("model_index.json", {"_class_name": "AnimateDiffPipeline"}, "is a AnimateDiffPipeline"),
    ("model_index.json", {"text_encoder_2": ["transformers", "CLIPTextModelWithProjection"]}, "is SDXL"),
    ("model_index.json", {"controlnet": ["diffusers", "ControlNetModel"]}, "controlnet is ['diffusers', 'ControlNe"),
]


@pytest.mark.parametrize("case", range(len(REFUSED)))
def test_a_folder_that_would_draw_wrong_pictures_is_refused_in_one_line(copy, tmp_path, capsys, case) -> None:
    file, changes, said = REFUSED[case]
    edit(copy / file, **changes)
    argv = ["sample", f"--model={copy}", "--prompt=a dog", f"--out={tmp_path}/out"]
    assert run_command(APP.dispatch, argv) == 2
    line = capsys.readouterr().err.strip()
    assert said in line, line
    assert "\n" not in line
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "changes",
    [
        ("unet", {"norm_eps": "x"}),
        ("text_encoder", {"vocab_size": "x"}),
        ("text_encoder", {"num_attention_heads": 3}),
        ("vae", {"block_out_channels": 4}),
    ],
)
def test_a_plan_reads_no_other_folder(copy, capsys, changes) -> None:
    component, fields = changes
    edit(copy / component / "config.json", **fields)
    assert run_command(APP.dispatch, ["plan", f"--model={copy}"]) == 2
    line = capsys.readouterr().err.strip()
    assert f"{component}/config.json: " in line, line
    assert "\n" not in line


def test_values_of_other_types_are_refused_in_every_field_that_a_class_annotates() -> None:
    """By `check_fields` alone, before a module is made; and what the classes and the published models say is taken."""
    for kind, component in (("unet", UNet2DConditionModel), ("vae", AutoencoderKL)):
        parameters = inspect.signature(component.__init__).parameters
        check_fields(kind, {name: parameters[name].default for name in init_fields(component)}, "it")
        for shape in SHAPES.values():
            check_fields(kind, getattr(shape, kind), "it")
        _refuses_other_types(kind, init_fields(component))
    check_fields("text_encoder", CLIPTextConfig().to_dict(), "it")
    _refuses_other_types("text_encoder", set(dataclasses.asdict(CLIPTextConfig())))
    for name in CLASSES.values():
        scheduler = getattr(diffusers, name)
        check_fields("scheduler", dict(scheduler().config), "it")
        _refuses_other_types("scheduler", fields_of(scheduler))


def _refuses_other_types(kind: str, names: set[str]) -> None:
    for name in names:
        for value in ({"a": [1]}, [{}], float("nan")):
            if name in ("id2label", "label2id") and isinstance(value, dict):
                continue
            with pytest.raises(UserError, match=f"it: {name} is "):
                check_fields(kind, {name: value}, "it")


def test_the_scheduler_is_of_the_class_that_the_index_names(copy) -> None:
    """diffusers makes that class of scheduler_config.json, whatever class the file itself was written by."""
    edit(copy / "model_index.json", scheduler=["diffusers", "EulerDiscreteScheduler"])
    theirs = StableDiffusionPipeline.from_pretrained(copy, local_files_only=True)
    theirs.set_progress_bar_config(disable=True)
    generator = [torch.Generator().manual_seed(3)]
    wanted = theirs(["a dog"], num_inference_steps=2, generator=generator, output_type="pt").images[0]
    [(_, found)] = generate(load_pipeline(copy), [PictureJob("a dog", 3)], Sampling("model", 2, 7.5))
    torch.testing.assert_close(found, wanted, rtol=0, atol=2e-5)


def test_a_word_that_the_text_encoder_has_not_is_named(copy) -> None:
    edit(copy / "tokenizer" / "tokenizer_config.json", extra_special_tokens=["<new>"])
    pipeline = load_pipeline(copy)
    assert pipeline.encode_prompts(["a dog"]).isfinite().all()
    with pytest.raises(UserError, match="reads '<new>' in a prompt"):
        pipeline.encode_prompts(["a dog", "a <new> dog"])


def test_sizes_may_be_pairs_as_in_diffusers(copy) -> None:
    edit(copy / "unet" / "config.json", sample_size=[6, 4])
    pipeline = load_pipeline(copy)
    [(_, picture)] = generate(pipeline, [PictureJob("a dog", 0)], Sampling("ddim", 1))
    assert picture.shape[1:] == (6 * pipeline.factor, 4 * pipeline.factor)
    assert pipeline.image_size == picture.shape[1:]


def test_a_u_net_that_is_told_its_guidance_draws_as_in_diffusers(tmp_path) -> None:
    """LCM: no second evaluation without the prompt, and the guidance as an embedding."""
    pipeline = tiny_pipeline()
    config = {name: value for name, value in pipeline.unet.config.items() if name != "_use_default_values"}
    unet = UNet2DConditionModel.from_config(config | {"time_cond_proj_dim": 32})
    torch.nn.init.normal_(unet.time_embedding.cond_proj.weight)
    pipeline.unet = unet.eval()
    pipeline.schedule = {"_class_name": "LCMScheduler"}
    folder = save_pipeline(pipeline, tmp_path / "lcm")
    theirs = StableDiffusionPipeline.from_pretrained(folder, local_files_only=True)
    theirs.set_progress_bar_config(disable=True)
    for guidance in (1.5, 8.0):
        generator = [torch.Generator().manual_seed(3)]
        wanted = theirs(
            ["a dog"], num_inference_steps=2, guidance_scale=guidance, generator=generator, output_type="pt"
        ).images[0]
        [(_, found)] = generate(load_pipeline(folder), [PictureJob("a dog", 3)], Sampling("model", 2, guidance))
        torch.testing.assert_close(found, wanted, rtol=0, atol=2e-5)
    write_pictures(tmp_path / "pictures", 2)
    argv = ["finetune", f"--model={folder}", f"--data.images={tmp_path}/pictures", f"--out={tmp_path}/out"]
    assert run_command(APP.dispatch, argv) == 2


@pytest.mark.parametrize("end", ["safetensors.index.fp16.json", "fp16.safetensors.index.json"])
def test_sharded_variants_are_whole(copy, end) -> None:
    """`…safetensors.index.fp16.json` is what diffusers and transformers write for a variant in shards."""
    for part, stem in (("unet", "diffusion_pytorch_model"), ("text_encoder", "model")):
        path = copy / part / f"{stem}.safetensors"
        tensors = load_file(path)
        names = sorted(tensors)
        shards = {f"{stem}.fp16-{i + 1:05d}-of-00002.safetensors": names[i::2] for i in range(2)}
        for file, held in shards.items():
            save_file({name: tensors[name] for name in held}, path.with_name(file))
        weight_map = {name: file for file, held in shards.items() for name in held}
        (path.parent / f"{stem}.{end}").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
        path.unlink()
    found, wanted = load_pipeline(copy), tiny_pipeline()
    for name, tensor in wanted.unet.state_dict().items():
        assert torch.equal(found.unet.state_dict()[name], tensor)
