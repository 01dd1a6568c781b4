"""K-FAC: natural gradients by Kronecker factors, on one rank and on any that share parameters and data.

Of a layer with the matrix V[m, n] and the factors R, C of its Fisher information (core/optim/kfac_layers.py), a step

1. sums a a^T and g g^T over the layer's inputs and the gradients of its outputs, for targets that the model draws
   (`fisher`), over all microbatches; all-reduces the sums of all layers                     -> one all-reduce
   those of experts that ranks have apart, among the ranks that have them                    -> one more
2. brings gradients to each layer's home rank (core/optim/home.py)                           -> one all-to-all
3. there R <- d R + (1 - d) R_new, d = min(factor_decay, 1 - 1/k) at the k-th time; now and then inverts them; and
   P = R^-1 V C^-1, damped (core/optim/kfac_solve.py)
4. sends P to who holds parts of it                                                          -> one all-to-all
5. nu = min(1, sqrt(kl_clip / (lr^2 sum V . P))) over all layers, of all stages              -> one all-reduce
6. M <- momentum M + nu P;  W <- (1 - lr weight_decay) W - lr M

method "ekfac" replaces the product of eigenvalues by the mean square of the gradient in that basis, V's entry by entry;
bases go to all ranks with the message of 5, of experts that ranks have apart to those that have them, in one or two of
their own. Norms and what else has no factors gets AdamW at lr_others.

Each matrix of a stack (experts) is a layer: its home is one of the ranks that compute with it, and a step without a row
for it leaves its factors as they were.

The ranks of 1 to 4 are those of a pipeline's stage, and look at its layers alone; what a stage sees of another's
parameter (a tied head) goes there behind 1.

Factors that are not finite, or that no method inverts, leave a layer with those it had; `fallbacks` counts them.

Martens and Grosse 2015, arXiv:1503.05671 (K-FAC; section 6.3 damping, 6.4 the norm); Grosse and Martens 2016,
arXiv:1602.01407 (convolutions); Ba et al. 2017 (the clip of 5); George et al. 2018, arXiv:1806.03884 (EKFAC);
Eschenhagen et al. 2023, arXiv:2311.00636 (expand and reduce).
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from core.config import UserError
from core.kernels.adamw import adamw
from core.layout import Layout, Slice, tag
from core.mesh import axis_size
from core.optim.home import Message, Parts, Piece, Pool, balanced, held_by, sent_home
from core.optim.kfac_cut import Apart, OtherStages, apart, cut_of, dealt_out, mesh_of, parts_of_rows, tensor_ranks
from core.optim.kfac_layers import (
    Layer,
    Sharing,
    find_layers,
    one_product,
    packed_factor,
    packed_factor_size,
    unpacked_factor,
)
from core.optim.kfac_observer import Observer
from core.optim.kfac_solve import NotInverted, damped_inverses, eigenbasis, into_basis, times
from core.optim.roles import Role
from core.optim.sharded import Batch, Held, ShardedOptimizer, trained_by_name, wide_dtype
from core.optim.spec import (
    OptimConfig,
    OptimizerSpec,
    Part,
    check_moments,
    check_momentum,
    check_options,
    own_values,
)
from core.optim.spectra import packed_size

Fisher = Literal["sampled", "exact", "empirical"]
Method = Literal["inverse", "eigen", "ekfac"]
BASES = ("row_basis", "column_basis")
"""State tensors that EKFAC keeps on all ranks that compute with a layer."""
FACTORED: tuple[Role, ...] = ("matrix", "experts", "kernel", "outer", "head", "embedding")
"""Roles of what is taken for a layer where memory is foretold."""
HomeShapes = dict[str, tuple[int, str, tuple[int, ...]]]
"""State tensor -> the place of its layer among all, its name among those of the layer, and its shape."""
NOT_BY_ROWS = ("*positions*", "*position_embedding*", "*wpe*")
"""Modules that look up the same for all rows of a batch."""
FACTORS = ("row_lower", "column_lower")
"""State tensors of R and C, packed. Those of earlier checkpoints, row_factor and column_factor, have another order."""


class KFAC(ShardedOptimizer):
    """K-FAC for a model, by hooks on its modules.

    model          the model; or name -> parameter, as `core.parallel`'s masters, and `watch` is given the model
    lr             of the layers with factors; the others, by AdamW of `betas` and `eps`, have `lr_others`
    damping        l, added to the Fisher information
    factor_decay   of the running means of factors
    factor_every   steps from one look at the model to the next
    inverse_every  steps from one inversion to the next
    kl_clip        bound of lr^2 sum V . P, about twice the divergence of a step; None: none
    fisher         the targets that factors are made from: drawn by the model ("sampled"), all of them, weighted, by
                   a backward for each output ("exact"), or the true ones ("empirical"), which makes another matrix
    sharing        what positions of a row are: cases of their own ("expand"), or one by their mean ("reduce")
    method         "inverse", "eigen" (damping of the product) or "ekfac"
    max_dim        the longest side of a layer with a factor that is no diagonal
    weight_decay   decoupled; of matrices
    exclude        patterns of names of modules that get AdamW

    In a loop of one's own, with `loss.backward()` done as ever, and before `step()`:

        optimizer.observe(lambda: loss_of_drawn_targets(model(x)), items=len(x))

    Raises UserError for values out of range, for a model without a layer that has factors, and in `step` where the
    model was not observed, or has a stack of matrices of which none was seen in use (core/optim/kfac_stacks.py).
    """

    def __init__(
        self, model: nn.Module | Mapping[str, Tensor], lr: float = 0.03, momentum: float = 0.9, *,
        damping: float = 1e-3, factor_decay: float = 0.95, factor_every: int = 1, inverse_every: int = 10,
        kl_clip: float | None = 1e-3, fisher: Fisher = "sampled", sharing: Sharing = "expand",
        method: Method = "inverse", max_dim: int = 4096, lr_others: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95), eps: float = 1e-8, weight_decay: float = 0.0,
        exclude: tuple[str, ...] = NOT_BY_ROWS,
    ):  # fmt: skip
        options = {name: value for name, value in locals().items() if name not in ("self", "model", "__class__")}
        _check(**options)
        named = trained_by_name(model, "KFAC")
        self._know(named)
        self._layers: list[Layer] = []
        self._dealt: dict[str, Layout] = {}
        self._apart: list[Apart] = []
        self._shapes: dict[str, HomeShapes] = {}
        self._observer: Observer | None = None
        self._stages: OtherStages | None = None
        self._pool: Pool | None = None
        self.fallbacks = 0
        self._stage_fallbacks = self._fallbacks_apart = 0
        super().__init__([{"params": list(named.values()), "factored": False}], options)
        if isinstance(model, nn.Module):
            self.watch(model)

    # --- the model ----------------------------------------------------------------------------------------------------

    def watch(
        self, model: nn.Module, table: Mapping[str, Any] | None = None, stages: OtherStages | None = None
    ) -> None:
        """Find the layers of the model that computes with these parameters, and hook them; once, before the first step.

        table   name -> `core.placement.table.Placed`: how ranks share parameters in forwards
        stages  of a pipeline, of which this rank has one or some; None: it has all
        """
        options, self._stages = self.defaults, stages
        known = self._named if stages is None else {**self._named, **stages.copies}
        shapes = {name: self.place(p).layout.shape for name, p in known.items()}
        found = find_layers(model, known, shapes, options["max_dim"], options["exclude"])
        self._layers = [layer for layer in found if layer.weight in self._named]
        if not self._layers:
            raise UserError(
                f"kfac: {'the model' if stages is None else 'a stage of the model'} has no layer with factors (linear, "
                "convolution, embedding) whose parameters are trained and not excluded; use another --optim.name"
            )
        found = [*self._layers, *(layer for layer in found if layer.weight not in self._named)]
        rows = {layer.weight: None if table is None else table[layer.weight] for layer in found}
        cuts = [[cut_of(u, layer, known[layer.weight], rows[layer.weight]) for u in layer.uses] for layer in found]
        if options["sharing"] == "reduce" and any(c is not None and c.parts_rows for of in cuts for c in of):
            raise UserError("kfac: sharing=reduce with tensor parallelism: ranks hold parts of a row; use expand")
        meshes = [mesh_of(row, known[name]) for name, row in rows.items() if row is not None]
        alike = max((math.prod(axis_size(m, a) for a in tensor_ranks(m)) for m in meshes if m is not None), default=1)
        parts = max((parts_of_rows(m) for m in meshes if m is not None), default=1)
        if options["sharing"] == "reduce" and parts > 1:
            raise UserError("kfac: sharing=reduce with mesh.cp: ranks hold parts of a row; use expand")
        self._observer = Observer(found, cuts, options["sharing"], alike * parts, model)
        self._dealt = dealt_out(self._layers, rows)
        self._apart, self._shapes, self._pool = apart(self._layers, self._dealt), {}, None
        factored = {name for layer in self._layers for name in (layer.weight, layer.bias) if name is not None}
        (group,) = self.param_groups
        rest = [p for n, p in self._named.items() if n not in factored]
        own = {**group, "params": [p for n, p in self._named.items() if n in factored], "factored": True}
        others = {**group, "params": rest, "factored": False, "lr": group["lr_others"]}
        self.param_groups[:] = [own, others] if rest else [own]

    @property
    def due(self) -> bool:
        """Whether the next step needs a look at the model."""
        return self._num_steps() % self.defaults["factor_every"] == 0

    @contextmanager
    def recording(
        self, items: float, *, rows: int | None = None, factor: float | None = None, length: int | None = None
    ) -> Iterator[list[Tensor]]:
        """Surround a forward whose backward is somebody else's: a step's own, for the empirical Fisher information.

        Yields the outputs of its layers, to which gradients must come.

        items   that the loss is a mean over
        rows    of the batch; None: those of each layer's input
        factor  times a gradient, what it is of the loss of one item; None: `items`
        length  of a row's sequence, which tensor parallelism may fill up
        """
        if not isinstance(self._observer, Observer):
            raise UserError("kfac: no model is watched; give KFAC the model, or call its watch")
        with self._observer.recording(items, rows, items if factor is None else factor, length) as outputs:
            yield outputs

    def observe(
        self, loss: Callable[[], Tensor | Sequence[Tensor]], items: float, *, rows: int | None = None,
        scale: float = 1.0, length: int | None = None, whole: float | None = None,
    ) -> None:  # fmt: skip
        """Look at the model: forward, and a backward that leaves no gradient in any parameter.

        loss   of a microbatch, the mean over its `items`, of targets that the model draws; or several whose outer
               products add up, as `core.optim.prediction.exact_fisher` has them. No items: nothing is seen
        rows   of the microbatch; None: those of each layer's input
        scale  of the loss, where it is scaled (fp16)
        length  of a row's sequence, which tensor parallelism may fill up
        whole  items of all microbatches on all ranks, where ranks send each other rows (experts); None: they do not
        """
        if self._observer is None:
            raise UserError("kfac: no model is watched; give KFAC the model, or call its watch")
        share = 1.0 if whole is None else items / whole  # gradients of rows of all ranks are then of one loss
        factor = (items if whole is None else whole) / scale
        with torch.enable_grad(), self._observer.recording(items, rows, factor, length) as outputs:
            made = loss()
        if not outputs:
            return
        values = [made] if isinstance(made, Tensor) else list(made)
        for index, value in enumerate(values):
            more = index + 1 < len(values)
            torch.autograd.grad(value * (scale * share), outputs, retain_graph=more, allow_unused=True)

    def forget(self) -> None:
        """Drop what was observed since the last step."""
        if self._observer is not None:
            self._observer.clear()

    @torch.no_grad()
    def step(self, closure=None, only=None):  # pyright: ignore[reportIncompatibleMethodOverride]
        """One step.

        closure  makes gradients and returns the loss, which is then returned; with fisher="empirical" the model is
                 observed meanwhile, its loss taken for a mean over the rows of its input
        """
        if closure is None or self.defaults["fisher"] != "empirical" or not self.due or self._observer is None:
            return super().step(closure, only)
        observer = self._observer

        def observed() -> Any:
            with observer.recording(0.0, None, 1.0):
                loss = closure()
            observer.items = float(observer.rows)
            for seen in observer.seen.values():
                seen.gradients *= observer.rows**2
            return loss

        return super().step(observed, only)

    # --- state --------------------------------------------------------------------------------------------------------

    @property
    def beside_bytes(self) -> int:
        """Sums of the layers that this rank sees, and once more as a message; EKFAC's bases; the widest factor."""
        if self._observer is None:
            return 0
        own = [layer for index, layer in enumerate(self._layers) if self._computes(index)]
        sums = sum(len(layer.uses) * sum(map(packed_factor_size, layer.factor_shapes())) for layer in own)
        turned = [layer for layer in own if self._is_rescaled(layer)]
        sums += sum(math.prod(layer.shape) for layer in turned)
        bases = sum(n**2 for layer in turned for n in layer.shape)
        widest = max(math.prod(factor) for layer in own for factor in layer.factor_shapes())
        width = wide_dtype(next(iter(self._named.values())).dtype).itemsize
        return width * (2 * sums + bases + widest)

    def take_over(self, found: Mapping[Tensor, Tensor]) -> None:
        super().take_over(found)
        self._know({name: found.get(p, p) for name, p in self._named.items()})
        self._pool = None

    def _know(self, named: dict[str, Tensor]) -> None:
        self._named, self._names = named, {parameter: name for name, parameter in named.items()}

    def _new_state(self, parameter: Tensor, options: dict[str, Any]) -> dict[str, Any]:
        if not options["factored"]:
            return {"exp_avg": self._zeros(parameter), "exp_avg_sq": self._zeros(parameter)}
        made: dict[str, Any] = {"momentum_buffer": self._zeros(parameter)} if options["momentum"] else {}
        for key in self._home_shapes(parameter):  # of experts those of each
            layout = self._lies(parameter, key)
            device = parameter.device
            dtype = wide_dtype(parameter.dtype)
            made[key] = tag(torch.zeros(layout.local_shape(), dtype=dtype, device=device), layout)
        return made

    def _home_shapes(self, parameter: Tensor) -> HomeShapes:
        """State tensors that lie at a layer's home, or on several ranks alike, of a parameter that is its weight."""
        name = self._names[parameter]
        if name not in self._shapes:
            own = [(index, layer) for index, layer in enumerate(self._layers) if layer.weight == name]
            self._shapes[name] = {
                layer.key(key): (index, key, shape)
                for index, layer in own
                for key, shape in self._shapes_of(layer).items()
            }
        return self._shapes[name]

    def _shapes_of(self, layer: Layer) -> dict[str, tuple[int, ...]]:
        """The state tensors of a layer that lie at its home, or on several ranks alike, and their shapes."""
        r, c = layer.factor_shapes()
        shapes: dict[str, tuple[int, ...]] = {"updates": (1,)}
        shapes |= {key: (packed_factor_size(shape),) for key, shape in zip(FACTORS, (r, c))}
        if self.defaults["method"] == "inverse":
            return shapes | {"row_inverse": r, "column_inverse": c}
        shapes |= {"row_basis": _basis_shape(r), "column_basis": _basis_shape(c)}
        if self._is_rescaled(layer):
            return shapes | {"scales": layer.shape}
        return shapes | {"row_values": r[:1], "column_values": c[:1]}

    def _state_of(self, layer: Layer) -> dict[str, Tensor]:
        """Its state tensors by the names of `_shapes_of`; none before its first step."""
        state = self.state.get(self._named[layer.weight], {})
        return {key: state[layer.key(key)] for key in self._shapes_of(layer)} if state else {}

    def _is_rescaled(self, layer: Layer) -> bool:
        """Return whether EKFAC's scales are kept of it: tied weights, embeddings and long sides keep the product."""
        return self.defaults["method"] == "ekfac" and len(layer.uses) == 1 and not any(layer.diagonal)

    def _lies(self, parameter: Tensor, key: str) -> Layout:
        found = self._home_shapes(parameter).get(key) if key not in ("step", "momentum_buffer") else None
        if found is None:
            return super()._lies(parameter, key)
        index, name, shape = found
        layer = self._layers[index]
        if name in BASES and self._is_rescaled(layer):
            return Layout(shape, absent=not self._computes(index))
        pool = self._homes()
        home = pool.home_of(self._key(layer))
        return Layout(shape, absent=home is not None and home != pool.rank)

    def _computes(self, index: int) -> bool:
        """Return whether this rank computes with a layer: with an expert of its own, or one that all have."""
        return self._layers[index].weight not in self._dealt or any(index in own.layers for own in self._apart)

    def _homes(self) -> Pool:
        """The homes of layers: a weight's and its bias's are one, dealt out by the cost of inversions and products."""
        if self._pool is None:
            keys = [(name, layer.expert) for layer in self._layers for name in layer.parameters]
            pool = Pool({key: self._layout_of(*key) for key in keys}, [0.0] * len(keys))
            homes = self._dealt_homes(pool)
            pool.homes = [home for layer, home in zip(self._layers, homes) for _ in layer.parameters]
            self._pool = pool
        return self._pool

    def _layout_of(self, name: str, expert: int | None) -> Layout | Slice:
        """Where the part of a parameter that is one layer's lies in itself."""
        layout = self.place(self._named[name]).layout
        return layout if expert is None else Slice(layout, expert)

    def _dealt_homes(self, pool: Pool) -> list[int]:
        """The home of each layer; of an expert that not all ranks have, one of those that have it."""
        everyone = tuple(range(pool.num_ranks))
        candidates: dict[tuple[int, ...], list[int]] = {}
        ranks = everyone if pool.group is None else dist.get_process_group_ranks(pool.group)
        held = {name: [own for (own,) in held_by([layout], ranks)] for name, layout in self._dealt.items()}
        for index, layer in enumerate(self._layers):
            those = everyone
            if layer.weight in held:
                those = tuple(rank for rank, (own, *_) in enumerate(held[layer.weight]) if _is_in(layer.expert, own))
            candidates.setdefault(those, []).append(index)
        loads, homes = [0.0] * pool.num_ranks, [0] * len(self._layers)
        for those, indices in sorted(candidates.items(), key=lambda pair: len(pair[0])):
            costs = [_cost(self._layers[index]) for index in indices]
            for index, cost, place in zip(indices, costs, balanced(costs, len(those), [loads[r] for r in those])):
                homes[index] = those[place]
                loads[homes[index]] += cost
        return homes

    def _num_steps(self) -> int:
        weights = (self._named[layer.weight] for layer in self._layers)
        return max((int(self.state[w]["step"]) for w in weights if self.state.get(w)), default=0)

    # --- a step -------------------------------------------------------------------------------------------------------

    def _update(self, batches: list[Batch]) -> None:
        if self._observer is None:
            raise UserError("kfac: no model is watched; give KFAC the model, or call its watch")
        held = {id(h.parameter): (h, batch) for batch in batches if batch.options["factored"] for h in batch.held}
        step = self._num_steps()
        if (step - 1) % self.defaults["factor_every"] == 0:
            self._observer.require_stacks()
            if not self._observer.seen:
                raise UserError(
                    f"kfac: step {step} needs a look at the model, and it was not observed: the closure is missing; "
                    "call observe before the step, give fit a predict, or use fisher=empirical with a closure"
                )
            self._take_factors()
        if held:
            self._step_layers(held, inverts=(step - 1) % self.defaults["inverse_every"] == 0)
        self._step_others([batch for batch in batches if not batch.options["factored"]])

    def _take_factors(self) -> None:
        """All-reduce what all ranks have seen; homes take it into their running means."""
        pool, observer = self._homes(), self._observer
        assert observer is not None
        together = [index for index, layer in enumerate(observer.layers) if layer.weight not in self._dealt]
        message = self._summed(together, pool.group if pool.num_ranks > 1 else None)
        items = message[-1].clamp(min=1)
        of_layers = self._by_layer(message, together)
        if self._stages is not None:
            for index, sums in sorted(zip(together, of_layers), key=lambda pair: observer.layers[pair[0]].weight):
                self._stages.add(observer.layers[index].weight, sums)
        failed = self._take_means(together, of_layers, items)
        if self._stages is None:
            self.fallbacks += failed
        elif pool.rank == 0:
            self._stage_fallbacks = failed  # the last message adds up those of all stages
        for own in self._apart:
            sums = self._by_layer(self._summed(own.layers, own.sums), own.layers)
            at_home = [i for i in own.layers if pool.home_of(self._key(self._layers[i])) in (None, pool.rank)]
            taken = dict(zip(own.layers, sums))
            self._fallbacks_apart += self._take_means(at_home, [taken[i] for i in at_home], items)
        observer.clear()

    def _summed(self, indices: Sequence[int], group: ProcessGroup | None) -> Tensor:
        """What the ranks of a group have seen of some layers, and the number of items."""
        observer, pool = self._observer, self._homes()
        assert observer is not None
        dtype = wide_dtype(next(iter(self._named.values())).dtype)
        device = pool.device if pool.num_ranks > 1 else self._named[self._layers[0].weight].device
        message = observer.message(device, dtype, indices)
        if group is not None:
            dist.all_reduce(message, group=group)
        return message

    def _by_layer(self, message: Tensor, indices: Sequence[int]) -> list[Tensor]:
        observer = self._observer
        assert observer is not None
        return list(message[:-1].split([sum(map(sum, of_layer)) for of_layer in observer.sizes(indices)]))

    def _take_means(self, indices: Sequence[int], of_layers: Sequence[Tensor], items: Tensor) -> int:
        """Take sums into the running means of those layers that are this rank's.  Returns how many were not finite."""
        observer, failed = self._observer, 0
        assert observer is not None
        for index, sums, of_layer in zip(indices, of_layers, observer.sizes(indices), strict=True):
            layer = observer.layers[index]
            if layer.weight not in self._named:
                continue  # another stage's
            pairs, squares, was_seen = [], None, False
            for use, of_use, size in zip(layer.uses, sums.split(list(map(sum, of_layer))), of_layer):
                inputs, cases, gradients, own_squares = of_use.split(size)
                was_seen |= bool(cases)
                pair = inputs / cases.clamp(min=1), gradients / items
                pairs.append(pair if use.inputs_first else pair[::-1])
                squares = own_squares / items if own_squares.numel() else None
            failed += was_seen and not self._average(layer, pairs, squares)
        return failed

    def _average(self, layer: Layer, pairs: list[tuple[Tensor, Tensor]], squares: Tensor | None) -> bool:
        """Running means of one layer's factors, at its home.  Returns whether they were finite, alike on all ranks."""
        if not all(bool(f.isfinite().all()) for pair in pairs for f in pair):
            return False
        weight = self._named[layer.weight]
        self._ensure_state(weight, self._options_of(weight))
        state = self._state_of(layer)
        if not state["updates"].numel():
            return True
        r_shape, c_shape = layer.factor_shapes()
        if len(pairs) > 1:
            r, c = one_product([(unpacked_factor(r, r_shape), unpacked_factor(c, c_shape)) for r, c in pairs])
            pairs = [(packed_factor(r), packed_factor(c))]
        state["updates"] += 1
        decay = min(self.defaults["factor_decay"], 1 - 1 / float(state["updates"]))
        for key, new in zip(FACTORS, pairs[0]):
            state[key].mul_(decay).add_(new.to(state[key].device), alpha=1 - decay)
        if squares is not None:
            decay = self.defaults["factor_decay"]
            state["scales"].mul_(decay).add_(squares.view(layer.shape).to(weight.device), alpha=1 - decay)
        return True

    def _step_layers(self, held: dict[int, tuple[Held, Batch]], inverts: bool) -> None:
        pool = self._homes()
        of = {self._names[h.parameter]: (h, batch) for h, batch in held.values()}
        keys = [(name, layer.expert) for layer in self._layers for name in layer.parameters if name in of]
        present = {pool.index[key]: key for key in keys}
        dtype = wide_dtype(next(iter(held.values()))[0].value.dtype)
        grads = {index: self._own_part(key, of[key[0]][0].grad) for index, key in present.items()}
        if pool.num_ranks > 1:
            there, back = ([p for p in way if p.matrix in present] for way in pool.ways())
            parts = Parts(sent_home(pool, there, grads, dtype), grads)
            wholes = {
                index: parts.whole(index, grads[index], pool.layouts[index].shape, dtype) for index in parts.matrices()
            }
        else:
            there, back = [], []
            wholes = {index: grad.to(dtype) for index, grad in grads.items()}
        updates: dict[int, Tensor] = {}
        sums = [0.0, float(self._fallbacks_apart)]
        self._fallbacks_apart = 0
        for layer in self._layers:
            weight = pool.index[self._key(layer)]
            if weight not in wholes:
                continue
            bias = None if layer.bias is None else pool.index[layer.bias, layer.expert]
            product, failed = self._layer_update(layer, wholes, weight, bias, updates, inverts)
            sums = [sums[0] + product, sums[1] + failed]
        came = [*updates.items()] if pool.num_ranks == 1 else _spread(pool, back, updates, dtype)
        shrink = self._last_message(pool, sums, inverts, next(iter(held.values()))[1].options)
        whole_updates: dict[str, Tensor] = {}
        for index, update in came:
            (name, expert), h = present[index], of[present[index][0]][0]
            update = update.to(h.value.device)
            if expert is None:
                whole_updates[name] = update.view(h.value.shape)
                continue
            if name not in whole_updates:
                whole_updates[name] = torch.zeros_like(h.value, dtype=dtype)
            own = self._own_part((name, expert), whole_updates[name])
            own.copy_(update.view(own.shape))
        for name, update in whole_updates.items():
            h, batch = of[name]
            self._move(h, update * shrink, batch.options)

    def _key(self, layer: Layer) -> tuple[str, int | None]:
        """What its weight is called among the matrices that go home."""
        return layer.weight, layer.expert

    def _own_part(self, key: tuple[str, int | None], value: Tensor) -> Tensor:
        """Of what this rank has of a parameter, or of a gradient of it, what is one layer's."""
        pool = self._homes()
        where = pool.layouts[pool.index[key]]
        if isinstance(where, Layout):
            return value
        return value[:0] if where.place is None else value[where.place]

    def _layer_update(
        self, layer: Layer, wholes: dict[int, Tensor], weight: int, bias: int | None, updates: dict[int, Tensor],
        inverts: bool,
    ) -> tuple[float, float]:  # fmt: skip
        """At home: P of one layer, put into `updates`.  Returns V . P, and whether an inversion failed."""
        parameter = self._named[layer.weight]
        state, whole = self._state_of(layer), wholes[weight].to(parameter.device)
        own_bias = None
        if bias is not None:
            own_bias = wholes[bias].to(whole) if bias in wholes else whole.new_zeros(self._bias_shape(layer))
        gradient = layer.joined(whole, own_bias)
        failed = 0.0
        if inverts and float(state["updates"]) > 0:
            try:
                self._invert(layer, state)
            except NotInverted:
                failed = 1.0
        if not self._is_inverted(state):
            update = torch.zeros_like(gradient)
        elif self.defaults["method"] == "inverse":
            update = times(state["row_inverse"], gradient, state["column_inverse"])
        else:
            update = self._in_basis(state, gradient)
        if not bool(update.isfinite().all()):
            update, failed = torch.zeros_like(gradient), 1.0
        updates[weight], of_bias = layer.parted(update, tuple(whole.shape))
        if bias is not None and of_bias is not None and bias in wholes:
            updates[bias] = of_bias
        return float((gradient * update).sum()), failed

    def _bias_shape(self, layer: Layer) -> tuple[int, ...]:
        """The whole shape of a layer's bias."""
        assert layer.bias is not None
        return self._layout_of(layer.bias, layer.expert).shape

    def _is_inverted(self, state: dict[str, Any]) -> bool:
        key = "row_inverse" if self.defaults["method"] == "inverse" else "row_basis"
        if key == "row_basis" and not state[key].numel():
            key = "scales" if "scales" in state else "row_values"
        return bool(state[key].any())

    def _invert(self, layer: Layer, state: dict[str, Any]) -> None:
        r, c = (unpacked_factor(state[key], shape) for key, shape in zip(FACTORS, layer.factor_shapes()))
        if self.defaults["method"] == "inverse":
            inverses = damped_inverses(r, c, self.defaults["damping"])
            for key, inverse in zip(("row_inverse", "column_inverse"), inverses):
                state[key].copy_(inverse)
            return
        (row_values, row_basis), (column_values, column_basis) = eigenbasis(r), eigenbasis(c)
        state["row_basis"].copy_(row_basis)
        state["column_basis"].copy_(column_basis)
        if self._is_rescaled(layer):
            state["scales"].copy_(row_values[:, None] * column_values)
        else:
            state["row_values"].copy_(row_values)
            state["column_values"].copy_(column_values)

    def _in_basis(self, state: dict[str, Any], gradient: Tensor) -> Tensor:
        scales = state["scales"] if "scales" in state else state["row_values"][:, None] * state["column_values"]
        turned = into_basis(gradient, state["row_basis"], state["column_basis"])
        turned /= scales + self.defaults["damping"]
        return into_basis(turned, state["row_basis"], state["column_basis"], back=True)

    def _last_message(self, pool: Pool, sums: list[float], inverts: bool, options: dict[str, Any]) -> float:
        """The sums of V . P and of failures over all homes; EKFAC's bases go along.  Returns nu."""
        rescaled = [i for i, layer in enumerate(self._layers) if inverts and self._is_rescaled(layer)]
        together = [i for i in rescaled if self._layers[i].weight not in self._dealt]
        device, dtype = pool.device, wide_dtype(next(iter(self._named.values())).dtype)
        first, start = torch.tensor(sums, dtype=dtype, device=device), 2
        if self._stages is not None:
            first[1] += self._stage_fallbacks
            self._stage_fallbacks = 0
            dist.all_reduce(first)
            sums, first, start = first.tolist(), first[:0], 0
        if pool.num_ranks > 1 and (together or (options["kl_clip"] is not None and self._stages is None)):
            message = torch.cat([first, *self._own_bases(pool, together)])
            dist.all_reduce(message, group=pool.group)
            sums = message[:start].tolist() or sums
            self._take_bases(together, message[start:])
        for own in self._apart:
            mine = [index for index in own.layers if index in rescaled]
            groups = [group for group in (own.sums, own.alike) if group is not None]
            if mine and groups:
                message = torch.cat(self._own_bases(pool, mine))
                for group in groups:
                    dist.all_reduce(message, group=group)
                self._take_bases(mine, message)
        self._show_bases()
        self.fallbacks += int(sums[1])
        clip, squared = options["kl_clip"], options["lr"] ** 2 * sums[0]
        return 1.0 if clip is None or squared <= clip else math.sqrt(clip / squared)

    def _own_bases(self, pool: Pool, indices: Sequence[int]) -> list[Tensor]:
        """The bases of layers whose home this is, and zeros of others."""
        states = [(self._state_of(self._layers[i]), pool.home_of(self._key(self._layers[i]))) for i in indices]
        return [s[key].flatten().to(pool.device) * (home == pool.rank) for s, home in states for key in BASES]

    def _take_bases(self, indices: Sequence[int], message: Tensor) -> None:
        bases = [self._state_of(self._layers[index])[key] for index in indices for key in BASES]
        for basis, came in zip(bases, message.split([basis.numel() for basis in bases]), strict=True):
            basis.copy_(came.view(basis.shape))

    def _show_bases(self) -> None:
        """Have the squares of gradients summed up in the bases that there are."""
        assert self._observer is not None
        for index, layer in enumerate(self._layers):
            state = self._state_of(layer) if self._is_rescaled(layer) else {}
            if state and bool(state["row_basis"].any()):
                self._observer.bases[index] = state["row_basis"], state["column_basis"]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load as torch's.  Raises UserError for a state dict whose factors lie in an earlier order."""
        if any(key.partition(".")[0] == "row_factor" for state in state_dict["state"].values() for key in state):
            raise UserError(
                "kfac: the state dict has row_factor, which lies in the order of an earlier version, and this one has "
                f"{FACTORS[0]}; load it with the version that saved it, or begin with a new optimizer"
            )
        super().load_state_dict(state_dict)
        self._show_bases()

    def restore(self, parameter: Tensor, tensors: dict[str, Tensor]) -> None:
        super().restore(parameter, tensors)
        self._show_bases()

    def _move(self, h: Held, update: Tensor, options: dict[str, Any]) -> None:
        if options["momentum"]:
            update = h.own("momentum_buffer").mul_(options["momentum"]).add_(update)
        decays = options["weight_decay"] and len(h.place.layout.shape) > 1
        if decays:
            h.value.mul_(1 - options["lr"] * options["weight_decay"])
        h.value.add_(update, alpha=-options["lr"])

    def _step_others(self, batches: list[Batch]) -> None:
        for batch in batches:
            held = [h for h in batch.held if h.value.numel()]
            for decays in (True, False):
                some = [h for h in held if (len(h.place.layout.shape) > 1) is decays]
                options = {name: batch.options[name] for name in ("lr", "betas", "eps")}
                decay = batch.options["weight_decay"] if decays else 0.0
                moments = ([h.own(name) for h in some] for name in ("exp_avg", "exp_avg_sq"))
                values, grads = [h.value for h in some], [h.grad for h in some]
                adamw(values, grads, *moments, step=batch.step, weight_decay=decay, maximize=False, **options)


def _spread(pool: Pool, back: list[Piece], updates: dict[int, Tensor], dtype: torch.dtype) -> list[tuple[int, Tensor]]:
    """Bring every rank what it holds of each update: (index, that)."""
    message = Message(pool, back, dtype)
    for piece in message.going:
        message.put(piece, piece.of(updates[piece.matrix]))
    message.send()
    own = [(piece.matrix, piece.of(updates[piece.matrix])) for piece in message.own]
    return own + [(piece.matrix, update) for piece, update in message.wait()]


def _cost(layer: Layer) -> float:
    """Multiplications of a layer's inversions and products at its home."""
    m, n = layer.shape
    return sum(float(size**3) for size, short in zip(layer.shape, layer.diagonal) if not short) + float(m * n * (m + n))


def _is_in(expert: int | None, stretches: tuple[range, ...]) -> bool:
    return any(expert in held for held in stretches)


def _basis_shape(factor: tuple[int, ...]) -> tuple[int, ...]:
    return factor if len(factor) == 2 else (0,)


def _check(
    *, lr: float, momentum: float, damping: float, factor_decay: float, factor_every: int, inverse_every: int,
    kl_clip: float | None, fisher: str, sharing: str, method: str, max_dim: int, lr_others: float,
    betas: tuple[float, ...], eps: float, weight_decay: float, exclude: tuple[str, ...],
) -> None:  # fmt: skip
    check_momentum("kfac", lr, momentum)
    check_moments("kfac", lr_others, betas, eps, weight_decay)
    check_options(
        "kfac",
        lr_others=(lr_others, lr_others >= 0, "a number >= 0"),
        damping=(damping, damping >= 0, "a number >= 0"),
        factor_decay=(factor_decay, 0 <= factor_decay < 1, "a number from 0 to below 1"),
        factor_every=(factor_every, factor_every >= 1, "a number of steps, at least 1"),
        inverse_every=(inverse_every, inverse_every >= 1, "a number of steps, at least 1"),
        kl_clip=(kl_clip, kl_clip is None or kl_clip > 0, "a number > 0, or None"),
        fisher=(fisher, fisher in get_args(Fisher), "sampled, exact or empirical"),
        sharing=(sharing, sharing in get_args(Sharing), "expand or reduce"),
        method=(method, method in get_args(Method), "inverse, eigen or ekfac"),
        max_dim=(max_dim, max_dim >= 1, "a number >= 1"),
        exclude=(exclude, isinstance(exclude, tuple | list), "patterns of names"),
    )


@dataclass(frozen=True)
class KfacConfig(OptimConfig):
    name: str = "kfac"
    lr: float = 0.03
    """peak learning rate of the layers with factors"""
    clip_norm: float | None = None
    """global gradient norm beyond which gradients are scaled down; None: never, for `kl_clip` bounds the step"""
    momentum: float = 0.9
    damping: float = 1e-3
    """what is added to the Fisher information"""
    factor_decay: float = 0.95
    """of the running means of factors"""
    factor_every: int = 1
    """steps from one look at the model to the next"""
    inverse_every: int = 10
    """steps from one inversion to the next"""
    kl_clip: float | None = 1e-3
    """bound of the rate squared times the natural gradient's square; None: none"""
    fisher: Fisher = "sampled"
    """targets that factors are made from: sampled by the model, exact (all, weighted), empirical (the true ones)"""
    sharing: Sharing = "expand"
    """positions of a row: expand (cases of their own) or reduce (one, by their mean)"""
    method: Method = "inverse"
    """inverse, eigen (damping of the product) or ekfac (scales measured in the eigenbasis)"""
    max_dim: int = 4096
    """the longest side of a layer with a factor that is no diagonal"""
    lr_others: float = 1e-3
    """peak rate of what has no factors, by AdamW"""
    betas: tuple[float, float] = (0.9, 0.95)
    """of what AdamW updates"""
    eps: float = 1e-8
    """of what AdamW updates"""
    weight_decay: float = 0.0
    """of matrices; vectors (norms, biases) are never decayed"""
    exclude: tuple[str, ...] = NOT_BY_ROWS
    """patterns of names of modules that AdamW updates"""

    def __post_init__(self) -> None:
        super().__post_init__()
        _check(lr=self.lr, **own_values(self))


def _state_bytes(config: KfacConfig, part: Part) -> int:
    """Of a matrix with a bias, of tables as if they were a head, too; of others two moments, which is no less."""
    if part.role not in FACTORED:
        return 2 * part.num_bytes
    count, sides = _matrices(part)
    dense_elements = sum(n if n > config.max_dim else n * n for n in sides)
    more = {"inverse": 0, "eigen": sum(sides), "ekfac": math.prod(sides)}[config.method]
    at_home = count * part.wide_bytes * (_packed_elements(config, sides) + dense_elements + more)
    return (part.num_bytes if config.momentum else 0) + -(-at_home // part.ranks)


def _beside_bytes(config: KfacConfig, part: Part) -> int:
    """See `KFAC.beside_bytes`, of which the widest factor is left out; of a stack the matrices that the part has."""
    if part.role not in FACTORED:
        return 0
    count, sides = _matrices(part)
    turned = config.method == "ekfac" and max(sides) <= config.max_dim
    sums = _packed_elements(config, sides) + turned * math.prod(sides)
    return count * part.wide_bytes * (2 * sums + turned * sum(n * n for n in sides))


def _matrices(part: Part) -> tuple[int, tuple[int, int]]:
    """How many a parameter is, and their sides with a bias."""
    count, (rows, *columns) = (part.whole[0], part.whole[1:]) if part.role == "experts" else (1, part.whole)
    return count, (rows, math.prod(columns) + 1)


def _packed_elements(config: KfacConfig, sides: tuple[int, int]) -> int:
    return sum(n if n > config.max_dim else packed_size(n) for n in sides)


def _build(config: KfacConfig, masters: Mapping[str, Tensor]) -> KFAC:
    return KFAC(masters, lr=config.lr, **own_values(config))


SPEC = OptimizerSpec(
    KfacConfig, _state_bytes, _build, ("momentum", "method", "max_dim"), beside_bytes=_beside_bytes, looks=True
)
