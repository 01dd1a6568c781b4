"""What physics leaves to gain where two formats are compared: what they read, and what they compute."""

SAME_BYTES = "both read weights in bf16, the same bytes: 1.0 to 1.15 is what there is to gain"
SAME_ARITHMETIC = "two digits of int8 compute as much as bf16: 1.0 is the limit where arithmetic bounds a step"


def limit_of(mine: str, theirs: str) -> str:
    """What bounds the rate of one of ours beside another system's; "" where nothing does."""
    if theirs == "vLLM" and mine.startswith("ours bf16"):
        return SAME_BYTES
    if mine.startswith("ours int8") and theirs.startswith(("ours bf16", "vLLM")):
        return SAME_ARITHMETIC
    return ""
