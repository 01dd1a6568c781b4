"""K-FAC: natural gradients by Kronecker factors, on one rank and on any that share parameters and data.

Of a layer with the matrix V[m, n] and the factors R, C of its Fisher information (core/optim/kfac_layers.py), a step

1. sums a a^T and g g^T over the layer's inputs and the gradients of its outputs, for targets that the model draws
   (`fisher`), over all microbatches; all-reduces the sums of all layers                     -> one all-reduce
2. brings gradients to each layer's home rank (core/optim/home.py)                           -> one all-to-all
3. there R <- d R + (1 - d) R_new, d = min(factor_decay, 1 - 1/k) at the k-th time; now and then inverts them; and
   P = R^-1 V C^-1, damped (core/optim/kfac_solve.py)
4. sends P to who holds parts of it                                                          -> one all-to-all
5. nu = min(1, sqrt(kl_clip / (lr^2 sum V . P))) over all layers, of all stages              -> one all-reduce
6. M <- momentum M + nu P;  W <- (1 - lr weight_decay) W - lr M

method "ekfac" replaces the product of eigenvalues by the mean square of the gradient in that basis, V's entry by entry;
bases go to all ranks with the message of 5. Norms and what else has no factors gets AdamW at lr_others.

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
from torch.distributed.device_mesh import DeviceMesh

from core.config import UserError
from core.kernels.adamw import adamw
from core.layout import Layout, layout_of, tag
from core.mesh import axis_size, tensor_names
from core.optim.home import Message, Parts, Piece, Pool, balanced, sent_home
from core.optim.kfac_cut import Cut, GridCut, OtherStages
from core.optim.kfac_layers import (
    Layer,
    Sharing,
    Use,
    find_layers,
    one_product,
    packed_factor,
    packed_factor_size,
    unpacked_factor,
)
from core.optim.kfac_observer import Observer
from core.optim.kfac_solve import NotInverted, damped_inverses, eigenbasis, into_basis, times
from core.optim.sharded import Batch, Held, ShardedOptimizer, wide_dtype
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

    Raises UserError for values out of range, for a model without a layer that has factors, for stacks of matrices
    (experts) that are not excluded, and in `step` where the model was not observed.
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
        parameters = model.named_parameters() if isinstance(model, nn.Module) else model.items()
        named: dict[str, Tensor] = {name: p for name, p in parameters if p.requires_grad}
        self._named = named
        self._layers: list[Layer] = []
        self._observer: Observer | None = None
        self._stages: OtherStages | None = None
        self._pool: Pool | None = None
        self.fallbacks = 0
        self._stage_fallbacks = 0
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
        cuts = [[_cut_of(use, layer, known, table) for use in layer.uses] for layer in found]
        cut = any(isinstance(c, Cut) and c.copies > 1 for of_layer in cuts for c in of_layer)
        if cut and options["sharing"] == "reduce":
            raise UserError("kfac: sharing=reduce with tensor parallelism: ranks hold parts of a row; use expand")
        self._observer = Observer(found, cuts, options["sharing"])
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
        scale: float = 1.0, length: int | None = None,
    ) -> None:  # fmt: skip
        """Look at the model: forward, and a backward that leaves no gradient in any parameter.

        loss   of a microbatch, the mean over its `items`, of targets that the model draws; or several whose outer
               products add up, as `core.optim.prediction.exact_fisher` has them. No items: nothing is seen
        rows   of the microbatch; None: those of each layer's input
        scale  of the loss, where it is scaled (fp16)
        length  of a row's sequence, which tensor parallelism may fill up
        """
        if self._observer is None:
            raise UserError("kfac: no model is watched; give KFAC the model, or call its watch")
        with torch.enable_grad(), self._observer.recording(items, rows, items / scale, length) as outputs:
            made = loss()
        values = [made] if isinstance(made, Tensor) else list(made)
        for index, value in enumerate(values):
            more = index + 1 < len(values)
            torch.autograd.grad(value * scale, outputs, retain_graph=more, allow_unused=True)

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
            with observer.recording(0.0, None, 1.0) as outputs:
                loss = closure()
            rows = max((len(y) for y in outputs), default=0)
            observer.items = float(rows)
            for seen in observer.seen.values():
                seen.gradients *= rows**2
            return loss

        return super().step(observed, only)

    # --- state --------------------------------------------------------------------------------------------------------

    def _new_state(self, parameter: Tensor, options: dict[str, Any]) -> dict[str, Any]:
        if not options["factored"]:
            return {"exp_avg": self._zeros(parameter), "exp_avg_sq": self._zeros(parameter)}
        made: dict[str, Any] = {"momentum_buffer": self._zeros(parameter)} if options["momentum"] else {}
        for key in self._home_shapes(parameter):
            layout = self._lies(parameter, key)
            device = parameter.device
            dtype = wide_dtype(parameter.dtype)
            made[key] = tag(torch.zeros(layout.local_shape(), dtype=dtype, device=device), layout)
        return made

    def _home_shapes(self, parameter: Tensor) -> dict[str, tuple[int, ...]]:
        """State tensors that lie at a layer's home, or are alike on all ranks, and their shapes; of its weight."""
        layer = next((layer for layer in self._layers if self._named[layer.weight] is parameter), None)
        if layer is None:
            return {}
        r, c = layer.factor_shapes()
        shapes: dict[str, tuple[int, ...]] = {"updates": (1,)}
        shapes |= {key: (packed_factor_size(shape),) for key, shape in zip(FACTORS, (r, c))}
        if self.defaults["method"] == "inverse":
            return shapes | {"row_inverse": r, "column_inverse": c}
        shapes |= {"row_basis": _basis_shape(r), "column_basis": _basis_shape(c)}
        if self._is_rescaled(layer):
            return shapes | {"scales": layer.shape}
        return shapes | {"row_values": r[:1], "column_values": c[:1]}

    def _is_rescaled(self, layer: Layer) -> bool:
        """Return whether EKFAC's scales are kept of it: tied weights, embeddings and long sides keep the product."""
        return self.defaults["method"] == "ekfac" and len(layer.uses) == 1 and not any(layer.diagonal)

    def _lies(self, parameter: Tensor, key: str) -> Layout:
        shapes = self._home_shapes(parameter) if key not in ("step", "momentum_buffer") else {}
        if key not in shapes:
            return super()._lies(parameter, key)
        if key in ("row_basis", "column_basis") and "scales" in shapes:
            return Layout(shapes[key])  # on every rank
        pool = self._homes()
        home = pool.home_of(parameter)
        return Layout(shapes[key], absent=home is not None and home != pool.rank)

    def _homes(self) -> Pool:
        """The homes of layers: a weight's and its bias's are one, dealt out by the cost of inversions and products."""
        if self._pool is None:
            parameters = [self._named[n] for layer in self._layers for n in (layer.weight, layer.bias) if n is not None]
            pool = Pool({p: self.place(p) for p in parameters}, [0.0] * len(parameters))
            homes = balanced([_cost(layer) for layer in self._layers], pool.num_ranks)
            pool.homes = [h for layer, h in zip(self._layers, homes) for _ in range(1 + (layer.bias is not None))]
            self._pool = pool
        return self._pool

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
        dtype = wide_dtype(next(iter(self._named.values())).dtype)
        device = pool.device if pool.num_ranks > 1 else self._named[self._layers[0].weight].device
        message = observer.message(device, dtype)
        if pool.num_ranks > 1:
            dist.all_reduce(message, group=pool.group)
        items, sizes = message[-1].clamp(min=1), iter(observer.sizes())
        of_uses = [[next(sizes) for _ in layer.uses] for layer in observer.layers]
        of_layers = message[:-1].split([sum(map(sum, of_layer)) for of_layer in of_uses])
        if self._stages is not None:
            for layer, sums in sorted(zip(observer.layers, of_layers), key=lambda pair: pair[0].weight):
                self._stages.add(layer.weight, sums)
        fine = []
        for layer, sums, of_layer in zip(self._layers, of_layers, of_uses):
            pairs, squares, was_seen = [], None, False
            for use, of_use, size in zip(layer.uses, sums.split(list(map(sum, of_layer))), of_layer):
                inputs, cases, gradients, own_squares = of_use.split(size)
                was_seen |= bool(cases)
                pair = inputs / cases.clamp(min=1), gradients / items
                pairs.append(pair if use.inputs_first else pair[::-1])
                squares = own_squares / items if own_squares.numel() else None
            if was_seen:
                fine.append(self._average(layer, pairs, squares))
        observer.clear()
        if self._stages is None:
            self.fallbacks += len(fine) - sum(fine)
        elif pool.rank == 0:
            self._stage_fallbacks = len(fine) - sum(fine)  # the last message adds up those of all stages

    def _average(self, layer: Layer, pairs: list[tuple[Tensor, Tensor]], squares: Tensor | None) -> bool:
        """Running means of one layer's factors, at its home.  Returns whether they were finite, alike on all ranks."""
        if not all(bool(f.isfinite().all()) for pair in pairs for f in pair):
            return False
        weight = self._named[layer.weight]
        state = self._ensure_state(weight, self._options_of(weight))
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
        present = {pool.index[h.parameter]: (h, batch) for h, batch in held.values()}
        dtype = wide_dtype(next(iter(held.values()))[0].value.dtype)
        if pool.num_ranks > 1:
            there, back = ([p for p in way if p.matrix in present] for way in pool.ways())
            grads = {index: h.grad for index, (h, _) in present.items()}
            parts = Parts(sent_home(pool, there, grads, dtype), grads)
            wholes = {
                index: parts.whole(index, grads[index], pool.layouts[index].shape, dtype) for index in parts.matrices()
            }
        else:
            there, back = [], []
            wholes = {index: h.grad.to(dtype) for index, (h, _) in present.items()}
        updates: dict[int, Tensor] = {}
        sums = [0.0, 0.0]
        for layer in self._layers:
            weight = pool.index[self._named[layer.weight]]
            if weight not in wholes:
                continue
            bias = None if layer.bias is None else pool.index[self._named[layer.bias]]
            product, failed = self._layer_update(layer, wholes, weight, bias, updates, inverts)
            sums = [sums[0] + product, sums[1] + failed]
        came = [*updates.items()] if pool.num_ranks == 1 else _spread(pool, back, updates, dtype)
        shrink = self._last_message(pool, sums, inverts, next(iter(held.values()))[1].options)
        for index, update in came:
            h, batch = present[index]
            self._move(h, update.to(h.value.device).view(h.value.shape) * shrink, batch.options)

    def _layer_update(
        self, layer: Layer, wholes: dict[int, Tensor], weight: int, bias: int | None, updates: dict[int, Tensor],
        inverts: bool,
    ) -> tuple[float, float]:  # fmt: skip
        """At home: P of one layer, put into `updates`.  Returns V . P, and whether an inversion failed."""
        parameter = self._named[layer.weight]
        state, whole = self.state[parameter], wholes[weight].to(parameter.device)
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
            update = self._in_basis(layer, state, gradient)
        if not bool(update.isfinite().all()):
            update, failed = torch.zeros_like(gradient), 1.0
        updates[weight], of_bias = layer.parted(update, tuple(whole.shape))
        if bias is not None and of_bias is not None and bias in wholes:
            updates[bias] = of_bias
        return float((gradient * update).sum()), failed

    def _bias_shape(self, layer: Layer) -> tuple[int, ...]:
        """The whole shape of a layer's bias."""
        assert layer.bias is not None
        return self.place(self._named[layer.bias]).layout.shape

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

    def _in_basis(self, layer: Layer, state: dict[str, Any], gradient: Tensor) -> Tensor:
        scales = state["scales"] if "scales" in state else state["row_values"][:, None] * state["column_values"]
        turned = into_basis(gradient, state["row_basis"], state["column_basis"])
        turned /= scales + self.defaults["damping"]
        return into_basis(turned, state["row_basis"], state["column_basis"], back=True)

    def _last_message(self, pool: Pool, sums: list[float], inverts: bool, options: dict[str, Any]) -> float:
        """The sums of V . P and of failures over all homes; EKFAC's bases go along.  Returns nu."""
        rescaled = [(i, layer) for i, layer in enumerate(self._layers) if inverts and self._is_rescaled(layer)]
        states = [self.state[self._named[layer.weight]] for _, layer in rescaled]
        device, dtype = pool.device, wide_dtype(next(iter(self._named.values())).dtype)
        first, start = torch.tensor(sums, dtype=dtype, device=device), 2
        if self._stages is not None:
            first[1] += self._stage_fallbacks
            self._stage_fallbacks = 0
            dist.all_reduce(first)
            sums, first, start = first.tolist(), first[:0], 0
        if pool.num_ranks > 1 and (rescaled or (options["kl_clip"] is not None and self._stages is None)):
            keys = ("row_basis", "column_basis")
            mine = [pool.home_of(self._named[layer.weight]) == pool.rank for _, layer in rescaled]
            parts = [s[key].flatten() * own for s, own in zip(states, mine) for key in keys]
            message = torch.cat([first, *(part.to(device) for part in parts)])
            dist.all_reduce(message, group=pool.group)
            sums = message[:start].tolist() or sums
            for state in states:
                for key in keys:
                    state[key].copy_(message[start : start + state[key].numel()].view(state[key].shape))
                    start += state[key].numel()
        self._show_bases()
        self.fallbacks += int(sums[1])
        clip, squared = options["kl_clip"], options["lr"] ** 2 * sums[0]
        return 1.0 if clip is None or squared <= clip else math.sqrt(clip / squared)

    def _show_bases(self) -> None:
        """Have the squares of gradients summed up in the bases that there are."""
        assert self._observer is not None
        for index, layer in enumerate(self._layers):
            state = self.state[self._named[layer.weight]]
            if self._is_rescaled(layer) and state and bool(state["row_basis"].any()):
                self._observer.bases[index] = state["row_basis"], state["column_basis"]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load as torch's.  Raises UserError for a state dict whose factors lie in an earlier order."""
        if any("row_factor" in state for state in state_dict["state"].values()):
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


def _basis_shape(factor: tuple[int, ...]) -> tuple[int, ...]:
    return factor if len(factor) == 2 else (0,)


def _cut_of(use: Use, layer: Layer, named: Mapping[str, Tensor], table: Mapping[str, Any] | None) -> Cut | GridCut:
    """How ranks share a layer in forwards.  Raises UserError for ways that its sums cannot be made on."""
    if table is None:
        return Cut()
    row = table[layer.weight]
    mesh = row.layout.mesh if row.layout.mesh is not None else layout_of(named[layer.weight]).mesh
    if not isinstance(mesh, DeviceMesh):
        return Cut()
    names = [axis for axis in tensor_names(mesh) if axis in (mesh.mesh_dim_names or ())]
    copies = math.prod(axis_size(mesh, axis) for axis in names)
    if copies == 1:
        return Cut()
    if row.layout.cuts:
        if names != ["tp"]:
            return GridCut(copies, row.layout)
        (_, dim), *_ = row.layout.cuts
        return Cut(copies, row.layout, dim, row.layout.axis_group("tp"))
    if {*names} & {*row.partial}:
        raise UserError(
            f"kfac: {use.name or 'the model'} computes on each rank's part of the batch, of which some may be filled "
            f"up; leave it out: --optim.exclude '{use.name}', or use --mesh.tp 1"
        )
    return Cut(copies)


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
    if part.role not in ("matrix", "kernel", "outer", "head", "embedding"):
        return 2 * part.num_bytes
    sides = part.whole[0], math.prod(part.whole[1:]) + 1
    packed_elements = sum(n if n > config.max_dim else packed_size(n) for n in sides)
    dense_elements = sum(n if n > config.max_dim else n * n for n in sides)
    more = {"inverse": 0, "eigen": sum(sides), "ekfac": math.prod(sides)}[config.method]
    at_home = part.wide_bytes * (packed_elements + dense_elements + more)
    return (part.num_bytes if config.momentum else 0) + -(-at_home // part.ranks)


def _build(config: KfacConfig, masters: Mapping[str, Tensor]) -> KFAC:
    return KFAC(masters, lr=config.lr, **own_values(config))


SPEC = OptimizerSpec(KfacConfig, _state_bytes, _build, sized_by=("momentum", "method", "max_dim"), looks=True)
