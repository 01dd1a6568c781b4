"""The cost of a step of any module, found before it runs; and the counting of what one has.

account   MemoryAccount: bytes of the tensors that are alive, on a CPU or without memory; peak_bytes of a device
alike     blocks that repeat: a step with a few of them tells of any number
balanced  what experts are given, where nobody can look
tracer    trace_step: a step on fake tensors, as stretches with their parameters, bytes and seconds
machine   what a device computes, reads and copies in a second, by data sheets or measured
"""
