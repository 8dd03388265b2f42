"""What people use hooks for, each in one line. Built on the public names alone.

``patching``: activation, attribution and path patching.
"""

from tenterhook.recipes import patching

__all__ = ["patching"]
