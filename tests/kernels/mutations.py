"""Break every kernel once and see its tests red: `python -m tests.kernels.mutations [KERNEL …]`.

Each mutation drops or turns one term of a kernel, by its text. The kernel so changed takes the real one's place, and
the cases of its SPEC run as in test_specs.py, in fp32 and strided, then those of test_two_phases.py, until one is red;
of a kernel that no case takes, the test in `TESTS`.
Exit code 1 when a mutation passes all of them, when a text is no longer in the source, or when a kernel has no
mutation. Not collected by pytest: it shows what the tests are worth, not whether the kernels are right.
"""

import os
import sys

os.environ["TRITON_INTERPRET"] = "1"

import importlib
import inspect
import tempfile
import time
import warnings
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

from triton.runtime.interpreter import InterpretedFunction

from core.kernels import specs
from tests.kernels.test_quantized_matmul import test_one_row_by_words
from tests.kernels.test_specs import check, strided
from tests.kernels.test_two_phases import FEW_PROGRAMS, check_with_programs


@dataclass(frozen=True)
class Mutation:
    """In `kernel`, the first `old` becomes `new`; the cases of the SPECs named have to see it."""

    kernel: str
    old: str
    new: str
    specs: tuple[str, ...]


def of(specs: str, *changes: tuple[str, str, str]) -> list[Mutation]:
    return [Mutation(*change, tuple(specs.split())) for change in changes]


MUTATIONS = {
    "activations": [
        *of(
            "swiglu",
            ("_swiglu_forward_kernel", "g * tl.sigmoid(g) * u", "tl.sigmoid(g) * u"),
            ("_swiglu_backward_kernel", "(1.0 + g * (1.0 - s))", "1.0"),
        ),
    ],
    "adafactor": of(
        "adafactor",
        ("_tile_sums", "tl.sum(g * g, 1)", "tl.sum(g, 1)"),
        ("_finish_sums", "tl.sum(total, 0)", "tl.max(total, 0)"),
        ("_averaged", "/ length - old", "/ length"),
        ("_factors", "tl.sum(total, 1) / num_rows", "tl.sum(total, 1)"),
        ("_inverse_root", "row / tl.maximum(mean, eps1)[:, None]", "row"),
        ("_tile_squares", "tl.sum(u * u)", "tl.sum(u)"),
        ("_finish_squares", "to + 1, tl.sum(of_p)", "to + 1, tl.sum(of_u)"),
        ("_apply_tile", "tl.maximum(rms_u / d, 1.0)", "1.0"),
    ),
    "adamw": of("adamw", ("_adamw", "rest2 * g * g", "rest2 * g")),
    "adamw8bit": of(
        "adamw_8bit",
        ("_adamw_8bit", "rest2 * g * g", "rest2 * g"),
        ("_quotient", "q = x * inverse", "q = y * inverse"),
        ("_adamw_8bit", "block // of_row * length", "block * 0"),
        ("_moment", "scales + block", "scales + block * 0"),
        ("_keep", "tl.abs(x), 1", "x, 1"),
    ),
    "attention": of(
        "attention attention_varlen",
        ("_sequence", "offset = S - L", "offset = 0"),
        ("_span", "first + offset - left, 0", "first + offset + BLOCK, 0"),
        ("_scores", "distance <= right", "distance < right"),
        ("_shared_at", "head // sharing[1]", "head * 0"),
        ("_forward_span", "total * shrink + tl.sum(p, 1)", "total + tl.sum(p, 1)"),
        ("_attention_forward", "top + tl.log2", "top - tl.log2"),
        ("_attention_delta", "total -= tl.load", "total += tl.load"),
        ("_of_queries", "total) * LOG2E", "total)"),
        ("_dkdv_span", "p * (dp - delta_M[None, :])", "p * dp"),
        ("_attention_dkdv", "dk_tile * scale", "dk_tile"),
        ("_dq_span", "p * (dp - delta_M[:, None])", "p * dp"),
        ("_attention_dq", "acc * scale", "acc"),
        ("_attention_dbias", "p * (dp - delta_M[:, None])", "p * dp"),
    ),
    "cross_entropy": of(
        "cross_entropy_of_shard",
        ("_cross_entropy_statistics", "sums * tl.exp(highest - shift)", "sums"),
        ("_cross_entropy_gradients", "g - q_target, g", "g, g"),
    ),
    "gated_output": of(
        "gated_residual gated_output",
        ("_gated_residual_forward", "value *= tl.sigmoid(g)", "value *= g"),
        ("_gated_residual_backward", "s * (1.0 - s)", "s"),
    ),
    "grouped_matmul": of(
        "grouped_matmul",
        ("_tile_of_group", "until <= program", "until < program"),
        ("_tile_of_group", "start + (program - until + tiles) * BM", "start"),
        ("_group_rows", "group.to(tl.int64) * we", "0 * we"),
        ("_group_rows", "range(0, K, BK)", "range(0, BK, BK)"),
        ("_group_weights", "range(first, last, BK)", "range(0, last, BK)"),
        ("_group_weights", "mask=group > 0", "mask=group < 0"),
    ),
    "group_norm": of(
        "group_norm",
        ("_slope", "1.0 + z", "z"),
        ("_whole_forward", "off * scale * w", "off * w"),
        ("_whole_backward", " - normal * s2", ""),
        ("_moments", " + change * change * (start * share)", ""),
        ("_merge_moments", " + count * off * off", ""),
        ("_normalize", "scale * w + b", "scale * w"),
        ("_channel_sums", "tl.sum(dz * normal, 1)", "tl.sum(dz, 1)"),
        ("_merge_sums", "s2 += w * ", "s2 += "),
        ("_input_gradient", " - s1 - normal", " - normal"),
    ),
    "norms": of(
        "layer_norm rms_norm",
        ("_norm_forward", "s += _vector(bias", "s -= _vector(bias"),
        ("_vector", "columns * stride", "columns * 0"),
        ("_normalised", "s * scale, scale", "s, scale"),
        ("_norm_backward", "d -= tl.sum(g, 1)[:, None] / length", "d -= 0.0"),
        ("_norm_backward_long", "d -= xhat * mean_product", "d -= 0.0"),
        ("_norm_backward_parameters", "weight_sum += g * xhat", "weight_sum += g"),
    ),
    "paged_attention": [
        *of(
            "paged_attention",
            ("_attend", "o * shrink[:, None]", "o"),
            ("_attend", "> position[:, None] - window", ">= position[:, None] - window"),
            ("_part", "* SHORTEST", "* (SHORTEST // 2)"),
            ("_decode", "(length - 1).to", "(length - 2).to"),
            ("_merge", "weight[:, None] * found", "found"),
            ("_first_tile", "// BLOCK_Q + b", "// BLOCK_Q"),
            ("_prefill", "length - num_queries + query, -1", "query, -1"),
        ),
        *of(
            "write_pages",
            ("_write_row", "largest * _PER_STEP", "largest"),
            ("_write_rows", "slot % PAGE", "slot % PAGE * 0"),
        ),
    ],
    "quantized_matmul": [
        *of(
            "int8_matmul",
            ("_tile", "tl.program_id(0) % tiles", "tl.program_id(0) * 0"),
            ("_store", "acc += tl.load(bias", "acc -= tl.load(bias"),
            ("_int8_rows", "codes.to(tl.float32) * values", "values"),
            ("_int8_tile", "values.to(tl.float32) * factors[None, :]", "values.to(tl.float32)"),
            ("_int8_words", "128.0 * plain", "127.0 * plain"),
            ("_int8_words", "word = later", "word = word"),
            ("_words_at", "< num_words", "< num_words - 1"),
            ("_byte", "word >> 8", "word >> 9"),
            ("_raised", "18446744073709551616.0 / (1 << (8", "18446744073709551616.0 / (2 << (8"),
            ("_sixteen", "16 * b", "8 * b"),
            ("_whole", "_as(codes, DTYPE)", "_as(codes + 1, DTYPE)"),
            ("_int8_words_tile", "N - 1", "N - 2"),
            ("_int8_words_split", "start + s < K", "start < K"),
            ("_merge_parts", "acc += tl.load(parts + n", "acc = 0 * acc + tl.load(parts + n"),
        ),
        *of(
            "int4_matmul",
            ("_int4_rows", "(high - middle)", "high"),
            ("_int4_tile", "(pair >> 4) - middle", "pair >> 4"),
            ("_int4_words", "- middle * plain[None, :]", ""),
            ("_int4_words", "word = later", "word = word"),
            ("_loaded_float", "(bits << 16)", "bits"),
            ("_loaded", "tl.pointer_type(tl.uint8)", "tl.pointer_type(tl.int8)"),
            ("_words_at", "other=0", "other=1"),
            ("_int4_words_tile", "2 * at + HALF", "2 * at"),
            ("_int4_words_split", "s * (2 * HALF)", "s * HALF"),
            ("_halves", "numbers >> 4", "numbers & 15"),
            ("_widen_int4", "byte // HALF", "byte * 0"),
        ),
        *of(
            "int8_dynamic_matmul",
            ("_is_apart", "kind == 2", "kind == 3"),
            ("_usual", "threshold), 0.0, values)", "threshold), values, values)"),
            ("_quantize_rows", "* 127, top", "* 126, top"),
            ("_int8_dynamic_tile", "y_tile += exact", "y_tile += 0.0 * exact"),
        ),
    ],
    "rope": of("rope", ("_turn_heads", "b * cos + a * sin", "b * cos"), ("_rope", " * sign", "")),
    "softmax": of(
        "softmax",
        ("_tile", "tl.program_id(0)", "0 * tl.program_id(0)"),
        ("_softmax_forward", "p / tl.sum(p, 1)", "p / tl.max(p, 1)"),
        ("_softmax_backward", "(dp - tl.sum(p * dp, 1)[:, None])", "dp"),
        ("_softmax_backward", "(dp - mean)", "dp"),
        ("_softmax_backward_shared", "total += ds", "total = ds"),
    ),
    "triangle": [
        *of(
            "gate_channels_first",
            ("_gate_forward_kernel", "other_value *= m", "other_value *= 1.0"),
            ("_gate_backward_kernel", "d * p * s * (1.0 - s)", "d * p * s"),
        ),
        *of(
            "norm_channels_last",
            ("_vector", "vector + channels", "vector"),
            ("_norm_forward_kernel", "off * scale * w + b", "off * scale * w"),
            ("_norm_backward_kernel", " - normal * slope", ""),
        ),
    ],
}
EXEMPT = {"_as", "_put", "_group", "_offsets", "_rows", "_tile", "_nearest_code"}
"""Addresses and casts that several kernels share; and codes, which no SPEC returns (see test_optimizers.py)."""


TESTS = {
    name: partial(test_one_row_by_words, kind, 4224, True)
    for name, kind in {"_int8_words": "int8", "_int4_words": 64}.items()
}
"""Kernels that have a way that no case of a SPEC takes: to read ahead is for a tuner to choose."""


def kernels_of(module: ModuleType) -> dict[str, Any]:
    own = {n: f for n, f in vars(module).items() if isinstance(f, InterpretedFunction)}
    return {n: f for n, f in own.items() if f.fn.__module__ == module.__name__}


def mutated(module: ModuleType, mutation: Mutation, folder: Path) -> Any:
    """The kernel with the mutation, defined in its module's names."""
    source = inspect.getsource(kernels_of(module)[mutation.kernel].fn)
    assert mutation.old in source, f"{mutation.kernel} has no '{mutation.old}' any more"
    path = folder / f"{mutation.kernel}.py"  # the interpreter reads the source of what it runs
    path.write_text(source.replace(mutation.old, mutation.new, 1))
    found: dict[str, Any] = {}
    exec(compile(path.read_text(), path, "exec"), vars(module), found)
    return found[mutation.kernel]


def seen_by(module: ModuleType, mutation: Mutation) -> str | None:
    """The first case that is red under the mutation."""
    with tempfile.TemporaryDirectory() as folder:
        kernel = mutated(module, mutation, Path(folder))
        with patch.object(module, mutation.kernel, kernel):
            for name in mutation.specs:
                spec = specs()[name]
                for index, case in enumerate(spec.cases):
                    try:
                        check(spec, case, spec.dtypes[0], strided)
                    except AssertionError:
                        return f"{name}-{index}"
            for case in FEW_PROGRAMS:
                if case[2] in mutation.specs:
                    try:
                        check_with_programs(*case)
                    except AssertionError:
                        return f"{case[2]}-{case[3]}, {case[4]} programs"
            if test := TESTS.get(mutation.kernel):
                try:
                    test()
                except AssertionError:
                    return "its test"
    return None


def main(names: list[str]) -> int:
    warnings.simplefilter("ignore")
    missed = 0
    for name, mutations in MUTATIONS.items():
        module = importlib.import_module(f"core.kernels.{name}")
        without = kernels_of(module).keys() - {m.kernel for m in mutations} - EXEMPT
        missed += len(without)
        for kernel in sorted(without):
            print(f"{name:18}{kernel:28}NO MUTATION", flush=True)
        for mutation in mutations:
            if names and mutation.kernel not in names:
                continue
            began = time.process_time()
            red = seen_by(module, mutation)
            missed += red is None
            seconds = time.process_time() - began
            print(f"{name:18}{mutation.kernel:28}{red or 'NOT SEEN':28}{seconds:5.1f} s  {mutation.old}", flush=True)
    print(f"{sum(map(len, MUTATIONS.values()))} mutations, {missed} missed")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
