"""Everything that tenterhook needs of PyTorch beyond its public interface.

Private names, private attributes, frames, closures and code objects are used in this package and nowhere else. The rest
of tenterhook calls functions with plain names: ``current_backward_id()``, ``checkpoints_around_this_call()``.

Each file holds one subject. :mod:`tenterhook.pytorch.names` looks private names up and knows all of them;
:mod:`tenterhook.pytorch.support` runs a small check of each feature before it is first used, and says what is available
with the installed release. :mod:`tenterhook.pytorch.release` knows which releases are supported; one that is too old is
refused here, before anything in it is used.
"""

import torch

from tenterhook.pytorch.release import refuse_older_torch

refuse_older_torch(torch.__version__)
