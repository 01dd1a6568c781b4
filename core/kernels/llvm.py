"""Loops for the CPU at hand that torch does not have, made through LLVM (package llvmlite).

A kernel is written in Python as what it does with vectors, and becomes code when it is first called: tens of
milliseconds; nothing is built at install, and no compiler is needed. Where llvmlite is missing there are none, and
whoever calls has another way.

    kernel = Kernel("double", 2, 1, build)       # build(code, arguments, first, last) writes it
    kernel(len(y), x.data_ptr(), y.data_ptr())   # on torch's threads, each from some first to some last

Arguments are 64-bit integers: addresses and numbers. A kernel works on the items first to last, with first < last.
"""

import ctypes
import math
import platform
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch

Value = Any
"""of llvmlite's, which has no types"""
Build = Callable[["Code", "Sequence[Value]", Value, Value], None]
# exp(x) = 2^n exp(r), n the nearest to x / ln 2; ln 2 in two parts, so that r is exact (Cody and Waite), and a
# polynomial of exp over |r| <= ln 2 / 2: Taylor's to r^7, at most 5e-9 off.
_LN2_HIGH, _LN2_LOW = 0.693359375, -2.12194440e-4
_LOWEST = -87.0
"""exp of less is below fp32's normal numbers"""


@cache
def library() -> Any:
    """llvmlite.binding, ready for this CPU.  Raises ImportError."""
    import llvmlite.binding

    llvmlite.binding.initialize_native_target()
    llvmlite.binding.initialize_native_asmprinter()
    return llvmlite.binding


@cache
def available() -> bool:
    """Return whether kernels can be made here."""
    try:
        library()
    except (ImportError, RuntimeError, OSError):
        return False
    return True


@cache
def x86_features() -> frozenset[str]:
    """An x86 CPU's features in LLVM's words; none elsewhere and where LLVM is missing."""
    if not available() or platform.machine().lower() not in ("x86_64", "amd64"):
        return frozenset()
    return frozenset(name for name, there in library().get_host_cpu_features().items() if there)


def looks_words_up() -> bool:
    """Return whether this CPU has an instruction that takes words out of a vector."""
    return {"avx512bw", "avx512vl"} <= x86_features()


@cache
def openmp() -> ctypes.CDLL | None:
    """The OpenMP whose threads torch computes on, if it can be told to run something."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return None
    names = {line.split(maxsplit=5)[-1] for line in maps.read_text(errors="replace").splitlines() if "omp" in line}
    for name in sorted(name for name in names if Path(name).name.startswith(("libgomp", "libiomp", "libomp"))):
        try:
            found = ctypes.CDLL(name)
        except OSError:
            continue
        if hasattr(found, "GOMP_parallel"):
            return found
    return None


def num_workers() -> int:
    """Threads that a kernel may run on."""
    return torch.get_num_threads() if openmp() is not None else 1


@cache
def bits_of(number: float) -> int:
    """Bits of a number's fp32, as a kernel is given one that is not whole."""
    return struct.unpack("i", struct.pack("f", number))[0]


def on_all_threads() -> bool:
    """Return whether kernels run on all of torch's threads; where not, its own operators may be faster."""
    return available() and num_workers() == torch.get_num_threads()


class Code:
    """The language of a kernel: numbers, vectors, loops. `types` and `build` are llvmlite's.

    worker  the number of the thread, below `num_workers()`
    """

    def __init__(self, build: Any, worker: Value = None):
        import llvmlite.ir

        self.types, self.build, self.worker = llvmlite.ir, build, worker
        self.i8, self.i16, self.i32, self.i64 = (self.types.IntType(bits) for bits in (8, 16, 32, 64))
        self.f32 = self.types.FloatType()

    # --- values -------------------------------------------------------------------------------------------------------

    def number(self, value: int) -> Value:
        return self.types.Constant(self.i64, value)

    def vector(self, kind: Any, count: int) -> Any:
        return self.types.VectorType(kind, count)

    def filled(self, kind: Any, count: int, value: float) -> Value:
        """A constant vector."""
        return self.types.Constant(self.vector(kind, count), [value] * count)

    def spread(self, value: Value, count: int) -> Value:
        """A number in every place of a vector."""
        kind = self.vector(value.type, count)
        nothing = self.types.Constant(kind, self.types.Undefined)
        one = self.build.insert_element(nothing, value, self.types.Constant(self.i32, 0))
        return self.build.shuffle_vector(one, nothing, self.types.Constant(self.vector(self.i32, count), [0] * count))

    def call(self, name: str, kind: Any, *given: Value) -> Value:
        """One of LLVM's intrinsics, or a function of a library that is there, which returns `kind`."""
        known = self.build.module.globals
        if name not in known:
            shape = self.types.FunctionType(kind, [value.type for value in given])
            self.types.Function(self.build.module, shape, name)
        return self.build.call(known[name], given)

    def fma(self, x: Value, y: Value, z: Value) -> Value:
        """x y + z of vectors in fp32, rounded once."""
        return self.call(f"llvm.fma.v{z.type.count}f32", z.type, x, y, z)

    def nearest(self, x: Value) -> Value:
        """The nearest whole numbers, of two the even one, in fp32."""
        return self.call(f"llvm.roundeven.v{x.type.count}f32", x.type, x)

    def from_bf16(self, bits: Value) -> Value:
        """Numbers, or one, in fp32: bf16 is its upper half."""
        if not isinstance(bits.type, self.types.VectorType):
            wide = self.build.shl(self.build.zext(bits, self.i32), self.types.Constant(self.i32, 16))
            return self.build.bitcast(wide, self.f32)
        count = bits.type.count
        wide = self.build.zext(bits, self.vector(self.i32, count))
        return self.build.bitcast(self.build.shl(wide, self.filled(self.i32, count, 16)), self.vector(self.f32, count))

    def to_bf16(self, values: Value) -> Value:
        """The nearest, of two the even one; what is no number stays none."""
        b, count = self.build, values.type.count
        one, upper = self.filled(self.i32, count, 1), self.filled(self.i32, count, 16)
        bits = b.bitcast(values, self.vector(self.i32, count))
        odd = b.and_(b.lshr(bits, upper), one)
        nearest = b.add(b.add(bits, self.filled(self.i32, count, 0x7FFF)), odd)
        none = b.fcmp_unordered("uno", values, values)
        kept = b.select(none, self.filled(self.i32, count, 0x7FC00000), nearest)
        return b.trunc(b.lshr(kept, upper), self.vector(self.i16, count))

    def to_fp16(self, values: Value) -> Value:
        """The nearest, as 16 bits."""
        halves = self.build.fptrunc(values, self.vector(self.types.HalfType(), values.type.count))
        return self.build.bitcast(halves, self.vector(self.i16, values.type.count))

    def larger_of(self, x: Value, y: Value) -> Value:
        """Place by place, of vectors in fp32."""
        return self.build.select(self.build.fcmp_ordered(">", x, y), x, y)

    def exp(self, x: Value) -> Value:
        """Exponentials of vectors of numbers up to 0; 0 below the lowest, and what is no number stays none."""
        b, floats, count = self.build, x.type, x.type.count
        words = self.vector(self.i32, count)

        def constant(value: float) -> Value:
            return self.filled(self.f32, count, value)

        kept = b.fcmp_unordered(">", x, constant(_LOWEST))
        x = b.select(kept, x, constant(_LOWEST))
        n = self.nearest(b.fmul(x, constant(math.log2(math.e))))
        r = self.fma(n, constant(-_LN2_LOW), self.fma(n, constant(-_LN2_HIGH), x))
        power = constant(1 / math.factorial(7))
        for degree in range(6, -1, -1):
            power = self.fma(power, r, constant(1 / math.factorial(degree)))
        exponent = b.shl(b.add(b.fptosi(n, words), self.filled(self.i32, count, 127)), self.filled(self.i32, count, 23))
        return b.select(kept, b.fmul(power, b.bitcast(exponent, floats)), constant(0.0))

    def joined(self, values: Sequence[Value]) -> Value:
        """Numbers as a vector."""
        whole = self.types.Constant(self.vector(values[0].type, len(values)), self.types.Undefined)
        for index, value in enumerate(values):
            whole = self.build.insert_element(whole, value, self.types.Constant(self.i32, index))
        return whole

    def shuffled(self, x: Value, y: Value, places: Sequence[int]) -> Value:
        """The numbers of two vectors, which lie behind each other, that stand in these places."""
        order = self.types.Constant(self.vector(self.i32, len(places)), list(places))
        return self.build.shuffle_vector(x, y, order)

    def looked_up(self, table: Value, places: Value) -> Value:
        """Look up words in a table of 16 by the last four bits of 16 or 32 words. Only where `looks_words_up()`."""
        count = places.type.count
        whole = self.shuffled(table, table, [number % 16 for number in range(count)])
        return self.call(f"llvm.x86.avx512.permvar.hi.{16 * count}", places.type, whole, places)

    def sum(self, vector: Value, combine: Callable[[Value, Value], Value]) -> Value:
        """Combine a vector's places by halves, so that the order is always the same."""
        count = vector.type.count
        while count > 1:
            count //= 2
            halves = (range(count), range(count, 2 * count))
            vector = combine(*(self.shuffled(vector, vector, half) for half in halves))
        return self.build.extract_element(vector, self.types.Constant(self.i32, 0))

    # --- memory -------------------------------------------------------------------------------------------------------

    def place(self, address: Value, kind: Any, *offsets: Value) -> Value:
        """The place so many elements behind an address."""
        pointer = self.build.inttoptr(address, kind.as_pointer()) if address.type == self.i64 else address
        return self.build.gep(pointer, [self.total(*offsets)])

    def total(self, *numbers: Value) -> Value:
        whole = numbers[0]
        for number in numbers[1:]:
            whole = self.build.add(whole, number)
        return whole

    def load(self, address: Value, kind: Any, count: int, *offsets: Value, mask: Value = None) -> Value:
        """Load so many elements, wherever they lie; those that the mask leaves out are 0 and not read."""
        shape = self.vector(kind, count)
        place = self.build.bitcast(self.place(address, kind, *offsets), shape.as_pointer())
        if mask is None:
            return self.build.load(place, align=1)
        zeros = self.filled(kind, count, 0)
        align = self.types.Constant(self.i32, 1)
        return self.call(f"llvm.masked.load.v{count}{_short(kind)}.p0", shape, place, align, mask, zeros)

    def load_one(self, address: Value, kind: Any, *offsets: Value) -> Value:
        return self.build.load(self.place(address, kind, *offsets), align=1)

    def store(self, value: Value, address: Value, kind: Any, *offsets: Value) -> None:
        place = self.build.bitcast(self.place(address, kind, *offsets), value.type.as_pointer())
        self.build.store(value, place, align=1)

    def store_some(self, value: Value, address: Value, kind: Any, mask: Value, *offsets: Value) -> None:
        """Store the elements that the mask names."""
        place = self.build.bitcast(self.place(address, kind, *offsets), value.type.as_pointer())
        align = self.types.Constant(self.i32, 1)
        name = f"llvm.masked.store.v{value.type.count}{_short(kind)}.p0"
        self.call(name, self.types.VoidType(), value, place, align, mask)

    def prefetch(self, address: Value, *offsets: Value) -> None:
        """Ask for a line of memory, which may lie behind the end of what there is, and is not to push others out."""
        how = (self.types.Constant(self.i32, value) for value in (0, 0, 1))
        self.call("llvm.prefetch.p0", self.types.VoidType(), self.place(address, self.i8, *offsets), *how)

    def first_of(self, count: Value, width: int) -> Value:
        """The mask of so many places of a vector, at most all of them."""
        places = self.types.Constant(self.vector(self.i64, width), list(range(width)))
        return self.build.icmp_signed("<", places, self.spread(count, width))

    def smaller(self, a: Value, b: Value) -> Value:
        return self.build.select(self.build.icmp_signed("<", a, b), a, b)

    def larger(self, a: Value, b: Value) -> Value:
        return self.build.select(self.build.icmp_signed(">", a, b), a, b)

    # --- loops --------------------------------------------------------------------------------------------------------

    @contextmanager
    def loop(self, first: Value, last: Value, step: Value, carried: Sequence[Value] = ()) -> Iterator["Loop"]:
        """Loop from first, which is below last, in steps; `carried` values go from turn to turn: set `values` anew.

        After it `values` are the last turn's.
        """
        build = self.build
        entry = build.block
        body, after = (build.function.append_basic_block() for _ in range(2))
        build.branch(body)
        build.position_at_end(body)
        at = build.phi(self.i64)
        at.add_incoming(first, entry)
        phis = []
        for value in carried:
            phi = build.phi(value.type)
            phi.add_incoming(value, entry)
            phis.append(phi)
        turn = Loop(at, list(phis))
        yield turn
        following = build.add(at, step)
        at.add_incoming(following, build.block)
        for phi, value in zip(phis, turn.values, strict=True):
            phi.add_incoming(value, build.block)
        build.cbranch(build.icmp_signed("<", following, last), body, after)
        build.position_at_end(after)

    def tiles(self, first: Value, last: Value, size: int) -> Any:
        """A loop over the beginnings of tiles; where they do not come out even the last one lies over another."""
        return self.loop(first, last, self.number(size))

    def beginning(self, turn: "Loop", last: Value, size: int) -> Value:
        return self.smaller(turn.at, self.build.sub(last, self.number(size)))


def _short(kind: Any) -> str:
    """A type in the name of an intrinsic."""
    return f"i{kind.width}" if hasattr(kind, "width") else "f32"


class Loop:
    """The place of a loop, and the values that it carries."""

    def __init__(self, at: Value, values: list[Value]):
        self.at, self.values = at, values


class Kernel:
    """A function of the items that it is to work on, `first` to `last`, and its arguments.

    least  items that it works on at once: it is never given fewer, and pieces of two threads may share some
    """

    def __init__(self, name: str, num_arguments: int, least: int, build: Build):
        self.name, self.num_arguments, self.least = name, num_arguments, least
        self._given = ctypes.c_int64 * (num_arguments + 1)
        self._engine, address, self._team = _compiled(name, num_arguments, least, build)
        self._function = ctypes.CFUNCTYPE(None, ctypes.c_void_p, *3 * [ctypes.c_int64])(address)

    def __call__(self, count: int, *arguments: int) -> None:
        given, threads = self._given(*arguments, count), torch.get_num_threads()
        team = openmp() if threads > 1 and count >= 2 * self.least else None
        if team is None:
            self._function(given, 0, count, 0)
        else:
            team.GOMP_parallel(ctypes.c_void_p(self._team), given, ctypes.c_uint(threads), ctypes.c_uint(0))


def _compiled(name: str, num_arguments: int, least: int, build: Build) -> tuple[Any, int, int]:
    """(what keeps the code, its address, the address of what a team of threads runs)"""
    import llvmlite.ir as ir

    binding = library()
    module = ir.Module(name)
    module.triple = binding.get_default_triple()
    i64, void = ir.IntType(64), ir.VoidType()
    pointer = i64.as_pointer()
    function = ir.Function(module, ir.FunctionType(void, [pointer, i64, i64, i64]), name)
    given, first, last, worker = function.args
    code = Code(ir.IRBuilder(function.append_basic_block()), worker)
    values = [code.build.load(code.build.gep(given, [code.number(n)])) for n in range(num_arguments)]
    build(code, values, first, last)
    code.build.ret_void()
    _team(module, function, num_arguments, least)

    target = binding.Target.from_default_triple().create_target_machine(
        cpu=binding.get_host_cpu_name(), features=binding.get_host_cpu_features().flatten(), opt=3
    )
    if team := openmp():
        for called in ("omp_get_thread_num", "omp_get_num_threads"):
            binding.add_symbol(called, ctypes.cast(getattr(team, called), ctypes.c_void_p).value)
    parsed = binding.parse_assembly(str(module))
    parsed.verify()
    passes = binding.create_pass_builder(target, binding.create_pipeline_tuning_options(speed_level=3))
    passes.getModulePassManager().run(parsed, passes)
    engine = binding.create_mcjit_compiler(parsed, target)
    engine.finalize_object()
    return engine, engine.get_function_address(name), engine.get_function_address(f"{name}_team") if team else 0


def _team(module: Any, function: Any, num_arguments: int, least: int) -> None:
    """The function of each thread of a team: its part of the items, at least `least`. Not there without OpenMP."""
    import llvmlite.ir as ir

    if openmp() is None:
        return
    shape = ir.FunctionType(ir.VoidType(), [function.args[0].type])
    whole = ir.Function(module, shape, f"{function.name}_team")
    code = Code(ir.IRBuilder(whole.append_basic_block()))
    build, (given,) = code.build, whole.args
    count = build.load(build.gep(given, [code.number(num_arguments)]))
    thread, threads = (build.sext(code.call(f"omp_get_{n}", code.i32), code.i64) for n in ("thread_num", "num_threads"))
    even = build.sdiv(build.sub(build.add(count, threads), code.number(1)), threads)
    size = build.select(build.icmp_signed("<", even, code.number(least)), code.number(least), even)
    first = code.smaller(build.mul(thread, size), count)
    last = code.smaller(build.add(first, size), count)
    with build.if_then(build.icmp_signed("<", first, last)):
        build.call(function, [given, code.smaller(first, build.sub(last, code.number(least))), last, thread])
    build.ret_void()
