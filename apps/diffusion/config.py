"""The options of `diffusion pretrain`, `finetune` and `dreambooth`: core's training run, a pipeline, pictures."""

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import ClassVar, Literal

from apps.diffusion.adapters import LoraConfig
from apps.diffusion.generate import Sampling
from apps.diffusion.noise import Prediction
from apps.diffusion.text import check_text, read_prompts
from core.config import UserError
from core.mesh import MeshConfig
from core.runtime import ranks_of
from core.train import TrainConfig

Method = Literal["full", "lora", "dreambooth"]


@dataclass(frozen=True)
class DataConfig:
    """The pictures that are learned from, and their sizes, crops and captions."""

    images: Path | None = None
    """a folder of images with captions: NAME.txt beside NAME.png, or metadata.jsonl with file_name and text"""
    prompt: str | None = None
    """the caption of every image; captions in the folder are then not read"""
    global_batch: int = 4
    """images of a step over all ranks; with prior preservation as many of the class come with them"""
    resolution: int | None = None
    """side of a square of the area that images are scaled to, in pixels; by default the model's"""
    buckets: bool = True
    """keep aspect ratios up to 2:1, in sizes of equal area; otherwise every image is cropped to a square"""
    crops: int = 1
    """crops of an image, evenly along what overhangs; a row shows one at random"""
    flip: bool = False
    """show images mirrored too, at random"""
    caption_dropout: float = 0.0
    """share of rows without their caption: what guidance at sampling leads away from; with class images of their rows
    alone, or guidance would lead away from the subject"""
    cache: Path | None = None
    """where latents and text embeddings are kept, by content and settings; by default cache/ beside --out"""

    def __post_init__(self) -> None:
        if self.global_batch < 1 or self.crops < 1:
            raise UserError(f"data.global_batch={self.global_batch}, data.crops={self.crops}; give at least 1 of each")
        if self.resolution is not None and self.resolution < 1:
            raise UserError(f"data.resolution={self.resolution}; give the side of a square in pixels, such as 512")
        if not 0 <= self.caption_dropout <= 1:
            raise UserError(f"data.caption_dropout={self.caption_dropout}; give a share from 0 to 1")
        if self.prompt is not None and not self.prompt.strip():
            raise UserError("data.prompt is empty; describe what the images show")
        check_text(self.prompt or "")


@dataclass(frozen=True)
class NoiseConfig:
    """The noise that training adds, and what the network learns to predict of it."""

    prediction: Prediction | None = None
    """what the U-Net predicts; by default what the weights' scheduler_config.json says"""
    min_snr: float | None = None
    """gamma of min-SNR weighting, 5 as a rule; by default every timestep counts alike"""
    offset: float = 0.0
    """share of noise that is alike in a whole channel, 0.1 at most: for very dark and very bright images"""
    zero_terminal_snr: bool = False
    """the last timestep becomes noise alone; only of models that predict v or the sample"""

    def __post_init__(self) -> None:
        if self.min_snr is not None and self.min_snr <= 0:
            raise UserError(f"noise.min_snr={self.min_snr}; give a positive number such as 5, or None for none")
        if not 0 <= self.offset <= 1:
            raise UserError(f"noise.offset={self.offset}; give a share from 0 to 1")


@dataclass(frozen=True)
class ValidationConfig:
    """The held-out loss and pictures of every --evaluate-every steps, and of the end."""

    prompts: tuple[str, ...] = ()
    """pictures of these go into a grid"""
    num_images: int = 4
    """of each prompt"""
    sampling: Sampling = field(default_factory=Sampling)
    images: Path | None = None
    """a folder of images with captions, held out: their loss is validation_loss"""

    def __post_init__(self) -> None:
        if self.num_images < 1:
            raise UserError(f"validation.num_images={self.num_images}; give at least 1")
        if any(not prompt.strip() for prompt in self.prompts):
            raise UserError("one of --validation.prompts is empty; say what to draw")
        for prompt in (*self.prompts, self.sampling.negative):
            check_text(prompt)

    def unread(self) -> dict[str, str]:
        """See `core.config.Unread`."""
        if self.prompts:
            return {}
        names = ["num_images", *(f"sampling.{item.name}" for item in fields(Sampling))]
        return dict.fromkeys(names, "without prompts: no pictures are drawn; give --validation.prompts")

    @property
    def wanted(self) -> bool:
        return bool(self.prompts) or self.images is not None


@dataclass(frozen=True)
class DiffusionConfig(TrainConfig):
    """Train a Stable Diffusion pipeline; what all commands have."""

    ELASTIC: ClassVar[bool] = False

    ESSENTIAL: ClassVar[tuple[str, ...]] = (
        *("model", "data.images", "data.global_batch", "data.resolution", "train_text_encoder", "average"),
        *("validation.prompts", "validation.images"),
        *(name for name in TrainConfig.ESSENTIAL if not name.startswith("mesh.")),
        "nproc",
    )

    model: Path | None = None
    """the pipeline to start from, a diffusers folder or a single-file checkpoint; by default the one that comes with
    this program"""
    tokenizer: Path | None = None
    """folder of a tokenizer, for single files, which hold none"""
    data: DataConfig = field(default_factory=DataConfig)
    noise: NoiseConfig = field(default_factory=NoiseConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    train_text_encoder: bool = False
    """the text encoder learns too; otherwise its embeddings are made once"""
    average: float | None = None
    """decay of a moving average of the weights, 0.9999 as a rule, which is then what is validated and saved"""
    average_on_host: bool = False
    """keep the average in CPU memory"""
    channels_last: bool = True
    """activations with their channels innermost, which convolutions like"""
    save_precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """of the weights in --out"""
    nproc: int = 1
    """local ranks to launch; under torchrun leave it at 1"""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.nproc < 1:
            raise UserError(f"nproc={self.nproc}; give the number of local ranks, at least 1")
        if self.average is not None and not 0 <= self.average < 1:
            raise UserError(f"average={self.average}; give a decay from 0 to below 1, or None")

    def unread(self) -> dict[str, str]:
        found = super().unread()
        if not self.validation.wanted:
            found["evaluate_every"] = "and nothing is validated; give --validation.prompts or --validation.images"
        if self.average is None:
            found["average_on_host"] = "without an average; give --average, such as 0.9999"
        elif self.gemini.disk is not None:
            found["average_on_host"] = "with gemini.disk, where an average lies with its masters; leave it out"
        return found


@dataclass(frozen=True)
class PretrainConfig(DiffusionConfig):
    """Train a U-Net (and a text encoder) from nothing, in the latents of the weights' VAE."""

    fresh: Literal["nothing", "unet", "unet+text_encoder"] = "unet"
    """what begins from --seed instead of the weights; their configurations are kept"""
    unet: str | None = None
    """a published model (`megalith diffusion recipes`) whose U-Net is trained, instead of the pipeline's own"""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.unet is not None and self.fresh == "nothing":
            raise UserError(f"unet={self.unet} with fresh=nothing: another U-Net has no weights; use --fresh unet")
        if self.fresh == "unet+text_encoder" and not self.train_text_encoder:
            raise UserError("fresh=unet+text_encoder without --train-text-encoder: nothing would teach it; add that")


@dataclass(frozen=True)
class FinetuneConfig(DiffusionConfig):
    """Go on training a pipeline that exists, on captioned images or on one subject."""

    ESSENTIAL: ClassVar[tuple[str, ...]] = (
        *("instance_dir", "instance_prompt", "class_dir", "class_prompt", "method", "lora.rank"),
        *DiffusionConfig.ESSENTIAL,
    )

    method: Method = "full"
    """full: all weights; lora: low-rank adapters of them; dreambooth: all weights, on the images of one subject"""
    lora: LoraConfig = field(default_factory=LoraConfig)
    instance_dir: Path | None = None
    """images of the subject, three to five; without --instance-prompt with captions, as in --data.images"""
    instance_prompt: str | None = None
    """what all of them show, with a word for the subject that means nothing yet: "a photo of sks dog" """
    class_dir: Path | None = None
    """images of the subject's class, that the class keeps its looks (prior preservation); without --class-prompt with
    captions, as in --data.images"""
    class_prompt: str | None = None
    """what all of those show: "a photo of a dog". Images that --class-dir lacks are drawn of it before training"""
    class_prompts: Path | None = None
    """a text file with a prompt a line, instead: images that --class-dir lacks are drawn of them in turn, and each has
    its own prompt as its caption"""
    num_class_images: int | None = None
    """images that --class-dir holds at least; by default 100 where there is a prompt to draw them of"""
    class_sampling: Sampling = field(default_factory=Sampling)
    """how class images are drawn; their size is that of --data.resolution. Much guidance makes them alike"""
    prior_weight: float = 1.0
    """weight of the class images' loss"""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("instance_prompt", "class_prompt"):
            value = getattr(self, name)
            if value is not None and not value.strip():
                raise UserError(f"--{name.replace('_', '-')} is empty; say what the images show")
            check_text(value or "")
        check_text(self.class_sampling.negative)
        if self.instance_prompt is not None and self.instance_dir is None:
            raise UserError("--instance-prompt without --instance-dir; name the folder of the subject's images")
        for name in ("class_prompt", "class_prompts"):
            if getattr(self, name) is not None and self.class_dir is None:
                option = f"--{name.replace('_', '-')}"
                raise UserError(f"{option} without --class-dir; name the folder of the images that it describes")
        if self.class_prompt is not None and self.class_prompts is not None:
            raise UserError(
                "--class-prompt and --class-prompts; give one caption for all class images, or one for each"
            )
        if self.class_dir is not None and self.instance_dir is None:
            raise UserError("--class-dir is for DreamBooth; give --instance-dir too")
        if self.method == "dreambooth" and self.data.images is not None:
            raise UserError("--data.images with DreamBooth; the subject's images are --instance-dir")
        if self.prior_weight < 0 or (self.num_class_images is not None and self.num_class_images < 1):
            raise UserError(
                f"prior_weight={self.prior_weight}, num_class_images={self.num_class_images}; "
                "give a weight of 0 or more, and at least 1 image"
            )

    def unread(self) -> dict[str, str]:
        found = super().unread()
        names = [item.name for item in fields(LoraConfig)]
        if self.method != "lora":
            found |= {f"lora.{name}": f"with method={self.method}; give --method lora" for name in names}
        elif self.lora.start is not None:
            why = "with lora.start, whose layers, ranks and alphas are taken; leave it out"
            found |= {f"lora.{name}": why for name in ("rank", "alpha", "targets")}
        if not self.has_prior:
            why = "without images of the class; give --class-dir and --class-prompt"
            found |= dict.fromkeys(("num_class_images", "prior_weight"), why)
        if self.class_prompt is None and self.class_prompts is None:
            why = "without --class-prompt and --class-prompts: no class images are drawn; give one of them"
            found |= {f"class_sampling.{item.name}": why for item in fields(Sampling)}
        if self.instance_dir is not None:
            found["data.prompt"] = "with --instance-dir, whose caption is --instance-prompt; leave it out"
        return found

    @property
    def has_prior(self) -> bool:
        return self.class_dir is not None

    def prompts_of_class(self) -> list[str]:
        """The prompts that class images are drawn of, in turn; none where all of them are given.

        Raises UserError for a --class-prompts that is no file of prompts.
        """
        if self.class_prompts is not None:
            return read_prompts(self.class_prompts)
        return [] if self.class_prompt is None else [self.class_prompt]


def check_combination(config: DiffusionConfig) -> MeshConfig:
    """The mesh with all its sizes.  Raises UserError for what cannot run together, before anything is loaded."""
    subject = isinstance(config, FinetuneConfig) and config.instance_dir is not None
    if isinstance(config, FinetuneConfig) and config.method == "dreambooth" and not subject:
        raise UserError('DreamBooth needs --instance-dir FOLDER, and --instance-prompt "a photo of sks dog"')
    if not subject and config.data.images is None:
        raise UserError("no pictures given; --data.images FOLDER holds images with captions")
    if subject and config.data.images is not None:
        raise UserError("--data.images and --instance-dir; give the one or the other")
    if isinstance(config, FinetuneConfig):
        config.prompts_of_class()
        _check_apart("--class-dir", config.class_dir, "--instance-dir", config.instance_dir)
        _check_apart("--instance-dir", config.instance_dir, "--class-dir", config.class_dir)
        _check_apart("--validation.images", config.validation.images, "--instance-dir", config.instance_dir)
    _check_apart("--validation.images", config.validation.images, "--data.images", config.data.images)
    if config.model is not None and not config.model.exists():
        raise UserError(f"--model {config.model} does not exist; give a diffusers folder or a file")
    mesh = config.mesh.resolve(ranks_of(config.nproc), config.zero)
    for name in ("pp", "tp", "cp"):
        if getattr(mesh, name) > 1:
            raise UserError(f"mesh.{name}={getattr(mesh, name)}: a U-Net is not cut so; use mesh.{name}=1 and --zero")
    rows = config.data.global_batch * (2 if isinstance(config, FinetuneConfig) and config.has_prior else 1)
    if rows % mesh.data_ranks:
        raise UserError(
            f"a step of {rows} rows (--data.global-batch {config.data.global_batch}) does not divide over "
            f"{mesh.data_ranks} data-parallel ranks; use a batch that does"
        )
    return mesh


def _check_apart(inner: str, inside: Path | None, outer: str, folder: Path | None) -> None:
    """Raises UserError for a folder within another, with whose images its own would be read."""
    if inside is not None and folder is not None and folder.resolve() in inside.resolve().parents:
        raise UserError(
            f"{inner} {inside} lies in {outer} {folder}, which is read with its subfolders; put it beside that folder"
        )
