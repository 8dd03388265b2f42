"""All uses of PyTorch beyond its public interface.

Private names, private attributes, frames, closures and code objects are used only in this package. The rest of
tenterhook calls functions with plain names: ``current_backward_id()``, ``checkpoints_around()``.

Each file has one subject. :mod:`tenterhook.pytorch.names` looks up and lists all private names.
:mod:`tenterhook.pytorch.support` runs a small check of each feature before its first use, and reports which features
work with the installed release. :mod:`tenterhook.pytorch.release` lists the supported releases. A release that is too
old is refused here, before anything in it is used.
"""

import torch

from tenterhook.pytorch.release import refuse_older_torch

refuse_older_torch(torch.__version__)
