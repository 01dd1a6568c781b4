"""Gemini: train models several times larger than the device's memory; the model data lives where a plan says.

trace      what one step of a model asks for, moment by moment: which chunks, how much memory beside them, how long
tracer     that of any module, found on fake tensors before anything is allocated
residency  where each chunk lives and every move of a step: a pure function of the trace, the budget, the bandwidths
    lifetimes    which buffers stay between two uses
    timeline     the moves that follow, their bytes and seconds
search     the chunk size, by planning the step of each candidate
figure     memory over a step, planned beside measured
"""
