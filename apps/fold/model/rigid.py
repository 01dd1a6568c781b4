"""Frames in space: a rotation and a translation each, and the quaternions that the structure module updates.

x_global = rotation x_local + translation. Products of 3 x 3 matrices are written as sums, not as matrix products: they
must not be rounded to tf32, and for such sizes this is as fast.

Shapes: [..] any leading dims.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Frames:
    """rotation[.., 3, 3] and translation[.., 3], in one unit of length."""

    rotation: Tensor
    translation: Tensor

    def apply(self, x: Tensor) -> Tensor:
        """Points x[.., 3] of the frames, in global coordinates."""
        return rotate(self.rotation, x) + self.translation

    def inverse_apply(self, x: Tensor) -> Tensor:
        """Global points x[.., 3], in the frames' coordinates."""
        return rotate(self.rotation.transpose(-1, -2), x - self.translation)

    def compose(self, other: "Frames") -> "Frames":
        """The frames that first apply `other`, then these."""
        return Frames(matmul3(self.rotation, other.rotation), self.apply(other.translation))

    def map(self, function: Callable[[Tensor], Tensor]) -> "Frames":
        """`function` applied to both tensors: what selects, stacks or moves along leading dims."""
        return Frames(function(self.rotation), function(self.translation))

    def scaled(self, factor: float) -> "Frames":
        """The same in another unit of length."""
        return Frames(self.rotation, self.translation * factor)


def stack(frames: list[Frames], dim: int) -> Frames:
    """Frames of equal leading dims, stacked along a new leading dim counted from the front."""
    return Frames(
        torch.stack([frame.rotation for frame in frames], dim), torch.stack([f.translation for f in frames], dim)
    )


def rotate(rotation: Tensor, x: Tensor) -> Tensor:
    """rotation[.., 3, 3] x[.., 3]."""
    return (rotation * x[..., None, :]).sum(-1)


def matmul3(a: Tensor, b: Tensor) -> Tensor:
    """a b of 3 x 3 matrices."""
    return (a[..., :, :, None] * b[..., None, :, :]).sum(-2)


def normalize(x: Tensor, eps: float = 1e-8) -> Tensor:
    """x / sqrt(|x|^2 + eps) over the last dim."""
    return x / torch.sqrt((x * x).sum(-1, keepdim=True) + eps)


def frames_from_points(negative_x: Tensor, origin: Tensor, xy_plane: Tensor) -> Frames:
    """Frames by Gram and Schmidt (algorithm 21): x points away from `negative_x`, `xy_plane` has y > 0.

    Points that coincide or lie on a line give a rotation that is not one, but finite, and finite gradients.
    """
    x = normalize(origin - negative_x)
    y = xy_plane - origin
    y = normalize(y - (x * y).sum(-1, keepdim=True) * x)
    return Frames(torch.stack([x, y, torch.linalg.cross(x, y)], dim=-1), origin)


def rotation_from_quaternion(q: Tensor) -> Tensor:
    """rotation[.., 3, 3] of unit quaternions q[.., 4], the real part first."""
    a, b, c, d = q.unbind(-1)
    rows = [
        [a * a + b * b - c * c - d * d, 2 * (b * c - a * d), 2 * (b * d + a * c)],
        [2 * (b * c + a * d), a * a - b * b + c * c - d * d, 2 * (c * d - a * b)],
        [2 * (b * d - a * c), 2 * (c * d + a * b), a * a - b * b - c * c + d * d],
    ]
    return torch.stack([torch.stack(row, -1) for row in rows], -2)


def turned_by(q: Tensor, vector: Tensor) -> Tensor:
    """The unit quaternions of q (1 + vector), q[.., 4] and vector[.., 3] of imaginary parts (algorithm 23)."""
    a, b, c, d = q.unbind(-1)
    x, y, z = vector.unbind(-1)
    change = [-b * x - c * y - d * z, a * x + c * z - d * y, a * y - b * z + d * x, a * z + b * y - c * x]
    turned = q + torch.stack(change, -1)
    return turned / torch.linalg.vector_norm(turned, dim=-1, keepdim=True)
