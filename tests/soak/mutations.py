"""One line of the product broken at a time, and the tests of the suite that must then be red.

What the suite leaves to `make soak` must not take with it what it proves: each of these was seen by what `make test`
runs, and is to be. A mutation that no test sees any more is a hole in the suite, not a reason to take it off the list.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutation:
    """In `file`, the text `old`, which stands there once, becomes `new`.

    tests  node ids of pytest, without -m soak: all of them together must then fail
    """

    what: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


TRAIN = "tests/parity/test_train.py"
MESHES = f"{TRAIN}::test_every_mesh_and_zero_level"
GRID = "tests/parity/test_tensor_grid.py"
PIPELINE = "tests/parity/test_pipeline.py::test_trains_as_one_rank_does"
EXPERTS = "tests/parity/test_experts.py::test_trains_as_one_rank_does"
DROPOUT = "tests/parity/test_dropout.py::test_dropout_is_that_of_one_rank"
RESUME = "tests/parity/test_resume.py"
OPTIMIZERS = "tests/parity/test_optimizers.py"
MATRICES = "tests/unit/test_matrices.py"
SIGNS = "tests/parity/test_one_bit.py"
LOCAL_STEPS = "tests/parity/test_local_steps.py"
PLACES = "tests/unit/test_infer_context.py"
REFUSED_BLOCKS = f"{PLACES}::test_blocks_that_are_not_sure_are_refused_with_the_reason"
FUSED = "tests/parity/test_inferred.py::test_several_matrices_in_one_go_on_on_another_mesh"
MASKED = "tests/parity/test_masked.py::test_every_mesh"
KFAC, FACTORS = "tests/parity/test_kfac.py", "tests/unit/test_kfac.py"


def mutation(what: str, file: str, old: str, new: str, *tests: str) -> Mutation:
    return Mutation(what, file, old, new, tests)


MUTATIONS = [
    mutation(
        "gradients of replicas are not summed",
        "core/parallel/data.py",
        "self.work = dist.all_reduce(whole, group=self.gradient_axis.get_group(), async_op=True)",
        "self.work = None",
        f"{TRAIN}::test_accumulation[0]",
    ),
    mutation(
        "of accumulated microbatches the last counts alone",
        "core/parallel/data.py",
        "slot.copy_(rows) if first else slot.add_(rows)",
        "slot.copy_(rows)",
        f"{TRAIN}::test_accumulation[0]",
    ),
    mutation(
        "hybrid shards are not summed over their replicas",
        "core/parallel/data.py",
        "dist.all_reduce(self.own, group=replicas.get_group())",
        "pass",
        f"{MESHES}[gpt2 on 4 dp_replicate=2 x dp_shard=2 zero 1]",
    ),
    mutation(
        "gradients that shards of activations contributed stay partial",
        "core/parallel/data.py",
        "dist.all_reduce(flat, group=sub_mesh(self.mesh, axis).get_group())",
        "pass",
        f"{MESHES}[gpt2 on 2 tp=2 zero 0]",
    ),
    mutation(
        "a rank takes its neighbour's rows for its own",
        "core/parallel/rows.py",
        "start = min(axis.get_local_rank() * rows, whole.shape[dim])",
        "start = min((axis.get_local_rank() + 1) % axis.size() * rows, whole.shape[dim])",
        f"{MESHES}[gpt2 on 2 zero 1]",
        f"{MESHES}[gpt2 on 3 zero 1]",
    ),
    mutation(
        "the norm counts what several ranks hold several times",
        "core/optim/clip.py",
        ".square().sum() / copies",
        ".square().sum()",
        f"{MESHES}[gpt2 on 2 tp=2 zero 0]",
    ),
    mutation(
        "the norm is that of a rank's own shards",
        "core/optim/clip.py",
        "        dist.all_reduce(total, group=group_of_ranks(mesh))",
        "        pass",
        f"{MESHES}[gpt2 on 3 zero 1]",
    ),
    mutation(
        "the mean of a loss is divided by the items of one rank times the ranks",
        "core/train/loop.py",
        "dist.all_reduce(whole_weight, group=axis.get_group())",
        "whole_weight *= axis.size()",
        f"{MESHES}[gpt2 on 3 zero 0]",
    ),
    mutation(
        "optimizer state is no part of a checkpoint",
        "core/train/state.py",
        'found |= {f"optim/{key}/{name}": value for key, value in state.items()}',
        "pass",
        f"{RESUME}::test_to_the_bit_on_the_same_mesh[1-options0]",
    ),
    mutation(
        "the generators' state is not restored",
        "core/train/state.py",
        "            set_rng_state(dict(random))",
        "            pass",
        f"{RESUME}::test_a_model_draws_on_from_where_it_was",
    ),
    mutation(
        "the loss scale is not restored",
        "core/train/state.py",
        'self.loss_scale.load_state(values["loss_scale"])',
        "pass",
        f"{RESUME}::test_to_the_bit_on_the_same_mesh[2-options3]",
    ),
    mutation(
        "what is loaded is not published to the parameters that compute",
        "core/train/state.py",
        "            if publish:\n                self.parallel.publish()\n",
        "",
        f"{RESUME}::test_to_the_bit_on_the_same_mesh[2-options1]",
        f"{RESUME}::test_to_the_bit_on_the_same_mesh[2-options2]",
    ),
    mutation(
        "ids are not shifted to the rows of the vocabulary that a rank holds",
        "core/parallel/tensor1d.py",
        "local_ids = ids - start",
        "local_ids = ids",
        f"{MESHES}[gpt2 on 2 tp=2 zero 0]",
    ),
    mutation(
        "the bias behind a row-parallel product is added by every rank",
        "core/parallel/tensor1d.py",
        "return y if bias is None else y + bias",
        "return y if bias is None else y + bias * axis.size()",
        f"{MESHES}[gpt2 on 2 tp=2 zero 0]",
    ),
    mutation(
        "sums of exponentials of shards are not brought to one maximum",
        "core/parallel/tensor1d.py",
        "sum_exp * torch.exp(maximum - whole_maximum)",
        "sum_exp",
        f"{MESHES}[gpt2 on 2 tp=2 zero 0]",
    ),
    mutation(
        "ranks drop the same elements of different shards",
        "core/parallel/draws.py",
        "return self.index * length",
        "return 0",
        f"{DROPOUT}[sequence]",
    ),
    mutation(
        "ranks drop the same elements of different rows",
        "core/train/loop.py",
        "[first + before for before",
        "[before for before",
        f"{DROPOUT}[replicas]",
    ),
    mutation(
        "rows come back from the experts in the order of the experts",
        "core/parallel/expert.py",
        "y_RD.index_select(0, order_R.argsort())",
        "y_RD.index_select(0, order_R)",
        f"{EXPERTS}[topk of 5 on 2 ep=2 zero 0]",
    ),
    mutation(
        "every rank of tensor parallelism adds the whole gradient of the routers' loss",
        "core/parallel/expert.py",
        "moe.share = 1 / axis.size()",
        "moe.share = 1.0",
        f"{EXPERTS}[topk of 5 on 3 tp=3 zero 0]",
    ),
    mutation(
        "a stage keeps the gradient of its copy of the tied head",
        "core/parallel/pipeline/run.py",
        "gradient += other.to(gradient.device)",
        "pass",
        f"{PIPELINE}[1f1b]",
    ),
    mutation(
        "a copy of the tied head is not brought up to date",
        "core/parallel/pipeline/run.py",
        "master.copy_(received)",
        "pass",
        f"{PIPELINE}[1f1b]",
    ),
    mutation(
        "only the last stage knows the loss",
        "core/parallel/pipeline/run.py",
        "        dist.all_reduce(step.total, group=self.group)\n",
        "",
        f"{PIPELINE}[interleaved]",
    ),
    mutation(
        "SUMMA keeps the last of its products",
        "core/parallel/summa.py",
        "y.addmm_(x_t, w_t.T if flipped else w_t)",
        "y = x_t @ (w_t.T if flipped else w_t)",
        f"{GRID}::test_trains_as_one_rank_does[2d-ragged]",
    ),
    mutation(
        "the distances of ALiBi begin anew in each block of a ring",
        "core/parallel/ring.py",
        "Part(start - key_start, causal, bias, self.slopes, self.window)",
        "Part(0, causal, bias, self.slopes, self.window)",
        "tests/parity/test_context.py::test_every_family[bloom-ring]",
    ),
    mutation(
        "slopes of ALiBi are those of the first heads on every rank of an exchange",
        "core/parallel/ulysses.py",
        "slopes[mine.start : mine.stop]",
        "slopes[: len(mine)]",
        "tests/parity/test_context.py::test_every_family[bloom-ulysses]",
    ),
    mutation(
        "an optimizer's sums are maxima",
        "core/optim/sharded.py",
        "self._work = dist.all_reduce(self._message, self._op,",
        "self._work = dist.all_reduce(self._message, dist.ReduceOp.MAX,",
        f"{OPTIMIZERS}::test_its_family",
    ),
    mutation(
        "an optimizer's means are over a rank's part",
        "core/optim/sharded.py",
        "return math.prod(self.layout.shape)",
        "return math.prod(self.layout.local_shape())",
        f"{OPTIMIZERS}::test_adafactor_row_column_2d_by_data_shards[row-dp2-local]",
    ),
    mutation(
        "Gemini's shards are not summed over their replicas",
        "core/gemini/transport.py",
        "dist.all_reduce(reduced, group=replicas.get_group())",
        "pass",
        "tests/parity/gemini/test_ranks.py::test_every_number_of_ranks[4-mesh4-3]",
    ),
    mutation(
        "Gemini gathers a rank's own rows in the places of all",
        "core/gemini/transport.py",
        "dist.all_gather_into_tensor(whole, own, group=self._shard(chunk).get_group())",
        "whole.view(chunk.ranks, -1).copy_(own)",
        "tests/parity/gemini/test_ranks.py::test_every_number_of_ranks[2-mesh2-3]",
    ),
    mutation(
        "an engine's ranks look up each other's part of the vocabulary",
        "core/parallel/tensor1d.py",
        "_gather_vocabulary(out, num_rows, axis)",
        "_gather_vocabulary(out, num_rows, axis).roll(1, -1)",
        "tests/parity/test_serve.py::test_two_ranks_write_what_one_writes[gpt2]",
    ),
    mutation(
        "a captured step takes no tokens from the last one",
        "apps/serve/runner.py",
        "return ids_T.where(sources_T < 0, self.tokens[sources_T.clamp(min=0)])",
        "return ids_T",
        "tests/unit/serve/test_decode.py::test_captured_steps_write_what_others_write[gpt2-plain-plenty]",
    ),
    mutation(
        "ranks that follow go on without the first one's tokens",
        "apps/serve/runner.py",
        "self._broadcast(self.tokens[:count])",
        "pass",
        "tests/parity/test_serve.py::test_two_ranks_write_by_captured_steps_what_one_writes[llama]",
    ),
    mutation(
        "penalties know nothing of what was written a step ago",
        "apps/serve/sampler.py",
        "histories.add(numbers[LANE], token_R)",
        "pass",
        "tests/unit/serve/test_sampler.py::test_histories_follow_what_is_drawn",
    ),
    mutation(
        "rows that fill up a step write to a page",
        "apps/serve/decode.py",
        '"slots": -1',
        '"slots": 0',
        "tests/unit/serve/test_decode.py::test_captured_steps_write_what_others_write[gpt2-plain-scarce]",
    ),
    mutation(
        "the engine is not a step ahead",
        "apps/serve/engine.py",
        "self._flight = self._launch_ahead(last)",
        "self._flight = None",
        "tests/unit/serve/test_decode.py::test_the_next_step_is_launched_before_the_last_one_is_read",
    ),
    mutation(
        "masks are drawn alike on every rank",
        "core/data/masked.py",
        "rank * len(ids_BL), ids_BL.shape, 3)",
        "0, ids_BL.shape, 3)",
        "tests/unit/test_data_masked.py::test_draws_are_those_of_the_place_in_the_global_batch",
    ),
    mutation(
        "a ring of BERT sees earlier tokens alone",
        "core/models/plan.py",
        '"ring": attend_by_ring(config.causal, side),',
        '"ring": attend_by_ring(True, side),',
        f"{MASKED}[bert on 2 cp=2 ring zero 0]",
    ),
    mutation(
        "gradients of the layer before BERT's head are those of one rank's rows",
        "core/models/plan.py",
        '"head_transform": sequence.replicate,',
        '"head_transform": replace(sequence.replicate, partial={}),',
        f"{MASKED}[bert on 2 tp=2 zero 0]",
    ),
    mutation(
        "a rank of a grid is said to pass all heads round a ring",
        "core/parallel/context.py",
        "keys = site.share(site.module.num_kv_heads, side.cols)",
        "keys = site.module.num_kv_heads",
        "tests/parity/test_placement.py::test_messages_are_those_of_the_closed_forms[2d-ring]",
    ),
    mutation(
        "blocks are not compiled",
        "core/compose.py",
        "    if config.compile:",
        "    if False:",
        "tests/unit/test_plan.py::test_blocks_of_a_grid_share_their_graphs",
    ),
    mutation(
        "a grid's rows have each its own routers' losses",
        "core/nn/moe.py",
        "value = of_batch(loss.detach())",
        "value = loss.detach()",
        f"{GRID}::test_experts_train_as_on_one_rank[2d-switch]",
    ),
    mutation(
        "a grid's router learns of one row of it alone",
        "core/parallel/expert.py",
        '"router.weight": (*FIRST.rows, FIRST.cols)}',
        '"router.weight": (FIRST.cols,)}',
        f"{GRID}::test_experts_train_as_on_one_rank[2d-switch]",
    ),
    mutation(
        "inferred places: a sum over the sequence is one over each rank's places",
        "core/parallel/infer/context.py",
        "if self._leaves & (op.summed | op.rows):",
        "if False:",
        f"{REFUSED_BLOCKS}[Sums-]",
    ),
    mutation(
        "inferred places: a block counts with the length of a rank's part",
        "core/parallel/infer/context.py",
        "        if plain != wanted:",
        "        if False:",
        f"{REFUSED_BLOCKS}[CountsPlaces-]",
    ),
    mutation(
        "inferred places: they meet values of the whole sequence",
        "core/parallel/infer/context.py",
        "if value not in self.constant:",
        "if False:",
        f"{REFUSED_BLOCKS}[Numbers-]",
    ),
    mutation(
        "inferred places: ranks draw differently",
        "core/parallel/infer/context.py",
        "    _check_draws(found)\n",
        "",
        f"{REFUSED_BLOCKS}[Draws-]",
    ),
    mutation(
        "inferred places: what looks at values is taken to hand them on",
        "core/parallel/infer/context.py",
        "if call.name in found.opaque.keys() - experts",
        "if False",
        f"{REFUSED_BLOCKS}[HoldsWhatLooksAtValues-]",
    ),
    mutation(
        "inferred places: attention that looks both ways is cut as a causal one",
        "core/parallel/infer/context.py",
        "all(_is_causal(op, model) for op in own)",
        "True",
        f"{PLACES}::test_pieces_of_both_ends_are_for_causal_rings[bert-ring-False]",
    ),
    mutation(
        "inferred places: experts are given tokens in one order and choices in another",
        "core/parallel/infer/context.py",
        "if op.name == EXPERTS and len(",
        "if False and len(",
        f"{PLACES}::test_experts_compute_each_place_by_itself",
    ),
    mutation(
        "inferred places: experts that look at other tokens are tried on one rank",
        "core/parallel/infer/experts.py",
        "_holding_experts(model, 2, sample)",
        "_holding_experts(model, 1, sample)",
        f"{PLACES}::test_experts_compute_each_place_by_itself",
    ),
    mutation(
        "inferred places: gradients of what every rank computes count once a rank",
        "core/parallel/infer/places.py",
        "return gradients[0] / ctx.num_ranks, None",
        "return gradients[0], None",
        "tests/parity/test_inferred.py::test_places_of_a_sequence_equal_one_rank[gpt2]",
    ),
    mutation(
        "inferred places: a rank has the places of another",
        "core/parallel/infer/places.py",
        "return x.index_select(dim, cut.places(axis.get_local_rank(), x.device)",
        "return x.index_select(dim, cut.places(1 - axis.get_local_rank(), x.device)",
        "tests/parity/test_inferred.py::test_places_of_a_sequence_equal_one_rank[gpt2]",
    ),
    mutation(
        "several matrices in one: a rank has its parts in another order",
        "core/layout.py",
        "found += _within(held[dim], first + share.start, first + share.stop)",
        "found = _within(held[dim], first + share.start, first + share.stop) + found",
        f"{FUSED}[gpt2-muon-legs0]",
    ),
    mutation(
        "several matrices in one: they are cut as one",
        "core/parallel/infer/roles.py",
        "parts=lengths if len(lengths) > 1 else ()",
        "parts=()",
        f"{FUSED}[gpt2-muon-legs0]",
    ),
    mutation(
        "several matrices in one: they are cut where others end",
        "core/parallel/infer/roles.py",
        "parts=lengths if",
        "parts=lengths[::-1] if",
        f"{FUSED}[phi3-adafactor-legs1]",
    ),
    mutation(
        "matrices: SOAP's second moments are not sorted with its basis",
        "core/optim/soap.py",
        'v[index] = v[index].index_select(0 if side == "left" else 1, found[0])',
        "pass",
        f"{MATRICES}::test_soap_is_the_authors_algorithm",
    ),
    mutation(
        "matrices: SOAP forgets the right factor",
        "core/optim/soap.py",
        'wanted = {"left": m, "right": n}',
        'wanted = {"left": m}',
        f"{MATRICES}::test_soap_is_the_authors_algorithm",
    ),
    mutation(
        "matrices: SOAP learns its factors before the step",
        "core/optim/soap.py",
        "turned = rotated(grad_BMN, bases).reshape(shape)",
        "self._refresh(h, grad_BMN.shape, options, mine); turned = rotated(grad_BMN, bases).reshape(shape)",
        f"{MATRICES}::test_soap_is_the_authors_algorithm",
    ),
    mutation(
        "matrices: Shampoo's roots are of factors with eps instead of pseudo-inverses",
        "core/optim/spectra.py",
        "powers = torch.where(values > 0, values.clamp(min=torch.finfo(values.dtype).tiny).pow(-1 / root), 0.0)",
        "powers = (values + 1e-12).pow(-1 / root)",
        f"{MATRICES}::test_directions_without_gradients_are_not_blown_up",
    ),
    mutation(
        "matrices: Shampoo's factors keep the bias of their beginning",
        "core/optim/shampoo.py",
        "factor / (1 - beta**batch.step) if beta < 1 else factor",
        "factor",
        f"{MATRICES}::test_shampoo_is_its_equations",
    ),
    mutation(
        "matrices: GaLore projects the left side of square matrices",
        "core/optim/galore.py",
        "is_left = grad_BMN.shape[1] < grad_BMN.shape[2]",
        "is_left = grad_BMN.shape[1] <= grad_BMN.shape[2]",
        f"{MATRICES}::test_galore_of_full_rank_is_adamw_in_the_basis_of_the_first_gradient",
    ),
    mutation(
        "matrices: rounding chooses the basis of what a factor lacks",
        "core/optim/spectra.py",
        "return values, torch.cat([vectors[:, :rank], settled(vectors[:, rank:])], 1)",
        "return values, vectors",
        f"{MATRICES}::test_bases_do_not_depend_on_rounding",
    ),
    mutation(
        "matrices: a stack of experts is one matrix",
        "core/optim/matrices.py",
        "return shape[0], shape[1], shape[2]",
        "return 1, shape[0] * shape[1], shape[2]",
        f"{MATRICES}::test_heads_and_stacks_are_orthogonalised_each_by_itself",
    ),
    mutation(
        "K-FAC's targets are the true ones",
        "core/train/curvature.py",
        "return part | {prediction.targets: drawn_targets(prediction, part[prediction.targets], drawing)}",
        "return part",
        f"{KFAC}::test_sampled_targets_are_not_the_true_ones",
    ),
    mutation(
        "K-FAC forgets that a loss is a mean",
        "core/optim/kfac.py",
        "factor = (items if whole is None else whole) / scale",
        "factor = 1 / scale",
        f"{FACTORS}::test_factors_of_linear_layers_are_their_sums",
    ),
    mutation(
        "transformers' Conv1D is taken for a Linear",
        "core/optim/kfac_layers.py",
        'return self.kind in ("conv1d", "embedding")',
        'return self.kind in ("embedding",)',
        f"{FACTORS}::test_factors_of_linear_layers_are_their_sums",
    ),
    mutation(
        "K-FAC's factors are of the last microbatch alone",
        "core/optim/kfac_observer.py",
        "self.seen.gradients.add_(total, alpha=gradient.share)",
        "self.seen.gradients.copy_(total)",
        f"{FACTORS}::test_factors_of_linear_layers_are_their_sums",
    ),
    mutation(
        "K-FAC on a grid has its own columns' features alone",
        "core/optim/kfac_cut.py",
        "dist.all_reduce(made, group=group)",
        "pass",
        f"{KFAC}::test_kfac_of_the_decoder_whose_rows_and_features_are_cut[2d]",
    ),
    mutation(
        "K-FAC counts twice how seldom an expert is chosen",
        "core/optim/kfac.py",
        "pair = inputs / cases.clamp(min=1), gradients / items",
        "pair = inputs / items, gradients / items",
        f"{FACTORS}::test_one_step_is_newtons_for_every_expert",
    ),
    mutation(
        "K-FAC's factors of an expert are of one rank's rows",
        "core/optim/kfac.py",
        "sums = self._by_layer(self._summed(own.layers, own.sums), own.layers)",
        "sums = self._by_layer(self._summed(own.layers, None), own.layers)",
        f"{KFAC}::test_kfac_of_experts_is_that_of_one_rank[ep ekfac]",
    ),
    mutation(
        "K-FAC takes a part of the router's gradient for all of it",
        "core/optim/kfac_cut.py",
        "dist.all_reduce(gradient, group=self.cut.partial)",
        "pass",
        f"{KFAC}::test_kfac_of_experts_is_that_of_one_rank[ep tp]",
    ),
    mutation(
        "K-FAC takes each matrix of a stack for its first",
        "core/optim/kfac_stacks.py",
        "self._take(stack.layers[matrix], ",
        "self._take(stack.layers[0], ",
        f"{FACTORS}::test_a_stack_of_a_module_that_it_does_not_know_moves_as_one_that_it_knows",
    ),
    mutation(
        "K-FAC takes places of a rank's gradients for those of its part of a row",
        "core/optim/kfac_cut.py",
        "self.part, self.share = there, 1.0",
        "self.part, self.share = there if cut_x else here, 1.0",
        f"{KFAC}::test_kfac_of_parts_of_rows_is_that_of_one_rank[tp]",
    ),
    mutation(
        "backwards by blocks begin with the last microbatch",
        "core/gemini/vertical.py",
        "for block in reversed(range(last)) for number in numbers]",
        "for block in reversed(range(last)) for number in reversed(numbers)]",
        "tests/unit/gemini/test_vertical.py::test_it_learns_what_it_learns_without_offload[host-adamw-three-0.7]",
    ),
    mutation(
        "gradients by blocks take the place of parameters that are read again",
        "core/gemini/hooks.py",
        "if chunk in self.kept:",
        "if False:",
        "tests/unit/gemini/test_vertical.py::test_reads_are_those_of_the_plan_and_fall_with_the_microbatches",
    ),
    mutation(
        "a look of K-FAC leaves a budget's chunks in use",
        "core/gemini/replicas.py",
        "finally:\n            self.hooks.give_up()\n\n    @contextmanager\n    def foreseen",
        "finally:\n            pass\n\n    @contextmanager\n    def foreseen",
        f"{KFAC}::test_a_look_reduces_no_chunk",
    ),
    mutation(
        "a second backward leaves the sums of tensor parallelism out",
        "core/comm/collectives.py",
        "return copy_to(grad, ctx.axis) if _graph_goes_on() else grad, None",
        "return grad, None",
        f"{KFAC}::test_hessian_free_on_two_ranks_is_that_on_one[tp]",
    ),
    mutation(
        "a slow link carries bytes for bits",
        "core/comm/volume.py",
        "time.sleep(8 * wire_share(",
        "time.sleep(wire_share(",
        "tests/unit/test_volume.py::test_a_slow_link_takes_its_wire_bytes_over_its_rate",
    ),
    mutation(
        "what a rank has not sent in signs is forgotten",
        "core/parallel/one_bit.py",
        "c.sub_(_signed(sign, mean)).mul_(self.moves[name])",
        "c.zero_()",
        f"{SIGNS}::test_ranks_are_a_simulation_of_them_to_the_bit[2-dtype0]",
    ),
    mutation(
        "elements without a second moment are sent as signs",
        "core/optim/frozen.py",
        'found.sqrt() > self.groups[id(self.masters[name])]["eps"]',
        "found.sqrt() >= 0",
        f"{SIGNS}::test_ranks_are_a_simulation_of_them_to_the_bit[2-dtype0]",
    ),
    mutation(
        "between sums ranks compute with the weights of the last one",
        "core/parallel/local_steps.py",
        "parameter.copy_(x)",
        "pass",
        f"{LOCAL_STEPS}::test_ranks_are_a_simulation_of_them_to_the_bit[2-dtype0]",
    ),
    mutation(
        "parameters are gathered where masters have stayed",
        "core/parallel/data.py",
        "self.stays = not self.compression.update(optimizer)",
        "self.compression.update(optimizer)",
        f"{LOCAL_STEPS}::test_bytes_are_those_of_the_sums[2]",
    ),
    mutation(
        "figures of momenta in signs leave out the errors of the rows that ranks serve",
        "core/parallel/one_bit.py",
        "self._own(c).add_(self.server_errors[name] * self._own(self.moves[name]))",
        "pass",
        f"{LOCAL_STEPS}::test_figures_are_those_of_what_was_sent",
    ),
    mutation(
        "figures of few bits leave out the errors of what workers add up",
        "core/parallel/coded_sum.py",
        "run += own[: run.numel()]",
        "pass",
        "tests/parity/test_local_figures.py::test_figures_are_those_of_what_was_sent[3-1-options0]",
    ),
    mutation(
        "momenta in signs are clipped once more, by their own norm",
        "core/train/loop.py",
        "clip = None  # they were",
        "pass",
        f"{SIGNS}::test_a_gradient_is_clipped_by_the_norms_of_all_ranks",
    ),
]
