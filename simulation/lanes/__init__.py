"""Convolutional networks that train faster on a CPU: the images of a batch lie side by side in memory.

With the batch innermost (``[H, C, W, B]``), a convolution of small images is a few large matrix products over a buffer
in which each row of pixels stands once for every column of the kernel; a window's rows of pixels follow one another in
that buffer, so that no window is copied out. Bias, ReLU and pooling are then one pass over whole vectors, which Numba
compiles (a second or two in each process). PyTorch's own layers, of which a quarter of such a network's time goes into
the pooling alone, give the same up to rounding.

Needs the extra ``lanes``.
"""

from medsilo.simulation.lanes.network import in_lanes

__all__ = ["in_lanes"]
