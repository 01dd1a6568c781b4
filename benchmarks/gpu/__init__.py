"""The first hour on a GPU: three commands, each at most nine minutes there (docs/gpu.md)."""
