"""The one decoder: the families of `core.models.families` are configurations of it, for training and for serving.

A forward: ids -> embedding -> blocks -> norm -> head. A masked language model, BERT, is one whose attention looks both
ways. What differs by execution (caches, shards, pages, rings) enters through the `attend` slot of attention, through
styles and through `context`, never through a second forward.

Initialisation draws each parameter from (seed, name, full shape) alone, in blocks of rows, so that a rank which holds
some rows makes only those, and every mesh starts from the same weights.

Sources: Radford et al. (GPT-2, 2019), Zhang et al. (OPT, 2022), BigScience (BLOOM, 2022), Touvron et al. (Llama, 2023).
No dropout: pretraining in this repository sees each token about once.

Shapes: B batch, L length, S keys, D model, E embedding size, V vocabulary, K head size, R turned pairs of a head.
"""

import hashlib
import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from core.compat import without_modes
from core.config import UserError
from core.layout import layout_of, local
from core.models.families import FAMILIES, FamilyName
from core.models.rope import RopeScaling, frequencies
from core.nn.attention import Attention, StepContext
from core.nn.block import Block
from core.nn.embedding import Embedding
from core.nn.head_transform import HeadTransform
from core.nn.linear import Linear
from core.nn.loss import Head
from core.nn.mlp import MLP, ActivationName, is_gated
from core.nn.moe import AuxiliaryLoss, MoE
from core.nn.norm import NormKind, build_norm
from core.nn.routing import MoEConfig


@dataclass(frozen=True)
class DecoderConfig:
    """The architecture. `family` says which Hugging Face family it is exported to; each family fixes some fields.

    max_length           rows of the position table (learned), otherwise the length it is meant for
    position_offset      rows in front of position 0 (OPT: 2)
    causal               a token attends to itself and earlier ones; without it to all, as masked language models do
    token_types          rows of the table of token types, of which the first is added to every token (BERT); 0: none
    mlm_head             a layer, an activation and a norm before the head, and a bias for each token in it (BERT)
    norm_first           norms before attention and MLP, not after the residual (OPT-350m: after)
    embed_dim            size of the token embedding where it is not `dim` (OPT's word_embed_proj_dim)
    residual_after_norm  the residual branches off after the norm (BLOOM's option)
    parallel_residual    attention and MLP take the same input, each through a norm of its own (GPT-NeoX)
    rotary_share         of each head's features that rotary positions turn, the first of them
    qk_norm              a norm of each head's query and key, before positions turn them
    out_norms            a norm behind attention and one behind the MLP as well, before the residual (Gemma 3)
    window               tokens that a token sees, itself and those before it; None: all
    full_layers          numbers, from 0, of the layers that see all in spite of the window
    local_rope_theta     rotary base of the layers with a window, which are not stretched; None: as the others
    query_scalar         scores are divided by its root; None: the head size
    scaled_embedding     token embeddings are multiplied by the root of `dim`
    """

    vocab_size: int
    dim: int
    num_layers: int
    num_heads: int
    ffn_dim: int
    max_length: int = 1024
    num_kv_heads: int | None = None
    head_dim: int | None = None
    causal: bool = True
    token_types: int = 0
    mlm_head: bool = False
    positions: Literal["learned", "alibi", "rotary"] = "learned"
    position_offset: int = 0
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    rotary_share: float = 1.0
    norm: NormKind = "layer_norm"
    norm_eps: float = 1e-5
    norm_affine: bool = True
    norm_first: bool = True
    final_norm: bool = True
    embedding_norm: bool = False
    activation: ActivationName = "gelu_tanh"
    attention_bias: bool = True
    mlp_bias: bool = True
    tied_head: bool = True
    embed_dim: int | None = None
    residual_after_norm: bool = False
    parallel_residual: bool = False
    qk_norm: bool = False
    out_norms: bool = False
    window: int | None = None
    full_layers: tuple[int, ...] = ()
    local_rope_theta: float | None = None
    query_scalar: int | None = None
    scaled_embedding: bool = False
    moe: MoEConfig = field(default_factory=MoEConfig)
    """experts in the place of the blocks' MLPs, each of them of ffn_dim"""
    family: FamilyName = "gpt2"

    def __post_init__(self) -> None:
        if isinstance(self.full_layers, list):  # of a file
            object.__setattr__(self, "full_layers", tuple(self.full_layers))
        if self.num_kv_heads == self.num_heads:  # one value for what is one model: a folder's is read so, too
            object.__setattr__(self, "num_kv_heads", None)
        for name in ("vocab_size", "dim", "num_layers", "num_heads", "ffn_dim", "max_length"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.token_types < 0:
            raise UserError(f"token_types is {self.token_types}; give the rows of that table, or 0 for none")
        if not 0 <= self.norm_eps < float("inf"):
            raise UserError(f"norm_eps is {self.norm_eps}; give a small number that is not negative, such as 1e-5")
        for name in ("rope_theta", "local_rope_theta", "query_scalar"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise UserError(f"{name} is {value}; give a positive number, such as 10000")
        if self.dim % self.num_heads:
            raise UserError(f"{self.num_heads} heads do not divide dim {self.dim}; change one of them")
        if self.num_heads % self.kv_heads:
            raise UserError(f"num_kv_heads is {self.kv_heads}; it must divide the {self.num_heads} heads")
        self._check_rotary()
        if not self.norm_first and self.final_norm:
            raise UserError("norm_first is False, so the last block ends in a norm; set final_norm to False as well")
        if self.out_norms and not self.norm_first:
            raise UserError("out_norms are behind what has a norm before it; set norm_first to True")
        self._check_window()
        if self.moe.every > self.num_layers:
            raise UserError(
                f"moe.every={self.moe.every}: the last of that many blocks would have experts, and there are "
                f"{self.num_layers}; give at most {self.num_layers}"
            )
        self._check_family()

    def _check_rotary(self) -> None:
        if self.positions != "rotary":
            return
        if not 0 < self.rotary_share <= 1:
            raise UserError(f"rotary_share is {self.rotary_share}; give a part of 1, such as 0.5")
        if self.rotary_share == 1 and self.head_size % 2:
            raise UserError(f"head size {self.head_size} is odd; rotary positions turn pairs, so it must be even")
        if self.rotary_size % 2 or not self.rotary_size:
            raise UserError(
                f"rotary_share={self.rotary_share} of a head of {self.head_size} is {self.rotary_size} features; "
                "rotary positions turn pairs, so it must be even"
            )
        if self.rope_scaling is not None:
            self.rope_scaling.check(self.rotary_size)

    def _check_window(self) -> None:
        if self.window is not None and self.window < 1:
            raise UserError(f"window is {self.window}; it counts the token itself, so give at least 1, or none")
        outside = [index for index in self.full_layers if not 0 <= index < self.num_layers]
        if outside or len(set(self.full_layers)) < len(self.full_layers):
            raise UserError(
                f"full_layers is {' '.join(map(str, self.full_layers))}; give numbers of layers, each once, of "
                f"0 … {self.num_layers - 1}"
            )

    def unread(self) -> dict[str, str]:
        """See `core.config.Unread`."""
        unread: dict[str, str] = {}
        if self.positions != "rotary":
            why = f"with model.positions={self.positions}; give --model.positions rotary"
            unread = dict.fromkeys(("rope_theta", "rope_scaling", "local_rope_theta", "rotary_share"), why)
        if self.window is None:
            without = "and no layer has a window; give --model.window"
            unread = {"full_layers": without, "local_rope_theta": without} | unread
        return unread

    def _check_family(self) -> None:
        family = FAMILIES.get(self.family)
        if family is None or family.family:
            raise UserError(f"family is {self.family!r}; give one of {', '.join(get_args(FamilyName))}")
        free = {*family.keys, "moe", "family", "rope_theta", *(["rope_scaling"] if family.rope_theta else [])}
        free |= {"local_rope_theta"} if family.local_rope_theta is not None else set()
        free |= {"rotary_share"} if family.rotary_share is not None else set()
        if self.positions != "rotary":  # `unread` says so of what is given for them
            free |= {"local_rope_theta", "rotary_share"}
        for item in (item for item in fields(self) if item.name not in free):
            value, fixed = getattr(self, item.name), family.fixed.get(item.name, item.default)
            if value != fixed:
                raise UserError(f"{item.name} is {value!r}; a model of family {self.family} has {fixed!r}")
        if is_gated(self.activation) != family.gated:
            kind = "gated" if family.gated else "not gated"
            raise UserError(f"activation {self.activation} in family {self.family}, whose MLP is {kind}")
        if self.rope_scaling is not None and (kind := self.rope_scaling.kind) not in family.rope_kinds.values():
            known = ", ".join(family.rope_kinds.values()) or "none"
            raise UserError(f"rope_scaling is of kind {kind}; a model of family {self.family} has {known}")
        if why := family.check(self):
            raise UserError(why)

    def require_causal(self) -> None:
        """Raises UserError for a masked language model, of whoever wants text to be continued."""
        if not self.causal:
            raise UserError(
                f"a model of family {self.family} attends both ways and predicts masked tokens, so it does not "
                "continue text; give a causal model, or measure this one: megalith llm evaluate"
            )

    @property
    def kv_heads(self) -> int:
        return self.num_kv_heads or self.num_heads

    @property
    def head_size(self) -> int:
        return self.head_dim or self.dim // self.num_heads

    @property
    def rotary_size(self) -> int:
        """Features of a head that rotary positions turn."""
        return int(self.head_size * self.rotary_share)

    @property
    def alike_to(self) -> int | None:
        """The tokens of a text up to which a token's position means the same in each; None: always."""
        if self.positions == "learned":
            return self.max_length
        return None if self.rope_scaling is None else self.rope_scaling.alike_to(self.max_length)

    @property
    def embedding_size(self) -> int:
        return self.embed_dim or self.dim

    def layer_window(self, index: int) -> int | None:
        """The window of a layer; None: it sees all."""
        return None if index in self.full_layers else self.window

    @property
    def every_window(self) -> int | None:
        """The window, where every layer has it; None: some layer sees all."""
        return None if self.full_layers else self.window

    @property
    def local_window(self) -> int | None:
        """The window of some layers, where others see all; None: all layers see alike."""
        return self.window if 0 < len(self.full_layers) < self.num_layers else None

    def num_parameters(self) -> int:
        """All parameters, a tied head counted once."""
        return sum(p.numel() for p in decoder_without_memory(self).parameters())

    def active_share(self, name: str) -> float:
        """The part of a parameter that one token is multiplied with: of experts those that it is meant for."""
        return self.moe.per_token / self.moe.num_experts if ".experts." in name else 1.0


class Decoder(nn.Module):
    """A decoder-only transformer. Needs no process group; can be built on the meta device and filled later."""

    def __init__(self, config: DecoderConfig):
        super().__init__()
        self.config = config
        self.embedding = Embedding(
            config.vocab_size,
            config.dim,
            embed_dim=config.embed_dim,
            num_positions=config.max_length if config.positions == "learned" else None,
            offset=config.position_offset,
            num_types=config.token_types,
            norm=self._norm() if config.embedding_norm else None,
            scale=math.sqrt(config.dim) if config.scaled_embedding else None,
        )
        self.blocks = nn.ModuleList(self._block(index) for index in range(config.num_layers))
        self.norm = self._norm() if config.final_norm else None
        width = config.embedding_size
        self.project_out = Linear(config.dim, width, bias=False) if width != config.dim else None
        tied = self.embedding.tokens.weight if config.tied_head else None
        self.head_transform = HeadTransform(width, config.activation, self._norm()) if config.mlm_head else None
        self.head = Head(config.vocab_size, width, weight=tied, bias=config.mlm_head)

    def _norm(self, size: int | None = None) -> nn.Module:
        c = self.config
        return build_norm(c.norm, size or c.dim, c.norm_eps, c.norm_affine)

    def _block(self, index: int) -> Block:
        c = self.config
        attention = Attention(
            c.dim,
            c.num_heads,
            c.kv_heads,
            c.head_size,
            bias=c.attention_bias,
            alibi=c.positions == "alibi",
            causal=c.causal,
            norm=self._norm if c.qk_norm else None,
            window=c.layer_window(index),
            query_scale=None if c.query_scalar in (None, c.head_size) else math.sqrt(c.head_size / c.query_scalar),
        )
        shape = (c.dim, c.ffn_dim, c.activation, c.mlp_bias)
        return Block(
            attention,
            MoE(*shape, c.moe) if c.moe.has_experts(index) else MLP(*shape),
            self._norm(),
            self._norm(),
            norm_first=c.norm_first,
            residual_after_norm=c.residual_after_norm,
            parallel_residual=c.parallel_residual,
            attention_out_norm=self._norm() if c.out_norms else None,
            mlp_out_norm=self._norm() if c.out_norms else None,
        )

    def forward(
        self,
        input_ids_BL: Tensor,
        attention_mask: Tensor | None = None,
        positions: Tensor | None = None,
        context: Any = None,
        *,
        targets: Tensor | None = None,
    ) -> Tensor:
        """logits[B, L, V], or with targets[B, L] the sum of the token losses (scalar, fp32 or wider).

        In training mode experts' routers add to that sum: see `core.nn.moe`.

        attention_mask  [B, L], or [B, S] when `attend` knows earlier keys: nonzero where there is a token. None: all
        positions       [B or 1, L]; by default as the family's own forward derives them from the mask
        context         data of this step for `attend`, handed on; by default a `StepContext` without documents
        targets         what is predicted at each place: the next token, or the one that a mask hides; -100: nothing
        """
        length = input_ids_BL.shape[1]
        if positions is None:
            positions = self.default_positions(input_ids_BL, attention_mask)
        if context is None:
            context = StepContext()
        auxiliary = self._auxiliary_loss(targets, context)
        x_BLD = self.embedding(input_ids_BL, positions)
        whole = getattr(context, "positions_BL", None)  # under context parallelism positions are a part of them
        rotary = RotaryAngles(self.config, positions, x_BLD.dtype, whole)
        for index, block in enumerate(self.blocks):
            x_BLD = block(x_BLD, positions, rotary.of_layer(index), attention_mask, context)
        if self.norm is not None:
            x_BLD = self.norm(x_BLD)
        if self.project_out is not None:
            x_BLD = self.project_out(x_BLD)
        if self.head_transform is not None:
            x_BLD = self.head_transform(x_BLD)
        out = self.head(x_BLD, targets, length, context.rows_R)
        return out if auxiliary is None else auxiliary.added_to(out)

    def _auxiliary_loss(self, targets: Tensor | None, context: Any) -> AuxiliaryLoss | None:
        """Where the routers of a training forward put what they add to its loss: into the context, for the blocks."""
        if not self.config.moe.num_experts:
            return None
        context.auxiliary = None
        if targets is not None and self.training:
            whole_rows = getattr(context, "num_targets_B", None)
            own_rows = (targets != self.head.ignore_index).sum(1)
            context.auxiliary = AuxiliaryLoss(own_rows if whole_rows is None else whole_rows)
        return context.auxiliary

    def default_positions(self, input_ids_BL: Tensor, mask_BL: Tensor | None) -> Tensor:
        """[B or 1, L]: those of a forward that is given none.  Raises UserError for more than the model has."""
        length, config = input_ids_BL.shape[1], self.config
        if config.positions == "learned" and length > config.max_length:
            raise UserError(
                f"{length} tokens; this model has positions for {config.max_length}, so give it at most those"
            )
        if mask_BL is None or not FAMILIES[config.family].mask_positions:
            return torch.arange(length, device=input_ids_BL.device)[None]
        return positions_from_mask(mask_BL)

    def _apply(self, fn: Any, recurse: bool = True) -> "Decoder":
        """A tied head stays tied when parameters are replaced, as `to_empty` does."""
        tied = self.head.weight is self.embedding.tokens.weight
        super()._apply(fn, recurse)
        if tied:
            self.head.weight = self.embedding.tokens.weight
        return self


@lru_cache(16)
def decoder_without_memory(config: DecoderConfig) -> Decoder:
    """`Decoder(config)` on the meta device, to look at: all who ask for it get the same one."""
    with without_modes(), torch.device("meta"):
        return Decoder(config)


def positions_from_mask(mask_BL: Tensor) -> Tensor:
    """Number of tokens before each one; 0 for padding in front, which no token sees."""
    tokens_BL = mask_BL != 0
    return (tokens_BL.cumsum(1) - 1).masked_fill(~tokens_BL, 0)


class RotaryAngles:
    """The angles of one forward's positions: those of layers with a window, where they differ, and the others'.

    Its arguments are those of `rotary_angles`.
    """

    def __init__(self, config: DecoderConfig, positions_BL: Tensor, dtype: torch.dtype, whole_BL: Tensor | None = None):
        self._config = config
        self._angles: tuple[Tensor, Tensor] | None = None
        self._local: tuple[Tensor, Tensor] | None = None
        if config.positions == "rotary":
            self._angles = self._local = rotary_angles(config, positions_BL, dtype, whole_BL)
        if config.local_rope_theta is not None:
            local = replace(config, rope_theta=config.local_rope_theta, rope_scaling=None)
            self._local = rotary_angles(local, positions_BL, dtype)

    def of_layer(self, index: int) -> tuple[Tensor, Tensor] | None:
        """(cos, sin), as `rotary_angles` gives them; None where positions are not rotary."""
        return self._angles if self._config.layer_window(index) is None else self._local


def rotary_angles(
    config: DecoderConfig, positions_BL: Tensor, dtype: torch.dtype, whole_BL: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(cos, sin) of position * frequency, each [B or 1, L, R]. The angles are taken in fp64.

    whole_BL  positions of the whole texts, where positions_BL are a part of them
    """
    scaling, whole_BL = config.rope_scaling, positions_BL if whole_BL is None else whole_BL
    frequency_R = frequencies(config.rope_theta, config.rotary_size, scaling, config.max_length, whole_BL)
    angle_BLR = positions_BL[..., None] * frequency_R
    gain = 1.0 if scaling is None else scaling.gain(config.max_length)
    return (angle_BLR.cos() * gain).to(dtype), (angle_BLR.sin() * gain).to(dtype)


def init_std(name: str, config: DecoderConfig) -> float | None:
    """Standard deviation of a parameter's normal initialisation; None for constants.

    GPT-2's scheme: 0.02, and residual projections divided by sqrt(2 * num_layers).
    """
    if name.endswith(".bias") or "norm." in name:
        return None
    residual = name.endswith(("attention.out.weight", "mlp.down.weight", "experts.down.weight"))
    return 0.02 / math.sqrt(2 * config.num_layers) if residual else 0.02


def constant_of(name: str, config: DecoderConfig) -> float:
    """The initial value of a parameter that `init_std` has no deviation for."""
    return 0.0 if name.endswith(".bias") or config.norm == "rms_norm_from_one" else 1.0


def init_rows(name: str, shape: tuple[int, ...], box: tuple[slice, ...], seed: int, std: float) -> Tensor:
    """fp32 normal values of the part `box` of parameter `name`; they depend on (seed, name, shape) alone.

    Rows come in blocks of about 64k values, each from its own generator, so only the blocks that `box` meets are made,
    by as many threads as torch has.
    """
    width = math.prod(shape[1:])
    block_rows = max(1, (1 << 16) // width)
    rows = box[0]
    value = torch.empty(rows.stop - rows.start, *(s.stop - s.start for s in box[1:]), device="cpu")

    def fill(first: int) -> None:
        stop = min(first + block_rows, shape[0])
        digest = hashlib.blake2b(f"{seed}/{name}/{first // block_rows}".encode(), digest_size=8).digest()
        generator = torch.Generator("cpu").manual_seed(int.from_bytes(digest, "little") >> 1)
        block = torch.empty(stop - first, *shape[1:], device="cpu").normal_(0.0, std, generator=generator)
        a, b = max(first, rows.start), min(stop, rows.stop)
        value[a - rows.start : b - rows.start] = block[(slice(a - first, b - first), *box[1:])]

    firsts = range(rows.start - rows.start % block_rows, rows.stop, block_rows)
    if type(value) is Tensor and (threads := min(torch.get_num_threads(), len(firsts))) > 1:  # modes are a thread's own
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(fill, firsts))
    else:
        for first in firsts:
            fill(first)
    return value


@torch.no_grad()
def initialise(model: nn.Module, seed: int) -> None:
    """Fill every parameter of a (sharded) Decoder from the seed: the same values on every mesh, each rank its part."""
    config = model.config
    assert isinstance(config, DecoderConfig)
    for name, parameter in model.named_parameters():
        std, here = init_std(name, config), local(parameter)
        if std is None:
            here.fill_(constant_of(name, config))
        else:
            layout = layout_of(parameter)
            here.copy_(init_rows(name, layout.shape, layout.box(), seed, std))
