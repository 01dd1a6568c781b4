"""The demo of folding: `python -m apps.fold.demo`. What it learns from and what came of that is `apps.fold.toy`."""
