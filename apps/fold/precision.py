"""The format that predictions are computed in where nobody names one."""

from typing import Literal

from core.precision import Precision

PredictionPrecision = Precision | Literal["auto"]


def chosen_precision(given: PredictionPrecision, device: str, measured: bool) -> Precision:
    """The given precision; for `auto` bf16 on a GPU, where products are a multiple faster, and fp32 elsewhere.

    measured  whether what bf16 does to outputs was measured for the model (docs/fold.md): AlphaFold's, not ESMFold's
    """
    if given != "auto":
        return given
    return "bf16" if device.startswith("cuda") and measured else "fp32"
