"""Which of some exact kernels is the fastest is nothing that a test asks: one call of each decides, on little."""


def choose_in_a_moment() -> None:
    """In this process, and in those that it forks."""
    from core.kernels import matmul, timing  # not before tests/kernels has chosen Triton's interpreter
    from core.quant import integers, packed

    timing._CACHED_BYTES = 4
    integers._MEASURED_WEIGHTS, integers._MEASURED_CHANNELS = 1, 64
    integers._ROUNDS = packed._ROUNDS = matmul._TRIES = 1
