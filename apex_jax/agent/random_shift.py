"""Random shifts of images (DrQ-v2, Yarats et al. 2022), so that a critic does not depend on single pixels."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def randomly_shifted(key: jax.Array, images: jax.Array, most: int) -> jax.Array:
    """Returns images [B, F, H, W, ...], each stack shifted by up to `most` pixels in each direction; see `shifted`."""
    rows, columns = jax.random.randint(key, (2, len(images)), -most, most + 1)
    return shifted(images, rows, columns)


def shifted(images: jax.Array, rows: jax.Array, columns: jax.Array) -> jax.Array:
    """Returns images in which pixel (i, j) is that of (i + row, j + column), or the next one at the edge.

    This is a crop of the image padded by repeated edges. `images`: [B, F, H, W, ...]; `rows`, `columns`: int32[B].
    """
    height, width = images.shape[2:4]

    def one(stack: jax.Array, row: jax.Array, column: jax.Array) -> jax.Array:
        at_row, at_column = jnp.arange(height) + row, jnp.arange(width) + column
        return stack[:, jnp.clip(at_row, 0, height - 1)][:, :, jnp.clip(at_column, 0, width - 1)]

    return jax.vmap(one)(images, rows, columns)
