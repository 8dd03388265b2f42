"""Plan, install, dispatch and undo: how actions get into a model's calls and out again.

The engine knows the :class:`~tenterhook.engine.action.Action` protocol and nothing of tapes or edits.
"""
