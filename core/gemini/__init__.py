"""Gemini: train models several times larger than the device's memory; the model data lives where a plan says.

trace      what one step of a model asks for, moment by moment: which chunks, how much memory beside them, how long
"""
