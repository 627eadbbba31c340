"""Learned volumetric upsampling: 3D transposed convolution, alone or fused with what follows it.

``conv_transpose3d`` and ``conv_transpose3d_block`` are functions in the manner of
``torch.nn.functional``, ``volup.nn`` has the layers, ``optimize`` puts them into a model that
already exists, ``freeze`` says that its weights stay as they are, and ``export`` writes a decoder
for the ``volup`` command line.
"""

from volup import nn
from volup._native import __version__
from volup.export import export
from volup.frozen import freeze, unfreeze
from volup.functional import conv_transpose3d, conv_transpose3d_block
from volup.optimize import Report, optimize, restore

__all__ = [
    "Report",
    "__version__",
    "conv_transpose3d",
    "conv_transpose3d_block",
    "export",
    "freeze",
    "nn",
    "optimize",
    "restore",
    "unfreeze",
]
