"""The first convolution on blocks of pixels (space to depth), which is several times as fast on GPUs.

A convolution of frames H x W x c with kernel k and stride s equals a convolution of blocks, H/s x W/s x (s x s x c),
with kernel k/s and stride 1: of 21 x 21 x 64 instead of 84 x 84 x 4. For 4 channels, cuDNN has no kernel that uses
tensor cores in bfloat16, and pads the frames in float32. On a CPU, blocks are not faster.
"""

from __future__ import annotations

import math
from typing import Any, TypeVar

import flax.linen as nn
import jax
import jax.numpy as jnp

from apex_jax.config import NetworkConfig

T = TypeVar("T", bound=Any)  # a JAX or NumPy array


def block_size(network: NetworkConfig) -> int:
    """Returns the height and width of a block of pixels: the first stride on a GPU, if blocks apply; otherwise 1."""
    if jax.default_backend() != "gpu" or network.torso != "convolutions" or not network.channels:
        return 1
    return network.strides[0] if network.kernel_sizes[0] % network.strides[0] == 0 else 1


def frame_block_size(network: NetworkConfig, frame_shape: tuple[int, ...]) -> int:
    """Returns `block_size` if whole blocks of it cover a frame [H, W] or [H, W, C], otherwise 1."""
    size = block_size(network) if len(frame_shape) > 1 else 1
    return 1 if any(side % size for side in frame_shape[:2]) else size


def to_blocks(frames: T, size: int) -> T:
    """Returns the blocks of frames: [A, B, H, W, ...] -> [A, B, H/size, W/size, size, size, ...].

    Rows and columns beyond the last whole block are omitted; a convolution without padding does not read them either.
    """
    rows, columns, rest = frames.shape[2] // size, frames.shape[3] // size, frames.shape[4:]
    whole = frames[:, :, : rows * size, : columns * size]
    split = whole.reshape(*frames.shape[:2], rows, size, columns, size, *rest)
    return split.transpose(0, 1, 2, 4, 3, 5, *range(6, split.ndim))


def from_blocks(blocks: T) -> T:
    """Returns frames [A, B, H, W, ...] from their blocks: the inverse of `to_blocks`."""
    rows, columns, size = blocks.shape[2:5]
    split = blocks.transpose(0, 1, 2, 4, 3, 5, *range(6, blocks.ndim))
    return split.reshape(*blocks.shape[:2], rows * size, columns * size, *blocks.shape[6:])


class BlockConvolution(nn.Module):
    """`nn.Conv` without padding of stacks of frames, with the same parameters, computed on blocks of pixels."""

    features: int
    kernel_size: int
    stride: int  # divides the kernel's size
    dtype: Any

    @nn.compact
    def __call__(self, observation: jax.Array) -> jax.Array:
        """Maps pixels uint8[B, F, H, W, ...] to dtype[B, Y, X, features]."""
        blocks = to_blocks(observation, self.stride)  # while still uint8, which moves fewer bytes
        stack, colors = observation.shape[1], observation.shape[4:]
        x = jnp.moveaxis(blocks, 1, 3)
        x = x.reshape(*x.shape[:3], -1).astype(self.dtype) / 255
        shape = (self.kernel_size, self.kernel_size, stack * math.prod(colors), self.features)
        kernel = self.param("kernel", nn.initializers.lecun_normal(), shape)
        bias = self.param("bias", nn.initializers.zeros_init(), (self.features,))
        # `to_blocks` takes the kernel as frames whose last axis has the features: [1, F, k, k, ..., features].
        as_frames = jnp.moveaxis(kernel.reshape(*shape[:2], stack, *colors, self.features), 2, 0)[None]
        in_blocks = jnp.moveaxis(to_blocks(as_frames, self.stride)[0], 0, 2)
        in_blocks = in_blocks.reshape(*in_blocks.shape[:2], -1, self.features).astype(self.dtype)
        y = jax.lax.conv_general_dilated(x, in_blocks, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        return y + bias.astype(self.dtype)
