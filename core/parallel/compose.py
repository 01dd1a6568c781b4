"""`core.compose`, by the name that libraries know it under."""

from core.compose import parallelize as parallelize
