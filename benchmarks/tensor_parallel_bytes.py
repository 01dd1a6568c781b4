"""Closed forms of what tensor parallelism on a grid sends: (operation, axis) -> bytes of full messages, of one rank.

Of a linear pair (sizes that divide) and of a whole step of the decoder on one data-parallel rank (any sizes): forward,
backward, and the sums of partial gradients at its end. `core.comm.volume` counts the same.
"""

from collections import Counter
from typing import NamedTuple

import torch

from core.layout import shares
from core.mesh import GRID_AXES, MeshConfig
from core.models.decoder import Decoder, DecoderConfig
from core.nn.mlp import is_gated

Counts = dict[tuple[str, str], int]
Elements = Counter[tuple[str, str]]


class Layer(NamedTuple):
    """A linear layer: its features, those of them here, the side of its input, and what stays together of it."""

    inputs: int
    outputs: int
    in_here: int
    out_here: int
    swapped: bool = False
    in_unit: int = 1


def pair_bytes(mesh: MeshConfig, rows: int, inner: int, outer: int, itemsize: int) -> Counts:
    """Two linear layers, x[rows, inner] -> [rows, outer] -> [rows, inner], without biases."""
    if mesh.tp == 1:
        return {}
    agreed = used_bytes(2)
    if mesh.tp_mode == "1d":
        return {("all_reduce", "tp"): 2 * rows * inner * itemsize + agreed}
    found: Elements = Counter()
    depth, side, _ = mesh.grid
    for inputs, outputs, swapped in ((inner, outer, False), (outer, inner, True)):
        if mesh.tp_mode == "3d":
            found += cube_layer(side, rows // side, inputs // side, outputs // side, swapped)
        else:
            found += square_layer(side, rows // (depth * side), inputs, outputs, inputs // side, outputs // side)
            if depth > 1:
                found["all_reduce", "tp_depth"] += inner * outer // side**2
    return {key: itemsize * number for key, number in found.items() if number} | {("all_reduce", "world"): agreed}


def used_bytes(parameters: int) -> int:
    """Of the message in which all ranks agree which parameters have a gradient: two marks of a byte each."""
    return 2 * parameters


def square_layer(side: int, rows: int, inputs: int, outputs: int, in_here: int, out_here: int) -> Elements:
    """A linear layer of 2D and 2.5D: three products of SUMMA, two messages each in every round.

    rows               of the activations held here
    in_here, out_here  features held here, of `inputs` and `outputs` in all
    """
    if side == 1:
        return Counter()
    least, other_here = (inputs, out_here) if inputs <= outputs else (outputs, in_here)
    return Counter({
        ("broadcast", "tp_col"): 2 * least * rows, ("reduce", "tp_col"): least * rows,
        ("broadcast", "tp_row"): 2 * least * other_here, ("reduce", "tp_row"): least * other_here,
    })  # fmt: skip


def cube_layer(side: int, rows: int, in_here: int, out_here: int, swapped: bool) -> Elements:
    """A linear layer of 3D.

    rows               of the activations that meet in a product: 1 / side of all
    in_here, out_here  features that meet there
    swapped            from the second side to the first
    """
    if side == 1:
        return Counter()
    inner, across = ("tp_row", "tp_col") if swapped else ("tp_col", "tp_row")
    weight = whole_rows(out_here, side) * in_here
    return Counter({
        ("all_gather", across): 2 * rows * in_here, ("reduce_scatter", across): rows * in_here,
        ("all_gather", inner): rows * out_here, ("reduce_scatter", inner): rows * out_here,
        ("all_gather", "tp_depth"): 2 * weight, ("reduce_scatter", "tp_depth"): weight,
    })  # fmt: skip


def whole_rows(rows: int, side: int) -> int:
    """Rows of a weight when they are gathered over the depth, padding included."""
    return side * -(-rows // side)


def decoder_step_bytes(
    mesh: MeshConfig, config: DecoderConfig, batch: int, length: int, rank: int, itemsize: int
) -> Counts:  # fmt: skip
    """A step of the decoder on `rank`, its loss in one chunk and all sequences of one length and position.

    Only for configurations whose embeddings are as wide as the model.
    """
    assert mesh.tp_mode != "1d"
    assert config.embedding_size == config.dim
    depth, side, _ = mesh.grid
    place = dict(zip(GRID_AXES, (rank // side**2, rank // side % side, rank % side), strict=True))
    form = _Cube if mesh.tp_mode == "3d" else _Square
    found = form(config, depth, side, place, batch, length).step()
    sizes = dict(zip(GRID_AXES, mesh.grid, strict=True))
    return {key: itemsize * number for key, number in found.items() if number and sizes[key[1]] > 1}


class _Square:
    """2D and 2.5D."""

    second = "tp_col"
    """The axis over which heads and hidden features are cut."""

    def __init__(self, config: DecoderConfig, depth: int, side: int, place: dict[str, int], batch: int, length: int):
        self.config, self.depth, self.side, self.place, self.length = config, depth, side, place, length
        self.tokens = -(-batch // (depth * side)) * length

    def here(self, size: int, axis: str, unit: int = 1) -> int:
        """What this rank holds of `size` features that are cut over an axis."""
        share = shares(size, self.side, unit)[self.place[axis]]
        return share.stop - share.start

    @property
    def model_here(self) -> int:
        return self.here(self.config.dim, "tp_col")

    def layers(self) -> list[Layer]:
        """Those of a block."""
        c = self.config
        group = c.num_heads // c.kv_heads
        qkv, heads = (group + 2) * c.head_size, group * c.head_size
        qkv_here, heads_here = (self.here(c.kv_heads * n, self.second, n) for n in (qkv, heads))
        hidden = self.here(c.ffn_dim, self.second)
        up = Layer(c.dim, c.ffn_dim, self.model_here, hidden)
        return [
            Layer(c.dim, c.kv_heads * qkv, self.model_here, qkv_here),
            Layer(c.kv_heads * heads, c.dim, heads_here, self.model_here, True, heads),
            *([up] * (2 if is_gated(c.activation) else 1)),
            Layer(c.ffn_dim, c.dim, hidden, self.model_here, True),
        ]

    def vectors(self) -> tuple[int, int]:
        """Elements here of biases and norms whose gradients are partial: on the first side, and on the second."""
        with torch.device("meta"):
            names = {n: p.shape[0] for n, p in Decoder(self.config).named_parameters() if p.ndim == 1}
        first = second = 0
        for name in names:
            if name.endswith("qkv.bias"):
                second += self.layers()[0].out_here
            elif name.endswith(("up.bias", "gate.bias")):
                second += self.layers()[-1].in_here
            else:
                first += self.model_here
        return first, second

    def norms(self) -> int:
        """Elements of the statistics of all norms, there and back."""
        c = self.config
        num_norms = 2 * c.num_layers + c.final_norm + c.embedding_norm
        return num_norms * (4 if c.norm == "layer_norm" else 2) * self.tokens

    def step(self) -> Elements:
        c, tokens = self.config, self.tokens
        found: Elements = Counter({("all_reduce", "tp_col"): self.norms() + 3 * tokens})
        found["reduce", "tp_row"] += self.side * tokens * self.model_here  # the embedding
        found["broadcast", "tp_row"] += self.side * tokens * self.model_here
        if c.positions == "learned":
            found["all_reduce", "tp_row"] += 2 * self.length * self.model_here
        weights = self.here(c.vocab_size, "tp_row") * self.model_here * (1 if c.tied_head else 2)
        weights += self.here(c.max_length, "tp_row") * self.model_here * (c.positions == "learned")
        for layer in self.layers() * c.num_layers:
            found += square_layer(self.side, tokens, *layer[:4])
            weights += self._weight(layer)
        # The head: its logits are in the place of the fewer features.
        found += square_layer(self.side, tokens, c.vocab_size, c.vocab_size, self.model_here, self.model_here)
        vectors = sum(self.vectors())
        found["all_reduce", "tp_row"] += vectors + 1
        found["all_reduce", "tp_depth"] += vectors + weights + 1
        return found

    def _weight(self, layer: Layer) -> int:
        """Elements here of its weight."""
        if layer.inputs <= layer.outputs:
            return self.here(layer.inputs, "tp_row", layer.in_unit) * layer.out_here
        return self.here(layer.outputs, "tp_row") * layer.in_here


class _Cube(_Square):
    """3D."""

    second = "tp_row"

    def step(self) -> Elements:
        c, side = self.config, self.side
        met = side * self.tokens  # tokens that meet in a product
        words = self.here(c.vocab_size, "tp_row")
        table = whole_rows(words, side) * self.model_here
        found: Elements = Counter({("all_reduce", "tp_col"): self.norms(), ("all_reduce", "tp_row"): 3 * self.tokens})
        for axis in ("tp_depth", "tp_col"):  # the loss
            found["all_reduce", axis] += 1
        # The embedding; then the head, whose x and g are gathered and whose logits and dx are scattered.
        for operation in ("all_gather", "reduce_scatter"):
            found[operation, "tp_depth"] += 2 * table
            found[operation, "tp_row"] += 2 * met * self.model_here
            found[operation, "tp_col"] += met * words
        if c.positions == "learned":
            rows = whole_rows(self.here(c.max_length, "tp_row"), side) * self.model_here
            found["all_gather", "tp_depth"] += rows
            found["reduce_scatter", "tp_depth"] += rows
            found["all_reduce", "tp_row"] += 2 * self.length * self.model_here
        for layer in self.layers() * c.num_layers:
            found += cube_layer(side, met, layer.in_here, layer.out_here, layer.swapped)
        first, second = self.vectors()
        found["all_reduce", "tp_depth"] += first + second
        found["all_reduce", "tp_row"] += first
        found["all_reduce", "tp_col"] += second
        return found
